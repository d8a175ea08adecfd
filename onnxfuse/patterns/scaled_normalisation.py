"""A normalisation that is scaled before it is centred: `x*s + (shift - mean*s)`, s the scale over the deviation.

TensorFlow's batch normalisation computes so, and Keras' layers with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.normalisation_forms import (
    LAST,
    MEANS,
    SOURCES,
    Core,
    axis_of,
    before,
    is_closed,
    maker,
    other,
    reader,
    root_of,
    squared,
)


@dataclass(frozen=True)
class _End:
    """What lies behind the scale over the deviation.

    Attributes:
        nodes: the product with the mean and what is done to it, then the product with the rows, and the sum last.
        rows: what is scaled.
        mean: of it.
        shift: what is added; nothing where there is none.
    """

    nodes: tuple[gs.Node, ...]
    rows: gs.Tensor
    mean: gs.Tensor
    shift: gs.Tensor | None


def of_scaled(graph: Graph, node: gs.Node) -> Core | None:
    """What is written so, from the node that takes the mean of squares on, along any axis."""
    axis = axis_of(graph, node) or LAST
    squares, root = squared(graph, node, *MEANS, axis=axis), root_of(graph, node)
    if not squares or root is None or root.factor != 1 or root.least or root.nodes[-1].op == "Sqrt":
        return None
    nodes = root.nodes
    scale = reader(nodes[-1], "Mul")
    between = [*nodes, *([scale] if scale is not None else [])]
    end = _end(between[-1].outputs[0])
    if end is None:
        return None
    affine = [("mul", other(scale, nodes[-1].outputs[0]))] if scale is not None else []
    affine += [("add", end.shift)] if end.shift is not None else []
    for source in SOURCES:
        centring, x = before(graph, squares[0].inputs[0], source, axis)
        casts, rows = source(graph, end.rows)
        every = {graph.index(each): each for each in (*centring, *casts, *squares, node, *between, *end.nodes)}
        own = tuple(every[index] for index in sorted(every))
        is_of_mean = any(end.mean is each.outputs[0] for each in centring) and centring[-1].op == "Sub"
        if x is rows and is_of_mean and is_closed(graph, own, end.nodes[-1]):
            return Core(node, own, x, end.nodes[-1].outputs[0], True, root.epsilon, tuple(affine), axis=axis)
    return None


def _end(scale: gs.Tensor) -> _End | None:
    """The two products with the scale, and what becomes of them."""
    products = [each for each in scale.outputs if each.op == "Mul"]
    if len(products) != 2 or len(scale.outputs) != 2:
        return None
    return _shifted(scale, *products) or _shifted(scale, *reversed(products))


def _shifted(scale: gs.Tensor, of_rows: gs.Node, of_mean: gs.Node) -> _End | None:
    """The same where it is known which of them is the mean's."""
    mean, nodes = other(of_mean, scale), [of_mean]
    negative = maker(mean, "Neg")
    if negative is not None:
        nodes, mean = [negative, of_mean], negative.inputs[0]
    ends = {"Add"} if negative is not None else {"Sub"}
    last, shift = reader(of_mean, *ends), None
    if last is not None and last is not reader(of_rows, *ends):
        shift = other(last, of_mean.outputs[0])
        is_less = last.op == "Add" or last.inputs[1] is of_mean.outputs[0]
        nodes, last = [*nodes, last], reader(last, "Add") if is_less else None
    if last is None or (last.op == "Sub" and last.inputs[0] is not of_rows.outputs[0]):
        return None
    if last is not reader(of_rows, last.op):
        return None
    return _End((*nodes, of_rows, last), other(of_rows, scale), mean, shift)
