"""What a model's file says of its inputs beside what ONNX Runtime tells: which have no rank, and what text it knows."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import ModelProto

from onnxfuse.graph.functions import walk
from onnxfuse.graph.input_sizes import input_sizes
from onnxfuse.graph.load import Model
from onnxfuse.known_inputs import InputFacts

_VOCABULARIES = frozenset({"keys_strings", "cats_strings", "string_vocabulary", "pool_strings", "classes_strings"})


def input_facts(model: Model) -> InputFacts:
    """Read a model's inputs, encoders and attention operators."""
    proto = model.proto
    tensors = (value for value in proto.graph.input if value.type.HasField("tensor_type"))
    unranked = (value.name for value in tensors if not value.type.tensor_type.HasField("shape"))
    return InputFacts(frozenset(unranked), tuple(dict.fromkeys(_words(proto))), input_sizes(model))


def _words(proto: ModelProto) -> Iterator[str]:
    for node in walk(proto.graph.node):
        for attribute in node.attribute:
            if attribute.name in _VOCABULARIES:
                yield from (word.decode(errors="replace") for word in attribute.strings)
