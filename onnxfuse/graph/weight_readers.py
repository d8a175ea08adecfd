"""Who reads a model's weights, at any depth: one that products alone read may lie otherwise in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set

from onnx import TensorProto

from onnxfuse.graph.graph import Graph, Model
from onnxfuse.graph.load import is_large, overridable
from onnxfuse.graph.operators import PRODUCTS, qualified_op

_PASSING_ON = frozenset({"Identity", "Transpose", "Dropout"})  # what may stand between a weight and its product
_ADDING = frozenset({"Add", "Gemm"})  # a bias, among others
_BLOCKS = {"DequantizeLinear": slice(None), "MatMulNBits": slice(1, 4)}  # inputs: a weight, its scales and zero points
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def product_weights(model: Model, graphs: Iterable[Graph]) -> frozenset[str]:
    """The main graph's weights that products alone read, and no run may override.

    Args:
        model: the model.
        graphs: all its scopes.
    """
    given = overridable(model.proto)
    names = {
        tensor.name
        for tensor in model.proto.graph.initializer
        if len(tensor.dims) > 1 and tensor.data_type in _FLOATS and is_large(tensor) and _is_at_hand(model, tensor)
    } - given
    for graph in graphs:
        names -= graph.scope.outputs
        for node, proto in zip(graph.nodes, graph.scope.nodes, strict=True):
            if qualified_op(node) not in PRODUCTS | _PASSING_ON:
                names -= set(proto.input)
    return frozenset(names)


def biases(model: Model, graphs: Iterable[Graph]) -> frozenset[str]:
    """The main graph's rows of numbers that one node reads, which adds them, and that no run may override."""
    stored = model.proto.graph.initializer
    rows = (tensor for tensor in stored if len(tensor.dims) == 1 and tensor.data_type in _FLOATS and is_large(tensor))
    names = {tensor.name for tensor in rows if _is_at_hand(model, tensor)} - overridable(model.proto)
    times = Counter[str]()
    for graph in graphs:
        names -= graph.scope.outputs
        for node, proto in zip(graph.nodes, graph.scope.nodes, strict=True):
            times.update(proto.input)
            if qualified_op(node) not in _ADDING:
                names -= set(proto.input)
    return frozenset(name for name in names if times[name] == 1)


def block_weights(model: Model, graphs: Iterable[Graph]) -> frozenset[str]:
    """The main graph's tensors that are quantised weights to all their readers, and that no run may override."""
    stored = model.proto.graph.initializer
    names = {tensor.name for tensor in stored if _is_at_hand(model, tensor)} - overridable(model.proto)
    read: set[str] = set()
    for graph in graphs:
        names -= graph.scope.outputs
        for proto in graph.scope.nodes:
            places = _BLOCKS.get(proto.op_type, slice(0))
            read.update(proto.input[places])
            names -= {name for name in proto.input if name not in proto.input[places]}
    return frozenset(names & read)


def _is_at_hand(model: Model, tensor: TensorProto) -> bool:
    """Whether a weight can be stored anew: one in a file of a model without a place is only named."""
    return model.path is not None or tensor.data_location != TensorProto.EXTERNAL


def readers(graphs: Iterable[Graph], names: Set[str]) -> Iterator[tuple[Graph, int, str]]:
    """Every node that reads one of some values, by scope and index, and which."""
    for graph in graphs:
        for index, node in enumerate(graph.scope.nodes):
            for name in names & set(node.input):
                yield graph, index, name


def readers_of_outputs(graph: Graph, index: int, made: Set[str] = frozenset()) -> list[int] | None:
    """The nodes that read what a node makes, and others do not make as well; None where that leaves the scope."""
    outputs = [tensor for tensor in graph.nodes[index].outputs if tensor.name and tensor.name not in made]
    if any(graph.is_escaping(tensor.name) for tensor in outputs):
        return None
    return [graph.index(reader) for tensor in outputs for reader in tensor.outputs]
