"""Branches that every run takes: an `If` whose condition is known before the run, by its nodes.

Exporters write one where code asks for a size that the model fixes. What the branches make has no known shape as long
as they differ. Like functions, branches are put in the place of their nodes to look for fusions, and the written model
has them so where it has any fusion.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper

from onnxfuse.graph.functions import body_of_call, reads_inside, subgraphs
from onnxfuse.graph.load import is_large
from onnxfuse.graph.unread import drop_unread

Choice = tuple[str, str]
"""An If of the main graph, by the first value that it makes, and the attribute with the branch that is taken."""


def can_be_taken(node: NodeProto) -> bool:
    """Whether either branch of an If may stand in its place: a weight that it stores no Constant should hold."""
    return bool(node.output and node.output[0]) and all(_is_plain(branch) for _, branch in subgraphs(node))


def _is_plain(branch: GraphProto) -> bool:
    made = {tensor.name for tensor in branch.initializer}.union(*(node.output for node in branch.node))
    outputs = [value.name for value in branch.output]
    is_stored = branch.sparse_initializer or any(map(is_large, branch.initializer))
    return not is_stored and made.issuperset(outputs) and len(set(outputs)) == len(outputs)


def take_branches(proto: ModelProto, choices: Iterable[Choice]) -> None:
    """Put branches in the place of their nodes, in place, one after another: one may stand inside of one before it."""
    graph = proto.graph
    for value, attribute in choices:
        place = next(i for i, node in enumerate(graph.node) if node.op_type == "If" and node.output[0] == value)
        choice = graph.node[place]
        read = [*choice.input, *reads_inside(choice)]
        body = body_of_call(proto, _as_function(dict(subgraphs(choice))[attribute]), choice)
        nodes = [*graph.node[:place], *body, *graph.node[place + 1 :]]
        del graph.node[:]
        graph.node.extend(nodes)
        drop_unread(graph, read)


def _as_function(branch: GraphProto) -> FunctionProto:
    """What a branch computes of the values around it, which keep their names."""
    stored = [helper.make_node("Constant", [], [each.name], each.name, value=each) for each in branch.initializer]
    outputs = [value.name for value in branch.output]
    return helper.make_function("", "If", [], outputs, [*stored, *branch.node], [])
