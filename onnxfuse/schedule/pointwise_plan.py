"""The plan of the epilogue-only kernel: accesses as wide as the tensors allow, and enough blocks for every m."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from onnxfuse.analysis.axis_mapping import AxisMapping, static_size
from onnxfuse.analysis.vector_width import EpilogueWidths, analyse_epilogue
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import FLOATS
from onnxfuse.ir.fusion import Pointwise
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.access import access
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.in_turns import loads_in_turn, outs_in_turn, with_turns
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.pointwise import POINTWISE
from onnxfuse.schedule.pointwise_tile import LONG, PointwiseSpec, PointwiseTile, rows_in_flight, span_of, tile_for
from onnxfuse.schedule.variant import PointwisePlan, PointwiseVariant

Spec = TypeVar("Spec", bound=PointwiseSpec)


def make_pointwise_plan(pointwise: Pointwise, mapping: AxisMapping, device: DeviceSpec) -> PointwisePlan:
    """Choose the kernels of what follows a product for one architecture."""
    widths = analyse_epilogue(pointwise, mapping)
    loads, outs = accesses(pointwise, mapping, widths)
    columns = _columns(pointwise, mapping)
    rows = 1 if static_size(pointwise, mapping.m) == 1 else rows_in_flight(loads, span_of(loads, outs), device)
    tall, flat = (tile_for(loads, outs, columns, count) for count in (rows, 1))
    # Below this m the tall tile makes too few blocks.
    blocks = calibration(device).pointwise_blocks * device.multiprocessors
    few = blocks // math.ceil(columns / tall.block_n) * tall.block_m
    spec = PointwiseSpec(loads, outs, pointwise.steps, tuple(out.value for out in pointwise.outs))
    variants = [_variant(spec, flat, 0, few), _variant(spec, tall, few + 1, MAX_M)]
    if flat == tall:
        variants = [_variant(spec, tall, 0, MAX_M)]
    if any(load.width > 1 for load in loads):
        variants.append(_variant(replace(spec, checked=True), checked_tile(spec, tall.span, columns, device), 0, MAX_M))
    if any(out.width > 1 for out in outs):
        single = narrow(spec)
        rows = rows_in_flight(single.loads, 1, device)
        variants.append(_variant(single, tile_for(single.loads, single.outs, columns, rows), 0, MAX_M))
    return PointwisePlan(device, tuple(variants), with_turns(pointwise, mapping, widths))


def _columns(pointwise: Pointwise, mapping: AxisMapping) -> int:
    """How many tiles are chosen by: where rows were joined, and only the run knows how many, long ones."""
    rows, columns = (math.prod(pointwise.size(axis) or 1 for axis in loop) for loop in (mapping.m, mapping.n))
    is_joined = len(mapping.n) > 1 and rows == 1
    return LONG if is_joined and static_size(pointwise, mapping.n) is None else columns


def _variant(spec: PointwiseSpec, tile: PointwiseTile, min_m: int, max_m: int) -> PointwiseVariant:
    return PointwiseVariant(POINTWISE, spec, tile, min_m, max_m)


def accesses(
    pointwise: Pointwise, mapping: AxisMapping, widths: EpilogueWidths
) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """How a kernel without a product reaches what it loads, and what it stores."""
    operands = [
        _along_n(access(pointwise, operand, mapping, width))
        for operand, width in zip(pointwise.operands, widths.operands, strict=True)
    ]
    pairs = zip(pointwise.outs, widths.outs, strict=True)
    stored = [_along_n(replace(access(pointwise, out.tensor, mapping, width), kind="tile")) for out, width in pairs]
    loads = loads_in_turn(pointwise, mapping, [operands[load.operand] for load in pointwise.loads])
    outs = outs_in_turn(pointwise, mapping, stored)
    # A thread owns what its widest access of numbers moves: of more columns, a warp's accesses would lie apart.
    span = max(way.columns for way in (*loads, *outs) if way.dtype in FLOATS)
    return tuple(_of_span(load, span) for load in loads), tuple(outs)


def _of_span(load: Access, span: int) -> Access:
    """The same tensor, no more columns of which are read at once than a thread owns."""
    turn = load.turn._replace(columns=min(load.turn.columns, span)) if load.turn else None
    return replace(load, width=min(load.width, span), turn=turn)


def _along_n(way: Access) -> Access:
    """The kernel goes along the rows only: where m is contiguous it takes one element at a time."""
    return replace(way, width=1, transposed=False) if way.transposed else way


def checked_tile(spec: PointwiseSpec, span: int, columns: int, device: DeviceSpec) -> PointwiseTile:
    """The tile of the same kernel, legal for every pointer and pitch of what it reads, with rows for single elements.

    Args:
        spec: the kernel with wide accesses.
        span: adjacent columns that one of its threads owns.
        columns: of the output.
        device: to plan for.
    """
    singles = tuple(map(narrowed, spec.loads))
    return tile_for(spec.loads, spec.outs, columns, rows_in_flight(singles, span, device))


def narrow(spec: Spec) -> Spec:
    """The same kernel with single-element accesses: legal for every pointer and pitch."""
    return replace(spec, loads=tuple(map(narrowed, spec.loads)), outs=tuple(map(narrowed, spec.outs)))


def narrowed(way: Access) -> Access:
    """The same tensor, element by element."""
    return replace(way, width=1, turn=None)
