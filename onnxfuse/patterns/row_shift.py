"""What is subtracted from all scores of a row in front of a softmax, and changes no probability: the row's own maximum.

Models that would leave the range of 16 bits otherwise write it down, as LayoutLMv3 does. A kernel sums in fp32 and
subtracts a maximum of its own.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import F32
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op

MAX_NODES = 8  # between a softmax and the difference, and between that and the maximum
CASTS = frozenset({"Cast", "Identity"})
VIEWS = frozenset({"Reshape", "Unsqueeze"})  # of a maximum, to the rank of what it is of
Nodes = tuple[gs.Node, ...]


def shift_of(graph: Graph, scores: gs.Tensor) -> Nodes:
    """The nodes that make the maximum of each row and subtract it, the difference last; none where nobody does.

    Args:
        graph: the scope.
        scores: what a softmax is of.
    """
    value = scores
    for _ in range(MAX_NODES):
        node = _only_maker(graph, value)
        if node is not None and qualified_op(node) == "Sub":
            return _with_maximum(graph, node)
        if node is None or not _keeps_shifts(graph, node):
            break
        value = node.inputs[0]
    return ()


def _only_maker(graph: Graph, value: gs.Tensor) -> gs.Node | None:
    """The maker of a value that nobody reads but one node."""
    alone = len(value.inputs) == len(value.outputs) == 1 and not graph.is_escaping(value.name)
    return value.inputs[0] if alone else None


def _keeps_shifts(graph: Graph, node: gs.Node) -> bool:
    """Whether a node makes of a row whose numbers are all shifted by one number another such row."""
    if qualified_op(node) in ("Mul", "Div"):
        known = graph.known_value(node.inputs[1])
        return known is not None and known.size == 1
    return qualified_op(node) in CASTS


def _with_maximum(graph: Graph, difference: gs.Node) -> Nodes:
    """The nodes from a value to the maximum of its rows, and to the difference of both; none where it is another."""
    whole, value = difference.inputs
    shape = graph.shape(whole.name)
    if shape is None or graph.shape(value.name) != (*shape[:-1], 1):
        return ()
    nodes = [difference]
    while value is not whole and len(nodes) < MAX_NODES:
        node = _only_maker(graph, value)
        if node is None or graph.dtype(value.name) not in (graph.dtype(whole.name), F32.onnx):
            return ()
        nodes.insert(0, node)
        value = node.inputs[0]
    return tuple(nodes) if value is whole and _is_of_rows(graph, tuple(nodes[:-1]), len(shape)) else ()


def _is_of_rows(graph: Graph, nodes: Nodes, rank: int) -> bool:
    """Whether nodes take a maximum along the last axis alone, and nothing else but hand it on."""
    ops = [qualified_op(node) for node in nodes]
    if ops.count("ReduceMax") != 1:
        return False
    place = ops.index("ReduceMax")
    alike = {*ops[:place]} <= CASTS and {*ops[place + 1 :]} <= CASTS | VIEWS
    return alike and reduced_axes(graph, nodes[place]) in ([-1], [rank - 1])


def reduced_axes(graph: Graph, node: gs.Node) -> list[int] | None:
    """Of a reduction: an attribute up to opset 17 and an input from 18 on."""
    if len(node.inputs) > 1:
        return graph.known_integers(node.inputs[1])
    return list(node.attrs.get("axes", ())) or None
