"""Sizes of what is made of an input of the graph by way of products, read of that input where they are the same.

TorchScript asks a projection's result how many tokens it has, `x + positions[:, :x.shape[1]]`, and makes positions,
masks or zeros of the answer. No kernel could read these and make that result: the product, and what follows it, stayed
apart. A product keeps all dimensions of its rows, so the answer is the input's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxfuse.graph.constants import constant_tensors
from onnxfuse.graph.unread import drop_unread

PRODUCTS = frozenset(("MatMul", "Gemm"))
BINARY = frozenset(("Add", "Div", "Mul", "Sub"))
UNARY = frozenset(("Cast", "Elu", "Erf", "Gelu", "Identity", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"))
OF_16_BITS = frozenset(("Cast", "Identity", "LayerNormalization"))
"""What ONNX Runtime's CPU provider has kernels of 16 bits for: it rounds that for a Shape (rounding_shapes.py)."""
MAKES_DATA = frozenset(("ConstantOfShape", "Expand", "Range", "Slice", "Tile"))
"""What makes operands of sizes; a Reshape takes its sizes apart by other means."""
MOST_STEPS = 64  # from a size to what it makes, and from an input to the value that is asked
MATRIX, VECTOR = 2, 1


@dataclass(frozen=True)
class _Facts:
    """What is looked up of a graph, by the names of values."""

    makers: Mapping[str, NodeProto]
    readers: Mapping[str, Sequence[NodeProto]]
    inputs: Mapping[str, ValueInfoProto]
    stored: Mapping[str, TensorProto]


@dataclass(frozen=True)
class _Step:
    """A node that keeps the dimensions of one of its inputs but the last, and that input."""

    node: NodeProto
    read: str


def read_sizes_of_inputs(graph: GraphProto) -> None:
    """Edit a graph whose nodes are in order, in place; branches and bodies stay."""
    if not any(node.op_type == "Shape" for node in graph.node):
        return
    facts = _facts(graph)
    found = [(gather, source) for gather in graph.node if (source := _source(facts, gather)) is not None]
    shapes = {source: f"{source}/sizes_of_input" for _, source in found}
    asked = {gather.input[0] for gather, _ in found}
    for gather, source in found:
        gather.input[0] = shapes[source]
    for source, name in ((source, name) for source, name in shapes.items() if name not in facts.makers):
        graph.node.insert(0, helper.make_node("Shape", [source], [name], name=name))
    if asked:
        drop_unread(graph, asked)


def _facts(graph: GraphProto) -> _Facts:
    readers = defaultdict[str, list[NodeProto]](list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    stored = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in stored}
    makers = {name: node for node in graph.node for name in node.output}
    return _Facts(makers, readers, inputs, constant_tensors(graph))


def _source(facts: _Facts, gather: NodeProto) -> str | None:
    """The input of the graph whose size a Gather takes by asking for that of a value; None where it does not."""
    is_of_two = gather.op_type == "Gather" and len(gather.input) == 2
    shape = facts.makers.get(gather.input[0]) if is_of_two else None
    if shape is None or shape.op_type != "Shape" or shape.attribute or len(shape.input) != 1:
        return None
    axis = _number(facts.stored.get(gather.input[1]))
    if axis is None or not _makes_data(facts, gather):
        return None
    steps = list(_steps(facts, shape.input[0]))
    source = facts.inputs.get(steps[-1].read) if steps else None
    if source is None or not any(step.node.op_type in PRODUCTS for step in steps):
        return None
    rank = len(source.type.tensor_type.shape.dim)
    if source.type.tensor_type.elem_type != TensorProto.FLOAT and steps[0].node.op_type in OF_16_BITS:
        return None
    is_kept = 0 <= axis < rank - 1 or -rank <= axis < -1
    return str(source.name) if rank >= MATRIX and is_kept else None


def _number(tensor: TensorProto | None) -> int | None:
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or len(tensor.dims) > VECTOR:
        return None
    values = numpy_helper.to_array(tensor) if tensor.data_type == TensorProto.INT64 else None
    return int(values.item()) if values is not None and values.size == 1 else None


def _steps(facts: _Facts, value: str) -> Iterator[_Step]:
    """The nodes from a value back to an input."""
    for _ in range(MOST_STEPS):
        node = facts.makers.get(value)
        read = _kept(facts, node) if node is not None else None
        if node is None or read is None:
            return
        yield _Step(node, read)
        value = read


def _kept(facts: _Facts, node: NodeProto) -> str | None:
    """The input of a node whose dimensions but the last are those of its output; None where that is not known."""
    if node.domain not in ("", "ai.onnx") or not node.input:
        return None
    first = str(node.input[0])
    if node.op_type in UNARY or (node.op_type == "LayerNormalization" and _is_of_columns(node)):
        return first
    if node.op_type == "MatMul":
        return first if len(node.input) == 2 and _rank(facts, node.input[1]) == MATRIX else None
    if node.op_type == "Gemm":
        is_turned = any(each.name == "transA" and each.i for each in node.attribute)
        return None if is_turned else first
    if node.op_type in BINARY:
        others = [
            str(name) for name in node.input if (_rank(facts, name) or VECTOR) > VECTOR or name not in facts.stored
        ]
        return others[0] if len(others) == 1 and others[0] not in facts.stored else None
    return None


def _is_of_columns(node: NodeProto) -> bool:
    return all(each.i == -1 for each in node.attribute if each.name == "axis")


def _rank(facts: _Facts, name: str) -> int | None:
    tensor = facts.stored.get(name)
    return None if tensor is None else len(tensor.dims)


def _makes_data(facts: _Facts, gather: NodeProto) -> bool:
    """Whether a size is one of something that is made, and not only of a Reshape."""
    queue, seen = [gather], set[str]()
    for node in queue:
        for value in node.output:
            if len(seen) > MOST_STEPS or value in seen:
                continue
            seen.add(value)
            for reader in facts.readers.get(value, ()):
                if reader.op_type in MAKES_DATA:
                    return True
                if reader.op_type != "Reshape":
                    queue.append(reader)
    return False
