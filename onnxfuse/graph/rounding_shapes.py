"""Shapes that nobody reads where a fusion leaves a value to ONNX Runtime's CPU provider that it would no longer round.

That provider has kernels of 16 bits for few ops, and computes the others in 32 bits. A node of those few is computed in
32 bits as well where all its neighbours are, and then nothing rounds what it makes; of its outputs the first one's
readers count alone. Without the bridge a fused model has the original's bits: where the last reader of 16 bits is gone,
a Shape takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from onnx import GraphProto, NodeProto, TensorProto, helper

from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.graph import SIXTEEN_BIT, Graph

WHY = "ONNX Runtime's CPU provider rounds what this reads"
# What has a kernel of 16 bits in ONNX Runtime 1.32 on x86_64: what computes, and what moves elements.
COMPUTES = (
    *("Attention", "Clip", "GroupQueryAttention", "LayerNormalization", "MatMulNBits", "Max", "Min", "Mod"),
    *("RMSNormalization", "RotaryEmbedding", "Round", "Shrink", "Sign", "SimplifiedLayerNormalization"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)
MOVES = (
    *("Cast", "Compress", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "IsInf"),
    *("IsNaN", "Reshape", "ReverseSequence", "Scatter", "ScatterElements", "ScatterND", "SequenceConstruct", "Shape"),
    *("Slice", "Split", "SplitToSequence", "Squeeze", "Transpose", "Unsqueeze"),
)
ROUNDED_ANEW = (*COMPUTES, "Split")  # of which a fused node leaves some, or has a copy, with fewer readers


def read_in_16_bits(nodes: Iterable[NodeProto], names: Mapping[str, str] = MappingProxyType({})) -> set[str]:
    """What nodes with kernels of 16 bits read, by the names that values have outside of a function."""
    read = {value for node in nodes if node.op_type in (*COMPUTES, *MOVES) for value in node.input}
    return {names.get(value, value) for value in read}


def has_readers_of_16_bits(graph: Graph, value: str) -> bool:
    """Whether a node with a kernel of 16 bits reads a value of the model's."""
    return any(reader.op in (*COMPUTES, *MOVES) for reader in graph.readers(value))


def moves_what_is_computed(graph: Graph, value: str) -> bool:
    """Whether the node that moves a value's elements reads what a node has computed, a Cast among them."""
    makers = graph.tensor(value).inputs if graph.readers(value) else []
    sources = [source for maker in makers for source in maker.inputs if graph.dtype(source.name) in SIXTEEN_BIT]
    return any(maker.op not in MOVES or maker.op == "Cast" for source in sources for maker in source.inputs)


def unread_shapes(
    graph: Graph,
    nodes: Iterable[NodeProto],
    lost: Collection[str],
    new_name: Callable[[str], str],
    ops: Collection[str] = ROUNDED_ANEW,
) -> Iterator[tuple[NodeProto, NodeProto]]:
    """The nodes whose results would no longer be rounded, and for each the Shape that takes a reader's place.

    Args:
        graph: the facts of their scope.
        nodes: what is left of it or copied.
        lost: values that nodes with kernels of 16 bits read no more.
        new_name: makes a name that is not taken.
        ops: of the nodes to look at, beside those that move what is computed and what a Shape read.
    """
    for node in nodes:
        value = node.output[0] if _is_rounded_anew(graph, node, ops) else ""
        if value in lost and graph.dtype(value) == TensorProto.FLOAT16:
            name = new_name(f"{value}/shape")
            yield node, helper.make_node("Shape", [value], [name], name=name, doc_string=WHY)


def _is_rounded_anew(graph: Graph, node: NodeProto, ops: Collection[str]) -> bool:
    op, value = _op_of(graph, node), node.output[0]
    if op in ops or op not in MOVES:
        return op in ops
    return any(reader.op == "Shape" for reader in graph.readers(value)) and moves_what_is_computed(graph, value)


def _op_of(graph: Graph, node: NodeProto) -> str:
    """A node's op; of a fused node that of the model's own node which makes its first output."""
    readers = graph.readers(node.output[0]) if node.domain == DOMAIN else ()
    return str(graph.tensor(node.output[0]).inputs[0].op) if readers else node.op_type


def read_again(graph: Graph, scope: GraphProto, lost: Collection[str], new_name: Callable[[str], str]) -> None:
    """Put those Shapes into what a scope has become."""
    shapes = {node.output[0]: shape for node, shape in unread_shapes(graph, scope.node, lost, new_name)}
    if shapes:
        nodes = list(scope.node)
        del scope.node[:]
        for node in nodes:
            scope.node.extend([node, *(shapes[value] for value in node.output[:1] if value in shapes)])
