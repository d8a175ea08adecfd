"""One site as a model of its own, several times side by side, to be timed: as it was, or in one of its implementations.

Copy i reads `x0_i, x1_i, ...`, the fused node's inputs in their order, weights among them, and makes `y0_i, ...`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper

from onnxfuse.graph.fallback_body import Replacement, needed, renamed, renamed_subgraph
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.known_nodes import constant
from onnxfuse.graph.rewrite import FUNCTION_IR_VERSION
from onnxfuse.graph.told_shape import expansion

Ports = Sequence[tuple[str, int, Sequence[int]]]
"""Name, ONNX element type and shape of what one copy reads or makes."""

KERNELS = "kernels"


def subgraph_id(whole: Replacement) -> str:
    """Equal for sites whose nodes compute the same in the same way, whatever their values are called."""
    text = b"\0".join(node.SerializeToString(deterministic=True) for node in stock_nodes(whole))
    return hashlib.sha256(text).hexdigest()[:16]


def stock_nodes(whole: Replacement) -> list[NodeProto]:
    """The site's own nodes."""
    return renamed_subgraph(whole)[0]


def fused_nodes(
    whole: Replacement, implementation: Replacement, expanded: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> list[NodeProto]:
    """The site's nodes with those of one implementation replaced by its fused node.

    Args:
        whole: the site.
        implementation: what replaces its nodes.
        expanded: what inputs are expanded to in front of the fused node.
    """
    nodes, names = renamed_subgraph(whole)
    retained = {names[value] for index in implementation.retained for value in whole.graph.scope.nodes[index].output}
    expanding: list[NodeProto] = []
    for name, shape in expanded.items():
        value, wide = names[name], f"{names[name]}/expanded"
        made = constant(f"{wide}/shape", np.array(shape, np.int64))
        node = expansion(whole.graph, name, implementation.expanded[name], (value, made.output[0]), wide)
        expanding += [made, node]
        names[name] = wide
    inputs = [KERNELS, *(names[name] for name in implementation.inputs)]
    outputs = [names[name] for name in implementation.outputs]
    fused = helper.make_node(implementation.kind, inputs, outputs, domain=DOMAIN, **implementation.attributes)
    return [*needed(nodes, retained), *expanding, fused]


def site_model(
    opsets: Iterable[OperatorSetIdProto],
    nodes: Iterable[NodeProto],
    inputs: Ports,
    outputs: Ports,
    copies: int,
    kernels: bytes = b"",
    functions: Iterable[FunctionProto] = (),
) -> bytes:
    """A serialised model of `copies` copies of some nodes, with every copy's inputs and outputs.

    Args:
        opsets: the operator sets of the nodes.
        nodes: of one copy.
        inputs: of one copy.
        outputs: of one copy.
        copies: how many.
        kernels: the archive that fused nodes read.
        functions: what fused nodes stand for, where no kernel can run.
    """
    nodes = list(nodes)
    values = {value for node in nodes for value in (*node.input, *node.output) if value} - {KERNELS}
    model = ModelProto(ir_version=FUNCTION_IR_VERSION, opset_import=opsets, functions=functions)
    model.graph.name = "site"
    for copy in range(copies):
        names = {value: f"{value}_{copy}" for value in values}
        model.graph.node.extend(renamed(node, names) for node in nodes)
        model.graph.input.extend(_value(port, copy) for port in inputs)
        model.graph.output.extend(_value(port, copy) for port in outputs)
    if kernels:
        archive = TensorProto(name=KERNELS, data_type=TensorProto.UINT8, dims=[len(kernels)], raw_data=kernels)
        model.graph.initializer.append(archive)
    return bytes(model.SerializeToString())


def _value(port: tuple[str, int, Sequence[int]], copy: int) -> ValueInfoProto:
    name, element, shape = port
    return helper.make_tensor_value_info(f"{name}_{copy}", element, list(shape))
