"""Sizes that what a product multiplies tells: of scores and probabilities, which no kernel stores, and of operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.graph import symbolic
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.told_shape import ToldShape, ToldSize
from onnxfuse.patterns.fallback_shape import is_rounded_otherwise
from onnxfuse.patterns.operand_views import is_stored
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.views import AxisKind, View, axis_view, extent


def told_shape(graph: Graph, product: Product, reader: gs.Node, whole: Sequence[Size]) -> ToldShape | None:
    """What takes the place of a Shape of a value; None for any other reader, or where no input of the product tells it.

    Args:
        graph: the scope.
        product: multiplies what tells the sizes.
        reader: of a value that the product makes.
        whole: the sizes of that value.
    """
    return _told_shape(graph, reader, [*_factors(graph, product), *_inputs(graph)], whole)


def _told_shape(
    graph: Graph, reader: gs.Node, bases: Sequence[tuple[str, View]], whole: Sequence[Size]
) -> ToldShape | None:
    """The same by the shapes of some values."""
    if qualified_op(reader) != "Shape" or is_rounded_otherwise(graph, reader.inputs[0]):
        return None
    return _told_by(bases, whole[reader.attrs.get("start", 0) : reader.attrs.get("end")])


def told_sizes(graph: Graph, product: Product, sizes: Sequence[Size]) -> ToldShape | None:
    """Sizes by the shapes of what a product multiplies, or of the scope's inputs; None where these tell too few."""
    return _told_by([*_factors(graph, product), *_inputs(graph)], sizes)


def told_of_views(graph: Graph, product: Product) -> Iterator[tuple[int, ToldShape]]:
    """What takes the place of Shapes of what a product is read through, by node, as of keys that are repeated.

    The tensor that is read tells them: it is made before anybody can ask a view of it. A repetition that a Shape alone
    reads would be made in each run.
    """
    for view in product.views:
        value = view.node.outputs[0]
        sizes = graph.shape(value.name)
        bases = [base for base in _factors(graph, product) if _is_of(value, base[0])]
        for reader in value.outputs if sizes is not None else ():
            told = _told_shape(graph, reader, bases, sizes or ())
            if told is not None:
                yield graph.index(reader), told


def _is_of(value: gs.Tensor, name: str) -> bool:
    """Whether views of a value make another one, each of its first input."""
    while value.name != name and value.inputs:
        value = value.inputs[0].inputs[0]
    return str(value.name) == name


def _factors(graph: Graph, product: Product) -> list[tuple[str, View]]:
    """What a product multiplies, as far as shapes of it may be read."""
    factors = [(product.lhs, product.lhs_view), (product.rhs, product.rhs_view)]
    return [(name, view) for name, view in factors if _tells(graph, name)]


def _told_by(bases: Sequence[tuple[str, View]], sizes: Sequence[Size]) -> ToldShape | None:
    """Sizes by the shapes of some values."""
    views = [view for _, view in bases]
    entries = [_told(size, views) if isinstance(size, str) else size for size in sizes]
    known = [entry for entry in entries if entry is not None]
    if len(known) < len(entries):
        return None
    used = sorted({entry.base for entry in known if isinstance(entry, ToldSize)})
    return ToldShape(
        tuple((bases[index][0], len(bases[index][1])) for index in used),
        tuple(replace(each, base=used.index(each.base)) if isinstance(each, ToldSize) else each for each in known),
    )


def _inputs(graph: Graph) -> Iterator[tuple[str, View]]:
    """The inputs of the scope that it reads."""
    for name in sorted(graph.scope.inputs):
        shape = graph.shape(name)
        if shape and graph.readers(name):
            yield name, axis_view(shape, AxisKind.LHS)


def _tells(graph: Graph, name: str) -> bool:
    """Whether a value's shape may be read: it is none that the model stores, nor one that is rounded for being read."""
    tensor = graph.tensor(name)
    return not is_stored(graph, tensor) and not is_rounded_otherwise(graph, tensor)


def _told(size: str, bases: Sequence[View]) -> ToldSize | None:
    """A size that only the run knows, as a multiple or a part of a dimension."""
    for base, view in enumerate(bases):
        for index, dim in enumerate(view):
            times, by = symbolic.divide(size, extent(dim)), symbolic.divide(extent(dim), size)
            if isinstance(times, int):
                return ToldSize(base, index, times=times)
            if isinstance(by, int):
                return ToldSize(base, index, by=by)
    return None
