"""Slices put in places that the model fixes: a ScatterND as a Concat, or as a Gather of what one puts together.

torch.export writes `q[:, :, text:] = rotated` so, tokens first (CogVideoX, CogView 4, GLM-Image), and columns in turn.
ONNX Runtime's CUDA provider copies each slice by one thread, element after element: 1,024 slices of 3,072 elements take
1.2 ms on an H200. Where a model is written that has any fusion, whole slices along the first dimension are put there by
ops that copy elements side by side. No bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, helper

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_nodes import constant
from onnxfuse.graph.stored_numbers import stored_integers

NewName = Callable[[str], str]


def put_side_by_side(scope: GraphProto, graph: Graph, new_name: NewName) -> None:
    """Edit a scope in place.

    Args:
        scope: what has become of it.
        graph: what it was, with its sizes and what is known before a run.
        new_name: makes a name that is not taken.
    """
    if not any(node.op_type == "ScatterND" for node in scope.node):
        return
    nodes = [each for node in scope.node for each in _instead(node, graph, new_name)]
    del scope.node[:]
    scope.node.extend(nodes)


def _instead(node: NodeProto, graph: Graph, new_name: NewName) -> list[NodeProto]:
    size, places = _placed(node, graph) if node.op_type == "ScatterND" else (0, [])
    if not places:
        return [node]
    if places == list(range(places[0], places[0] + len(places))):
        return _between(node, places[0], places[-1] + 1, size, new_name)
    return _gathered(node, places, size, new_name)


def _placed(node: NodeProto, graph: Graph) -> tuple[int, list[int]]:
    """The size of the first dimension, and where slices along it are put; none of other scatters."""
    data, where = (graph.shape(name) for name in node.input[:2])
    size = data[0] if data is not None and len(data) > 1 else None
    if not isinstance(size, int) or where is None or len(where) != 2 or where[1] != 1:
        return 0, []
    if any(each.name == "reduction" and each.s != b"none" for each in node.attribute):
        return 0, []
    known = stored_integers(graph, graph.tensor(node.input[1])) or []
    places = [place + size if place < 0 else place for place in known]
    is_fit = len(set(places)) == len(places) and all(0 <= place < size for place in places)
    return size, places if is_fit else []


def _between(node: NodeProto, first: int, end: int, size: int, new_name: NewName) -> list[NodeProto]:
    """What was there before and behind, as a Concat with what is put between."""
    data, _, updates = node.input
    before, behind = (_slice(data, low, high, node.output[0], new_name) for low, high in ((0, first), (end, size)))
    parts = [name for made in (before, behind) for name in (made[-1].output if made else ())]
    parts.insert(int(bool(before)), updates)
    return [*before, *behind, helper.make_node("Concat", parts, list(node.output), name=node.name, axis=0)]


def _slice(data: str, low: int, high: int, name: str, new_name: NewName) -> list[NodeProto]:
    """The nodes that make a range of the first dimension, the last one it; none of an empty one."""
    if low == high:
        return []
    made = new_name(f"{name}/{low}")
    limits = [constant(new_name(f"{made}/limit"), np.array([value], np.int64)) for value in (low, high, 0)]
    names = (limit.output[0] for limit in limits)
    return [*limits, helper.make_node("Slice", [data, *names], [made], name=made)]


def _gathered(node: NodeProto, places: Sequence[int], size: int, new_name: NewName) -> list[NodeProto]:
    """All that was there and what is put, from which each place takes its slice."""
    data, _, updates = node.input
    both, order = (new_name(f"{node.output[0]}/{part}") for part in ("both", "order"))
    taken = np.arange(size)
    taken[list(places)] = size + np.arange(len(places))
    return [
        helper.make_node("Concat", [data, updates], [both], name=both, axis=0),
        constant(order, taken),
        helper.make_node("Gather", [both, order], list(node.output), name=node.name, axis=0),
    ]
