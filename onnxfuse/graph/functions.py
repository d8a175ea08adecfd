"""Put the bodies of a model's own functions in place of their calls: ONNX Runtime does so as it loads a model.

Matching sees through functions in this way, and a fused node never stands inside one, where it could not read the main
graph's kernels. In the model that is written only those functions are inlined that a fusion reaches into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, defs, helper

from onnxfuse.errors import ModelError

DOMAIN = "onnxfuse"  # of fused nodes and their fallback functions; nothing inside these is looked at again

OPENED = frozenset(("com.microsoft", f"Skip{kind}LayerNormalization") for kind in ("", "Simplified"))
"""Ops that are taken apart as if they called functions, each a function of its own (opened_ops.py)."""

FunctionKey = tuple[str, str, str]
"""Domain, name and overload: what a call and its function have in common; of an op of OPENED, its output in place."""
Functions = Mapping[FunctionKey, FunctionProto]


def subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """A node's branches and loop bodies with their attributes' names."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those inside their branches and bodies."""
    for node in nodes:
        yield node
        for _, graph in subgraphs(node):
            yield from walk(graph.node)


def count_fused(proto: ModelProto) -> int:
    """How many fused nodes a model has, at all depths."""
    return sum(node.domain == DOMAIN for node in walk(proto.graph.node))


def reads(node: NodeProto) -> Iterator[str]:
    """Every value that a node reads, also from inside its branches and bodies."""
    yield from node.input
    yield from reads_inside(node)


def reads_inside(node: NodeProto) -> Iterator[str]:
    """Every value that a node's branches and bodies read."""
    for _, graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for child in graph.node:
            yield from reads(child)


def call_key(node: NodeProto) -> FunctionKey:
    """What a node calls, if it calls a function."""
    if (node.domain, node.op_type) in OPENED:
        return (node.domain, node.op_type, node.output[0] if node.output else "")
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload)


def _key(function: FunctionProto) -> FunctionKey:
    return (function.domain, function.name, function.overload)


def functions_of(proto: ModelProto) -> dict[FunctionKey, FunctionProto]:
    """The model's own functions, fallback functions aside, and those named as an operator, which ONNX Runtime prefers.

    Raises:
        ModelError: a function calls itself.
    """
    functions = {_key(function): function for function in proto.functions if not _is_never_called(function)}
    _check_calls(functions)
    return functions


def _is_never_called(function: FunctionProto) -> bool:
    domain = "" if function.domain == "ai.onnx" else function.domain
    return domain == DOMAIN or bool(defs.has(function.name, domain))


def _check_calls(functions: Functions) -> None:
    calls = {key: {call_key(node) for node in walk(function.node)} for key, function in functions.items()}
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        circle: list[FunctionKey] = error.args[1]
        raise ModelError(f"function {circle[0][1]!r} calls itself") from None


def why_not(function: FunctionProto, proto: ModelProto) -> str:
    """Why a function cannot be inlined; empty where its operators mean the same in the model's operator sets."""
    own, outer = versions(function.opset_import), versions(proto.opset_import)
    for node in walk(function.node):
        domain = "" if node.domain == "ai.onnx" else node.domain
        inner_version, outer_version = own.get(domain, 1), outer.get(domain, own.get(domain, 1))
        if inner_version != outer_version and _since(node, inner_version) != _since(node, outer_version):
            return f"{node.op_type} of operator set {inner_version} is another one in the model's {outer_version}"
    return ""


def _since(node: NodeProto, version: int) -> int:
    """The version that last changed an operator; the version itself where ONNX does not define the operator."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return int(defs.get_schema(node.op_type, version, domain).since_version)
    except defs.SchemaError:
        return version


def versions(opsets: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Versions of operator sets by domain."""
    return {"" if opset.domain == "ai.onnx" else opset.domain: opset.version for opset in opsets}


def inline(proto: ModelProto, functions: Functions) -> dict[str, frozenset[FunctionKey]]:
    """Inline functions, in place, and drop those that nothing calls any more.

    Returns:
        For the name of each node that took a call's place, the functions that it comes from.
    """
    if not functions:
        return {}
    inliner = _Inliner(proto, functions)
    inliner.expand(proto.graph)
    _import_opsets(proto, functions)
    _drop_uncalled(proto, functions)
    return inliner.origins


def body_of_call(proto: ModelProto, function: FunctionProto, call: NodeProto) -> list[NodeProto]:
    """The nodes that take the place of a call, by names that the model does not have.

    What they read that is neither an input of the function nor made by them is the model's.
    """
    return _Inliner(proto, {}).body(function, call)


def _import_opsets(proto: ModelProto, functions: Functions) -> None:
    """The domains that functions import and the model does not."""
    known = versions(proto.opset_import)
    for function in functions.values():
        missing = versions(function.opset_import).keys() - known.keys()
        proto.opset_import.extend(entry for entry in function.opset_import if entry.domain in missing)
        known = versions(proto.opset_import)


def _drop_uncalled(proto: ModelProto, functions: Functions) -> None:
    """An inlined function stays while one that was not inlined calls it."""
    kept = [function for function in proto.functions if _key(function) not in functions]
    called = {call_key(node) for nodes in (proto.graph.node, *(f.node for f in kept)) for node in walk(nodes)}
    pending = [key for key in functions if key in called]
    while pending:
        for node in walk(functions[pending.pop()].node):
            if call_key(node) in functions and call_key(node) not in called:
                called.add(call_key(node))
                pending.append(call_key(node))
    for index in reversed(range(len(proto.functions))):
        key = _key(proto.functions[index])
        if key in functions and key not in called:
            del proto.functions[index]


class _Inliner:
    """Expands calls; every value and node of a body gets a name that is its own."""

    def __init__(self, proto: ModelProto, functions: Functions) -> None:
        self.functions = functions
        self.origins: dict[str, frozenset[FunctionKey]] = {}
        self.values = {tensor.name for tensor in proto.graph.initializer} | {value.name for value in proto.graph.input}
        self.nodes = {node.name for node in walk(proto.graph.node)}
        for node in walk(proto.graph.node):
            self.values.update((*node.input, *node.output))

    def expand(self, graph: GraphProto) -> None:
        """Expand the calls of a graph and of the graphs inside."""
        if any(call_key(node) in self.functions for node in walk(graph.node)):
            nodes = list(self._expanded(graph.node, frozenset()))
            del graph.node[:]
            graph.node.extend(nodes)

    def _expanded(self, nodes: Iterable[NodeProto], around: frozenset[FunctionKey]) -> Iterator[NodeProto]:
        for node in nodes:
            key = call_key(node)
            if key in self.functions:
                yield from self._expanded(self.body(self.functions[key], node), around | {key})
                continue
            if around:
                self.origins[node.name] = around
            for _, graph in subgraphs(node):
                inner = list(self._expanded(graph.node, around))
                del graph.node[:]
                graph.node.extend(inner)
            yield node

    def body(self, function: FunctionProto, call: NodeProto) -> list[NodeProto]:
        """A function's nodes with the call's values and attributes in them."""
        label = call.name or call.output[0]
        given = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
        names = dict(zip(function.input, [*call.input, *[""] * len(function.input)], strict=False))
        returned = dict(zip(function.output, call.output, strict=False))
        for name in _made(function.node):
            names[name] = returned.get(name) or _fresh(f"{label}/{name}", self.values)
        nodes = [with_attributes(node, given) for node in function.node]
        for node in walk(nodes):
            name = node.name or next(filter(None, node.output), node.op_type)
            node.name = _fresh(f"{label}/{name}", self.nodes)
            rename(node, names)
        passed = [(names[name], out) for name, out in returned.items() if name in function.input and out]
        return [*nodes, *(helper.make_node("Identity", [x], [out], _fresh(label, self.nodes)) for x, out in passed)]


def _fresh(name: str, taken: set[str]) -> str:
    """The name, numbered where it is taken; it is taken then."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    taken.add(candidate)
    return candidate


def _made(nodes: Iterable[NodeProto]) -> list[str]:
    """Every value that the nodes, or the graphs inside them, make or declare, once each."""
    made: dict[str, None] = {}
    for node in walk(nodes):
        made.update(dict.fromkeys(filter(None, node.output)))
        for _, graph in subgraphs(node):
            made.update(dict.fromkeys(entry.name for entry in (*graph.input, *graph.initializer)))
    return list(made)


def rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename a node's values, and those that its graphs declare; the nodes inside are renamed by themselves."""
    for values in (node.input, node.output):
        renamed = [names.get(value, value) for value in values]
        del values[:]
        values.extend(renamed)
    for _, graph in subgraphs(node):
        for entry in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
            entry.name = names.get(entry.name, entry.name)


def with_attributes(node: NodeProto, given: Mapping[str, AttributeProto]) -> NodeProto:
    """A copy of a node, the function's attributes filled in; one that the call leaves out is left out here as well."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        source = given.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is None:
            continue
        made = copy.attribute.add()
        made.CopyFrom(source)
        made.name = attribute.name
        for graph in [made.g] if made.HasField("g") else made.graphs:
            _fill(graph, given)
    return copy


def _fill(graph: GraphProto, given: Mapping[str, AttributeProto]) -> None:
    inner = [with_attributes(child, given) for child in graph.node]
    del graph.node[:]
    graph.node.extend(inner)
