"""Values that nothing reads any more, once nodes are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from onnx import GraphProto, ModelProto, NodeProto

from onnxfuse.graph.functions import reads, walk

_WITH_OPTIONAL_OUTPUTS = frozenset(
    ("Dropout", "LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
     "SkipSimplifiedLayerNormalization")
)  # fmt: skip


def unread_values(graph: GraphProto, nodes: Sequence[NodeProto], candidates: Iterable[str]) -> set[str]:
    """Of the candidates and of what feeds them, the values that nothing reads any more."""
    uses = Counter(value.name for value in graph.output)
    for node in nodes:
        uses.update(reads(node))
    makers = {value: node for node in nodes for value in node.output}
    dead: set[str] = set()
    stack = sorted(candidates)
    while stack:
        value = stack.pop()
        if not value or uses[value] or value in dead:
            continue
        dead.add(value)
        maker = makers.get(value)
        if maker is not None and all(not uses[output] for output in maker.output):
            dead.update(maker.output)
            uses.subtract(reads(maker))
            stack.extend(maker.input)
    return dead


def drop_unread(graph: GraphProto, candidates: Iterable[str]) -> None:
    """Remove the nodes and the initializers that make what nothing reads any more."""
    dead = unread_values(graph, graph.node, candidates)
    kept = [node for node in graph.node if not (node.output and dead.issuperset(node.output))]
    del graph.node[:]
    graph.node.extend(kept)
    drop(graph.value_info, dead)
    drop(graph.initializer, dead - {value.name for value in graph.input})


def drop(entries: object, names: set[str]) -> None:
    """Remove the entries of a repeated field that carry one of the names, last first, without copying the others."""
    for index in reversed(range(len(entries))):  # type: ignore[arg-type]
        if entries[index].name in names:  # type: ignore[index]
            del entries[index]  # type: ignore[attr-defined]


def drop_unread_outputs(proto: ModelProto) -> None:
    """Leave no name to an optional output that nothing reads, as of a mean: tools that rewrite models name them all.

    A node that makes more than one value is otherwise taken for one that others read in part.
    """
    bodies = [(proto.graph.node, {value.name for value in proto.graph.output})]
    bodies += [(function.node, set(function.output)) for function in proto.functions]
    for nodes, outputs in bodies:
        several = [node for node in walk(nodes) if len(node.output) > 1 and _has_optional_outputs(node)]
        read = outputs.union(*map(reads, nodes)) if several else outputs
        for node in several:
            node.output[1:] = [name if name in read else "" for name in node.output[1:]]
            while len(node.output) > 1 and not node.output[-1]:
                del node.output[-1]


def _has_optional_outputs(node: NodeProto) -> bool:
    return node.op_type in _WITH_OPTIONAL_OUTPUTS and node.domain in ("", "ai.onnx", "com.microsoft")
