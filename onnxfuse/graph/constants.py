"""The tensors of a graph's messages that no run changes."""

from __future__ import annotations

from onnx import GraphProto, TensorProto


def constant_tensors(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers that are no inputs, and what each Constant has as a tensor, by the names of the values."""
    given = {value.name for value in graph.input}
    stored = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in given}
    made = (node for node in graph.node if node.op_type == "Constant" and node.domain in ("", "ai.onnx"))
    tensors = (
        (name, each.t) for node in made for name in node.output for each in node.attribute if each.name == "value"
    )
    return stored | dict(tensors)
