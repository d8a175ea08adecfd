"""The axis mapping: which axes of a fusion are the kernel's batch, m, n and k. Resolved once; strides follow from it.

A kernel knows three loops over its output, `[batch, m, n]`, and one over `k`. A tensor is row-major over named axes,
and one that lacks an axis is broadcast along it (stride 0). Row axes that one stride walks in lhs are all `m`, so that
tiles are full whatever the size of each; but an operand that has some of them only, as a scale of each image, makes the
outer ones the batch, along which it is a plain vector, unless a batch has so few rows that its tiles would be mostly
empty. So do row axes that lie apart in lhs, beside those that rhs has as well.

A loop may still have axes that lie apart in some tensor, as the columns `n1 n2` of an output stored as
`[b, n1, m, n2]`, which is how heads are split. Such a tensor walks the loop in two levels: a stride within a run, and
another from run to run. Of lhs that may be k, where it is contiguous, of lhs and rhs the batch, as that of heads in
`[b, s, h, d]`, of operands and outputs batch, m and n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from onnxfuse.dtypes import FLOATS
from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import PART_AXIS, Fusion, Pointwise, Tensor
from onnxfuse.limits import MOST_LEVELS, WIDEST_BYTES

Axes = tuple[str, ...]
FEW_ROWS = 64  # of a batch: a block of a kernel that normalises has up to 16
# Rows of a batch from which on a kernel that multiplies has a tile for each: 8 take 7 times as long so as all together,
# 49 two thirds (docs/kernel-notes.md, "Rows of a batch"); between them none was timed.
ENOUGH_FOR_A_TILE = 32


@dataclass(frozen=True)
class AxisMapping:
    """The axes of each loop of the kernel, outermost first; they flatten into one index.

    Attributes:
        heads: of an attention alone, inside of the batch.
        o: of an attention alone: columns of the values and of what is stored.
    """

    batch: Axes
    m: Axes
    n: Axes
    k: Axes
    heads: Axes = ()
    o: Axes = ()

    def __str__(self) -> str:
        outer = (("batch", self.batch), ("heads", self.heads))
        groups = (*outer, ("m", self.m), ("n", self.n), ("k", self.k), ("o", self.o))
        return " ".join(f"{name}={'*'.join(axes)}" for name, axes in groups if axes)

    def kind(self, tensor: Tensor) -> str:
        """`scalar`, `row`, `column` or `tile`: by the axes that a tensor has, never by their sizes."""
        has_rows = any(axis in tensor.axes for axis in self.m)
        has_columns = any(axis in tensor.axes for axis in self.n)
        return (("scalar", "row"), ("column", "tile"))[has_rows][has_columns]


def map_axes(fusion: Fusion) -> AxisMapping:
    """Give every axis its loop.

    Raises:
        NotFusable: the axes of a loop lie in more groups in some tensor than a kernel walks, the contiguous axis of
            lhs is neither k nor m, or that of one rhs is k where that of another is n.
    """
    out = tuple(axis for axis in fusion.outs[0].tensor.axes if axis != PART_AXIS)
    lhs, rhs = fusion.lhs.axes, fusion.rhs[0].axes
    shared = tuple(axis for axis in lhs if axis in rhs and axis in out)
    own = tuple(axis for axis in lhs if axis in out and axis not in rhs)
    rows = _row_groups(fusion, own)
    outer, columns = _column_groups(fusion, tuple(axis for axis in rhs if axis in out and axis not in lhs))
    contracted = tuple(axis for axis in rhs if axis in lhs and axis not in out)
    apart = levels(fusion, fusion.lhs, own) > 1 if shared else len(rows) > 1
    first_m = 1 if apart and not outer else 0
    inner = {*shared, *(axis for group in rows[:first_m] for axis in group)}
    batch = (*outer, *(axis for axis in lhs if axis in inner))
    mapping = AxisMapping(batch, tuple(axis for group in rows[first_m:] for axis in group), columns, contracted)
    _check_contiguous(fusion, mapping)
    _check_one_order(fusion, mapping)
    for loop, tensors, most in _walks(fusion, mapping):
        for tensor in tensors:
            _check_levels(fusion, tensor, loop, most)
    return mapping


def broadcast_product_axes(fusion: Fusion) -> Axes:
    """The axes along which operands repeat the product, as pixels do a time embedding."""
    own = {*fusion.lhs.axes, *fusion.rhs[0].axes, PART_AXIS}
    stored = dict.fromkeys(axis for out in fusion.outs for axis in out.tensor.axes)
    return tuple(axis for axis in stored if axis not in own)


def map_broadcast_product(fusion: Fusion) -> AxisMapping:
    """The loops of an epilogue whose operands repeat the product: n is what neighbours of its output differ in."""
    out = tuple(axis for axis in fusion.outs[-1].tensor.axes if axis != PART_AXIS)
    spread = broadcast_product_axes(fusion)
    rows = out
    while rows and (rows[-1] in spread) == (out[-1] in spread):
        rows = rows[:-1]
    contracted = tuple(axis for axis in fusion.lhs.axes if axis in fusion.rhs[0].axes and axis not in out)
    return AxisMapping((), rows, out[len(rows) :], contracted)


def _column_groups(fusion: Fusion, columns: Axes) -> tuple[Axes, Axes]:
    """The axes of rhs alone that are a batch, and those that are n.

    What lies apart in rhs is a batch, as that of images under a constant weight. So is a batch that only the run knows
    where no stride walks both in an output, which a kernel could store by single elements only.
    """
    *outer, inner = flatten(fusion, fusion.rhs, columns)
    batch = tuple(axis for group in outer for axis in group)
    if not batch and len(inner) > 1 and fusion.size(inner[0]) is None:
        outs = [out.tensor for out in fusion.outs]
        batch = inner[:1] if len(flatten(fusion, outs, inner)) > 1 else ()
    return batch, tuple(axis for axis in inner if axis not in batch)


def _row_groups(fusion: Fusion, rows: Axes) -> list[Axes]:
    """One group where one stride walks all rows of lhs, and two those of the rest; else as every tensor can."""
    epilogue = (*fusion.operands, *(out.tensor for out in fusion.outs))
    stepping = set(stepped(fusion, rows))
    whole = all(stepping.issubset(tensor.axes) or stepping.isdisjoint(tensor.axes) for tensor in epilogue)
    groups = flatten(fusion, _tensors(fusion), rows)
    together = whole or _are_few(fusion, groups[1:])
    if together and levels(fusion, fusion.lhs, rows) == 1 and _most_levels(fusion, epilogue, rows) <= MOST_LEVELS:
        return [rows]
    return groups


def _are_few(fusion: Pointwise, groups: list[Axes]) -> bool:
    """Whether a batch has so few rows that a tile for each would be mostly empty."""
    rows = static_size(fusion, itertools.chain(*groups))
    return rows is not None and rows < ENOUGH_FOR_A_TILE


def _most_levels(fusion: Pointwise, tensors: Iterable[Tensor], loop: Axes) -> int:
    return max(levels(fusion, tensor, loop) for tensor in tensors)


def map_pointwise(pointwise: Pointwise, mapping: AxisMapping) -> AxisMapping:
    """The mapping of what is left of a fusion without its product: no k, and lhs has no say in what a kernel walks.

    Raises:
        NotFusable: as for a whole fusion.
    """
    rows = flatten(pointwise, _tensors(pointwise), (*mapping.batch, *mapping.m))
    batch = mapping.batch if len(rows) > 1 else ()
    own = AxisMapping(batch, tuple(axis for axis in (*mapping.batch, *mapping.m) if axis not in batch), mapping.n, ())
    own = _with_wide_accesses(pointwise, own)
    for tensor in _tensors(pointwise):
        for loop in (own.batch, own.m, own.n):
            _check_levels(pointwise, tensor, loop, MOST_LEVELS)
    return own


def _with_wide_accesses(pointwise: Pointwise, mapping: AxisMapping) -> AxisMapping:
    """Rows that begin where no wide access is legal, as those of small images, joined where nothing lies between them.

    As few of the axes before n as make rows of a multiple of the most bytes; where none do, all stays as it is.
    """
    joined = [replace(mapping, m=mapping.m[:first], n=mapping.m[first:] + mapping.n) for first in range(len(mapping.m))]
    whole = [each for each in joined if len(flatten(pointwise, _tensors(pointwise), each.n)) == 1]
    return max((mapping, *reversed(whole)), key=lambda each: _aligned_bytes(pointwise, each.n))


def _aligned_bytes(pointwise: Pointwise, columns: Axes) -> int:
    """Bytes of an access that is legal wherever a row of so many columns begins."""
    known = math.prod(size for axis in columns if (size := pointwise.size(axis)) is not None)
    element = min(tensor.dtype.bytes for tensor in _tensors(pointwise) if tensor.dtype in FLOATS)
    return math.gcd(known * element, WIDEST_BYTES)


def map_rows(fusion: Pointwise, rows: Axes, along: Axes) -> AxisMapping:
    """The mapping of what has no product: one loop over rows, or where tensors have them otherwise a batch and another.

    Args:
        fusion: what is computed.
        rows: its axes.
        along: those of a row.

    Raises:
        NotFusable: the axes of a loop lie in more groups in some tensor than a kernel walks.
    """
    groups = flatten(fusion, _tensors(fusion), rows)
    found = [_rows_behind(groups, along, outer) for outer in range(len(groups))]
    first, *others = [mapping for mapping in found if _is_walked(fusion, mapping)] or found[:1]
    for loop in (first.batch, first.m, first.n):
        for tensor in _tensors(fusion):
            _check_levels(fusion, tensor, loop, MOST_LEVELS)
    return next((each for each in others if _is_of_batches(fusion, each)), first)


def _rows_behind(groups: list[Axes], along: Axes, outer: int) -> AxisMapping:
    """So many outer groups of axes as the batch, the others as m."""
    batch, rows = (tuple(axis for group in each for axis in group) for each in (groups[:outer], groups[outer:]))
    return AxisMapping(batch, rows, along, ())


def _is_walked(fusion: Pointwise, mapping: AxisMapping) -> bool:
    loops = (mapping.batch, mapping.m, mapping.n)
    return all(_most_levels(fusion, _tensors(fusion), loop) <= MOST_LEVELS for loop in loops)


def _is_of_batches(fusion: Pointwise, mapping: AxisMapping) -> bool:
    """Whether operands are the same for all rows of a batch, which are enough to fill blocks."""
    rows = static_size(fusion, mapping.m)
    is_shared = all(mapping.kind(operand) in ("scalar", "row") for operand in fusion.operands[1:])
    return is_shared and (rows is None or rows >= FEW_ROWS)


def static_size(fusion: Pointwise, loop: Iterable[str]) -> int | None:
    """How many steps a loop over some axes has: 1 over none, None where only the run knows."""
    sizes = [fusion.size(axis) for axis in loop]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def levels(fusion: Pointwise, tensor: Tensor, loop: Axes) -> int:
    """How many strides walk a loop's axes in a tensor."""
    return len(flatten(fusion, (tensor,), loop))


def flatten(fusion: Pointwise, tensors: Iterable[Tensor], loop: Axes) -> list[Axes]:
    """Groups of neighbouring axes that one stride walks in every tensor; an axis of size 1 is never stepped along."""
    tensors = tuple(tensors)
    groups: list[Axes] = [()]
    outer = ""
    for axis in loop:
        if fusion.size(axis) != 1:
            if outer and not all(_adjacent(fusion, tensor, outer, axis) for tensor in tensors):
                groups.append(())
            outer = axis
        groups[-1] = (*groups[-1], axis)
    return groups


def reads_rows(fusion: Fusion, mapping: AxisMapping) -> bool:
    """Whether lhs is read along m, its contiguous axis, and not along k."""
    lhs, m = stepped(fusion, fusion.lhs.axes), stepped(fusion, mapping.m)
    return bool(lhs and m) and lhs[-1] == m[-1]


def stepped(fusion: Pointwise, axes: Iterable[str]) -> Axes:
    """The axes that are ever stepped along: those not of size 1."""
    return tuple(axis for axis in axes if fusion.size(axis) != 1)


def _tensors(fusion: Pointwise) -> tuple[Tensor, ...]:
    return (*fusion.inputs, *(out.tensor for out in fusion.outs))


def _walks(fusion: Fusion, mapping: AxisMapping) -> Iterator[tuple[Axes, tuple[Tensor, ...], int]]:
    """Each loop, tensors that are walked along it, and in how many levels a kernel can."""
    epilogue = (*fusion.operands, *(out.tensor for out in fusion.outs))
    yield mapping.batch, (fusion.lhs, *fusion.rhs), MOST_LEVELS
    yield mapping.batch, epilogue, MOST_LEVELS
    yield mapping.m, (fusion.lhs,), 1
    yield mapping.k, (fusion.lhs,), 1 if reads_rows(fusion, mapping) else MOST_LEVELS
    yield mapping.k, fusion.rhs, 1
    yield mapping.n, fusion.rhs, 1
    yield mapping.m, epilogue, MOST_LEVELS
    yield mapping.n, epilogue, MOST_LEVELS


def _check_contiguous(fusion: Fusion, mapping: AxisMapping) -> None:
    lhs, k = stepped(fusion, fusion.lhs.axes), stepped(fusion, mapping.k)
    if k and lhs[-1] != k[-1] and not reads_rows(fusion, mapping):
        detail = f"{fusion.lhs.name!r} lies as ({' '.join(fusion.lhs.axes)}), with neither k nor m contiguous"
        raise NotFusable("lhs_transposed", fusion.anchor, detail)


def _check_one_order(fusion: Fusion, mapping: AxisMapping) -> None:
    k = set(stepped(fusion, mapping.k))
    if k and len({stepped(fusion, tensor.axes)[-1] in k for tensor in fusion.rhs}) > 1:
        orders = ", ".join(f"{tensor.name!r} lies as ({' '.join(tensor.axes)})" for tensor in fusion.rhs)
        detail = f"{orders}, and none may be stored otherwise: --keep-weights, or others read it"
        raise NotFusable("orders_differ", fusion.anchor, detail)


def _check_levels(fusion: Pointwise, tensor: Tensor, loop: Axes, most: int) -> None:
    found = levels(fusion, tensor, loop)
    if found > most:
        detail = f"{tensor.name!r} has the axes ({' '.join(loop)}) in {found} groups; a kernel walks {most}"
        raise NotFusable("axes_do_not_flatten", fusion.anchor, detail)


def _dimension(tensor: Tensor, axis: str) -> int:
    return next(index for index, dim in enumerate(tensor.dims) if axis in dim)


def _adjacent(fusion: Pointwise, tensor: Tensor, outer: str, inner: str) -> bool:
    """Whether one stride steps through both axes of a tensor."""
    axes = stepped(fusion, tensor.axes)
    if outer not in axes or inner not in axes:
        return outer not in axes and inner not in axes
    if tensor.wide is not None and _dimension(tensor, outer) < tensor.wide[0] <= _dimension(tensor, inner):
        return False  # what is beside the window lies between
    return axes.index(inner) == axes.index(outer) + 1
