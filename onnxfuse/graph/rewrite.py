"""Put fused nodes in place of matches, in the ModelProto itself: what is not fused stays as it was, byte for byte.

A fused node is `onnxfuse::FusedGemm_0`, or `onnxfuse::FusedPointwise_0` where the products stay ordinary nodes, and a
model-local function of the same name whose body is the matched subgraph, node for node. Matches with equal bodies share
one function; different bodies differ in the number behind the name (op_names.py). Fused nodes inside branches and loops
read the main graph's kernels, as these may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    helper,
    numpy_helper,
)

from onnxfuse.graph.fallback_shape import FallbackShape
from onnxfuse.graph.functions import DOMAIN, functions_of, inline, reads, walk
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_nodes import constant, known_array, known_nodes
from onnxfuse.graph.load import OVERRIDING_IR_VERSION
from onnxfuse.graph.op_names import FUSED_GEMM, OpNames
from onnxfuse.graph.scopes import graph_at

KERNELS = "onnxfuse.kernels"
FUNCTION_IR_VERSION = 8  # the first that has ModelProto.functions


@dataclass(frozen=True)
class Replacement:
    """One match and the node that takes its place.

    Attributes:
        graph: the facts of the scope that the match lies in; stale after the edit.
        nodes: indices of the matched nodes in the scope, ascending.
        copied: indices of nodes that matched ones may need too, and that stay as long as others need them.
        place: the index among them where the fused node goes, behind its inputs and before its outputs' readers.
        folded: indices of nodes that are not needed any more: what others read of them are constants.
        constants: the names of those.
        inputs: values that the kernel reads, in order.
        outputs: values that it makes.
        name: name of the fused node.
        attributes: the fused node's attributes, all strings.
        kind: `FusedGemm`, or `FusedPointwise` where the products are kept.
        kept: indices of matched nodes that stay as they are, right before the fused node.
        shapes: by node, what takes the place of the shape that a Reshape reads from outside.
    """

    graph: Graph
    nodes: tuple[int, ...]
    copied: tuple[int, ...]
    place: int
    folded: tuple[int, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    attributes: dict[str, str]
    kind: str = FUSED_GEMM
    kept: tuple[int, ...] = ()
    shapes: dict[int, FallbackShape] = field(default_factory=dict)


def rewrite(proto: ModelProto, replacements: Iterable[Replacement], kernels: bytes) -> ModelProto:
    """Edit a model in place and return it; functions that are inlined in the replacements' graphs are inlined.

    Args:
        proto: the model that the replacements' graphs are of.
        replacements: disjoint matches, those of outer scopes before those of the scopes inside.
        kernels: the archive that every fused node reads, uint8 `[bytes]`.
    """
    replacements = tuple(replacements)
    if not replacements:
        return proto
    inlined = replacements[0].graph.scope.inlined
    inline(proto, {key: function for key, function in functions_of(proto).items() if key in inlined})
    kernels_name = _unused_name(proto.graph, KERNELS)
    op_names = OpNames(proto.functions)
    for graph, group in reversed(_by_graph(replacements)):  # an edit of the outer scope replaces those inside
        scope = graph_at(proto.graph, graph.scope.path)
        names = {node.name for node in scope.node}
        fused: dict[int, list[NodeProto]] = {}
        for replacement in group:
            kept = [scope.node[index] for index in replacement.kept]
            body, constants = fallback_body(replacement)
            node = _fused_node(replacement, kernels_name, _add_function(proto, op_names, body), constants)
            node.name = _unlike(node.name, names)
            names.add(node.name)
            fused[replacement.place] = [*kept, node]
        matched = {index for replacement in group for index in (*replacement.nodes, *replacement.folded)}
        _replace_nodes(scope, matched, fused)
        read = {name for node in scope.node for name in reads(node)} | {value.name for value in scope.output}
        stored = dict.fromkeys(name for replacement in group for name in replacement.constants if name in read)
        scope.initializer.extend(numpy_helper.from_array(known_array(graph, name), name) for name in stored)
    proto.graph.initializer.append(
        TensorProto(name=kernels_name, data_type=TensorProto.UINT8, dims=[len(kernels)], raw_data=kernels)
    )
    _declare_domain(proto)
    return proto


def _add_function(proto: ModelProto, op_names: OpNames, body: FunctionProto) -> str:
    """The op that has this body; its function is added where the model has none."""
    known = len(op_names.names)
    name = op_names.add(body)
    assert name is not None, "more bodies than names; op_names.named tells which sites get one"
    if len(op_names.names) > known:
        body.name = name
        proto.functions.append(body)
    return name


def _by_graph(replacements: tuple[Replacement, ...]) -> list[tuple[Graph, list[Replacement]]]:
    groups: dict[int, tuple[Graph, list[Replacement]]] = {}
    for replacement in replacements:
        groups.setdefault(id(replacement.graph), (replacement.graph, []))[1].append(replacement)
    return list(groups.values())


def _unused_name(graph: GraphProto, name: str) -> str:
    """A name that no value has at any depth: the kernels are read from inside branches and bodies as well."""
    taken = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    taken.update(value for node in walk(graph.node) for value in (*node.input, *node.output))
    return _unlike(name, taken)


def _unlike(name: str, taken: set[str]) -> str:
    """A name, or the first numbered one, that is not taken."""
    numbered = (f"{name}.{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(candidate for candidate in numbered if candidate not in taken)


def _declare_domain(proto: ModelProto) -> None:
    if proto.ir_version < OVERRIDING_IR_VERSION:  # what was stored stays constant
        _drop(proto.graph.input, {tensor.name for tensor in proto.graph.initializer})
    proto.ir_version = max(proto.ir_version, FUNCTION_IR_VERSION)
    if all(opset.domain != DOMAIN for opset in proto.opset_import):
        proto.opset_import.append(OperatorSetIdProto(domain=DOMAIN, version=1))


def _fused_node(
    replacement: Replacement, kernels_name: str, op_type: str, constants: Mapping[str, TensorProto]
) -> NodeProto:
    return helper.make_node(
        op_type,
        [kernels_name, *replacement.inputs],
        list(replacement.outputs),
        name=replacement.name,
        domain=DOMAIN,
        **replacement.attributes,
        **constants,
    )


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
    """The matched nodes but the kept ones, and what their values are called: by position, so that equal ones are equal.

    Inputs are called x0, x1, ..., outputs y0, y1, ..., and what lies between v0, v1, ...
    """
    nodes, shapes = _nodes(replacement)
    names = {name: f"x{index}" for index, name in reversed(list(enumerate(replacement.inputs)))}
    body = known_nodes(replacement.graph, [*shapes, *nodes], names)
    inner = (value for node in body for value in node.output if value)
    names |= {value: f"v{index}" for index, value in enumerate(inner)}
    names |= {name: f"y{index}" for index, name in enumerate(replacement.outputs)}
    return [renamed(node, names) for node in body], names


def opsets_of(graph: Graph, nodes: Iterable[NodeProto]) -> list[OperatorSetIdProto]:
    """The operator sets that nodes of a graph need: ONNX's own, for Constant nodes, and those of its nodes."""
    used = {"" if node.domain == "ai.onnx" else node.domain for node in nodes} | {""}
    return [OperatorSetIdProto(domain=domain, version=graph.scope.opsets.get(domain, 1)) for domain in sorted(used)]


def _nodes(replacement: Replacement) -> tuple[list[NodeProto], list[NodeProto]]:
    """The matched nodes, and before them what some of them read in place of a computed shape."""
    scope = replacement.graph.scope.nodes
    own = [index for index in replacement.nodes if index not in replacement.kept]
    # What only kept products need stays with them.
    read = {value for index in own for value in scope[index].input}
    copied = {node.output[0] for node in needed([scope[index] for index in replacement.copied], read)}
    nodes: list[NodeProto] = []
    shapes: list[NodeProto] = []
    for index in (*(index for index in replacement.copied if scope[index].output[0] in copied), *own):
        node = scope[index]
        if index in replacement.shapes:
            node = renamed(node, {})
            shape = replacement.shapes[index]
            shapes += _shape(
                f"{node.output[0]}/shape", shape, "" if shape.is_constant else replacement.inputs[shape.base]
            )
            node.input[1] = shapes[-1].output[0]
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]  # 0 keeps a dimension
            del node.attribute[:]
            node.attribute.extend(kept)
        nodes.append(node)
    return nodes, shapes


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


def _replace_nodes(graph: GraphProto, matched: set[int], fused: dict[int, list[NodeProto]]) -> None:
    """Drop the matched nodes and what only fed them, and insert those that take their place."""
    nodes = list(graph.node)
    kept = [new for index, node in enumerate(nodes) for new in (fused.get(index, []) if index in matched else [node])]
    candidates = {value for index in matched for value in nodes[index].input}
    dead = _dead_values(graph, kept, candidates)
    removed = {value for index in matched for value in nodes[index].output} | dead
    removed -= {value for new in fused.values() for node in new for value in node.output}
    del graph.node[:]
    graph.node.extend(node for node in kept if not (node.output and set(node.output) <= dead))
    _drop(graph.value_info, removed)
    inputs = {value.name for value in graph.input}
    _drop(graph.initializer, dead - inputs)


def _dead_values(graph: GraphProto, nodes: list[NodeProto], candidates: set[str]) -> set[str]:
    """Of the candidates and of what feeds them, the values that nothing reads any more."""
    uses = Counter(value.name for value in graph.output)
    for node in nodes:
        uses.update(reads(node))
    makers = {value: node for node in nodes for value in node.output}
    dead: set[str] = set()
    stack = sorted(candidates)
    while stack:
        value = stack.pop()
        if not value or uses[value] or value in dead:
            continue
        dead.add(value)
        maker = makers.get(value)
        if maker is not None and all(not uses[output] for output in maker.output):
            dead.update(maker.output)
            uses.subtract(reads(maker))
            stack.extend(maker.input)
    return dead


def _drop(entries: object, names: set[str]) -> None:
    """Remove the entries of a repeated field that carry one of the names, last first, without copying the others."""
    for index in reversed(range(len(entries))):  # type: ignore[arg-type]
        if entries[index].name in names:  # type: ignore[index]
            del entries[index]  # type: ignore[attr-defined]
