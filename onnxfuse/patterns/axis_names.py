"""Pieces of axes -> the named axes of the IR: every axis is cut where any tensor of the fusion cuts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import PART_AXIS, Axis, Dim
from onnxfuse.patterns.views import COLUMNS, Piece, View, cut

LEADING_AXES = ("h", "g", "f", "e", "d", "c")  # between the batch and the rows, for products of rank 4 and more
MOST_AXES = 2 + len(LEADING_AXES)


@dataclass(frozen=True)
class AxisNames:
    """The IR's axes and the pieces that they are.

    Attributes:
        axes: rows, then columns, then k.
        pieces: of each axis.
        width: columns of one part.
    """

    axes: tuple[Axis, ...]
    pieces: tuple[Piece, ...]
    width: int

    def dims(self, view: View) -> tuple[Dim, ...]:
        """A tensor's dimensions. Columns that are wider than a part are parts side by side."""
        return tuple(tuple(name for piece in dim for name in self._names(piece)) for dim in view)

    def _names(self, piece: Piece) -> Dim:
        if piece.axis == COLUMNS and isinstance(piece.size, int) and piece.size > self.width:
            return (PART_AXIS, *self._names(Piece(COLUMNS, self.width)))
        end = piece.step * piece.size if isinstance(piece.size, int) else 0
        parts = sorted(zip(self.pieces, self.axes, strict=True), key=lambda entry: -entry[0].step)
        own = ((part.step, axis.name) for part, axis in parts if part.axis == piece.axis)
        return tuple(name for step, name in own if step == piece.step or piece.step < step < end)


def name_axes(rows: View, k: View, tensors: Iterable[View], width: int) -> AxisNames:
    """Cut the axes, and name the pieces.

    Args:
        rows: the product's dimensions but the last.
        k: its contracted dimension.
        tensors: every tensor of the fusion.
        width: columns of one part.

    Raises:
        NotFusable: two tensors cut an axis at places that do not divide each other, or there are too many axes.
    """
    tensors = (rows, k, *tensors)
    cuts: dict[str, set[int]] = {}
    for piece in (piece for view in tensors for dim in view for piece in dim):
        if isinstance(piece.size, int) and not (piece.axis == COLUMNS and piece.size > width):
            cuts.setdefault(piece.axis, {1}).update((piece.step, piece.step * piece.size))
    row_pieces = _finest(rows, cuts)
    column_pieces = _finest((((Piece(COLUMNS, width),)),), cuts)
    k_pieces = _finest(k, cuts)
    names = (*_row_names(len(row_pieces)), *_numbered("n", column_pieces), *_numbered("k", k_pieces))
    pieces = (*row_pieces, *column_pieces, *k_pieces)
    sizes = (piece.size if isinstance(piece.size, int) else None for piece in pieces)
    return AxisNames(tuple(map(Axis, names, sizes)), pieces, width)


def _finest(view: View, cuts: dict[str, set[int]]) -> tuple[Piece, ...]:
    return tuple(part for dim in view for piece in dim for part in cut(piece, cuts.get(piece.axis, ())))


def _row_names(count: int) -> tuple[str, ...]:
    """`m`; `b, m`; `b, h, m`; ..."""
    if count > MOST_AXES:
        raise NotFusable("rank_too_high", "", f"the product's rows have {count} axes")
    return (*("b", *LEADING_AXES)[: max(count - 1, 0)], "m")[-count:] if count else ()


def _numbered(name: str, pieces: tuple[Piece, ...]) -> tuple[str, ...]:
    """`n`, or `n1, n2`, ..."""
    return (name,) if len(pieces) == 1 else tuple(f"{name}{number}" for number in range(1, len(pieces) + 1))
