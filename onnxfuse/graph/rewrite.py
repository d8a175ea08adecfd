"""Put fused nodes in place of matches, in the ModelProto itself: what is not fused stays as it was, byte for byte.

A fused node is `onnxfuse::FusedGemm_0`, or `onnxfuse::FusedPointwise_0` where the products stay ordinary nodes, and a
model-local function of the same name whose body is the matched subgraph, node for node. Matches with equal bodies share
one function; different bodies differ in the number behind the name (op_names.py). Fused nodes inside branches and loops
read the main graph's kernels, as these may.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.fallback_body import Replacement, fallback_body
from onnxfuse.graph.flag_counts import count_in_fp32
from onnxfuse.graph.functions import DOMAIN, inline, reads, walk
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_branches import take_branches
from onnxfuse.graph.known_nodes import known_array
from onnxfuse.graph.left_of_opened import left_of_opened
from onnxfuse.graph.load import OVERRIDING_IR_VERSION, put_in_order
from onnxfuse.graph.op_names import OpNames
from onnxfuse.graph.opened_ops import add_zeros, functions_and_openings
from onnxfuse.graph.placed_slices import put_side_by_side
from onnxfuse.graph.rounding_shapes import read_again, read_in_16_bits
from onnxfuse.graph.scopes import graph_at
from onnxfuse.graph.told_shape import ToldShape, expansion
from onnxfuse.graph.transposed_data import Order, transpose
from onnxfuse.graph.unread import drop, unread_values

KERNELS = "onnxfuse.kernels"
FUNCTION_IR_VERSION = 8  # the first that has ModelProto.functions


def rewrite(
    proto: ModelProto, replacements: Iterable[Replacement], kernels: bytes, description: str = ""
) -> ModelProto:
    """Edit a model in place and return it; what is inlined in the replacements' graphs is inlined.

    Args:
        proto: the model that the replacements' graphs are of.
        replacements: disjoint matches, those of outer scopes before those of the scopes inside.
        kernels: the archive that every fused node reads, uint8 `[bytes]`.
        description: what the kernels are, for the model's metadata, under the archive's name.
    """
    replacements = tuple(replacements)
    if not replacements:
        return proto
    take_branches(proto, replacements[0].graph.scope.branches)
    inlined = replacements[0].graph.scope.inlined
    inline(proto, {key: function for key, function in functions_and_openings(proto).items() if key in inlined})
    taken = _names(proto.graph)
    new_name = functools.partial(_new_name, taken=taken)
    kernels_name = _unlike(KERNELS, taken)
    weights = _stored_names(replacements, taken)
    op_names = OpNames(proto.functions)
    for graph, group in reversed(_by_graph(replacements)):  # an edit of the outer scope replaces those inside
        scope = graph_at(proto.graph, graph.scope.path)
        names = {node.name for node in scope.node}
        lost = read_in_16_bits(scope.node)
        fused: dict[int, list[NodeProto]] = {}
        for replacement in group:
            retained = [scope.node[index] for index in replacement.retained]
            body, constants = fallback_body(replacement)
            expanded, expanding = _expanded_inputs(replacement, new_name)
            own = (expanded.get(name) or _stored(name, replacement, weights) for name in replacement.inputs)
            inputs = [kernels_name, *own]
            node = _fused_node(replacement, inputs, _add_function(proto, op_names, body), constants)
            node.name = _unlike(node.name, names)
            names.add(node.name)
            fused.setdefault(replacement.insertion_point, []).extend((*retained, *expanding, node))
            lost -= read_in_16_bits(body.node, dict(zip(body.input, inputs, strict=True)))
        matched = {index for replacement in group for index in (*replacement.nodes, *replacement.folded)}
        for index, shape in _told(group).items():
            fused[index] = shape.nodes(scope.node[index].output[0], new_name)
            matched.add(index)
        _replace_nodes(scope, matched, fused, weights.keys(), new_name)
        read_again(graph, scope, lost - read_in_16_bits(scope.node), new_name)
        _store_constants(scope, graph, group)
        add_zeros(scope, left_of_opened(graph), new_name)
        put_side_by_side(scope, graph, new_name)
    _add_kernels(proto, kernels_name, kernels, description)
    _declare_domain(proto)
    _transpose_weights(proto, weights)
    count_in_fp32(proto.graph)
    return proto


def _store_constants(scope: GraphProto, graph: Graph, replacements: Iterable[Replacement]) -> None:
    """Make initializers of the computed constants that a scope still reads."""
    read = {name for node in scope.node for name in reads(node)} | {value.name for value in scope.output}
    stored = dict.fromkeys(name for replacement in replacements for name in replacement.constants if name in read)
    scope.initializer.extend(numpy_helper.from_array(known_array(graph, name), name) for name in stored)


def _add_kernels(proto: ModelProto, name: str, kernels: bytes, description: str) -> None:
    proto.graph.initializer.append(
        TensorProto(name=name, data_type=TensorProto.UINT8, dims=[len(kernels)], raw_data=kernels)
    )
    if description:
        proto.metadata_props.add(key=name, value=description)


def _told(replacements: Iterable[Replacement]) -> dict[int, ToldShape]:
    """The shapes that are made anew, but those that nobody needs any more."""
    replacements = tuple(replacements)
    folded = {index for replacement in replacements for index in replacement.folded}
    told = (each for replacement in replacements for each in replacement.told.items())
    return {index: shape for index, shape in told if index not in folded}


def _expanded_inputs(
    replacement: Replacement, new_name: Callable[[str], str]
) -> tuple[dict[str, str], list[NodeProto]]:
    """What each expanded input is called then, and the nodes that make it."""
    names: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for name, shape in replacement.expanded.items():
        wanted, names[name] = new_name(f"{name}/expanded/shape"), new_name(f"{name}/expanded")
        nodes += shape.nodes(wanted, new_name)
        nodes.append(expansion(replacement.graph, name, shape, (name, wanted), names[name]))
    return names, nodes


def _stored_names(replacements: Iterable[Replacement], taken: set[str]) -> dict[str, tuple[str, Order]]:
    """What each weight that is stored otherwise is called then, and how it is transposed.

    It has another name, so that whoever sets it by its own finds none and no other order.
    """
    perms = {name: perm for replacement in replacements for name, perm in replacement.transposed.items()}
    names: dict[str, tuple[str, Order]] = {}
    for name, perm in perms.items():
        names[name] = _new_name(f"{name}.transposed", taken), perm
    return names


def _stored(name: str, replacement: Replacement, weights: Mapping[str, tuple[str, Order]]) -> str:
    return weights[name][0] if name in replacement.transposed else name


def _transpose_weights(proto: ModelProto, weights: Mapping[str, tuple[str, Order]]) -> None:
    """Put the weights that are stored otherwise in the place of those that nobody reads any more."""
    graph = proto.graph
    read = {name for node in graph.node for name in reads(node)} if weights else set()
    for tensor in [tensor for tensor in graph.initializer if tensor.name in weights]:
        name, perm = weights[tensor.name]
        if tensor.name in read:
            graph.initializer.append(tensor)
            tensor = graph.initializer[-1]
        transpose(tensor, perm)  # before its name changes, which an error tells
        tensor.name = name
    drop(graph.value_info, weights.keys() - read)


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


def _names(graph: GraphProto) -> set[str]:
    """The names of all values, at any depth: what is stored is read from inside branches and bodies as well."""
    taken = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    taken.update(value for node in walk(graph.node) for value in (*node.input, *node.output))
    return taken


def _new_name(name: str, taken: set[str]) -> str:
    """The same, which is taken from now on."""
    new = _unlike(name, taken)
    taken.add(new)
    return new


def _unlike(name: str, taken: set[str]) -> str:
    """A name, or the first numbered one, that is not taken."""
    numbered = (f"{name}.{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(candidate for candidate in numbered if candidate not in taken)


def _declare_domain(proto: ModelProto) -> None:
    if proto.ir_version < OVERRIDING_IR_VERSION:  # what was stored stays constant
        drop(proto.graph.input, {tensor.name for tensor in proto.graph.initializer})
    proto.ir_version = max(proto.ir_version, FUNCTION_IR_VERSION)
    if all(opset.domain != DOMAIN for opset in proto.opset_import):
        proto.opset_import.append(OperatorSetIdProto(domain=DOMAIN, version=1))


def _fused_node(
    replacement: Replacement, inputs: list[str], op_type: str, constants: Mapping[str, TensorProto]
) -> NodeProto:
    return helper.make_node(
        op_type,
        inputs,
        list(replacement.outputs),
        name=replacement.name,
        domain=DOMAIN,
        **replacement.attributes,
        **constants,
    )


def _replace_nodes(
    graph: GraphProto,
    matched: set[int],
    fused: dict[int, list[NodeProto]],
    kept_weights: Collection[str],
    new_name: Callable[[str], str],
) -> None:
    """Drop the matched nodes and what only fed them, and insert those that take their place."""
    nodes = list(graph.node)
    made = {value for new in fused.values() for node in new for value in node.output}
    unread = _made_again((node for index, node in enumerate(nodes) if index not in matched), made, new_name)
    own = ([] if index in matched else [node] for index, node in enumerate(nodes))
    kept = [new for index, staying in enumerate(own) for new in (*staying, *fused.get(index, ()))]
    candidates = {value for index in matched for value in nodes[index].input} | unread
    dead = unread_values(graph, kept, candidates)
    removed = {value for index in matched for value in nodes[index].output} | dead
    removed -= made
    del graph.node[:]
    graph.node.extend(node for node in kept if not (node.output and set(node.output) <= dead))
    assert put_in_order(graph), "fused nodes close a cycle"  # insertion points are there so that none does
    drop(graph.value_info, removed)
    inputs = {value.name for value in graph.input}
    drop(graph.initializer, dead - inputs - {*kept_weights})


def _made_again(nodes: Iterable[NodeProto], made: Collection[str], new_name: Callable[[str], str]) -> set[str]:
    """New names for what nodes that stay make as fused nodes do, as a Split that others need: nobody reads it there."""
    names: set[str] = set()
    for node in nodes:
        for place, value in enumerate(node.output):
            if value in made:
                node.output[place] = new_name(f"{value}/unread")
                names.add(node.output[place])
    return names
