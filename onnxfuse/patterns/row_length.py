"""Rows over their own length: by a ReduceL2, alone as CLIP has it or bounded and expanded as torch's `normalize` does.

A length that is bounded from below is the root of a mean of squares that is. Divided by the root of the number of
columns it is that root itself: RMSNorms as their authors wrote them add epsilon to it, others bound it.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.deviation import MOST_ADDED
from onnxfuse.patterns.normalisation_forms import (
    BOUNDS,
    Core,
    axis_of,
    columns_of,
    handed_on,
    kept_axis,
    least_of,
    multiplied,
    number,
    of_rows,
    other,
    reader,
)

LENGTH = "ReduceL2"


def of_length(graph: Graph, node: gs.Node) -> Core | None:
    """Rows that are divided by their own length, along any axis."""
    axis = axis_of(graph, node) if node.op == LENGTH else None
    columns = columns_of(graph, node, axis) if axis is not None else None
    views = handed_on(graph, node) if axis is not None else []
    if axis is None or columns is None or not (views or kept_axis(graph, node) == axis):
        return None
    whole = views[-1] if views else node
    scaled, factor = multiplied(graph, whole)
    limits = _limited(graph, scaled)
    if limits is None:
        return None
    between, bound, added = limits
    scaling = [scaled] if scaled is not whole else []
    nodes = [node, *views, *scaling, *between]
    expand = reader(nodes[-1], "Expand")
    nodes += [expand] if expand is not None else []
    last = reader(nodes[-1], "Div")
    if last is None or last.inputs[1] is not nodes[-1].outputs[0] or not _is_of_its_rows(graph, expand, last.inputs[0]):
        return None
    count = columns * factor**2
    core = of_rows(graph, node, (*nodes, last), last.inputs[0], 0.0, count, axis)
    return core and replace(core, least=bound**2 / count, added=added * count**-0.5)


def _limited(graph: Graph, length: gs.Node) -> tuple[list[gs.Node], float, float] | None:
    """The node that bounds a length from below or adds a number to it, if there is one, the bound and the number."""
    bounded, add = reader(length, *BOUNDS), reader(length, "Add")
    if bounded is not None:
        bound = least_of(graph, bounded, length)
        return None if bound is None else ([bounded], bound, 0.0)
    if add is not None:
        added = number(graph, other(add, length.outputs[0]))
        return None if added is None or not 0 <= added <= MOST_ADDED else ([add], 0.0, added)
    return [], 0.0, 0.0


def _is_of_its_rows(graph: Graph, expand: gs.Node | None, rows: gs.Tensor) -> bool:
    """Whether lengths are repeated along the rows that they are of, if at all."""
    shape = graph.shape(rows.name)
    known = shape is not None and None not in shape
    return expand is None or (known and graph.shape(expand.outputs[0].name) == shape)
