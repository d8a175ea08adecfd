"""The scopes of a model: its main graph, and the branches and loop bodies inside.

A scope is one list of nodes with everything that is visible to them. Shapes are inferred on a *skeleton*, the same
model whose large initializers are declared as inputs, so that neither inference nor onnx-graphsurgeon copies a weight
of the main graph. In the skeleton the model's own functions are inlined.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.declared_types import inferred_types
from onnxfuse.graph.functions import DOMAIN, FunctionKey, functions_of, inline, subgraphs, versions, walk, why_not
from onnxfuse.graph.known_branches import Choice, take_branches
from onnxfuse.graph.load import Model, is_large, overridable, tensors
from onnxfuse.graph.opened_ops import functions_and_openings
from onnxfuse.graph.operators import MICROSOFTS, known_operators

ScopePath = tuple[tuple[int, str], ...]
"""How to reach a scope from the main graph: a node's index and its attribute's name, once a level."""


@dataclass(frozen=True)
class Scope:
    """A list of nodes and what they see.

    Attributes:
        path: where it stands.
        label: the same in names, `If_3/then_branch`; empty for the main graph.
        nodes: copies of the nodes.
        types: the types of all values in sight.
        small: the small tensors in sight.
        stored: names of the initializers in sight.
        inputs: names of its own inputs.
        outputs: names of the values that leave the scope.
        opsets: versions of the operator sets by domain.
        inlined: the functions that are inlined in the whole model.
        branches: the branches of the main graph that stand in the place of their nodes.
        origins: for nodes that come from functions, by name, those functions.
        fault: why nothing is known inside; empty where types are known.
    """

    path: ScopePath
    label: str
    nodes: tuple[NodeProto, ...]
    types: Mapping[str, TypeProto.Tensor]
    small: Mapping[str, TensorProto]
    stored: frozenset[str]
    inputs: frozenset[str]
    outputs: frozenset[str]
    opsets: Mapping[str, int]
    inlined: frozenset[FunctionKey]
    branches: tuple[Choice, ...]
    origins: Mapping[str, frozenset[FunctionKey]]
    fault: str = ""


def skeleton_of(proto: ModelProto) -> ModelProto:
    """The same model with the main graph's weights, and what a run may override, declared as inputs alone."""
    skeleton = ModelProto(ir_version=max(proto.ir_version, 4))
    skeleton.opset_import.extend(proto.opset_import)
    skeleton.functions.extend(proto.functions)
    graph, target = proto.graph, skeleton.graph
    target.name = graph.name or "graph"
    target.node.extend(graph.node)
    for node in walk(target.node):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    given = overridable(proto)
    stored = {tensor.name for tensor in graph.initializer if tensor.name not in given}
    target.input.extend(value for value in graph.input if value.name not in stored)
    _name_open_dimensions(target.input)
    for tensor in graph.initializer:
        if tensor.name in given:
            continue
        if is_large(tensor):
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims)))
        else:
            target.initializer.append(tensor)
    for sparse in graph.sparse_initializer:  # dense as ONNX Runtime loads it, and so are the nodes that read it
        name, dims = sparse.values.name, tuple(sparse.dims)
        target.input.append(helper.make_tensor_value_info(name, sparse.values.data_type, dims))
    return skeleton


def _drop_absent_last_inputs(node: NodeProto) -> None:
    """An optional input with an empty name is as good as none; some rules count what a node names.

    A Loop has two, and may name neither.
    """
    known = onnx.defs.has(node.op_type, node.domain)
    least = onnx.defs.get_schema(node.op_type, node.domain).min_input if known else 0
    while len(node.input) > least and not node.input[-1]:
        del node.input[-1]


def _name_open_dimensions(inputs: Sequence[ValueInfoProto]) -> None:
    """Give every dimension of inputs that has neither size nor name a name of its own.

    So inference knows it again where it comes back, as it does with one that has a name in the file; else it makes up
    another one at every node.
    """
    dimensions = [list(value.type.tensor_type.shape.dim) for value in inputs]
    taken = {dim.dim_param for dims in dimensions for dim in dims}
    for number, dims in enumerate(dimensions):
        for axis, dim in enumerate(dims):
            if not dim.dim_param and (not dim.HasField("dim_value") or dim.dim_value < 0):
                name = f"input{number}.{axis}"  # of no sign that means arithmetic, as an input's own name may have
                dim.dim_param = name if name not in taken else f"_{name}"


def main_scope(model: Model) -> Scope:
    """The main graph, functions inlined.

    Raises:
        ModelError: invalid; the message names the fault.
    """
    return _main_scope(model, None, (), {})


def all_scopes(
    model: Model,
    functions: Collection[FunctionKey] | None = None,
    branches: Sequence[Choice] = (),
    sizes: Mapping[str, int | str] = MappingProxyType({}),
) -> tuple[Scope, ...]:
    """Every scope in which a fused node may stand, outer ones before those inside them.

    Functions that cannot be inlined come last: nothing in them can be fused, and their `fault` says why.

    Args:
        model: the model.
        functions: which functions to inline; by default all that can be.
        branches: which of them to put in the place of their nodes.
        sizes: what to take names of the inputs' dimensions for: a number, or another's name.

    Raises:
        ModelError: invalid; the message names the fault.
    """
    main = _main_scope(model, functions, branches, sizes)
    closed = (
        replace(main, label=function.name, nodes=tuple(function.node), fault=fault)
        for function in functions_of(model.proto).values()
        if (fault := why_not(function, model.proto))
    )
    return (main, *_inner_scopes(main), *closed)


def graph_at(graph: GraphProto, path: ScopePath) -> GraphProto:
    """The graph of a scope, from the main graph down its path."""
    for index, name in path:
        graph = dict(subgraphs(graph.node[index]))[name]
    return graph


def count_nodes(proto: ModelProto) -> int:
    """Nodes of the main graph and of the model's functions, those inside branches and bodies too."""
    functions = (function.node for function in proto.functions if function.domain != DOMAIN)
    return sum(1 for nodes in (proto.graph.node, *functions) for _ in walk(nodes))


def _main_scope(
    model: Model,
    inlined: Collection[FunctionKey] | None,
    branches: Sequence[Choice],
    sizes: Mapping[str, int | str],
) -> Scope:
    skeleton = skeleton_of(model.proto)
    _fix_sizes(skeleton.graph, sizes)
    take_branches(skeleton, branches)
    chosen = {
        key: function
        for key, function in functions_and_openings(skeleton).items()
        if (not why_not(function, skeleton) if inlined is None else key in inlined)
    }
    origins = inline(skeleton, chosen)
    for node in walk(skeleton.graph.node):
        _drop_absent_last_inputs(node)
    unlike = [function for function in skeleton.functions if why_not(function, skeleton)]
    for function in unlike:  # the checker would refuse the whole model
        skeleton.functions.remove(function)
    inferred = _infer(skeleton, model.label)
    stored = frozenset(tensor.name for tensor in model.proto.graph.initializer)
    opsets, none = versions(inferred.opset_import), frozenset[str]()
    empty = Scope((), "", (), {}, {}, stored, none, none, opsets, frozenset(chosen), tuple(branches), origins)
    return _scope(empty, inferred.graph)


def _fix_sizes(graph: GraphProto, sizes: Mapping[str, int | str]) -> None:
    """Give the named dimensions of a graph's inputs, outputs and values their size or another name, in place."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            size = sizes.get(dim.dim_param)
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size


def _infer(skeleton: ModelProto, label: str) -> ModelProto:
    try:
        with known_operators(microsoft=False), _shaped(skeleton.graph), _out_of_files(skeleton):
            onnx.checker.check_model(skeleton)
        with known_operators(microsoft=_may_have_microsofts(skeleton)):
            return inferred_types(skeleton)
    except MemoryError:
        raise ModelError(f"{label}: a shape or a constant in it is larger than memory") from None
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{label}: invalid model: {reason[:300]}") from None


def _may_have_microsofts(skeleton: ModelProto) -> bool:
    """Whether ONNX Runtime's operators have to be known: to register all takes longer than to infer a small model."""
    return bool(skeleton.functions) or any(node.domain == MICROSOFTS for node in walk(skeleton.graph.node))


@contextmanager
def _out_of_files(skeleton: ModelProto) -> Iterator[None]:
    """Leave tensors that lie in files no elements, of branches, bodies and nodes: the checker looks where it runs."""
    stored = (tensor for tensor in tensors(skeleton) if tensor.data_location == TensorProto.EXTERNAL)
    outside = [(tensor, tuple(tensor.dims)) for tensor in stored]
    for tensor, _ in outside:
        tensor.data_location, tensor.dims[:] = TensorProto.DEFAULT, [0]
    try:
        yield
    finally:
        for tensor, dims in outside:
            tensor.data_location, tensor.dims[:] = TensorProto.EXTERNAL, dims


@contextmanager
def _shaped(graph: GraphProto) -> Iterator[None]:
    """Give outputs without a type and values of unknown rank some: the checker asks for one, ONNX Runtime does not."""
    untyped = [value for value in graph.output if not value.type.WhichOneof("value")]
    for value in untyped:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    bare = [kind for kind in _tensor_types(graph) if not kind.HasField("shape")]
    for kind in bare:
        kind.shape.SetInParent()
    try:
        yield
    finally:
        for kind in bare:
            kind.ClearField("shape")
        for value in untyped:
            value.ClearField("type")


def _tensor_types(graph: GraphProto) -> Iterator[TypeProto.Tensor]:
    """Types of the inputs and outputs of a graph and of those inside."""
    values = (*graph.input, *graph.output)
    yield from (value.type.tensor_type for value in values if value.type.HasField("tensor_type"))
    for node in graph.node:
        for _, inner in subgraphs(node):
            yield from _tensor_types(inner)


def _types_in(graph: GraphProto) -> dict[str, TypeProto.Tensor]:
    """The types of the tensors that a graph names."""
    values = (graph.value_info, graph.output, graph.input)  # an output that is stored is typed as what is read
    types = {
        value.name: value.type.tensor_type for group in values for value in group if value.type.HasField("tensor_type")
    }
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tuple(tensor.dims)).tensor_type
    return types


def _scope(around: Scope, graph: GraphProto) -> Scope:
    """A graph's own scope inside, or in place of, the scope `around`."""
    types = _types_in(graph)
    small = {tensor.name: tensor for tensor in graph.initializer if not is_large(tensor)}
    own = frozenset(tensor.name for tensor in graph.initializer)
    return replace(
        around,
        nodes=tuple(graph.node),
        types=ChainMap(types, around.types),  # type: ignore[arg-type]
        small=ChainMap(small, around.small),  # type: ignore[arg-type]
        stored=around.stored | own if own else around.stored,
        inputs=frozenset(value.name for value in graph.input),
        outputs=frozenset(value.name for value in graph.output),
    )


def _inner_scopes(scope: Scope) -> Iterator[Scope]:
    """The branches and bodies inside a scope, and those inside them."""
    places = [(index, node, *inner) for index, node in enumerate(scope.nodes) for inner in subgraphs(node)]
    constants = _small_constants(scope.nodes) if places else {}
    for index, node, name, graph in places:
        label = "/".join(filter(None, (scope.label, node.name or node.output[0], name)))
        small = ChainMap(constants, scope.small)  # type: ignore[arg-type]
        inner = _scope(replace(scope, path=(*scope.path, (index, name)), label=label, small=small), graph)
        yield inner
        yield from _inner_scopes(inner)


def _small_constants(nodes: Iterable[NodeProto]) -> dict[str, TensorProto]:
    """What Constant nodes hold, seen from inside a branch or body."""
    return {
        node.output[0]: attribute.t
        for node in nodes
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx")
        for attribute in node.attribute
        if attribute.name == "value" and not is_large(attribute.t)
    }
