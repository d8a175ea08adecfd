"""Pieces of axes -> the named axes of the IR: every axis is split where any tensor of the fusion splits it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxfuse.dtypes import DType
from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import PART_AXIS, Axis, Dim, Tensor
from onnxfuse.patterns.views import COLUMNS, Piece, View, ViewAxis, extent, is_broadcast, split_at

LEADING_AXES = ("h", "g", "f", "e", "d", "c")  # between the batch and the rows, for products of rank 4 and more
MOST_AXES = 2 + len(LEADING_AXES)


@dataclass(frozen=True)
class AxisNames:
    """The IR's axes and the pieces that they are.

    Attributes:
        axes: rows, then columns, then k, then those along which operands repeat the product.
        pieces: of each axis.
        width: columns of one part.
        is_window: whether the only part is one of any width.
    """

    axes: tuple[Axis, ...]
    pieces: tuple[Piece, ...]
    width: int | str
    is_window: bool = False

    def tensor(self, name: str, dtype: DType, view: View) -> Tensor:
        """A tensor. Columns that are wider than a part are parts side by side, or what a window is of."""
        dims = tuple(tuple(name for piece in dim for name in self._names(piece)) for dim in view)
        wide = [(index, dim[0].size) for index, dim in enumerate(view) if len(dim) == 1 and self._is_wide(dim[0])]
        return Tensor(name, dtype, dims, *((index, int(size)) for index, size in wide))

    def _is_wide(self, piece: Piece) -> bool:
        return self.is_window and _is_packed(piece, self.width)

    def _names(self, piece: Piece) -> Dim:
        if _is_packed(piece, self.width):
            names = self._names(Piece(COLUMNS, self.width))
            return names if self.is_window else (PART_AXIS, *names)
        if _counts_parts(piece, self.width):
            return (PART_AXIS,)
        if not self.is_window and _spans_parts(piece, self.width):
            return (PART_AXIS, *self._names(_of_one_part(piece, self.width)))
        end = piece.step * piece.size if isinstance(piece.size, int) else math.inf
        own = self._outermost_first[piece.axis]
        return tuple(name for step, name in own if step == piece.step or piece.step < step < end)

    @cached_property
    def _outermost_first(self) -> Mapping[ViewAxis, list[tuple[int, str]]]:
        """Step and name of each piece of an axis."""
        found = defaultdict[ViewAxis, list[tuple[int, str]]](list)
        for piece, axis in sorted(zip(self.pieces, self.axes, strict=True), key=lambda entry: -entry[0].step):
            found[piece.axis].append((piece.step, axis.name))
        return found


def _is_packed(piece: Piece, width: int | str) -> bool:
    """Whether a piece is columns of several parts; the parts themselves may be more than the columns of one."""
    sizes = isinstance(piece.size, int) and isinstance(width, int)
    return piece.axis == COLUMNS and sizes and int(piece.size) > int(width) and not _counts_parts(piece, width)


def _counts_parts(piece: Piece, width: int | str) -> bool:
    """Whether a step along a piece is to the same column of the next part."""
    return piece.axis == COLUMNS and piece.step == width != 1


def _spans_parts(piece: Piece, width: int | str) -> bool:
    """Whether some steps along a piece are of one part and others of the next, as the heads of a value in halves."""
    if piece.axis != COLUMNS or isinstance(piece.size, str) or isinstance(width, str):
        return False
    return 1 < piece.step < width < piece.step * piece.size


def _of_one_part(piece: Piece, width: int | str) -> Piece:
    """The steps along such a piece that are of one part.

    Raises:
        NotFusable: a part has no whole number of them.
    """
    if int(width) % piece.step:
        raise NotFusable("not_equal_parts", "", f"{width} columns of a part have no whole steps of {piece.step}")
    return replace(piece, size=int(width) // piece.step)


def varies_by_part(view: View, width: int | str) -> bool:
    """Whether a tensor holds different columns for each of the parts of so many columns."""
    pieces = [piece for dim in view for piece in dim]
    return any(_is_packed(each, width) or _counts_parts(each, width) or _spans_parts(each, width) for each in pieces)


def name_axes(
    rows: View, k: View, columns: tuple[Piece, ...], tensors: Iterable[View], is_window: bool = False
) -> AxisNames:
    """Split the axes, and name the pieces.

    Args:
        rows: the product's dimensions but the columns.
        k: its contracted dimension.
        columns: those of one part.
        tensors: every tensor of the fusion.
        is_window: whether wider columns are what a window is of, and not parts.

    Raises:
        NotFusable: two tensors split an axis where one part does not divide the other, or there are too many axes.
    """
    tensors = (rows, k, *tensors)
    width = extent(columns)
    bounds: dict[ViewAxis, set[int]] = {}
    for piece in (piece for view in tensors for dim in view for piece in dim):
        if not is_window and _spans_parts(piece, width):
            piece = _of_one_part(piece, width)
        if isinstance(piece.size, int) and not _is_packed(piece, width) and not _counts_parts(piece, width):
            bounds.setdefault(piece.axis, {1}).update((piece.step, piece.step * piece.size))
    row_pieces = _finest(rows, bounds)
    column_pieces = _finest((columns,), bounds)
    k_pieces = _finest(k, bounds)
    broadcast = {piece.axis: piece for view in tensors for dim in view for piece in dim if is_broadcast(piece)}
    broadcast_pieces = _finest((tuple(broadcast.values()),), bounds)
    names = (*_row_names(len(row_pieces)), *_numbered("n", column_pieces), *_numbered("k", k_pieces))
    names = (*names, *_numbered("s", broadcast_pieces))
    pieces = (*row_pieces, *column_pieces, *k_pieces, *broadcast_pieces)
    sizes = (piece.size if isinstance(piece.size, int) else None for piece in pieces)
    return AxisNames(tuple(map(Axis, names, sizes)), pieces, width, is_window)


def _finest(view: View, bounds: dict[ViewAxis, set[int]]) -> tuple[Piece, ...]:
    return tuple(part for dim in view for piece in dim for part in split_at(piece, bounds.get(piece.axis, ())))


def _row_names(count: int) -> tuple[str, ...]:
    """`m`; `b, m`; `b, h, m`; ..."""
    if count > MOST_AXES:
        raise NotFusable("rank_too_high", "", f"the product's rows have {count} axes")
    return (*("b", *LEADING_AXES)[: max(count - 1, 0)], "m")[-count:] if count else ()


def _numbered(name: str, pieces: tuple[Piece, ...]) -> tuple[str, ...]:
    """`n`, or `n1, n2`, ..."""
    return (name,) if len(pieces) == 1 else tuple(f"{name}{number}" for number in range(1, len(pieces) + 1))
