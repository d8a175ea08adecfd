"""The values of small tensors that the model fixes, also through shape arithmetic: what a Slice bound or a scalar is.

`Shape(t)` is known entry by entry: a dimension that only the run knows is `None`, and arithmetic carries `None` on. So
`Div(Add(Gather(Shape(t), -1), 1), 2)` is known as soon as the last dimension of `t` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import Graph

Array = np.ndarray[Any, np.dtype[Any]]
MAX_DEPTH = 64  # longer chains than any exporter writes; bounds the recursion


def known_value(graph: Graph, tensor: gs.Tensor, depth: int = 0) -> Array | None:
    """The tensor's value, with `None` entries (dtype object) where only the run knows; None where nothing is known."""
    if isinstance(tensor, gs.Constant):
        return np.asarray(tensor.values)
    if graph.is_initializer(tensor.name) or not tensor.inputs or depth > MAX_DEPTH:
        return None
    node = tensor.inputs[0]
    evaluate = _EVALUATE.get(node.op)
    if evaluate is None or node.domain not in (None, "", "ai.onnx"):
        return None
    return evaluate(graph, node, depth + 1)


def known_integers(graph: Graph, tensor: gs.Tensor) -> list[int] | None:
    """A fully known integer tensor, flattened."""
    value = known_value(graph, tensor)
    if value is None or any(entry is None for entry in value.ravel().tolist()):
        return None
    return [int(entry) for entry in value.ravel()]


def _inputs(graph: Graph, node: gs.Node, depth: int) -> list[Array] | None:
    values = [known_value(graph, tensor, depth) for tensor in node.inputs]
    return None if any(value is None for value in values) else [value for value in values if value is not None]


def _constant(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if name in node.attrs:
            value = node.attrs[name]
            return np.asarray(value.values if isinstance(value, gs.Tensor) else value)
    return None


def _shape(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    shape = graph.shape(node.inputs[0].name)
    if shape is None:
        return None
    sizes = [size if isinstance(size, int) else None for size in shape]
    return np.array(sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))], dtype=object)


def _gather(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    values = _inputs(graph, node, depth)
    if values is None or values[0].ndim != 1 or values[1].dtype == object:
        return None
    data, indices = values
    inside = (indices >= -data.size) & (indices < data.size)
    return np.asarray(data[indices], dtype=data.dtype) if inside.all() else None


def _elementwise(apply: Callable[[Any, Any], Any]) -> Callable[[Graph, gs.Node, int], Array | None]:
    def evaluate(graph: Graph, node: gs.Node, depth: int) -> Array | None:
        values = _inputs(graph, node, depth)
        if values is None:
            return None
        lhs, rhs = np.broadcast_arrays(*(value.astype(object) for value in values))
        entries = [None if a is None or b is None else apply(a, b) for a, b in zip(lhs.flat, rhs.flat, strict=True)]
        out = np.empty(len(entries), dtype=object)
        out[:] = entries
        return out.reshape(lhs.shape)

    return evaluate


def _divide(a: Any, b: Any) -> Any:
    """ONNX integer division truncates toward zero; a division by zero has no known value."""
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a / b


def _same(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    return known_value(graph, node.inputs[0], depth)


def _cast(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    value = known_value(graph, node.inputs[0], depth)
    if value is None or value.dtype != object:
        return None if value is None else _cast_plain(value, int(node.attrs["to"]))
    return value if int(node.attrs["to"]) in (6, 7) else None


def _cast_plain(value: Array, to: int) -> Array | None:
    dtypes = {1: np.float32, 6: np.int32, 7: np.int64, 10: np.float16, 11: np.float64}
    return value.astype(dtypes[to]) if to in dtypes else None


def _flatten_to_vector(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    value = known_value(graph, node.inputs[0], depth)
    return value.reshape(1) if value is not None and value.size == 1 else None


def _squeeze(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    value = known_value(graph, node.inputs[0], depth)
    return value.reshape(()) if value is not None and value.size == 1 else None


def _concat(graph: Graph, node: gs.Node, depth: int) -> Array | None:
    values = _inputs(graph, node, depth)
    if values is None or any(value.ndim != 1 for value in values):
        return None
    return np.concatenate([value.astype(object) for value in values])


_EVALUATE: dict[str, Callable[[Graph, gs.Node, int], Array | None]] = {
    "Constant": _constant,
    "Shape": _shape,
    "Gather": _gather,
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_divide),
    "Identity": _same,
    "Cast": _cast,
    "Unsqueeze": _flatten_to_vector,
    "Squeeze": _squeeze,
    "Concat": _concat,
}
