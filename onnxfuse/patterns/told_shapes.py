"""Shapes of scores, which no kernel stores: what the product multiplies tells them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.patterns.fallback_shape import is_rounded_otherwise
from onnxfuse.patterns.operand_views import is_stored
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.views import View, extent


def told_shape(graph: Graph, product: Product, reader: gs.Node, view: View) -> ToldShape | None:
    """What takes the place of a Shape of a value; None for any other reader, or where no input of the product tells it.

    Args:
        graph: the scope.
        product: multiplies what tells the sizes.
        reader: of a value that the product makes.
        view: of that value, in pieces of the product's axes.
    """
    if qualified_op(reader) != "Shape" or is_rounded_otherwise(graph, reader.inputs[0]):
        return None
    bases = [(name, dims) for name, dims in ((product.lhs, product.lhs_view), (product.rhs, product.rhs_view))]
    bases = [(name, dims) for name, dims in bases if _tells(graph, name)]
    entries = list(_entries(view, [dims for _, dims in bases]))[reader.attrs.get("start", 0) : reader.attrs.get("end")]
    known = [entry for entry in entries if entry is not None]
    used = sorted({entry[0] for entry in known if isinstance(entry, tuple)})
    if not used or len(known) < len(entries):
        return None
    return ToldShape(
        tuple((bases[index][0], len(bases[index][1])) for index in used),
        tuple(entry if isinstance(entry, int) else (used.index(entry[0]), entry[1]) for entry in known),
    )


def _tells(graph: Graph, name: str) -> bool:
    """Whether a value's shape may be read: it is none that the model stores, nor one that is rounded for being read."""
    tensor = graph.tensor(name)
    return not is_stored(graph, tensor) and not is_rounded_otherwise(graph, tensor)


def _entries(view: View, bases: list[View]) -> Iterator[int | tuple[int, int] | None]:
    """The sizes of a value: numbers, or which dimension of which base has them."""
    sizes = {extent(dim): (base, index) for base, dims in enumerate(bases) for index, dim in enumerate(dims)}
    for dim in view:
        size = extent(dim)
        yield size if isinstance(size, int) else sizes.get(size)
