"""The numbers of a tensor that a model stores, however large: in its message, in a file beside it, in a node."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.constant_propagation import Array, stored_value
from onnxfuse.graph.external_data import read_data
from onnxfuse.graph.graph import Graph, Model
from onnxfuse.graph.load import overridable

KINDS = "bf"  # of NumPy's types; bfloat16 becomes float32


def stored_numbers(graph: Graph, tensor: gs.Tensor) -> Array | None:
    """Conditions or floating-point numbers that no run changes; None where there are none, or they cannot be read."""
    found = _stored(graph, tensor)
    if found is None or found.dtype == object:
        return None
    found = found.astype(np.float32) if found.dtype.kind == "V" else found
    return found if found.dtype.kind in KINDS else None


def stored_integers(graph: Graph, tensor: gs.Tensor) -> list[int] | None:
    """Integers that no run changes, flattened; None where there are none, or they cannot be read."""
    found = _stored(graph, tensor)
    return None if found is None or found.dtype.kind != "i" else [int(each) for each in found.ravel()]


def _stored(graph: Graph, tensor: gs.Tensor) -> Array | None:
    maker = tensor.inputs[0] if tensor.inputs else None
    if maker is not None:
        value = maker.attrs.get("value") if maker.op == "Constant" else None
        if not isinstance(value, gs.Tensor):
            return None
        own = stored_value(value)
        return _of_node(graph, maker) if own is None else own
    known = graph.known_value(tensor)
    # Inside a branch or a body another tensor may have the name.
    return _of_main_graph(graph, tensor.name) if known is None and not graph.scope.path else known


def _of_main_graph(graph: Graph, name: str) -> Array | None:
    proto = graph.model.proto
    fixed = graph.is_initializer(name) and name not in overridable(proto)
    initializer = next((each for each in proto.graph.initializer if each.name == name), None) if fixed else None
    return None if initializer is None else _read_safely(graph.model, initializer)


def _of_node(graph: Graph, constant: gs.Node) -> Array | None:
    """What a Constant holds whose data lie in a file."""
    (value,) = (each.t for each in graph.scope.nodes[graph.index(constant)].attribute if each.name == "value")
    return _read_safely(graph.model, value)


def _read_safely(model: Model, tensor: TensorProto) -> Array | None:
    try:
        return _read(model, tensor)
    except (ModelError, ValueError):  # said where data that are missing matter
        return None


def _read(model: Model, tensor: TensorProto) -> Array:
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(read_data(model, tensor), dtype).reshape(tuple(tensor.dims))
