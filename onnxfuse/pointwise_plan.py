"""The plan of the kernel behind a product: accesses as wide as the tensors allow, and enough blocks for every m."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxfuse.axes import AxisMapping
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import FLOATS
from onnxfuse.fusion import Pointwise
from onnxfuse.kernel_spec import Access
from onnxfuse.plan import MAX_M, access
from onnxfuse.pointwise_tile import PointwiseSpec, PointwiseTile, rows_on_their_way, span_of, tile_for
from onnxfuse.vector_width import operand_widths, out_widths

BLOCKS_A_MULTIPROCESSOR = 4  # fewer leave memory idle: then rows are spread over more blocks


@dataclass(frozen=True)
class PointwiseVariant:
    """A kernel and the rows that it is for, `min_m <= m <= max_m`."""

    spec: PointwiseSpec
    min_m: int
    max_m: int

    @property
    def tile(self) -> PointwiseTile:
        """The tile that the kernel computes with."""
        return self.spec.tile


@dataclass(frozen=True)
class PointwisePlan:
    """The kernels of one fusion behind its product on one architecture, in the order in which a launch tries them."""

    device: DeviceSpec
    variants: tuple[PointwiseVariant, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{self.device.arch:<7} m {variant.min_m}..{variant.max_m if variant.max_m < MAX_M else ''}  {variant.tile}"
            for variant in self.variants
        )


def make_pointwise_plan(pointwise: Pointwise, mapping: AxisMapping, device: DeviceSpec) -> PointwisePlan:
    """Choose the kernels of what follows a product for one architecture."""
    loads, outs = _accesses(pointwise, mapping)
    columns = math.prod(pointwise.size(axis) or 1 for axis in mapping.n)
    rows = rows_on_their_way(loads, span_of(loads, outs))
    tall, flat = (tile_for(loads, outs, columns, count) for count in (rows, 1))
    # Below this m the tall tile makes too few blocks.
    few = BLOCKS_A_MULTIPROCESSOR * device.multiprocessors // math.ceil(columns / tall.block_n) * tall.block_m
    spec = PointwiseSpec(loads, outs, pointwise.steps, tuple(out.value for out in pointwise.outs), tall)
    variants = [PointwiseVariant(replace(spec, tile=flat), 0, few), PointwiseVariant(spec, few + 1, MAX_M)]
    if flat == tall:
        variants = [PointwiseVariant(spec, 0, MAX_M)]
    if any(load.width > 1 for load in loads):
        variants.append(PointwiseVariant(checked_spec(spec, columns), 0, MAX_M))
    if any(out.width > 1 for out in outs):
        variants.append(PointwiseVariant(_narrow(spec, columns), 0, MAX_M))
    return PointwisePlan(device, tuple(variants))


def _accesses(pointwise: Pointwise, mapping: AxisMapping) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    widths = zip(pointwise.operands, operand_widths(pointwise, mapping), strict=True)
    operands = [_along_n(access(pointwise, operand, mapping, width)) for operand, width in widths]
    outs = zip(pointwise.outs, out_widths(pointwise, mapping), strict=True)
    stored = [_along_n(replace(access(pointwise, out.tensor, mapping, width), kind="tile")) for out, width in outs]
    # A thread owns what its widest access of numbers moves: of more columns, a warp's accesses would lie apart.
    span = max(way.width for way in (*operands, *stored) if way.dtype in FLOATS)
    loads = (operands[load.operand] for load in pointwise.loads)
    return tuple(replace(load, width=min(load.width, span)) for load in loads), tuple(stored)


def _along_n(way: Access) -> Access:
    """The kernel goes along the rows only: where m is contiguous it takes one element at a time."""
    return replace(way, width=1, turned=False) if way.turned else way


def checked_spec(spec: PointwiseSpec, columns: int) -> PointwiseSpec:
    """The same kernel, legal for every pointer and pitch of what it reads, with rows to hold single elements of it."""
    singles = tuple(replace(load, width=1) for load in spec.loads)
    rows = rows_on_their_way(singles, spec.tile.span)
    return replace(spec, tile=tile_for(spec.loads, spec.outs, columns, rows), checked=True)


def _narrow(spec: PointwiseSpec, columns: int) -> PointwiseSpec:
    """The same kernel with single-element accesses: legal for every pointer and pitch."""
    loads = tuple(replace(load, width=1) for load in spec.loads)
    outs = tuple(replace(out, width=1) for out in spec.outs)
    return replace(spec, loads=loads, outs=outs, tile=tile_for(loads, outs, columns, rows_on_their_way(loads, 1)))
