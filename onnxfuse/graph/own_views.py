"""Rows of several dimensions that products read as one: a view for each product, where they share it.

TensorFlow multiplies `[batch, tokens, width]` as `[batch*tokens, width]`, and its optimiser leaves q, k and v one
Reshape. The fusion of the first product takes it, and the others have rows of one dimension then, which nothing behind
them could be read along where only the run knows how many tokens there are. A Reshape moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from onnx import GraphProto, NodeProto

from onnxfuse.graph.functions import reads

Readers = Mapping[str, list[NodeProto]]


def give_views(graph: GraphProto) -> None:
    """Edit a graph whose nodes are in order, in place; branches and bodies stay."""
    readers = defaultdict[str, list[NodeProto]](list)
    for node in graph.node:
        for name in reads(node):
            readers[name].append(node)
    names = {name for node in graph.node for name in node.output} | {value.name for value in graph.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if not _is_shared(node, readers) or any(value.name == node.output[0] for value in graph.output):
            continue
        for number, product in enumerate(readers[node.output[0]][1:], 1):
            own = NodeProto()
            own.CopyFrom(node)
            own.name, own.output[0] = (f"{name}/own{number}" for name in (node.name, node.output[0]))
            if own.output[0] not in names:
                product.input[0] = own.output[0]
                nodes.append(own)
    if len(nodes) != len(graph.node):
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _is_shared(node: NodeProto, readers: Readers) -> bool:
    """Whether a Reshape is read by several products alone, and each of them by a Reshape alone."""
    if node.op_type != "Reshape" or node.domain:
        return False
    products = readers[node.output[0]]
    return len(products) > 1 and all(_is_product_of(each, node, readers) for each in products)


def _is_product_of(product: NodeProto, view: NodeProto, readers: Readers) -> bool:
    is_lhs = product.op_type == "MatMul" and [*product.input].index(view.output[0]) == 0
    behind = readers[product.output[0]] if is_lhs else []
    restored = len(behind) == 1 and behind[0].op_type == "Reshape" and behind[0].input[0] == product.output[0]
    return restored and product.input[1] != view.output[0]
