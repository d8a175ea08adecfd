"""A match and the node that takes its place -> that node's function, whose body is the matched subgraph, node for node.

Values are named by position, so that equal matches have equal bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import AttributeProto, FunctionProto, NodeProto, OperatorSetIdProto, TensorProto, helper

from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_nodes import constant, known_nodes
from onnxfuse.graph.left_of_opened import left_of_opened
from onnxfuse.graph.op_names import FUSED_GEMM
from onnxfuse.graph.opened_ops import adding_zeros
from onnxfuse.graph.packed_data import Packing, unpacking
from onnxfuse.graph.padded_rows import PaddedRows, without_padding
from onnxfuse.graph.rounding_shapes import COMPUTES, MOVES, has_readers_of_16_bits, read_in_16_bits, unread_shapes
from onnxfuse.graph.rows_in_turn import RowsInTurn, taking_turns
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.graph.transposed_data import Order

RESTORING = "brings a stored weight into the order that the model had"  # of those nodes of a body; they have no names


OF_16_BITS = (*COMPUTES, *MOVES)
OWN = -1  # in the place of an input's index


@dataclass(frozen=True)
class FallbackShape:
    """The second input of a Reshape in a fallback function, where the model computes it elsewhere.

    Attributes:
        entries: as Reshape reads them: 0 keeps a dimension, -1 is the one that is left.
        of_base: for each entry, the dimension of an input that is taken instead; None for the entry itself.
        base: which of the fusion's inputs, or OWN for what the Reshape itself reads.
    """

    entries: tuple[int, ...]
    of_base: tuple[int | None, ...]
    base: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether no dimension of an input is needed."""
        return not any(index is not None for index in self.of_base)


@dataclass(frozen=True)
class Replacement:
    """One match and the node that takes its place.

    Attributes:
        graph: the facts of the scope that the match lies in; stale after the edit.
        nodes: indices of the matched nodes in the scope, ascending.
        copied: indices of nodes that matched ones may need too, and that stay as long as others need them.
        insertion_point: where the fused node goes: in place of one of them, or behind a copied one where there is none.
        folded: indices of nodes that are not needed any more: what others read of them are constants.
        constants: the names of those.
        inputs: values that the kernel reads, in order.
        outputs: values that it makes.
        name: name of the fused node.
        attributes: the fused node's attributes, all strings.
        kind: `FusedGemm`, or `FusedPointwise` where the products stay.
        retained: indices of matched nodes that stay as they are, right before the fused node.
        shapes: by node, what takes the place of the shape that a Reshape reads from outside.
        expanded: by input, what it is expanded to in front of the node.
        told: by node, what takes the place of a Shape of a value that no kernel stores.
        transposed: by input, how the stored weight is transposed: dimension i of it is `perm[i]` of the model's; or how
            its integers are packed.
    """

    graph: Graph
    nodes: tuple[int, ...]
    copied: tuple[int, ...]
    insertion_point: int
    folded: tuple[int, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    attributes: dict[str, str]
    kind: str = FUSED_GEMM
    retained: tuple[int, ...] = ()
    shapes: dict[int, FallbackShape] = field(default_factory=dict)
    expanded: Mapping[str, ToldShape] = field(default_factory=dict)
    told: Mapping[int, ToldShape] = field(default_factory=dict)
    transposed: Mapping[str, Order] = field(default_factory=dict)


def fallback_body(replacement: Replacement) -> tuple[FunctionProto, dict[str, TensorProto]]:
    """The matched subgraph as a function that is named after its kind, and the constants that it takes as attributes.

    Scales, bounds and shapes are the node's and not the function's, so that more nodes have equal bodies.
    """
    nodes, names = renamed_subgraph(replacement)
    constants: dict[str, TensorProto] = {}
    for node in nodes:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            name = f"c{len(constants)}"
            constants[name] = TensorProto()
            constants[name].CopyFrom(node.attribute[0].t)
            node.attribute[0].CopyFrom(AttributeProto(name="value", type=AttributeProto.TENSOR, ref_attr_name=name))
    body = FunctionProto(
        domain=DOMAIN,
        name=replacement.kind,
        input=["kernels", *(f"x{index}" for index in range(len(replacement.inputs)))],
        output=[names[name] for name in replacement.outputs],
        attribute=sorted([*replacement.attributes, *constants]),
        node=nodes,
        opset_import=opsets_of(replacement.graph, nodes),
    )
    return body, constants


def renamed_subgraph(replacement: Replacement) -> tuple[list[NodeProto], dict[str, str]]:
    """The matched nodes but the retained, and what their values are called: by position, so that equal ones are equal.

    Inputs are called x0, x1, ..., outputs y0, y1, ..., and what lies between v0, v1, ... (`Graph.body_prefix`).
    """
    rows = left_of_opened(replacement.graph)
    nodes = [new for node in _nodes(replacement) for new in adding_zeros(_with_stash_type(node), rows, str)]
    names = {name: f"x{index}" for index, name in reversed(list(enumerate(replacement.inputs)))}
    body = known_nodes(replacement.graph, nodes, names)
    stored = {name: names[name] for name in replacement.transposed}
    inner = (*stored, *(value for node in body for value in node.output if value))
    prefix = replacement.graph.body_prefix
    names |= {value: f"{prefix}{index}" for index, value in enumerate(inner)}
    names |= {name: f"y{index}" for index, name in enumerate(replacement.outputs)}
    orders = replacement.transposed.items()
    restoring = (node for name, order in orders for node in _restoring(stored[name], names[name], order))
    return [*restoring, *(renamed(node, names) for node in body)], names


def _with_stash_type(node: NodeProto) -> NodeProto:
    """The node with what ONNX Runtime (1.32) ends the process for where a body leaves it out: the default."""
    if node.op_type != "SimplifiedLayerNormalization" or any(each.name == "stash_type" for each in node.attribute):
        return node
    told = renamed(node, {})
    told.attribute.append(helper.make_attribute("stash_type", TensorProto.FLOAT))
    return told


def _restoring(stored: str, name: str, order: Order) -> list[NodeProto]:
    """The nodes that make a weight as the model has it from the stored one."""
    if isinstance(order, Packing):
        nodes = unpacking(order, stored, name)
    elif isinstance(order, RowsInTurn):
        nodes = taking_turns(order, stored, name)
    elif isinstance(order, PaddedRows):
        nodes = without_padding(order, stored, name)
    else:
        own = [order.index(place) for place in range(len(order))]
        nodes = [helper.make_node("Transpose", [stored], [name], perm=own)]
    for node in nodes:
        node.doc_string = RESTORING
    return nodes


def opsets_of(graph: Graph, nodes: Iterable[NodeProto]) -> list[OperatorSetIdProto]:
    """The operator sets that nodes of a graph need: ONNX's own, for Constant nodes, and those of its nodes."""
    used = {"" if node.domain == "ai.onnx" else node.domain for node in nodes} | {""}
    return [OperatorSetIdProto(domain=domain, version=graph.scope.opsets.get(domain, 1)) for domain in sorted(used)]


def _nodes(replacement: Replacement) -> list[NodeProto]:
    """The matched nodes, and before some of them what they read in place of a computed shape."""
    scope = replacement.graph.scope.nodes
    own = [index for index in replacement.nodes if index not in replacement.retained]
    # What only retained products need stays with them.
    read = {value for index in own for value in scope[index].input} | {*replacement.outputs}
    copied = {node.output[0] for node in needed([scope[index] for index in replacement.copied], read)}
    nodes: list[NodeProto] = []
    for index in (*(index for index in replacement.copied if scope[index].output[0] in copied), *own):
        node = scope[index]
        if index in replacement.shapes:
            nodes += _reshape(node, replacement.shapes[index], replacement.inputs)
        else:
            nodes.append(node)
    return _rounded_as_before(replacement, nodes)


def _rounded_as_before(replacement: Replacement, nodes: list[NodeProto]) -> list[NodeProto]:
    """The same nodes, and Shapes where copied ones have readers less, or where a Shape became a number.

    What is copied, as a Transpose before a product, stays in the model for its other readers.
    """
    graph = replacement.graph
    shaped = {value for index in replacement.folded for value in graph.scope.nodes[index].input}
    shaped |= {value for index in replacement.copied for value in graph.scope.nodes[index].output}
    values = {node.output[0] for node in nodes if node.op_type == "Split"}
    shaped |= {value for value in replacement.outputs if _only_concats_read(graph, value)}
    values |= {node.output[0] for node in nodes if node.op_type in OF_16_BITS and node.output[0] in shaped}
    lost = {value for value in values if has_readers_of_16_bits(graph, value)} - read_in_16_bits(nodes)
    return [*nodes, *(shape for _, shape in unread_shapes(graph, nodes, lost, _unread, OF_16_BITS))]


def _only_concats_read(graph: Graph, value: str) -> bool:
    """Whether all that reads a value in 16 bits puts it beside others.

    ONNX Runtime goes through the nodes in their order, those of bodies last: a Concat may be one of 32 bits by then.
    """
    readers = [reader.op for reader in graph.readers(value) if reader.op in OF_16_BITS]
    return bool(readers) and {*readers} == {"Concat"}


def _unread(name: str) -> str:
    """Unlike a Shape that a Reshape reads."""
    return f"{name}/unread"


def _reshape(node: NodeProto, shape: FallbackShape, inputs: Sequence[str]) -> list[NodeProto]:
    """A copy of a Reshape to a shape of the body's own, behind the nodes that make this."""
    node = renamed(node, {})
    base = node.input[0] if shape.base == OWN else inputs[shape.base]
    made = _shape(f"{node.output[0]}/shape", shape, base)
    node.input[1] = made[-1].output[0]
    # 0 keeps a dimension
    attributes = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
    del node.attribute[:]
    node.attribute.extend(attributes)
    return [*made, node]


def needed(nodes: Sequence[NodeProto], values: set[str]) -> list[NodeProto]:
    """The nodes that make some values, and what those need."""
    found: list[NodeProto] = []
    for node in reversed(nodes):
        if values & set(node.output):
            found.insert(0, node)
            values = values | set(node.input)
    return found


def _shape(name: str, shape: FallbackShape, base: str) -> list[NodeProto]:
    """Nodes that make a shape; sizes of an input are gathered from its own shape and the constant entries."""
    entries = constant(name, np.array(shape.entries, np.int64))
    if shape.is_constant:
        return [entries]
    rank = 1 + max(index for index in shape.of_base if index is not None)
    places = [rank + position if index is None else index for position, index in enumerate(shape.of_base)]
    own, known, first, chosen, made = (f"{name}/{part}" for part in ("own", "known", "first", "chosen", "made"))
    return [
        entries,
        helper.make_node("Shape", [base], [own]),
        constant(first, np.arange(rank)),
        helper.make_node("Gather", [own, first], [f"{own}/first"]),
        helper.make_node("Concat", [f"{own}/first", name], [known], axis=0),
        constant(chosen, np.array(places, np.int64)),
        helper.make_node("Gather", [known, chosen], [made]),
    ]


def renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A nameless copy of a node that reads and makes other values."""
    copy = NodeProto(op_type=node.op_type, domain=node.domain, overload=node.overload, attribute=node.attribute)
    copy.input.extend(names.get(value, value) for value in node.input)
    copy.output.extend(names.get(value, value) for value in node.output)
    return copy
