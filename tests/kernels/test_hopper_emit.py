"""The sm_90a kernel without a GPU: it compiles for its architecture, keeps to its registers, and its tables agree."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from onnxfuse.dtypes import F32
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.hopper import emit
from onnxfuse.limits import MAX_MAPS, STAGE_ROW_BYTES
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_tile import (
    ATOM,
    GROUP_WARPS,
    HopperTile,
    footprint,
    is_served,
    map_rules,
    rhs_pieces,
    why_not,
)
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from tests.helpers.hopper_cases import (
    DEVICE,
    PORTABLE,
    HopperCase,
    batch_runs_cases,
    cases,
    kept_cases,
    masked_cases,
    served_cases,
    small_m_cases,
    split_cases,
    tall_cases,
    three_groups_cases,
    walked_cases,
)
from tests.helpers.kernel_problem import Size, make_spec
from tests.helpers.thinning import Taken
from tests.perf.calibrate import planned_spec

SERIALISED = ("C7510", "C7508", "C7514")  # wgmma waits for each other, or setmaxnreg is ignored
CASES = list(cases())
WALKED = list(walked_cases())
TALL = list(tall_cases())
MASKED = list(masked_cases())
SPLIT = list(split_cases())
SMALL_M_CASES = list(small_m_cases())
BATCH_RUNS = list(batch_runs_cases())
THREE_GROUPS = list(three_groups_cases())
SERVED = list(served_cases())
KEPT = list(kept_cases())
SAMPLE = [
    *CASES[:: max(len(CASES) // 16, 1)],
    *WALKED[::8],
    *TALL[::7],
    *MASKED[::3],
    *SPLIT[::2],
    *SMALL_M_CASES[::2],
    *BATCH_RUNS[::3],
    *THREE_GROUPS[::3],
    *SERVED[::2],
    *KEPT[::2],
]
ALIGNED = Size(504, 136, 248)


def test_sample_needs_no_local_memory_and_stays_asynchronous(taken: Taken) -> None:
    check_code(taken(SAMPLE, 24))


def test_tiles_that_keep_rhs_need_no_local_memory(taken: Taken) -> None:
    """Those that plans take, of one part and two."""
    specs = [planned_spec(320, 1280, parts, order, "bias", "f16", DEVICE) for parts in (1, 2) for order in ("nk", "kn")]
    tiles = [(spec, entry.tile) for spec in specs for entry in HOPPER.candidates(spec, DEVICE, 320)]
    legal = [(spec, tile) for spec, tile in tiles if tile.kept_k and why_not(spec, tile, DEVICE.shared_bytes) is None]
    assert len(legal) > 12
    check_code([HopperCase(f"{spec.parts}x-{tile}", spec, tile, ()) for spec, tile in taken(legal, 6)])


def check_code(sample: Sequence[HopperCase]) -> None:
    """No registers are spilled, and no wgmma waits for another."""

    def compiled(case: HopperCase):
        return compile_source(emit(case.spec, case.tile, DEVICE.shared_bytes), DEVICE)

    with ThreadPoolExecutor(2) as pool:
        images = list(pool.map(compiled, sample))
    for case, image in zip(sample, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), case.name
        assert not [code for code in SERIALISED if code in image.log], case.name


@pytest.mark.parametrize(
    "case",
    [*CASES, *WALKED, *TALL, *MASKED, *SPLIT, *SMALL_M_CASES, *BATCH_RUNS, *THREE_GROUPS, *SERVED, *KEPT],
    ids=lambda case: case.name,
)
def test_layout_fits_and_boxes_fill_a_stage(case: HopperCase) -> None:
    layout = footprint(case.spec, case.tile, DEVICE.shared_bytes)
    assert layout.total <= DEVICE.shared_bytes
    assert layout.stages >= 2
    shared_by = case.tile.splits
    assert layout.sums * shared_by == case.tile.block_m * case.tile.block_n * case.spec.parts * F32.bytes * (
        shared_by - 1
    )
    columns = case.spec.parts * case.tile.block_n
    assert layout.kept == case.tile.kept_k * case.spec.dtype.bytes * columns
    boxes_begin = layout.stages * layout.stage, layout.stages * layout.stage + layout.kept + layout.sums
    assert not any(begin % 1024 for begin in boxes_begin), "boxes begin on a period of their swizzle"
    lhs, *rhs = map_rules(case.spec, case.tile, DEVICE.shared_bytes)
    pieces = rhs_pieces(case.spec, case.tile)
    rhs, outs = rhs[: case.spec.parts * len(pieces)], rhs[case.spec.parts * len(pieces) :]
    outs, loads = outs[: len(case.spec.outs)], outs[len(case.spec.outs) :]
    assert len(outs) == len(case.spec.outs)
    assert len(loads) == layout.in_place
    assert 1 + len(rhs) + len(outs) + len(loads) <= MAX_MAPS
    if is_served(case.spec, case.tile):
        (out,) = outs
        columns = out.box_inner
        assert out.box_outer * columns * 2 * layout.load_buffers == GROUP_WARPS * layout.staging
        slabs = case.tile.group_m // out.box_outer * case.tile.block_n // columns
        assert layout.load_buffers > 1 or slabs == 1, "a slab is loaded when the one behind it is stored"
        assert not layout.in_place or layout.load_buffers + layout.refills == slabs
    for load in loads:
        (out,) = outs
        assert (load.box_inner, load.box_outer, load.swizzle) == (out.box_inner, out.box_outer, out.swizzle)
        assert case.spec.loads[load.index].kind == "tile"
    assert sum(piece.columns for piece in pieces) == case.tile.block_n
    size = case.spec.dtype.bytes
    rows = ATOM if lhs.rows_contiguous else case.tile.lhs_rows or case.tile.block_m // case.tile.cluster_n
    boxes = case.tile.block_m // rows
    assert lhs.box_inner * lhs.box_outer * boxes * size == case.tile.block_m * STAGE_ROW_BYTES
    for rule, piece in zip(rhs, (piece for piece in pieces for _ in range(case.spec.parts)), strict=True):
        along_n = rule.box_outer * case.tile.cluster_m if rule.rows_contiguous else rule.box_inner
        assert piece.columns % along_n == 0
    for rule in (lhs, *rhs):
        assert rule.box_inner * size == rule.swizzle
        assert max(rule.box_inner, rule.box_outer) <= 256
        assert rule.box_inner * rule.box_outer * size % 1024 == 0 or rule.swizzle < 128


def test_refusals_name_their_reason() -> None:
    spec = make_spec("f16", 2, "nk", PORTABLE, ALIGNED)
    tile = HopperTile(128, 80, True)

    def reason(spec=spec, **changes):
        return why_not(spec, replace(tile, **changes), DEVICE.shared_bytes) or ""

    assert reason() == ""
    assert "16-byte" in reason(replace(spec, lhs_width=4))
    assert "wgmma" in reason(replace(spec, dtype=F32, math="fp32"))
    assert "wgmma" in reason(replace(spec, dtype=F32, math="3xtf32"))
    assert "k contiguous" in reason(make_spec("tf32", 2, "kn", PORTABLE, ALIGNED))
    assert "rows" in reason(block_m=96)
    assert "columns" in reason(block_n=136)
    assert "accumulators" in reason(block_n=112)
    three = make_spec("f16", 3, "kn", PORTABLE, ALIGNED, outs=(None, None, None))
    assert reason(three, block_n=64) == ""
    assert "tensor maps" in reason(three, block_n=80, pingpong=False)
    assert "clusters" in reason(cluster_m=2, cluster_n=2)
    assert "stages" in reason(stages=9)
    assert "2 or 4" in reason(splits=3)
    assert "cooperative" in reason(splits=2)
    assert "cooperative" in reason(pingpong=False, splits=2, cluster_m=2)
    assert reason(pingpong=False, splits=2) == ""
    assert reason(pingpong=False, block_n=128, stages=4) == ""
    assert "stages fit" in reason(pingpong=False, block_n=128, stages=4, splits=2)  # beside the sums
    assert reason(lhs_rows=16) == reason(lhs_rows=128) == ""
    assert "multiple of 8" in reason(lhs_rows=4)
    assert "part of the tile's rows" in reason(lhs_rows=48)
    assert "share no loads" in reason(lhs_rows=16, cluster_m=2)
    assert "k is contiguous" in reason(make_spec("f16", 1, "nk", PORTABLE, ALIGNED, lhs_order="km"), lhs_rows=16)
    runs = replace(spec, rhs_batch_runs=True)
    assert reason(runs) == ""
    assert "runs" in reason(runs, cluster_m=2)
    assert "runs" in reason(replace(spec, lhs_batch_runs=True, lhs_run=64))
    assert "groups" in reason(groups=3)
    assert "groups" in reason(make_spec("f16", 1, "nk", PORTABLE, ALIGNED, "residual"), groups=4)
    assert "accumulators" in reason(groups=4)


def test_gelu_is_the_fast_one_for_the_dtypes_that_are_stored() -> None:
    """Half of the bias is staged where the sum and the bias have no other reader."""

    def emitted(spec: KernelSpec) -> str:
        return emit(spec, HopperTile(128, 128, True), DEVICE.shared_bytes)

    spec = make_spec("f16", 2, "kn", PORTABLE, ALIGNED)
    source = emitted(spec)
    assert "const float g0 = pointwise::fast_short_gelu_of_half(fmaf(acc1, 0.5f, op1));" in source
    assert "HALVED_LOADS = 2;" in source
    assert "float a1 =" not in source
    assert "float a0 = acc0 + op0;" in source
    exact = emitted(replace(spec, outs=(Access("tile", F32, 4),)))
    assert "const float g0 = pointwise::fast_gelu_of_half(fmaf(acc1, 0.5f, op1));" in exact
    for read in ("a1", "op1"):
        twice = emitted(replace(spec, outs=spec.outs * 2, out_values=(*spec.out_values, read)))
        assert "const float g0 = pointwise::fast_short_gelu_of_half(0.5f * a1);" in twice
        assert "HALVED_LOADS = 0;" in twice
    rounded = replace(spec, steps=(*spec.steps, Step("r", "round_f16", spec.out_values)), out_values=("r",))
    assert "HALVED_LOADS = 0;" in emitted(rounded)
    assert "pointwise::gelu(a1)" in emitted(rounded)
