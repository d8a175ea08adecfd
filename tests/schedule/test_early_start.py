"""Which kernels start beside the end of the one before them, and with how much k."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import F16
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED, TILES
from onnxfuse.schedule.hopper_quantized_tile import stage_bytes
from onnxfuse.schedule.hopper_tile import STAGE_ROW_BYTES
from onnxfuse.schedule.kernel_family import ANY_DEPTH, AnyTile
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.small_m import SMALL_M
from tests.perf.calibrate import planned_spec
from tests.perf.early_launch import starts_early
from tests.perf.result_file import read_result

ROOT = Path(__file__).parents[2]

RINGS = ("hopper", "hopper_swapped")
CASES = list(product((320, 14336), (1280, 4096), (1, 2), (("kn", "f16"), ("nk", "f16"), ("nk", "f32"))))


def early_depths(spec: KernelSpec, device: DeviceSpec, k: int) -> list[tuple[str, AnyTile, int]]:
    """Of every legal tile, with its family's name."""
    return [
        (entry.family.name, entry.tile, entry.family.launch(spec, entry.tile, device).early_depth)
        for family in PRODUCTS
        for entry in family.candidates(spec, device, k)
        if entry.family.why_not(spec, entry.tile, device) is None
    ]


@pytest.mark.parametrize(("k", "n", "parts", "weight"), CASES)
def test_a_block_that_starts_early_loads_no_more_than_pays(k: int, n: int, parts: int, weight: tuple[str, str]) -> None:
    """Of lhs and rhs, in elements of its tile; and with a stage more it would not start early."""
    device = ARCHITECTURES["sm_90a"]
    spec = planned_spec(k, n, parts, weight[0], "bias", weight[1], device)
    most = calibration(device).hopper_early_bytes
    found = [each for each in early_depths(spec, device, k) if each[0] in RINGS]
    assert found
    for _, tile, depth in found:
        splits = getattr(tile, "splits") * getattr(tile, "last_wave_splits", 1)  # noqa: B009, blocks to a tile
        rhs, kept = spec.parts * tile.block_n * spec.dtype.bytes, getattr(tile, "kept_k", 0)
        of_k = (tile.block_m * spec.dtype.bytes + (0 if kept else rhs)) / splits
        assert most - splits * STAGE_ROW_BYTES / spec.dtype.bytes * of_k < depth * of_k + kept * rhs <= most


@pytest.mark.parametrize(("k", "n", "parts", "weight"), CASES)
def test_a_full_grid_may_load_more_where_each_element_is_multiplied_often(
    k: int, n: int, parts: int, weight: tuple[str, str]
) -> None:
    device = ARCHITECTURES["sm_90a"]
    spec = planned_spec(k, n, parts, weight[0], "bias", weight[1], device)
    for family in (each for each in PRODUCTS if each.name in RINGS):
        for tile in (each.tile for each in family.candidates(spec, device, k)):
            if family.why_not(spec, tile, device) is not None:
                continue
            rule = family.launch(spec, tile, device)
            products, loaded = rule.block_m * rule.block_n * parts, rule.block_m + rule.block_n * parts
            assert (rule.full_early_depth > rule.early_depth) == (products >= 54 * loaded), tile
            clusters = device.multiprocessors // rule.cluster
            for count in (clusters // 2, clusters):
                depth = rule.full_early_depth if count == clusters else rule.early_depth
                assert starts_early(rule, count, k, device) == (k <= depth), tile


def _early(row: Mapping[str, Any], device: DeviceSpec) -> bool:
    """Whether a timed kernel, whose blocks share nothing, is launched early: by its numbers, not by its rule."""
    m, _, n = (int(number) for number in re.findall(r"\d+", row["problem"])[:3])
    rows, columns = (int(number) for number in re.findall(r"\d+", row["tile"])[:2])
    width = columns * (2 if "glu" in row["problem"] else 1)
    known, limits = calibration(device), [calibration(device).hopper_early_bytes]
    if -(-m // rows) * -(-n // columns) >= 0.75 * device.multiprocessors:
        multiplied = rows * width / (rows + width)
        limits += [most for least, most in known.hopper_full_early_bytes.items() if multiplied >= float(least)]
    return row["loaded_mb"] * 1e6 <= max(limits)


def test_the_rule_gains_where_it_was_measured() -> None:
    """Over kernels that never, that always, and that all start early up to the same number of bytes."""
    device = ARCHITECTURES["sm_90a"]
    timed = read_result(ROOT / "results/h200-early-start.json")["rows"]
    alone = [row for row in timed if not re.search("cluster|split|kept", row["tile"])]
    assert len(alone) > 100

    def time(rule: Callable[[Mapping[str, Any]], bool]) -> float:
        return geometric_mean([row["early_us" if rule(row) else "late_us"] for row in alone])

    own = time(lambda row: _early(row, device))
    assert own < time(lambda _: False)
    assert own < time(lambda _: True)
    for most in (0.7, 1.0, 1.6, 3.0):
        assert own < time(lambda row, most=most: row["loaded_mb"] <= most)  # type: ignore[misc]
    best = geometric_mean([min(row["early_us"], row["late_us"]) for row in alone])
    assert own < 1.01 * best


@pytest.mark.parametrize(("bits", "parts"), list(product((4, 8), (1, 2))))
def test_a_full_grid_of_quantized_kernels_loads_no_more_than_pays(bits: int, parts: int) -> None:
    """Of stages, each with activations, integers and scales."""
    device, k = ARCHITECTURES["sm_90a"], 4096
    form = Quantization(bits, 32, False, F16)
    spec = replace(planned_spec(k, 4096, parts, "nk", "bias", "f16", device), quantization=form, rhs_width=16)
    most = calibration(device).hopper_quantized_early_bytes
    legal = [tile for tile in TILES if HOPPER_QUANTIZED.why_not(spec, tile, device) is None]
    assert legal
    for tile in legal:
        rule = HOPPER_QUANTIZED.launch(spec, tile, device)
        stage = stage_bytes(spec, tile) / tile.splits
        for depth, limit in ((rule.early_depth, calibration(device).hopper_early_bytes), (rule.full_early_depth, most)):
            assert limit - stage < depth / tile.block_k * stage <= limit, tile


@pytest.mark.parametrize(("k", "n", "early"), [(1024, 4096, True), (3072, 2048, True), (4096, 4096, False)])
@pytest.mark.parametrize("parts", [1, 2])
def test_few_rows_of_fp32_start_early_where_the_weight_is_small(k: int, n: int, parts: int, early: bool) -> None:
    """Whatever its tiles are, and not those of 16 bits, whose weight is as large."""
    device = ARCHITECTURES["sm_90a"]
    for dtype, width in (("f32", n // parts), ("f16", 2 * n // parts)):
        spec = planned_spec(k, width, parts, "nk", "bias", dtype, device)
        tiles = [each for each in SMALL_M.candidates(spec, device, k) if not SMALL_M.why_not(spec, each.tile, device)]
        assert tiles
        for entry in tiles:
            rule = SMALL_M.launch(spec, entry.tile, device)
            grid = -(-width // entry.tile.block_n)
            assert starts_early(rule, grid, k, device) == (early or dtype == "f16"), entry.tile


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "ptx"])
def test_other_kernels_start_early_where_the_chip_can(arch: str) -> None:
    device = ARCHITECTURES[arch]
    spec = planned_spec(1024, 1024, 1, "nk", "bias", "f16", device)
    others = {depth for name, _, depth in early_depths(spec, device, 1024) if name not in RINGS}
    assert others == {ANY_DEPTH if arch == "sm_90a" else 0}
