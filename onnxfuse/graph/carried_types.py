"""Types of what a Loop carries from one iteration to the next, of which ONNX's inference forgets the shape.

By induction: a value that has a shape before the first iteration has it in every one, and behind the Loop, if the body
makes that shape of it. What the body makes otherwise, a size or the rank, is forgotten, and what is left tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, helper

from onnxfuse.graph.branch_names import infer_shapes
from onnxfuse.graph.functions import reads, subgraphs
from onnxfuse.graph.load import is_large

Types = Mapping[str, TypeProto]
MADE_UP = "unk__"  # begins the names that inference gives to sizes of which it knows nothing
_BEFORE = 2  # inputs of a Loop, and of its body, before those that are carried; its outputs have one less


@dataclass(frozen=True)
class _Outside:
    """What bodies see of the model around them, of which the types are known and small numbers as well."""

    model: ModelProto
    types: Types
    tensors: Mapping[str, TensorProto]
    constants: Mapping[str, NodeProto]


def loops(model: ModelProto) -> list[NodeProto]:
    """Those of the main graph."""
    return [node for node in model.graph.node if node.op_type == "Loop" and node.domain in ("", "ai.onnx")]


def tell_bodies(model: ModelProto, known: Types) -> tuple[dict[str, TypeProto], bool]:
    """Give bodies of the main graph's Loops the shapes of what they carry, where they declare none.

    Args:
        model: of which bodies are told.
        known: the types of the main graph's values.

    Returns:
        The types of what the Loops make of that, by name, and whether any body was told something.
    """
    made: dict[str, TypeProto] = {}
    told = False
    nodes = loops(model)
    outside = _outside(model if nodes else ModelProto(), known)
    for node in nodes:
        body = dict(subgraphs(node))["body"]
        types = _carried(outside, node, body)
        for value, kind in zip(body.input[_BEFORE:], types, strict=False):
            told |= _tell(value.type, kind)
        made |= {name: kind for name, kind in zip(node.output, types, strict=False) if name and _has_shape(kind)}
    return made, told


def _tell(own: TypeProto, kind: TypeProto) -> bool:
    """Add to what a body declares; whether there was anything to add."""
    if not _has_shape(kind):
        return False
    before = TypeProto()
    before.CopyFrom(own)
    dims = own.tensor_type.shape.dim
    if not _has_shape(own):
        own.CopyFrom(kind)
    elif len(dims) == len(kind.tensor_type.shape.dim):
        for dim, said in zip(dims, kind.tensor_type.shape.dim, strict=True):
            if _size(dim) == "":
                dim.CopyFrom(said)
    return bool(own != before)


def _outside(model: ModelProto, known: Types) -> _Outside:
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    return _Outside(model, known, {tensor.name: tensor for tensor in model.graph.initializer}, constants)


def _carried(outside: _Outside, node: NodeProto, body: GraphProto) -> list[TypeProto]:
    """The types that hold in every iteration and behind a Loop; without a shape where its rank may change."""
    types = [_sure(outside.types.get(name)) for name in node.input[_BEFORE:]]
    while any(map(_has_shape, types)):
        made = _made(outside, body, types)
        common = [_common(before, after) for before, after in zip(types, made, strict=True)]
        if common == types:
            break
        types = common
    return types


def _made(outside: _Outside, body: GraphProto, types: Sequence[TypeProto]) -> list[TypeProto]:
    """The types that a body makes of what it is given."""
    alone = ModelProto(ir_version=outside.model.ir_version, opset_import=outside.model.opset_import)
    graph = alone.graph
    graph.name = "body"
    graph.input.extend(body.input)
    for value, kind in zip(graph.input[_BEFORE:], types, strict=False):
        if kind.WhichOneof("value"):
            value.type.CopyFrom(kind)
    read = set(_reads(body)) - {name for node in body.node for name in node.output}
    read -= {value.name for value in (*body.input, *body.initializer)}
    names = sorted(read)
    _add_stored(graph, (*body.initializer, *(outside.tensors[name] for name in names if name in outside.tensors)))
    graph.node.extend(outside.constants[name] for name in names if name in outside.constants)
    there = {name for node in graph.node for name in node.output}
    there |= {value.name for value in (*graph.input, *graph.initializer)}
    seen = (name for name in names if name in outside.types and name not in there)
    graph.input.extend(helper.make_value_info(name, outside.types[name]) for name in seen)
    graph.node.extend(body.node)
    inferred = infer_shapes(alone, data_prop=True).graph
    found = {value.name: value.type for value in (*inferred.input, *inferred.value_info)}
    outputs = [value.name for value in body.output[_BEFORE - 1 :]]
    return [_sure(found.get(name)) for name in (*outputs, *("" for _ in types))][: len(types)]


def _reads(body: GraphProto) -> Iterator[str]:
    return (name for node in body.node for name in reads(node))


def _add_stored(graph: GraphProto, tensors: Iterable[TensorProto]) -> None:
    """Initializers, large ones as inputs: inference needs no more than their types."""
    for tensor in tensors:
        if is_large(tensor):
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims)))
        else:
            graph.initializer.append(tensor)


def _has_shape(kind: TypeProto) -> bool:
    return bool(kind.HasField("tensor_type") and kind.tensor_type.HasField("shape"))


def _sure(kind: TypeProto | None) -> TypeProto:
    """A type without names that inference made up."""
    sure = TypeProto()
    if kind is not None:
        sure.CopyFrom(kind)
    if _has_shape(sure):
        for dim in sure.tensor_type.shape.dim:
            if dim.dim_param.startswith(MADE_UP):
                dim.Clear()
    return sure


def _common(before: TypeProto, after: TypeProto) -> TypeProto:
    """What is the same of a type before an iteration and after it."""
    common = TypeProto()
    common.CopyFrom(before)
    if not _has_shape(before):
        return common
    shape = after.tensor_type.shape.dim if _has_shape(after) else ()
    if not _has_shape(after) or len(shape) != len(before.tensor_type.shape.dim):
        common.tensor_type.ClearField("shape")
        return common
    for dim, made in zip(common.tensor_type.shape.dim, shape, strict=True):
        if _size(dim) != _size(made):
            dim.Clear()
    return common


def _size(dim: TensorShapeProto.Dimension) -> int | str:
    """Of a dimension; empty where nothing is known."""
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param
