"""The axis mapping: which axes of a fusion are the kernel's batch, m, n and k. Resolved once; strides follow from it.

A kernel knows three loops over its output, `[batch, m, n]`, and one over `k`. A tensor is row-major over named axes,
and one that lacks an axis is broadcast along it (stride 0). Neighbouring row axes flatten into one where every
tensor has both, one behind the other, or neither; what does not flatten into `m` becomes the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import PART_AXIS, Fusion, Pointwise, Tensor


@dataclass(frozen=True)
class AxisMapping:
    """The axes of each loop of the kernel, outermost first; they flatten into one index."""

    batch: tuple[str, ...]
    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]

    def __str__(self) -> str:
        groups = (("batch", self.batch), ("m", self.m), ("n", self.n), ("k", self.k))
        return " ".join(f"{name}={'*'.join(axes)}" for name, axes in groups if axes)

    def kind(self, tensor: Tensor) -> str:
        """`scalar`, `row`, `column` or `tile`: by the axes that a tensor has, never by their sizes."""
        has_rows = any(axis in tensor.axes for axis in self.m)
        has_columns = any(axis in tensor.axes for axis in self.n)
        return (("scalar", "row"), ("column", "tile"))[has_rows][has_columns]


def map_axes(fusion: Fusion) -> AxisMapping:
    """Give every axis its loop.

    Raises:
        NotFusable: the row axes do not flatten into a batch and an m.
    """
    out_axes = tuple(axis for axis in fusion.outs[0].tensor.axes if axis != PART_AXIS)
    rhs_axes = {axis for rhs in fusion.rhs for axis in rhs.axes}
    rows = tuple(axis for axis in out_axes if axis not in rhs_axes)
    columns = tuple(axis for axis in out_axes if axis not in fusion.lhs.axes)
    contracted = tuple(axis for axis in fusion.lhs.axes if axis not in out_axes)
    return AxisMapping(*_row_loops(fusion, rows), columns, contracted)


def map_pointwise(pointwise: Pointwise, mapping: AxisMapping) -> AxisMapping:
    """The mapping of what is left of a fusion without its product: no k, and lhs has no say in how rows flatten.

    Raises:
        NotFusable: the row axes do not flatten into a batch and an m.
    """
    return AxisMapping(*_row_loops(pointwise, (*mapping.batch, *mapping.m)), mapping.n, ())


def _row_loops(fusion: Pointwise, rows: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The row axes as a batch, which may have none, and an m."""
    groups = _flatten(fusion, rows)
    if len(groups) > 2:
        detail = f"the row axes ({' '.join(rows)}) form {len(groups)} groups; the kernel has a batch and an m"
        raise NotFusable("axes_do_not_flatten", fusion.anchor, detail)
    return groups[0] if len(groups) == 2 else (), groups[-1]


def _flatten(fusion: Pointwise, rows: tuple[str, ...]) -> list[tuple[str, ...]]:
    tensors = (*fusion.inputs, *(out.tensor for out in fusion.outs))
    groups = [rows[:1]]
    for outer, inner in pairwise(rows):
        if all(_adjacent(fusion, tensor, outer, inner) for tensor in tensors):
            groups[-1] = (*groups[-1], inner)
        else:
            groups.append((inner,))
    return groups


def _adjacent(fusion: Pointwise, tensor: Tensor, outer: str, inner: str) -> bool:
    """Whether one stride steps through both axes of a tensor; an axis of size 1 is never stepped along."""
    axes = tensor.axes
    if 1 in (fusion.size(outer), fusion.size(inner)):
        return True
    if outer not in axes or inner not in axes:
        return outer not in axes and inner not in axes
    return axes.index(inner) == axes.index(outer) + 1
