"""Rows less their mean over their deviation, as layers written by hand have them: `a * (x - mean) / (std + epsilon)`.

The sum of squares may be divided by one less than the number of columns, as torch's `std` and `var` do; what is added
may be added to the deviation or to the variance, and rows may be scaled before they are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.normalisation_forms import (
    LAST,
    MEANS,
    Core,
    axis_of,
    handed_on,
    maker,
    number,
    of_rows,
    other,
    reader,
    squared,
)

MOST_ADDED = 2.0**63  # fp32 has more, and its square


@dataclass(frozen=True)
class _Deviation:
    """What rows are divided by.

    Attributes:
        nodes: from the mean of squares to it.
        factor: what the mean is multiplied by.
        epsilon: what is added to that.
        added: what is added to the root.
    """

    nodes: tuple[gs.Node, ...]
    factor: float
    epsilon: float
    added: float


def of_deviation(graph: Graph, node: gs.Node) -> Core | None:
    """What is written so, from the node that takes the mean of squares on."""
    variance, factor = _corrected(graph, node)
    axis = axis_of(graph, node) or LAST
    squares = squared(graph, node, *MEANS, behind=variance[-1], axis=axis)
    found = _deviation_of(graph, variance, factor) if squares else None
    last = reader(found.nodes[-1], "Div") if found is not None else None
    if found is None or last is None or last.inputs[1] is not found.nodes[-1].outputs[0]:
        return None
    epsilon, added = found.epsilon / found.factor, found.added * found.factor**-0.5
    for scaling, rows, affine in _scaled(last.inputs[0]):
        nodes = (*squares, *found.nodes, *scaling, last)
        core = of_rows(graph, node, nodes, rows, epsilon, found.factor, axis)
        if core is not None:
            return replace(core, affine=affine, added=added)
    return None


def _scaled(divided: gs.Tensor) -> Iterator[tuple[tuple[gs.Node, ...], gs.Tensor, tuple[tuple[str, gs.Tensor], ...]]]:
    """The ways to read what is divided: the rows, or those times either factor of a product."""
    yield (), divided, ()
    product = maker(divided, "Mul")
    for scale in product.inputs if product is not None else ():
        assert product is not None, "it has inputs"
        yield (product,), other(product, scale), (("mul", scale),)


def _deviation_of(graph: Graph, variance: list[gs.Node], factor: float) -> _Deviation | None:
    """The root of a variance with what is added before it or behind it."""
    nodes = [*variance, *handed_on(graph, variance[0], variance[-1])]
    nodes = [*nodes, *_cast(graph, nodes[-1])]
    before = _addition(graph, nodes[-1])
    root = reader(nodes[-1] if before is None else before[0], "Sqrt")
    if root is None or factor <= 0:
        return None
    nodes = [*nodes, *(before or ())[:1], root]
    nodes = [*nodes, *_cast(graph, root)]
    behind = _addition(graph, nodes[-1])
    epsilon, added = (0.0 if each is None else each[1] for each in (before, behind))
    if not (0 <= epsilon <= MOST_ADDED and 0 <= added <= MOST_ADDED):
        return None
    return _Deviation((*nodes, *(behind or ())[:1]), factor, epsilon, added)


def _corrected(graph: Graph, mean: gs.Node) -> tuple[list[gs.Node], float]:
    """The product and the quotient that make a sum over one less of a mean, behind that, and the factor."""
    product = reader(mean, "Mul")
    count = None if product is None else number(graph, other(product, mean.outputs[0]))
    quotient = None if product is None else reader(product, "Div")
    if product is None or count is None or quotient is None or quotient.inputs[0] is not product.outputs[0]:
        return [mean], 1.0
    less = number(graph, quotient.inputs[1])
    return ([mean, product, quotient], count / less) if less else ([mean], 1.0)


def _cast(graph: Graph, node: gs.Node) -> list[gs.Node]:
    """The cast of what a node makes to another float."""
    cast = reader(node, "Cast")
    return [cast] if cast is not None and graph.dtype(cast.outputs[0].name) in FLOATS_BY_ONNX else []


def _addition(graph: Graph, node: gs.Node) -> tuple[gs.Node, float] | None:
    """The node that adds a number to what another makes, and the number."""
    add = reader(node, "Add")
    added = None if add is None else number(graph, other(add, node.outputs[0]))
    return None if add is None or added is None else (add, added)
