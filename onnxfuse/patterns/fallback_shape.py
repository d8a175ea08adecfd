"""The shape of a Reshape or Expand in a fallback function, and the shape arithmetic that nothing else needs then."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.fallback_body import OWN, FallbackShape
from onnxfuse.graph.graph import SIXTEEN_BIT, Graph
from onnxfuse.graph.rounding_shapes import moves_what_is_computed
from onnxfuse.graph.symbolic import Size
from onnxfuse.patterns.view_ops import MOVES
from onnxfuse.patterns.views import View, extent, is_repeated

MAX_SHAPE_VALUES = 64  # that shape arithmetic of one Reshape takes


@dataclass(frozen=True)
class Base:
    """An input of a fusion, whose dimensions a shape may be computed from: its name, its view, its place."""

    name: str
    view: View
    index: int = 0


def shape_of(before: View, after: View, base: Base, prefer_base: bool = False) -> FallbackShape | None:
    """How a Reshape's shape follows from its input's dimensions and those of a base; None where it does not.

    A Shape of a base may be why ONNX Runtime rounds that; one of what the Reshape reads anyway is not.
    """
    sizes = [extent(dim) for dim in after]
    same = [index < len(before) and extent(before[index]) == size for index, size in enumerate(sizes)]
    entries = [
        size if isinstance(size, int) else 0 if is_same else -1 for size, is_same in zip(sizes, same, strict=True)
    ]
    own = _taken_of(before, sizes, entries, OWN)
    of_base = _taken_of(base.view, sizes, entries, base.index, prefer_base)
    return of_base or own if prefer_base else own or of_base


def _taken_of(
    view: View, sizes: Sequence[Size], entries: Sequence[int], place: int, everywhere: bool = False
) -> FallbackShape | None:
    """A shape that takes sizes of one tensor, all that it can or those that are too many to be left open."""
    entries, of_base = list(entries), list[int | None]([None] * len(entries))
    known = [extent(dim) for dim in view]
    for index, size in enumerate(sizes):
        wanted = everywhere or (entries.count(-1) > 1 and entries[index] == -1)
        if isinstance(size, str) and wanted and size in known:
            entries[index], of_base[index] = 0, known.index(size)
    return FallbackShape(tuple(entries), tuple(of_base), place) if entries.count(-1) <= 1 else None


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
    if any(_is_rounded_before_a_cast(graph, tensor) for tensor in read):
        raise NotFusable("unknown_shape", "", "reshapes to the shape of a value that is rounded for being read")
    shape = shape_of(before, after, base, any(tensor.name == base.name for tensor in read))
    if shape is None:
        raise NotFusable("unknown_shape", "", "reshapes to several sizes that only the run knows")
    return shape


def _repeats(after: View, base: Base) -> FallbackShape:
    """The shape of an Expand: 1 keeps a dimension."""
    repeated = [dim[0].size if dim and is_repeated(dim[0]) else 1 for dim in after]
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


def is_rounded_otherwise(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether ONNX Runtime's CPU provider rounds a 16-bit value, or does not, because its shape is read.

    What computes has no kernel of 16 bits there: what it makes is rounded, unless a Cast to 32 bits alone reads it.
    What moves elements has one, but between nodes that compute it moves 32 bits.
    """
    return _is_rounded_before_a_cast(graph, tensor) or _is_rounded_as_it_moves(graph, tensor)


def _is_rounded_before_a_cast(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether a Shape keeps what is computed from staying in 32 bits up to the Cast that alone reads it else."""
    computes = tensor.inputs and not any(maker.op in MOVES for maker in tensor.inputs)
    return bool(computes) and graph.dtype(tensor.name) in SIXTEEN_BIT and _read_by(tensor) == ["Cast"]


def _is_rounded_as_it_moves(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether a Shape keeps what is computed from moving in 32 bits: where it dies, an unread one takes its place."""
    if graph.dtype(tensor.name) not in SIXTEEN_BIT or not any(maker.op in MOVES for maker in tensor.inputs):
        return False
    is_read_as_it_is = any(op in MOVES or op == "Cast" for op in _read_by(tensor))
    return not is_read_as_it_is and moves_what_is_computed(graph, str(tensor.name))


def _read_by(tensor: gs.Tensor) -> list[str]:
    """What reads a value's elements."""
    return [reader.op for reader in tensor.outputs if reader.op != "Shape"]
