"""Views: what Transpose, Reshape and their kind do to the axes of a value.

A dimension is a row of pieces, outermost first, and a piece is a part of an axis: Transpose permutes dimensions,
Reshape groups and splits their pieces. There is no division in it: a Reshape that does not factor is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.graph.data_propagation import CONTRADICTIONS
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.graph import SIXTEEN_BIT, Graph, Size

MAX_SHAPE_VALUES = 64  # that shape arithmetic of one Reshape takes
COLUMNS = "n"  # the axis of a product's columns, `n0`, `n1`, ... where they are several; others are those of lhs
REPEATED = "~"  # begins the name of an axis along which an Expand repeats its input
SPREAD = "^"  # of one along which an operand repeats the product, as pixels do a time embedding


@dataclass(frozen=True)
class Piece:
    """Part of an axis: of `size` steps, each as long as `step` steps of the axis itself.

    Attributes:
        axis: name of the axis.
        size: an int, or a symbol for what only the run knows; an axis of symbolic size is never split.
    """

    axis: str
    size: int | str
    step: int = 1


Dim = tuple[Piece, ...]
View = tuple[Dim, ...]
"""The dimensions of a value; `()` is a dimension of size 1."""


def axis_view(shape: Sequence[Size], name: str) -> View:
    """A tensor of its own axes, `x0`, `x1`, ...; a size that has no symbol gets one that nothing else has."""
    return tuple(
        (Piece(f"{name}{index}", f"?{name}{index}" if size is None else size),) for index, size in enumerate(shape)
    )


def extent(pieces: Iterable[Piece]) -> int | str:
    """The size of some pieces together."""
    size = symbolic.multiply(piece.size for piece in pieces)
    assert size is not None, "pieces have sizes"
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
    return _joined(taken)


def split(piece: Piece, size: Size) -> tuple[Piece, Piece]:
    """A piece in two, the outer one of the given size."""
    if isinstance(piece.size, str) or not isinstance(size, int) or piece.size % size:
        raise NotFusable("reshape_does_not_factor", "", "reshapes across the axes of the product")
    inner = piece.size // size
    return replace(piece, size=size, step=piece.step * inner), replace(piece, size=inner)


def _joined(pieces: list[Piece]) -> Dim:
    """Neighbours that are one piece of an axis become it, so that equal views are equal."""
    joined: list[Piece] = []
    for piece in pieces:
        whole = _one_piece(joined[-1], piece) if joined else None
        joined[-1 if whole else len(joined) :] = [whole or piece]
    return tuple(joined)


def _one_piece(outer: Piece, inner: Piece) -> Piece | None:
    if isinstance(outer.size, str) or isinstance(inner.size, str) or outer.axis != inner.axis:
        return None
    return replace(inner, size=outer.size * inner.size) if outer.step == inner.step * inner.size else None


def refined(view: View, other: View) -> View:
    """A view whose pieces are cut where another view cuts them."""
    cuts: dict[str, set[int]] = {}
    for piece in (piece for dim in (*view, *other) for piece in dim):
        if isinstance(piece.size, int):
            cuts.setdefault(piece.axis, set()).update((piece.step, piece.step * piece.size))
    return tuple(tuple(part for piece in dim for part in cut(piece, cuts.get(piece.axis, set()))) for dim in view)


def cut(piece: Piece, places: Iterable[int]) -> list[Piece]:
    """A piece in parts that begin at these steps of its axis, outermost first.

    Raises:
        NotFusable: the places do not divide each other.
    """
    if isinstance(piece.size, str):
        return [piece]
    inside = sorted(place for place in places if piece.step <= place <= piece.step * piece.size)
    parts: list[Piece] = []
    for inner, outer in pairwise(inside):
        if outer % inner:
            raise NotFusable("reshape_does_not_factor", "", f"an axis is split at {inner} and at {outer}")
        parts.insert(0, Piece(piece.axis, outer // inner, inner))
    return parts or [piece]


def is_column(piece: Piece) -> bool:
    """Whether a piece is of a product's columns."""
    return piece.axis.startswith(COLUMNS)


def columns_dim(view: View) -> int | None:
    """The dimension that is all columns and nothing else; None where they are split or grouped."""
    found = [index for index, dim in enumerate(view) if any(map(is_column, dim))]
    whole = len(found) == 1 and len(view[found[0]]) == 1 and view[found[0]][0].step == 1
    return found[0] if whole else None


def with_columns(view: View, index: int, length: int, step: int) -> View:
    """The view of a range of the columns along a dimension, a step of which is `step` columns."""
    dim = () if length == 1 < step else (Piece(COLUMNS, length, step),)
    return (*view[:index], dim, *view[index + 1 :])


@dataclass(frozen=True)
class Base:
    """An input of a fusion, whose dimensions a shape may be computed from: its name, its view, its place."""

    name: str
    view: View
    index: int = 0


def shape_of(before: View, after: View, base: Base, prefer_base: bool = False) -> FallbackShape | None:
    """How a Reshape's shape follows from its input's dimensions and those of a base; None where it does not."""
    sizes = [extent(dim) for dim in after]
    kept = [index < len(before) and extent(before[index]) == size for index, size in enumerate(sizes)]
    entries = [size if isinstance(size, int) else 0 if keep else -1 for size, keep in zip(sizes, kept, strict=True)]
    of_base: list[int | None] = [None] * len(entries)
    known = [extent(dim) for dim in base.view]
    for index, size in enumerate(sizes):
        wanted = prefer_base or (entries.count(-1) > 1 and entries[index] == -1)
        if isinstance(size, str) and wanted and size in known:
            entries[index], of_base[index] = 0, known.index(size)
    return FallbackShape(tuple(entries), tuple(of_base), base.index) if entries.count(-1) <= 1 else None


# ---- ONNX ops


def _transpose(graph: Graph, node: gs.Node, view: View) -> View:
    order = node.attrs.get("perm", list(reversed(range(len(view)))))
    return tuple(view[index] for index in order)


def _reshape(graph: Graph, node: gs.Node, view: View) -> View:
    shape, target = graph.shape(node.outputs[0].name), graph.known_value(node.inputs[1])
    if shape is None:
        raise NotFusable("unknown_shape", "", "reshapes to a shape that is not known before the run")
    given = (None,) * len(shape) if target is None else target.ravel().tolist()
    is_open = [size in (None, -1) for size in given]
    one_open = is_open.count(True) == 1
    return regroup(view, [None if left and one_open else size for left, size in zip(is_open, shape, strict=True)])


def _squeeze(graph: Graph, node: gs.Node, view: View) -> View:
    axes = _axes(graph, node, len(view))
    if axes is None and not all(isinstance(extent(dim), int) for dim in view):
        raise NotFusable("unknown_shape", "", "squeezes every dimension that turns out to be of size 1")
    gone = [index for index, dim in enumerate(view) if extent(dim) == 1] if axes is None else axes
    if any(extent(view[index]) != 1 for index in gone):
        raise NotFusable("unknown_shape", "", "squeezes a dimension that is not provably of size 1")
    return tuple(dim for index, dim in enumerate(view) if index not in gone)


def _unsqueeze(graph: Graph, node: gs.Node, view: View) -> View:
    given = _axes(graph, node, None)
    if given is None:
        raise NotFusable("unknown_shape", "", "where it inserts dimensions is not known before the run")
    rank = len(view) + len(given)
    new = {axis % rank for axis in given}
    old = iter(view)
    return tuple(() if index in new else next(old) for index in range(rank))


def _flatten(graph: Graph, node: gs.Node, view: View) -> View:
    axis = node.attrs.get("axis", 1)
    axis += len(view) if axis < 0 else 0
    return regroup(view, [extent(piece for dim in dims for piece in dim) for dims in (view[:axis], view[axis:])])


def _axes(graph: Graph, node: gs.Node, rank: int | None) -> list[int] | None:
    """Axes are an attribute up to opset 12 and an input from 13 on."""
    axes = list(node.attrs["axes"]) if "axes" in node.attrs else None
    if axes is None and len(node.inputs) > 1 and not node.inputs[1].is_empty():
        axes = graph.known_integers(node.inputs[1])
        if axes is None:
            raise NotFusable("unknown_shape", "", "its axes are not known before the run")
    return axes if axes is None or rank is None else [axis % rank for axis in axes]


def _expand(graph: Graph, node: gs.Node, view: View) -> View:
    """Dimensions of size 1 become axes that the tensor itself does not have."""
    shape = graph.shape(node.outputs[0].name)
    if shape is None or None in shape:
        raise NotFusable("unknown_shape", "", "expands to a shape that is not known before the run")
    padded = ((),) * (len(shape) - len(view)) + view
    return tuple(
        _expanded(dim, size, f"{REPEATED}{graph.index(node)}.{index}")
        for index, (dim, size) in enumerate(zip(padded, shape, strict=True))
    )


def _tile(graph: Graph, node: gs.Node, view: View) -> View:
    """An Expand that counts repetitions."""
    repeats = graph.known_integers(node.inputs[1])
    if repeats is None or len(repeats) != len(view):
        raise NotFusable("unknown_shape", "", "how often it repeats is not known before the run")
    if any(count != 1 and extent(dim) != 1 for dim, count in zip(view, repeats, strict=True)):
        raise NotFusable("unknown_shape", "", "repeats a dimension that is not provably of size 1")
    return tuple(
        dim if count == 1 else (Piece(f"{REPEATED}{graph.index(node)}.{index}", count),)
        for index, (dim, count) in enumerate(zip(view, repeats, strict=True))
    )


def _expanded(dim: Dim, size: Size, axis: str) -> Dim:
    if extent(dim) == size:
        return dim
    if extent(dim) != 1 or size is None:
        raise NotFusable("unknown_shape", "", "expands a dimension that is not provably of size 1")
    return (Piece(axis, size),)


VIEWS: dict[str, Callable[[Graph, gs.Node, View], View]] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
}
"""ONNX op -> the view of its output, given that of its first input; NotFusable says why there is none."""


INPUT_VIEWS = VIEWS | {"Expand": _expand, "Tile": _tile}
"""The same of nodes before a product, which may repeat what it reads."""

MOVES = frozenset(INPUT_VIEWS) | {"Concat", "Gather", "Identity", "Slice", "Split"}  # elements, and computes nothing


def viewed(graph: Graph, node: gs.Node, view: View) -> View:
    """The view behind a node of the tables.

    Raises:
        NotFusable: what it does is not known before the run, is no view, or cannot be done to such a tensor.
    """
    try:
        return INPUT_VIEWS[node.op](graph, node, view)
    except CONTRADICTIONS:
        raise NotFusable("invalid_model", "", "its attributes do not go with the shape of its input") from None


def fallback_shape(graph: Graph, node: gs.Node, before: View, after: View, base: Base) -> FallbackShape | None:
    """The shape of a Reshape or Expand that computes it from elsewhere; None where its own input will do.

    Where the model computes it from the product's input, so does the fallback: for 16-bit values ONNX Runtime's CPU
    provider rounds differently where a value has one reader less.

    Raises:
        NotFusable: it does not follow from the sizes of the product's input.
    """
    if node.op not in ("Reshape", "Expand") or graph.known_integers(node.inputs[1]) is not None:
        return None
    if node.op == "Expand":
        return _repeats(after, base)
    read = list(_sources(node.inputs[1]))
    if any(_would_be_rounded_otherwise(graph, tensor) for tensor in read):
        raise NotFusable("unknown_shape", "", "reshapes to the shape of a value that is rounded for being read")
    shape = shape_of(before, after, base, any(tensor.name == base.name for tensor in read))
    if shape is None:
        raise NotFusable("unknown_shape", "", "reshapes to several sizes that only the run knows")
    return shape


def _repeats(after: View, base: Base) -> FallbackShape:
    """The shape of an Expand: 1 keeps a dimension."""
    repeated = [dim[0].size if dim and dim[0].axis.startswith(REPEATED) else 1 for dim in after]
    if any(isinstance(size, str) for size in repeated):
        raise NotFusable("unknown_shape", "", "repeats its input as often as only the run knows")
    return FallbackShape(tuple(int(size) for size in repeated), (None,) * len(repeated), base.index)


def _sources(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """The values whose shapes a shape is computed from."""
    stack, seen = [tensor], set[str]()
    while stack and len(seen) < MAX_SHAPE_VALUES:
        tensor = stack.pop()
        seen.add(str(tensor.name))
        for maker in tensor.inputs:
            if maker.op == "Shape":
                yield maker.inputs[0]
            else:
                stack += [value for value in maker.inputs if str(value.name) not in seen]


def only_feeding(graph: Graph, views: Collection[int]) -> frozenset[int]:
    """Shape arithmetic that nothing but the shapes of some views needs; nodes are indices in the graph."""
    found: set[int] = set()
    stack = [graph.nodes[view].inputs[1] for view in views]
    while stack and len(found) < MAX_SHAPE_VALUES * len(views):
        for maker in stack.pop().inputs:
            if all(_dies(graph, value, found, views) for value in maker.outputs):
                found.add(graph.index(maker))
                stack += [] if maker.op == "Shape" else maker.inputs
    return frozenset(found)


def _dies(graph: Graph, value: gs.Tensor, dead: Collection[int], views: Collection[int]) -> bool:
    """Whether nothing reads a value but dead nodes, and views as their shape."""
    readers = ((graph.index(reader), reader.inputs[0]) for reader in value.outputs)
    return not graph.is_escaping(value.name) and all(
        index in dead or (index in views and value is not viewed) for index, viewed in readers
    )


def _would_be_rounded_otherwise(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether ONNX Runtime's CPU provider rounds a 16-bit value, or does not, because its shape is read.

    What computes has no kernel of 16 bits there: what it makes is rounded, unless a Cast to 32 bits alone reads it.
    What moves elements has one, but between nodes that compute it moves 32 bits.
    """
    if graph.dtype(tensor.name) not in SIXTEEN_BIT or not tensor.inputs:
        return False
    others = [reader.op for reader in tensor.outputs if reader.op != "Shape"]
    if not any(maker.op in MOVES for maker in tensor.inputs):
        return others == ["Cast"]
    sources = (value for maker in tensor.inputs for value in maker.inputs if graph.dtype(value.name) in SIXTEEN_BIT)
    computed = any(source.op not in MOVES for value in sources for source in value.inputs)
    return computed and not any(op in MOVES or op == "Cast" for op in others)
