"""A normalisation whose variance is the mean of squares less the square of the mean, as Flax computes it by default.

It needs no row twice, but loses what the two have in common; the kernel takes the deviation of centred rows.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.normalisation_forms import (
    LAST,
    MEANS,
    SOURCES,
    Core,
    End,
    ends,
    is_closed,
    is_square,
    kept_axis,
    maker,
    number,
    reader,
    squared,
)


def of_fast_variance(graph: Graph, node: gs.Node) -> Core | None:
    """What is written so, from the node that takes the mean of squares on."""
    axis = kept_axis(graph, node) or LAST
    squares, difference = squared(graph, node, *MEANS, axis=axis), reader(node, "Sub")
    if not squares or difference is None or difference.inputs[0] is not node.outputs[0]:
        return None
    square = maker(difference.inputs[1], "Mul", "Pow")
    mean = maker(square.inputs[0], *MEANS) if square is not None and is_square(graph, square) else None
    if square is None or mean is None or kept_axis(graph, mean) != axis:
        return None
    limit = _at_least_zero(graph, difference)
    variance = (*squares, node, mean, square, difference, *([] if limit is None else [limit]))
    for end in ends(graph, variance[-1]):
        core = _of_rows(graph, node, variance, mean, end) if end.factor == 1 and not end.least else None
        if core is not None:
            return replace(core, axis=axis)
    return None


def _of_rows(graph: Graph, anchor: gs.Node, variance: tuple[gs.Node, ...], mean: gs.Node, end: End) -> Core | None:
    """The same up to the rows that are divided, if they are those less their mean, and nobody else reads of it."""
    centred = maker(end.divided, "Sub")
    if centred is None or centred.inputs[1] is not mean.outputs[0]:
        return None
    read = (variance[0].inputs[0], mean.inputs[0], centred.inputs[0])
    for source in SOURCES:
        casts, rows = zip(*(source(graph, tensor) for tensor in read), strict=True)
        own = [*(cast for each in casts for cast in each), *variance, centred, *end.between, end.last]
        every = {graph.index(each): each for each in own}
        nodes = tuple(every[index] for index in sorted(every))
        if all(x is rows[0] for x in rows) and is_closed(graph, nodes, end.last):
            return Core(anchor, nodes, rows[0], end.last.outputs[0], True, end.epsilon, end.affine)
    return None


def _at_least_zero(graph: Graph, variance: gs.Node) -> gs.Node | None:
    """The node that makes 0 of what rounding has made less."""
    limit = reader(variance, "Max", "Relu", "Clip")
    if limit is None or limit.op == "Relu":
        return limit
    bounds = [tensor for tensor in limit.inputs if tensor is not variance.outputs[0] and tensor.name]
    is_least = limit.op == "Max" or limit.inputs[1:2] == bounds
    return limit if is_least and len(bounds) == 1 and number(graph, bounds[0]) == 0.0 else None
