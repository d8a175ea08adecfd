"""Rhs that stays in shared memory: where it may, what a block then computes, and where it would stay in vain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto

from onnxfuse.device import ARCHITECTURES
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.hopper import HOPPER, LONGEST_KEPT_ROW, is_kept_in_vain, waves_of_rows
from onnxfuse.schedule.hopper_tile import HopperTile
from onnxfuse.schedule.kernel_family import Problem
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.perf.calibrate import planned_spec

DEVICE = ARCHITECTURES["sm_90a"]
TILE = HopperTile(128, 80, True, group_rows=1, kept_k=320)


def geglu(k: int | str, columns: int = 1280) -> ModelProto:
    b = Builder(FLOAT16)
    product = b("MatMul", b.input("x", ("rows", k)), b.input("weight", (k, 2 * columns)))
    value, gate = b("Split", product, outputs=2, axis=-1, num_outputs=2)
    return b.model(b("Mul", value, b("Gelu", gate)))


def kept(model: ModelProto) -> set[int]:
    """How much k the tiles keep that a plan has looked at, and 0 if some keep none."""
    (site,) = analyse_model(model, [DEVICE]).sites
    return {getattr(entry.tile, "kept_k", 0) for ranked in site.plans[0].ranked for _, entry in ranked.tiles}


@pytest.mark.parametrize(("k", "stages_of_k"), [(320, 320), (264, 320), (256, 256), (8, 64)])
def test_a_tile_keeps_all_k_that_a_model_fixes(k: int, stages_of_k: int) -> None:
    assert kept(geglu(k)) == {0, stages_of_k}


def test_no_tile_keeps_what_may_be_deeper() -> None:
    """The kernel would write behind the memory that it has for rhs."""
    assert kept(geglu("k")) == {0}
    assert kept(geglu(LONGEST_KEPT_ROW // 2 + 8)) == {0}


def test_every_kernel_has_room_for_the_k_that_it_is_chosen_for() -> None:
    for k in (8, 72, 320, 504, 512):
        spec = planned_spec(k, 1280, 2, "nk", "bias", "f16", DEVICE)
        found = [entry.tile for entry in HOPPER.candidates(spec, DEVICE, k) if entry.tile.kept_k]
        assert found
        assert all(0 <= tile.kept_k - k < 64 for tile in found)


def test_a_block_computes_as_many_tiles_as_are_counted() -> None:
    """Numbers of tiles go along the columns; a block's are as many apart as blocks work, whole rows of tiles."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        m, n = (int(2 ** rng.uniform(0, 14)) for _ in "mn")
        rows, columns = math.ceil(m / TILE.block_m), math.ceil(n / TILE.block_n)
        if columns > DEVICE.multiprocessors:
            continue
        blocks = DEVICE.multiprocessors // columns * columns
        tiles = [range(block, rows * columns, blocks) for block in range(min(blocks, rows * columns))]
        assert all(len({number % columns for number in own}) == 1 for own in tiles)
        assert waves_of_rows(TILE, Problem(m, n, 320), DEVICE) == max(map(len, tiles))


@pytest.mark.parametrize("problem", [Problem(0, 1280, 320), Problem(8192, 0, 320), Problem(8192, 1280, 320, batch=0)])
def test_of_nothing_a_block_is_taken_to_compute_a_tile(problem: Problem) -> None:
    assert waves_of_rows(TILE, problem, DEVICE) >= 1


def test_rhs_is_kept_in_vain_where_the_next_tile_has_another() -> None:
    problem = Problem(8192, 1280, 320)
    widest = DEVICE.multiprocessors * TILE.block_n
    others = [replace(problem, batch=2), replace(problem, guessed=True), replace(problem, n=widest + 8)]
    assert not is_kept_in_vain(TILE, problem, DEVICE)
    assert not is_kept_in_vain(TILE, replace(problem, n=widest), DEVICE)
    assert all(is_kept_in_vain(TILE, each, DEVICE) for each in others)
    assert not any(is_kept_in_vain(replace(TILE, kept_k=0), each, DEVICE) for each in others)
