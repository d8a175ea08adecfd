"""The sm_90a kernel whose M side is the weight: on the emulator of Hopper, within its registers, and its tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import F32
from onnxfuse.kernels.hopper_swapped import emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED, TILES
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile, footprint, map_rules
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.helpers.kernel_problem import Size, make_problem, make_spec
from tests.helpers.swapped_cases import DEVICE, PORTABLE, TYPES, SwappedCase, swapped_cases
from tests.helpers.thinning import Taken
from tests.kernels.test_hopper_on_cpu import build, check, launch

LARGE = Size(154, 4096, 4096)
SPECS = [
    make_spec(dtype, parts, order, PORTABLE, LARGE, kind, outs)
    for dtype, order in TYPES
    for parts, kind, outs in ((1, "residual", (None,)), (2, "plain", (None,)), (1, "plain", (None, F32)))
]


def legal(spec: KernelSpec) -> list[SwappedTile]:
    tiles = [entry.tile for entry in HOPPER_SWAPPED.candidates(spec, DEVICE, LARGE.k)]
    return [tile for tile in tiles if HOPPER_SWAPPED.why_not(spec, tile, DEVICE) is None]


@pytest.mark.one_in(144)
@pytest.mark.parametrize("case", list(swapped_cases()), ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: SwappedCase, tmp_path: Path) -> None:
    check(case, tmp_path)


# Of four blocks: tiles along m and along n, batches -> how many columns of tiles are split.
LAST_WAVES = ((1, 2, 1, 2), (1, 5, 1, 1), (1, 3, 1, 0), (2, 5, 1, 1), (3, 3, 1, 0), (1, 5, 2, 0))


# The operands of 120 rows come in more slabs than there is room for.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rows", "parts", "kind"), [(120, 1, "residual"), (40, 2, "plain")])
def test_clusters_split_what_remains_of_a_last_wave(rows: int, parts: int, kind: str, tmp_path: Path) -> None:
    """Its bits are those of a kernel that splits all tiles, and the others' those of one that splits none."""
    depth, columns = 136, 64
    tile = SwappedTile(rows, columns, group_rows=1, pingpong=True, last_wave_splits=2)
    tiles = {"some": tile, "none": SwappedTile(rows, 128), "all": SwappedTile(rows, 128, splits=2)}
    spec = make_spec("f16", parts, "nk", PORTABLE, Size(rows, 128, depth), kind, (F32,))
    own = {name: SwappedCase(name, spec, each, ()) for name, each in tiles.items()}
    for name in own:
        (tmp_path / name).mkdir()
    libraries = {name: build(each, tmp_path / name) for name, each in own.items()}
    for down, across, batch, split in LAST_WAVES:
        problem = make_problem(spec, Size(down * rows - 3, across * columns, depth, batch=batch))
        outs = {name: launch(libraries[name], own[name], problem, 2, lazy=False)[0] for name in tiles}
        late = launch(libraries["some"], own["some"], problem, 2, lazy=True)
        problem.check(late)
        some, none, every = (outs[name][problem.outs[0].index] for name in ("some", "none", "all"))
        np.testing.assert_array_equal(late[0][problem.outs[0].index], some)
        whole = (across - split) * columns
        np.testing.assert_array_equal(some[..., :whole], none[..., :whole])
        np.testing.assert_array_equal(some[..., whole:], every[..., whole:])
        assert (none != every).any()  # the order of sums is seen


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32"])
def test_tiles_compile_without_spills(dtype: str, taken: Taken) -> None:
    kernels = [(spec, tile) for spec in SPECS if spec.math == dtype for tile in legal(spec)]
    with ThreadPoolExecutor() as pool:
        run = pool.map(lambda each: compile_source(emit(*each, DEVICE.shared_bytes), DEVICE), taken(kernels, 180))
    assert {(image.spill_bytes, image.local_bytes) for image in run} == {(0, 0)}


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_boxes_fill_a_stage_and_all_fits(spec: KernelSpec) -> None:
    tiles = legal(spec)
    assert {tile.block_m for tile in tiles} >= {80, 160}
    for tile in tiles:
        lhs, *rhs = [rule for rule in map_rules(spec, tile) if rule is not None]
        boxes = 1 if spec.rhs_order == "nk" else tile.block_n // rhs[0].box_inner
        held = lhs.box_inner * lhs.box_outer * tile.cluster_n
        held += boxes * sum(rule.box_inner * rule.box_outer for rule in rhs) * tile.cluster_m
        layout = footprint(spec, tile, DEVICE.shared_bytes)
        assert held * spec.dtype.bytes == layout.stage
        assert layout.total <= DEVICE.shared_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile": SwappedTile(76, 128)}, "8 rows"),
        ({"tile": SwappedTile(80, 96)}, "64 columns"),
        ({"tile": SwappedTile(272, 128)}, "64 columns"),
        ({"tile": SwappedTile(160, 128, splits=3)}, "split"),
        ({"tile": SwappedTile(160, 128, splits=2, cluster_m=2)}, "share no loads"),
        ({"tile": SwappedTile(88, 64, pingpong=True, cluster_n=16)}, "8 blocks"),
        ({"tile": SwappedTile(88, 64, pingpong=True, cluster_m=2, last_wave_splits=2)}, "share nothing"),
        ({"tile": SwappedTile(88, 128, last_wave_splits=2)}, "in ping-pong"),
        ({"tile": SwappedTile(88, 64, pingpong=True, last_wave_splits=4)}, "split by 2"),
        ({"tile": SwappedTile(72, 64, pingpong=True, cluster_n=5)}, "equal parts"),
        ({"tile": SwappedTile(240, 256)}, "accumulators"),
    ],
)
def test_what_it_cannot_run_says_why(change: dict[str, object], reason: str) -> None:
    spec = make_spec(str(change.get("dtype", "f16")), 1, str(change.get("order", "nk")), PORTABLE, LARGE)
    tile = change.get("tile", TILES[0])
    assert isinstance(tile, SwappedTile)
    assert reason in str(HOPPER_SWAPPED.why_not(spec, tile, DEVICE))


def test_accesses_are_no_wider_than_what_tiles_begin_at() -> None:
    spec = make_spec("f16", 1, "nk", PORTABLE, LARGE, "residual")
    wide = replace(spec, loads=tuple(replace(load, width=16) for load in spec.loads))
    reasons = {tile: HOPPER_SWAPPED.why_not(wide, tile, DEVICE) for tile in legal(spec) if tile.splits == 1}
    assert {tile.block_m for tile, reason in reasons.items() if reason} == {
        tile.block_m for tile in reasons if tile.block_m % 16
    }
