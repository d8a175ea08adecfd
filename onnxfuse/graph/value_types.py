"""Types of values as ONNX Runtime writes them, `seq(map(int64,tensor(float)))`, and as ONNX's messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

from onnx import ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TypeProto, ValueInfoProto, helper

DOUBLE = "tensor(double)"
FLOAT = "tensor(float)"
FLOAT_TENSORS = frozenset({DOUBLE, FLOAT, "tensor(float16)", "tensor(bfloat16)"})

_NAMES: dict[int, str] = {int(number): name.lower() for name, number in TensorProto.DataType.items() if number}
_NUMBERS = {name: number for number, name in _NAMES.items()}
_FLOAT_INSIDE = re.compile(r"(?<!_)tensor\((float|float16|bfloat16)\)")
_NESTED = re.compile(r"(\w+)\((.*)\)")


def element_text(element: int | None) -> str:
    """An ONNX element type in words: of a value of which no type is known, that is said."""
    return _NAMES.get(element or 0, "an unknown type, for ONNX infers none of it")


def tensor_text(element: int) -> str:
    """The type of a tensor of an ONNX element type; empty where the element type is unknown."""
    return f"tensor({_NAMES[element]})" if element in _NAMES else ""


def type_text(value: TypeProto) -> str:
    """A type as text; empty where it is unknown."""
    kind = value.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        inner, prefix = tensor_text(getattr(value, kind).elem_type), "sparse_" * (kind == "sparse_tensor_type")
        return inner and prefix + inner
    if kind in ("sequence_type", "optional_type"):
        inner = type_text(getattr(value, kind).elem_type)
        return inner and f"{'seq' if kind == 'sequence_type' else 'optional'}({inner})"
    if kind == "map_type":
        return f"map({_NAMES[value.map_type.key_type]},{type_text(value.map_type.value_type)})"
    return ""


def type_proto(text: str) -> TypeProto:
    """The message of a type; of a tensor without a shape."""
    value = TypeProto()
    found = _NESTED.fullmatch(text)
    kind, inner = found.groups() if found else ("", "")
    if kind == "tensor":
        value.tensor_type.elem_type = _NUMBERS[inner]
    elif kind == "sparse_tensor":
        value.sparse_tensor_type.elem_type = _NUMBERS[inner]
    elif kind == "seq":
        value.sequence_type.elem_type.CopyFrom(type_proto(inner))
    elif kind == "optional":
        value.optional_type.elem_type.CopyFrom(type_proto(inner))
    elif kind == "map":
        key, held = inner.split(",", 1)
        value.map_type.key_type = _NUMBERS[key]
        value.map_type.value_type.CopyFrom(type_proto(held))
    return value


def in_double(text: str) -> str:
    """The type with floats in double; what a map holds stays, as no operator makes another."""
    return text if "map(" in text else _FLOAT_INSIDE.sub(DOUBLE, text)


def lone_node(
    node: NodeProto, types: Iterable[str], opsets: Iterable[OperatorSetIdProto], ir_version: int
) -> bytes | None:
    """A model of one node, whose outputs' types are left to whoever reads it; None where an input's is not known.

    Args:
        node: copied; values and the node itself are named by position, so that equal nodes give equal models.
        types: of the node's inputs, as text.
        opsets: that the model imports.
        ir_version: of the model.
    """
    typed = dict(zip(node.input, types, strict=True))
    names = {name: f"x{index}" if name else "" for index, name in enumerate(typed)}
    if any(name and not text for name, text in typed.items()):
        return None
    lone = NodeProto()
    lone.CopyFrom(node)
    lone.name = lone.doc_string = ""
    del lone.input[:], lone.output[:]
    lone.input.extend(names[name] for name in node.input)
    lone.output.extend(f"y{index}" if name else "" for index, name in enumerate(node.output))
    inputs = [ValueInfoProto(name=names[name], type=type_proto(text)) for name, text in typed.items() if name]
    outputs = [ValueInfoProto(name=name) for name in lone.output if name]
    graph = helper.make_graph([lone], "node", inputs, outputs)
    model = ModelProto(ir_version=ir_version, graph=graph, opset_import=opsets)
    return bytes(model.SerializeToString(deterministic=True))
