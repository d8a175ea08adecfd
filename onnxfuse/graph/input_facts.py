"""What a model's file says of its inputs beside what ONNX Runtime tells: ranks, known text, what chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxfuse.graph.functions import walk
from onnxfuse.graph.input_sizes import input_sizes
from onnxfuse.graph.load import Model
from onnxfuse.known_inputs import InputFacts

_VOCABULARIES = frozenset({"keys_strings", "cats_strings", "string_vocabulary", "pool_strings", "classes_strings"})


def input_facts(model: Model) -> InputFacts:
    """Read a model's inputs, encoders, branches and attention operators."""
    proto = model.proto
    tensors = (value for value in proto.graph.input if value.type.HasField("tensor_type"))
    unranked = (value.name for value in tensors if not value.type.tensor_type.HasField("shape"))
    words = tuple(dict.fromkeys(_words(proto)))
    return InputFacts(frozenset(unranked), words, input_sizes(model), tuple(_switches(proto)), _past(proto))


def _switches(proto: ModelProto) -> Iterator[str]:
    """The inputs that are the condition of an If, at any depth, as they are or through nodes of one input."""
    makers = {output: node.input[0] for node in proto.graph.node if len(node.input) == 1 for output in node.output}
    conditions = {_origin(node.input[0], makers) for node in walk(proto.graph.node) if node.op_type == "If"}
    return (value.name for value in proto.graph.input if value.name in conditions and _is_one_boolean(value))


def _origin(name: str, makers: Mapping[str, str]) -> str:
    while name in makers:
        name = makers[name]
    return name


def _is_one_boolean(value: ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.elem_type == TensorProto.BOOL and all(dim.dim_value == 1 for dim in tensor.shape.dim)


def _past(proto: ModelProto) -> tuple[str, ...]:
    symbols = (dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim)
    return tuple(dict.fromkeys(each for each in symbols if "past" in each.lower() and each.isidentifier()))


def _words(proto: ModelProto) -> Iterator[str]:
    for node in walk(proto.graph.node):
        for attribute in node.attribute:
            if attribute.name in _VOCABULARIES:
                yield from (word.decode(errors="replace") for word in attribute.strings)
