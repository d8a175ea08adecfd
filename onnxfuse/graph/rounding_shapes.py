"""Shapes that are read again though a fusion needs them no more, because ONNX Runtime rounds what they are of.

Its CPU provider has kernels of 16 bits for few ops, and computes the others in 32 bits. A node of those few is computed
in 32 bits as well where all its neighbours are, and then nothing rounds what it makes. A Shape is no such neighbour: a
value of 16 bits whose shape somebody reads is rounded. Without the bridge a fused model has the original's bits, so
somebody reads its shape there too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from onnx import GraphProto, NodeProto, TensorProto, helper

from onnxfuse.graph.graph import Graph

WHY = "ONNX Runtime's CPU provider rounds what this reads"
# What computes, rather than moves elements, and has a kernel of 16 bits in ONNX Runtime 1.32 on x86_64.
KERNELS_OF_16_BITS = (
    *("Attention", "Celu", "Clip", "GroupQueryAttention", "LayerNormalization", "MatMulNBits", "Max", "Min", "Mod"),
    *("RMSNormalization", "RotaryEmbedding", "Round", "Shrink", "Sign", "SimplifiedLayerNormalization"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)


def shapes_read(nodes: Iterable[NodeProto], names: Mapping[str, str] = MappingProxyType({})) -> set[str]:
    """The values that a Shape reads, by the names that they have outside of a function."""
    read = (node.input[0] for node in nodes if node.op_type == "Shape")
    return {names.get(value, value) for value in read}


def read_shapes_again(graph: Graph, scope: GraphProto, lost: Collection[str], new_name: Callable[[str], str]) -> None:
    """Put a Shape that nobody reads behind every node whose results would no longer be rounded.

    Args:
        graph: the facts of the scope.
        scope: what is left of it, and what takes the place of the rest.
        lost: values whose shapes were read.
        new_name: makes a name that is not taken.
    """
    nodes: list[NodeProto] = []
    for node in scope.node if lost else ():
        nodes.append(node)
        rounded = (value for value in node.output if value in lost and graph.dtype(value) == TensorProto.FLOAT16)
        for value in rounded if node.op_type in KERNELS_OF_16_BITS else ():
            name = new_name(f"{value}/shape")
            nodes.append(helper.make_node("Shape", [value], [name], name=name, doc_string=WHY))
    if len(nodes) > len(scope.node):
        del scope.node[:]
        scope.node.extend(nodes)
