"""Two tensors with labelled dimensions -> the axes that they share: what MatMul, Gemm, Einsum and Conv have in common.

    lhs  b h m k       a label of both that the output lacks is contracted; one of both that it has is a batch
    rhs  b h k n       a label of one tensor alone belongs to the rows (lhs) or to the columns (rhs)
    out  b h m n       a dimension of size 1, or one that an Expand made, has no axis: the tensor is broadcast along it

Axes carry the names of lhs; those of rhs alone are columns, or rows where they come before all that lhs has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxfuse.dtypes import F16
from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.limits import MOST_LEVELS, STAGE_ROW_BYTES
from onnxfuse.patterns.operand_views import Source
from onnxfuse.patterns.views import COLUMNS, AxisKind, Dim, Piece, View, ViewAxis, is_repeated, refined, split

STAGE_DEPTH = STAGE_ROW_BYTES // F16.bytes  # where heads are narrower, merging them is left outside


@dataclass(frozen=True)
class Labels:
    """The dimensions of a product, by name: `bmk`, `kn`, `bmn`.

    Attributes:
        broadcasts: a contracted dimension may be 1 in one input; else both sizes are equal, or the model is wrong.
    """

    lhs: str
    rhs: str
    out: str
    broadcasts: bool = False


@dataclass(frozen=True)
class Contraction:
    """Views of both tensors and of the output over common axes.

    Attributes:
        lhs: dimensions of the tensor itself, before its views; likewise `rhs`.
        out: dimensions of the output.
        rows: those of them that are not columns; `columns` the others.
        k: the contracted axes.
    """

    lhs: View
    rhs: View
    out: View
    rows: View
    columns: Dim
    k: Dim


_Names = dict[Piece, Dim]  # what a piece of a tensor's own axes is called in the product


def contract(lhs: Source, rhs: Source, labels: Labels) -> Contraction:
    """Give every dimension its axes.

    Raises:
        NotFusable: two dimensions of one label are not provably equal, or split differently.
    """
    left, right = dict(zip(labels.lhs, lhs.seen, strict=True)), dict(zip(labels.rhs, rhs.seen, strict=True))
    names: tuple[_Names, _Names] = ({}, {})
    contracted = [label for label in labels.lhs if label in labels.rhs and label not in labels.out]
    unified = [] if labels.broadcasts else contracted
    met = {
        label: _met(left.get(label), right.get(label), names, label in contracted, label in unified)
        for label in (*contracted, *labels.out)
    }
    k = tuple(piece for label in contracted for piece in met[label])
    dims = {label: met[label] for label in labels.out}
    first = min((place for place, label in enumerate(labels.out) if label in left), default=len(labels.out) - 1)
    column_labels = [label for label in labels.out[max(first, 0) :] if label in right and label not in left]
    dims |= _columns({label: dims[label] for label in column_labels}, names[1])
    return Contraction(
        lhs=_named(lhs, names[0]),
        rhs=_named(rhs, names[1]),
        out=tuple(dims[label] for label in labels.out),
        rows=tuple(dims[label] for label in labels.out if label not in column_labels),
        columns=tuple(piece for label in column_labels for piece in dims[label]),
        k=k,
    )


def _pairs(left: list[Piece], right: list[Piece], names: tuple[_Names, _Names]) -> list[Piece]:
    """What both have in common from the last piece on, which is taken from both."""
    found: list[Piece] = []
    while left and right:
        size = _smaller(left[-1].size, right[-1].size)
        found.insert(0, _common(_taken(left, size), _taken(right, size), names))
    return found


def _met(lhs: Dim | None, rhs: Dim | None, names: tuple[_Names, _Names], contracted: bool, unified: bool) -> Dim:
    """The axes of one label; sizes of a unified one are equal, or the model is wrong."""
    if lhs is None or rhs is None:
        return _real((lhs or ()) + (rhs or ()))
    if unified and len(lhs) == len(rhs) == 1:
        return _unified(lhs[0], rhs[0], names)
    left, right = ([piece for piece in dim if piece.size != 1] for dim in (lhs, rhs))
    for own, dim in zip(names, (lhs, rhs), strict=True):
        own.update({piece: () for piece in dim if piece.size == 1})
    if not left or not right:
        return _alone((*left, *right), contracted)
    found = _pairs(left, right, names)
    if left or right:
        raise NotFusable("unknown_broadcast", "", "the sizes of its inputs do not provably agree")
    return tuple(found)


def _alone(pieces: Dim, contracted: bool) -> Dim:
    """The axes of a label that the other input lacks, or has in size 1."""
    if contracted and pieces:
        raise NotFusable("unknown_broadcast", "", f"k is 1 in one input and {pieces[0].size} in the other")
    return _real(pieces)


def _real(pieces: Dim) -> Dim:
    if any(map(is_repeated, pieces)):
        raise NotFusable("unknown_broadcast", "", "a dimension is repeated that neither input has")
    return pieces


def _unified(left: Piece, right: Piece, names: tuple[_Names, _Names]) -> Dim:
    """One axis for two that the model says are equal; a number says more than a symbol."""
    if left.size == right.size:
        return (_common(left, right, names),)
    if isinstance(left.size, int) and isinstance(right.size, int):
        raise NotFusable("invalid_model", "", f"k is {left.size} in one input and {right.size} in the other")
    whole = replace(left, size=left.size if isinstance(left.size, int) else right.size)
    names[0][left] = names[1][right] = _real((whole,))
    return (whole,)


def _smaller(left: int | str, right: int | str) -> int | str:
    if left == right:
        return left
    number, other = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(number, str) or 0 in (left, right) or (isinstance(other, str) and not symbolic.divide(other, number)):
        raise NotFusable("unknown_broadcast", "", f"sizes of its inputs, {left} and {right}, do not provably agree")
    return min(number, other) if isinstance(other, int) else number


def _taken(pieces: list[Piece], size: int | str) -> Piece:
    """Take the innermost steps of some pieces."""
    own = pieces.pop()
    if own.size == size:
        return own
    left = symbolic.divide(own.size, size) if isinstance(size, int) else None
    if left is None:
        raise NotFusable("unknown_broadcast", "", f"sizes of its inputs, {own.size} and {size}, do not agree")
    outer, inner = split(own, left)
    pieces.append(outer)
    return inner


def _common(left: Piece, right: Piece, names: tuple[_Names, _Names]) -> Piece:
    """The axis of both, which one of them may lack."""
    common = right if is_repeated(left) else left
    _real((common,))
    names[0][left] = (common,) if common is left else ()
    names[1][right] = () if is_repeated(right) else (common,)
    return common


def _columns(dims: dict[str, Dim], names: _Names) -> dict[str, Dim]:
    """Columns get axes of their own: one, which may be split into parts, or several."""
    pieces = [piece for dim in dims.values() for piece in dim]
    if len(pieces) <= 1:
        called = {piece: Piece(COLUMNS, piece.size) for piece in pieces}
    else:
        called = {piece: Piece(ViewAxis(AxisKind.COLUMNS, (index,)), piece.size) for index, piece in enumerate(pieces)}
    names.update({piece: (called[piece],) for piece in pieces})
    return {label: tuple(called[piece] for piece in dim) for label, dim in dims.items()}


def _named(source: Source, names: _Names) -> View:
    own = refined(source.view, (tuple(names),))
    return tuple(tuple(name for piece in dim for name in names.get(piece, (piece,))) for dim in own)


# ---- what kernels address


def is_addressable(found: Contraction) -> bool:
    """Whether the kernels read both tensors where they lie.

    The innermost axis of lhs is k's, in at most two groups of neighbours, or the rows'. Its rows are a batch and an m;
    those that rhs has too are the batch. Batch, k and columns of rhs are a group each.
    """
    every = (*found.lhs, *found.rhs, *found.rows, found.k)
    lhs, rhs, rows, k = (_order(refined(view, every)) for view in (found.lhs, found.rhs, found.rows, (found.k,)))
    shared = [piece for piece in rows if piece in rhs]
    own = [piece for piece in rows if piece in lhs and piece not in rhs]
    columns = [piece for piece in rhs if piece not in k and piece not in rows]
    return _is_lhs_addressable(lhs, k, [piece for piece in shared if piece in lhs], own) and all(
        _groups(rhs, pieces) <= 1 for pieces in (k, columns, shared)
    )


def _is_lhs_addressable(lhs: list[Piece], k: list[Piece], shared: list[Piece], own: list[Piece]) -> bool:
    if not k or _groups(lhs, shared) > 1 or _groups(lhs, own) > MOST_LEVELS - bool(shared):
        return False
    if lhs[-1] != k[-1] or _groups(lhs, k) == 1:
        return _groups(lhs, k) == 1
    return _groups(lhs, k) == MOST_LEVELS and _run(lhs, k) % STAGE_DEPTH == 0


def _order(view: View) -> list[Piece]:
    return [piece for dim in view for piece in dim if piece.size != 1]


def _run(order: list[Piece], pieces: list[Piece]) -> int:
    """Steps of the innermost group: the product of the pieces that end the tensor's own order."""
    run = 1
    for own, piece in zip(reversed(order), reversed(pieces), strict=False):
        if own != piece or isinstance(piece.size, str):
            break
        run *= piece.size
    return run


def _groups(order: list[Piece], pieces: list[Piece]) -> int:
    """How many runs of neighbours, in the tensor's own order, some pieces are."""
    return sum(
        index == 0 or order.index(piece) != order.index(pieces[index - 1]) + 1 for index, piece in enumerate(pieces)
    )
