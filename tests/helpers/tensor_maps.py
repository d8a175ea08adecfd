"""What the tensor maps of a launch of the sm_90a kernel say, for a driver or an emulator to encode."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.schedule.kernel_family import MapRule
from tests.helpers.hopper_cases import HopperCase
from tests.helpers.kernel_problem import Buffer, Problem
from tests.helpers.quantized_cases import QuantizedCase
from tests.helpers.swapped_cases import SwappedCase

MAP_BYTES = 128


@dataclass(frozen=True)
class Described:
    """A tensor as TMA sees it, the contiguous axis first; strides in elements."""

    buffer: Buffer
    extents: list[int]
    strides: list[int]
    box: list[int]
    swizzle: int


def described(case: HopperCase | QuantizedCase | SwappedCase, problem: Problem) -> list[Described | None]:
    """The maps of the kernel's second argument; None where there is nothing to say."""
    groups = {"lhs": [problem.lhs], "rhs": problem.rhs, "load": problem.loads, "out": problem.outs}
    maps: list[Described | None] = []
    for rule in case.launch.maps:
        if rule is None:
            maps.append(None)
            continue
        buffer = groups[rule.tensor][rule.index]
        walked = rule.tensor == "out" and bool(case.spec.outs[rule.index].two_levels)
        extents, strides = walked_axes(buffer) if walked else plain_axes(buffer, rule)
        if rule.tensor == "rhs" and case.spec.quantization is not None:  # in bytes
            extents[0] = strides[1]
        for axis in range(1, len(extents)):  # a stride that is never stepped along is still one
            if extents[axis] == 1 or not strides[axis]:
                strides[axis] = max(-(-strides[axis - 1] * extents[axis - 1] // 8) * 8, 8)
        box = [rule.box_inner, rule.box_outer, *[1] * (len(extents) - 2)]
        maps.append(Described(buffer, extents, strides, box, rule.swizzle))
    return maps


def plain_axes(buffer: Buffer, rule: MapRule) -> tuple[list[int], list[int]]:
    """Extents and strides of the contiguous axis, the other one and the batch, and of runs of batches.

    Runs of k are batches too.
    """
    batch, rows, columns = buffer.shape
    batch_stride, row_stride, column_stride = buffer.strides
    inner, outer, pitch = (rows, columns, column_stride) if rule.rows_contiguous else (columns, rows, row_stride)
    _, run_stride, _, run = buffer.outer
    if run_stride:
        inner, batch, batch_stride = run, batch * columns // run, run_stride
    runs_stride, batches = buffer.batch_outer
    if batches:
        return [inner, outer, batches, batch // batches if runs_stride else 1], [1, pitch, batch_stride, runs_stride]
    return [inner, outer, batch if batch_stride else 1], [1, pitch, batch_stride]


def walked_axes(buffer: Buffer) -> tuple[list[int], list[int]]:
    """Extents and strides of the columns of a run, its rows, the runs of columns, those of rows, and the batch."""
    batch, rows, columns = buffer.shape
    rows_stride, columns_stride, row_run, column_run = buffer.outer
    return (
        [column_run, row_run, columns // column_run, rows // row_run, batch],
        [1, buffer.strides[1], columns_stride, rows_stride, buffer.strides[0]],
    )
