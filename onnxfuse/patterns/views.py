"""The algebra of views: what grouping and splitting dimensions does to the axes of a value.

A dimension is a row of pieces, outermost first, and a piece is a part of an axis: Transpose permutes dimensions,
Reshape groups and splits their pieces. There is no division in it: a Reshape that does not factor is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.graph.graph import Size


class AxisKind(Enum):
    """Whose an axis is."""

    LHS = "x"
    RHS = "y"
    COLUMNS = "n"  # a product's
    REPEATED = "~"  # along which an Expand repeats its input
    BROADCAST = "^"  # along which an operand repeats the product, as pixels do a time embedding


@dataclass(frozen=True)
class ViewAxis:
    """An axis that dimensions have a part in.

    Attributes:
        kind: whose it is.
        place: which of its kind: the dimension, after the node that makes it where one does.
    """

    kind: AxisKind
    place: tuple[int, ...] = ()


COLUMNS = ViewAxis(AxisKind.COLUMNS)  # where they are one axis; several have a place each


@dataclass(frozen=True)
class Piece:
    """Part of an axis: of `size` steps, each as long as `step` steps of the axis itself.

    Attributes:
        axis: the axis.
        size: an int, or a symbol for what only the run knows: then it is the outermost piece of its axis.
    """

    axis: ViewAxis
    size: int | str
    step: int = 1


Dim = tuple[Piece, ...]
View = tuple[Dim, ...]
"""The dimensions of a value; `()` is a dimension of size 1."""


def axis_view(shape: Sequence[Size], kind: AxisKind) -> View:
    """A tensor of its own axes; a size that has no symbol gets one that nothing else has."""
    return tuple(
        (Piece(ViewAxis(kind, (index,)), f"?{kind.value}{index}" if size is None else size),)
        for index, size in enumerate(shape)
    )


def extent(pieces: Iterable[Piece]) -> int | str:
    """The size of some pieces together.

    Raises:
        NotFusable: it is none that has a name, as where names of dimensions are kilobytes long.
    """
    size = symbolic.multiply(piece.size for piece in pieces)
    if size is None:
        raise NotFusable("unknown_shape", "", "the sizes of several dimensions together have no name")
    return size


def regroup(view: View, wanted: Sequence[Size]) -> View:
    """The view after a Reshape to some sizes, of which one may be None.

    Raises:
        NotFusable: the pieces do not factor into these dimensions.
    """
    pieces = [piece for dim in view for piece in dim if piece.size != 1]
    return tuple(_take(pieces, size) for size in _closed(extent(pieces), wanted))


def _closed(total: Size, wanted: Sequence[Size]) -> list[int | str]:
    """The sizes with the open one filled in, which make up all of the total."""
    if sum(size is None for size in wanted) > 1:
        raise NotFusable("unknown_shape", "", "reshapes to sizes that are not known before the run")
    rest = symbolic.divide(total, symbolic.multiply(size for size in wanted if size is not None))
    if rest is None or (None not in wanted and rest != 1):
        raise NotFusable("unknown_shape", "", "reshapes to sizes that are not provably those of its input")
    return [rest if size is None else size for size in wanted]


def _take(pieces: list[Piece], size: Size) -> Dim:
    """Take the pieces of one dimension from the front, the last one in part where it is longer."""
    taken: list[Piece] = []
    while size != 1:
        if not pieces:
            raise NotFusable("reshape_does_not_factor", "", "reshapes across the axes of the product")
        if symbolic.divide(size, pieces[0].size) is None:
            pieces[:1] = split(pieces[0], size)
        taken.append(pieces.pop(0))
        size = symbolic.divide(size, taken[-1].size)
    return joined(taken)


def split(piece: Piece, size: Size) -> tuple[Piece, Piece]:
    """A piece in two, the outer one of the given size; the inner one has a size that is known."""
    inner = symbolic.divide(piece.size, size)
    if size is None or not isinstance(inner, int):
        raise NotFusable("reshape_does_not_factor", "", "reshapes across the axes of the product")
    return replace(piece, size=size, step=piece.step * inner), replace(piece, size=inner)


def joined(pieces: Iterable[Piece]) -> Dim:
    """Neighbours that are one piece of an axis become it, so that equal views are equal."""
    found: list[Piece] = []
    for piece in pieces:
        whole = _one_piece(found[-1], piece) if found else None
        found[-1 if whole else len(found) :] = [whole or piece]
    return tuple(found)


def _one_piece(outer: Piece, inner: Piece) -> Piece | None:
    if isinstance(inner.size, str) or outer.axis != inner.axis or outer.step != inner.step * inner.size:
        return None
    return replace(inner, size=extent((outer, inner)))


def refined(view: View, other: View) -> View:
    """A view whose pieces are split where another view splits them."""
    bounds: dict[ViewAxis, set[int]] = {}
    for piece in (piece for dim in (*view, *other) for piece in dim):
        ends = (piece.step, piece.step * piece.size) if isinstance(piece.size, int) else (piece.step,)
        bounds.setdefault(piece.axis, set()).update(ends)
    return tuple(tuple(part for piece in dim for part in split_at(piece, bounds.get(piece.axis, ()))) for dim in view)


def split_at(piece: Piece, bounds: Iterable[int]) -> list[Piece]:
    """A piece in parts that begin at these steps of its axis, outermost first.

    Raises:
        NotFusable: the bounds do not divide each other.
    """
    end = math.inf if isinstance(piece.size, str) else piece.step * piece.size
    inside = sorted(bound for bound in bounds if piece.step <= bound <= end)
    parts: list[Piece] = []
    for inner, outer in pairwise(inside):
        if outer % inner:
            raise NotFusable("reshape_does_not_factor", "", f"an axis is split at {inner} and at {outer}")
        parts.insert(0, Piece(piece.axis, outer // inner, inner))
    if isinstance(piece.size, str) and parts:
        parts.insert(0, replace(piece, size=_rest(piece, inside[-1] // piece.step), step=inside[-1]))
    return parts or [piece]


def _rest(piece: Piece, inner: int) -> int | str:
    """How often some steps go into a piece."""
    rest = symbolic.divide(piece.size, inner)
    if rest is None:
        raise NotFusable("reshape_does_not_factor", "", f"an axis of {piece.size} is split at {inner}")
    return rest


def is_column(piece: Piece) -> bool:
    """Whether a piece is of a product's columns."""
    return piece.axis.kind is AxisKind.COLUMNS


def is_repeated(piece: Piece) -> bool:
    """Whether a piece is of an axis that an Expand made."""
    return piece.axis.kind is AxisKind.REPEATED


def is_broadcast(piece: Piece) -> bool:
    """Whether a piece is of an axis along which an operand repeats the product."""
    return piece.axis.kind is AxisKind.BROADCAST


def columns_dim(view: View) -> int | None:
    """The dimension that is all columns and nothing else; None where they are split or grouped."""
    found = [index for index, dim in enumerate(view) if any(map(is_column, dim))]
    whole = len(found) == 1 and len(view[found[0]]) == 1 and view[found[0]][0].step == 1
    return found[0] if whole else None


def ends_in_columns(view: View) -> bool:
    """Whether the last dimension is all columns and nothing else: one axis of them, or several grouped."""
    is_last = bool(view) and all(is_column(piece) and piece.step == 1 for piece in view[-1])
    return is_last and not any(is_column(piece) for dim in view[:-1] for piece in dim)


def in_turn(columns: int, parts: int, run: int = 1) -> Dim:
    """The columns of a dimension in which those of some parts take turns, numbered part by part.

    One after the other, `(n p)`; or so many at a time, as the halves of heads that a rotation turns, `(n1 p n2)`.
    """
    width = columns // parts
    turns = Piece(COLUMNS, width // run, run), Piece(COLUMNS, parts, width)
    return (*turns, Piece(COLUMNS, run)) if run > 1 else turns


def with_columns(view: View, index: int, length: int, step: int) -> View:
    """The view of a range of the columns along a dimension, a step of which is `step` columns."""
    dim = () if length == 1 < step else (Piece(COLUMNS, length, step),)
    return (*view[:index], dim, *view[index + 1 :])


def common_view(views: Sequence[View]) -> View:
    """The dimensions of values that meet: they are the same, but that only some may be repeated by an operand.

    Raises:
        NotFusable: they are not.
    """
    dims = list(views[0])
    for view in views[1:]:
        if len(view) != len(dims):
            raise NotFusable("views_differ", "", "combines values that were reshaped or transposed differently")
        dims = [_common_dim(one, other) for one, other in zip(dims, view, strict=True)]
    return tuple(dims)


def _common_dim(one: Dim, other: Dim) -> Dim:
    for dim, short in ((one, other), (other, one)):
        if one == other or (dim and is_broadcast(dim[0]) and extent(short) == 1):
            return dim
    raise NotFusable("views_differ", "", "combines values that were reshaped or transposed differently")
