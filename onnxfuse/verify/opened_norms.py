"""The norms of query and key inside of GroupQueryAttention, as nodes in front of it.

ONNX Runtime computes them on the GPU alone, where GenAI's builder puts them (Qwen 3, Gemma 3). The reference runs on
the CPU, whose op knows none; in front of it they are in double as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, NodeProto

from onnxfuse.graph.group_query import DOMAIN, EPSILON, KEY, KEY_NORM, OP, QUERY, QUERY_NORM
from onnxfuse.verify.float64_ops import Emitter, attribute_of

_BOTH = "qk_norm_epsilon"
_OWN = {QUERY_NORM: "q_norm_epsilon", KEY_NORM: "k_norm_epsilon"}  # where given, instead of that of both


def open_norms(graph: GraphProto) -> None:
    """Put the norms of all attentions of a graph, and of the graphs inside, in front of them."""
    fresh = (f"float64_reference_norm_{number}" for number in itertools.count())
    _open(graph, fresh)


def _open(graph: GraphProto, fresh: Iterator[str]) -> None:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _open(attribute.g, fresh)
    nodes = [new for node in graph.node for new in _opened(node, fresh)]
    del graph.node[:]
    graph.node.extend(nodes)


def _opened(node: NodeProto, fresh: Iterator[str]) -> list[NodeProto]:
    """The op behind its norms, or as it is where it has none."""
    if (node.domain, node.op_type) != (DOMAIN, OP) or not any(node.input[QUERY_NORM:]):
        return [node]
    e = Emitter(fresh, {})
    heads = [int(attribute_of(node, "num_heads", 1)), int(attribute_of(node, "kv_num_heads", 1))]
    both = attribute_of(node, _BOTH, EPSILON)
    norms = [(node.input[place], float(attribute_of(node, name, both))) for place, name in _OWN.items()]
    if node.input[KEY]:
        for place, count, norm in zip((QUERY, KEY), heads, norms, strict=True):
            node.input[place] = _columns(e, _norm(e, _heads(e, node.input[place], count), *norm))
    else:
        rows = _heads(e, node.input[QUERY], heads[0] + 2 * heads[1])
        bounds = [0, heads[0], sum(heads)]
        normed = [
            _norm(e, e("Slice", rows, [first], [last], [2]), *norm)
            for (first, last), norm in zip(itertools.pairwise(bounds), norms, strict=True)
        ]
        values = e("Slice", rows, [bounds[-1]], [sum(heads) + heads[1]], [2])
        node.input[QUERY] = _columns(e, e("Concat", *normed, values, axis=2))
    kept = [each for each in node.attribute if each.name not in (_BOTH, *_OWN.values())]
    del node.attribute[:]
    del node.input[QUERY_NORM:]
    node.attribute.extend(kept)
    return [*e.nodes, node]


def _heads(e: Emitter, rows: str, count: int) -> str:
    """`[b, s, (count h)] -> [b, s, count, h]`."""
    return e("Reshape", rows, [0, 0, count, -1])


def _columns(e: Emitter, heads: str) -> str:
    """`[b, s, count, h] -> [b, s, (count h)]`."""
    return e("Reshape", heads, [0, 0, -1])


def _norm(e: Emitter, heads: str, scale: str, epsilon: float) -> str:
    """Each head over the root of its mean square."""
    return e("SimplifiedLayerNormalization", heads, scale, axis=-1, epsilon=epsilon, stash_type=1)
