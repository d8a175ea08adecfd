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
    names = {tensor.name for tensor in _large_floats(model) if len(tensor.dims) > 1}
    return frozenset(_read_by_alone(PRODUCTS | _PASSING_ON, names, graphs))


def biases(model: Model, graphs: Iterable[Graph]) -> frozenset[str]:
    """The main graph's rows of numbers that one node reads, which adds them, and that no run may override."""
    names = {tensor.name for tensor in _large_floats(model) if len(tensor.dims) == 1}
    times = Counter(name for graph in graphs for proto in graph.scope.nodes for name in proto.input)
    return frozenset(name for name in _read_by_alone(_ADDING, names, graphs) if times[name] == 1)


def _large_floats(model: Model) -> Iterator[TensorProto]:
    """What the main graph stores in many bytes, can store anew, and no run may override."""
    given = overridable(model.proto)
    for tensor in model.proto.graph.initializer:
        is_large_float = tensor.data_type in _FLOATS and is_large(tensor)
        if is_large_float and tensor.name not in given and _is_at_hand(model, tensor):
            yield tensor


def _read_by_alone(ops: Set[str], names: set[str], graphs: Iterable[Graph]) -> set[str]:
    """Those of the names that no other ops read and no graph gives out."""
    for graph in graphs:
        names = names - graph.scope.outputs
        for node, proto in zip(graph.nodes, graph.scope.nodes, strict=True):
            if qualified_op(node) not in ops:
                names = names - set(proto.input)
    return names


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
