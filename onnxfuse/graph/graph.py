"""What the matcher asks of a scope: producers, consumers, shapes, dtypes, known values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph.constant_propagation import FLOAT_OPS, MAX_ENTRIES, Array, integers
from onnxfuse.graph.data_propagation import Facts
from onnxfuse.graph.foldable import FOLDED_TYPES, foldable_values
from onnxfuse.graph.functions import OPENED, FunctionKey, reads_inside, subgraphs
from onnxfuse.graph.known_branches import Choice, can_be_taken
from onnxfuse.graph.load import Model as Model  # re-exported for the rooms beyond the ONNX world
from onnxfuse.graph.load import ModelProto as ModelProto
from onnxfuse.graph.load import load_model as load_model
from onnxfuse.graph.load import overridable
from onnxfuse.graph.operators import keeps_type, name_of_op, qualified_op
from onnxfuse.graph.scopes import Scope, ScopePath, all_scopes, main_scope
from onnxfuse.graph.symbolic import Size as Size  # re-exported: what a dimension of the graph is

MOST_UNTYPED = 64  # nodes of which nothing told the type that it is looked for through
SIXTEEN_BIT = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


_INLINED = re.compile(r"_inlfunc_Fused.*_(v+)\d+")


class Graph:
    """The facts of one scope of a model, by default of its main graph. Read only.

    Attributes:
        model: the model.
        scope: the nodes and what they see.
        nodes: `nodes[i]` is `scope.nodes[i]`; inside a branch or body their names say where they stand.
    """

    def __init__(self, model: Model, scope: Scope | None = None, around: Graph | None = None) -> None:
        self.model = model
        self.scope = scope = scope or main_scope(model)
        self.nodes: tuple[gs.Node, ...] = _import(scope)
        self._tensors = {tensor.name: tensor for node in self.nodes for tensor in node.inputs}
        self._index = {id(node): index for index, node in enumerate(self.nodes)}
        self._facts = Facts(self.nodes, dict(_inferred_shapes(scope)) | dict(_shapes_around(scope, around)))
        self._read_by_subgraphs = {name for node in scope.nodes for name in reads_inside(node)}

    @cached_property
    def opened_sums(self) -> Mapping[int, frozenset[int]]:
        """The Adds of an op that was taken apart (opened_ops.py): for the index of each, all those of the same op."""
        by_op: dict[FunctionKey, set[int]] = {}
        for index, node in enumerate(self.nodes):
            for key in self.opened(node) if node.op == "Add" else ():
                by_op.setdefault(key, set()).add(index)
        return {index: frozenset(sums) for sums in by_op.values() for index in sums}

    def opened(self, node: gs.Node) -> list[FunctionKey]:
        """The ops that a node came from, of those that were taken apart."""
        origins = self.scope.origins.get(self.scope.nodes[self.index(node)].name, ())
        return [key for key in origins if key[:2] in OPENED]

    def sums_before(self, nodes: Iterable[int]) -> frozenset[int]:
        """The Adds of the ops that nodes are what is left of; none for nodes of the model's own, and for the Adds."""
        left = [self.nodes[index] for index in nodes if index not in self.opened_sums]
        keys = {key for node in left for key in self.opened(node)}
        return frozenset(index for index in self.opened_sums if keys & {*self.opened(self.nodes[index])})

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return self.scope.opsets.get("", 0)

    def index(self, node: gs.Node) -> int:
        """Position of a node in the scope."""
        return self._index[id(node)]

    def tensor(self, name: str) -> gs.Tensor:
        """A value that some node of the scope reads."""
        return self._tensors[name]

    def readers(self, name: str) -> Sequence[gs.Node]:
        """The scope's nodes that read a value, which may be none."""
        return self._tensors[name].outputs if name in self._tensors else ()

    def is_escaping(self, name: str) -> bool:
        """Whether a value is read by more than the scope's nodes: an output, or read in a branch or loop inside."""
        return name in self.scope.outputs or name in self._read_by_subgraphs

    def is_read_by_subgraphs(self, name: str) -> bool:
        """Whether a branch or a loop body reads a value of the main graph."""
        return name in self._read_by_subgraphs

    def is_initializer(self, name: str) -> bool:
        """Whether the value is stored in the model."""
        return name in self.scope.stored

    def is_fixed(self, name: str) -> bool:
        """Whether a value that nodes compute is of stored tensors alone, in any type: every run computes the same."""
        return name in self._foldable

    def is_folded(self, name: str) -> bool:
        """Whether ONNX Runtime computes a value once, as it loads the model: from what is stored, in fp32 or fp64."""
        return self.is_fixed(name) and self.dtype(name) in FOLDED_TYPES

    @cached_property
    def body_prefix(self) -> str:
        """What values of a fallback body are called, a number aside: unlike those of bodies that ONNX Runtime inlined.

        A model that it optimised and saved has them, and it makes the same names again of a body with such values.
        """
        names = (*self.scope.types, *(name for node in self.scope.nodes for name in node.output))
        inlined = filter(None, map(_INLINED.fullmatch, names))
        return "v" * (1 + max((len(found[1]) for found in inlined), default=0))

    @cached_property
    def _foldable(self) -> frozenset[str]:
        return foldable_values(self.scope, overridable(self.model.proto))

    def shape(self, name: str) -> tuple[Size, ...] | None:
        """Dimensions: an int, a symbol, or None where nothing is known; None for an unknown rank."""
        return self._facts.shape(name)

    def known_value(self, tensor: gs.Tensor) -> Array | None:
        """The tensor's value, its entries symbols or None where only the run knows; None where nothing is known."""
        return self._facts.value(tensor)

    def known_integers(self, tensor: gs.Tensor) -> list[int] | None:
        """A fully known integer tensor, flattened."""
        return integers(self._facts.value(tensor))

    def is_computed_in_16_bits(self, tensor: gs.Tensor) -> bool:
        """Whether a run may round a known number or not: ONNX Runtime drops casts between nodes of 16-bit numbers."""
        stack, seen = [tensor], 0
        while stack:
            tensor, seen = stack.pop(), seen + 1
            maker = tensor.inputs[0] if tensor.inputs else None
            if maker is None or maker.op == "Shape":
                continue
            if seen > MAX_ENTRIES or (self.dtype(tensor.name) in SIXTEEN_BIT and _rounds(maker)):
                return True
            stack += maker.inputs[: 1 if maker.op == "CastLike" else None]
        return False

    def known_choices(self) -> tuple[Choice, ...]:
        """The branches that every run takes, of the model's own nodes."""
        own = ((node, self.scope.nodes[index]) for index, node in enumerate(self.nodes) if node.op == "If")
        known = (
            (proto, self.known_value(node.inputs[0]))
            for node, proto in own
            if can_be_taken(proto) and proto.name not in self.scope.origins
        )
        return tuple(
            (proto.output[0], "then_branch" if value.item() else "else_branch")
            for proto, value in known
            if value is not None and value.size == 1 and isinstance(value.item(), bool)
        )

    def dtype(self, name: str) -> int | None:
        """TensorProto.DataType number of a value, None where unknown.

        Inference says nothing of some bodies: then it is that of what ops keep which keep types.
        """
        for _ in range(MOST_UNTYPED):
            tensor_type = self.scope.types.get(name)
            if tensor_type is not None and tensor_type.elem_type:
                return int(tensor_type.elem_type)
            maker = next(iter(self._tensors[name].inputs if name in self._tensors else ()), None)
            if maker is None or maker.outputs[0].name != name or not keeps_type(qualified_op(maker)):
                break
            name = maker.inputs[0].name
        return None


def _rounds(maker: gs.Node) -> bool:
    """Whether a node of known values makes other numbers than those that it reads, a cast of a stored one aside."""
    return maker.op in FLOAT_OPS or (
        maker.op in ("Cast", "CastLike") and any(each.op != "Constant" for each in maker.inputs[0].inputs)
    )


def all_graphs(
    model: Model,
    functions: Collection[FunctionKey] | None = None,
    branches: Sequence[Choice] = (),
    sizes: Mapping[str, int | str] = MappingProxyType({}),
) -> tuple[Graph, ...]:
    """The facts of every scope of a model, the main graph's first, with all branches taken that every run takes.

    The arguments are those of `all_scopes`.

    Raises:
        ModelError: invalid; the message names the fault.
    """
    scopes = all_scopes(model, functions, branches, sizes)
    main = Graph(model, scopes[0])
    choices = main.known_choices()
    if choices:
        return all_graphs(model, functions, (*branches, *choices), sizes)
    graphs = [main]
    places: dict[ScopePath, Graph] = {(): main}
    for scope in scopes[1:]:
        graphs.append(Graph(model, scope, places.get(scope.path[:-1]) if scope.path else None))
        if not scope.fault:
            places[scope.path] = graphs[-1]
    return tuple(graphs)


def reached_functions(places: Iterable[tuple[Graph, Iterable[int]]]) -> frozenset[FunctionKey]:
    """The functions that nodes, given by scope and indices, come from."""
    scopes = ((graph.scope, index) for graph, indices in places for index in indices)
    return frozenset(key for scope, index in scopes for key in scope.origins.get(scope.nodes[index].name, ()))


def _import(scope: Scope) -> tuple[gs.Node, ...]:
    """The scope's nodes by themselves: a reader inside a branch or loop is no reader here."""
    proto = GraphProto(name="scope")
    proto.node.extend(_with_type(_readable(node), scope) for node in scope.nodes)
    read = {name for node in scope.nodes for name in node.input}
    made = {name for node in scope.nodes for name in node.output}
    proto.initializer.extend(_named(scope.small[name], name) for name in sorted(read - made) if name in scope.small)
    model = onnx.ModelProto(graph=proto, ir_version=10, opset_import=[helper.make_opsetid("", scope.opsets.get("", 1))])
    with G_LOGGER.suppress(G_LOGGER.ERROR):  # it warns of every type that NumPy lacks
        nodes = tuple(gs.import_onnx(model).nodes)
    for node in nodes:
        node.op = name_of_op(node)
        if scope.label:
            node.name = f"{scope.label}/{node_label(node)}"
    return nodes


def _readable(node: NodeProto) -> NodeProto:
    """The node as onnx-graphsurgeon can hold it: without graphs inside, and with text for strings.

    What is no text, as the compiled part in an EPContext node, is no option that anybody could know.
    """
    if not any(subgraphs(node)) and not any(map(_binary, node.attribute)):
        return node
    bare = NodeProto(op_type=node.op_type, domain=node.domain, name=node.name, input=node.input, output=node.output)
    for attribute in node.attribute:
        if attribute.HasField("g") or attribute.graphs:
            continue
        bare.attribute.append(helper.make_attribute(attribute.name, "\ufffd") if _binary(attribute) else attribute)
    return bare


def _with_type(node: NodeProto, scope: Scope) -> NodeProto:
    """A CastLike with the attribute of a Cast: the type is known, though that of a value may be what names it."""
    made = scope.types.get(node.output[0]) if node.op_type == "CastLike" and node.output else None
    if made is None:
        return node
    typed = NodeProto()
    typed.CopyFrom(node)
    typed.attribute.append(helper.make_attribute("to", made.elem_type))
    return typed


def _binary(attribute: AttributeProto) -> bool:
    try:
        for text in (attribute.s, *attribute.strings):
            text.decode()
    except UnicodeDecodeError:
        return True
    return False


def _named(tensor: TensorProto, name: str) -> TensorProto:
    """What a Constant node holds has the node's output for a name."""
    if tensor.name == name:
        return tensor
    named = TensorProto()
    named.CopyFrom(tensor)
    named.name = name
    return named


def _inferred_shapes(scope: Scope) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """The shapes of all values that the scope's nodes read or make."""
    for name in {name for node in scope.nodes for name in (*node.input, *node.output)}:
        tensor_type = scope.types.get(name)
        if tensor_type is not None and tensor_type.HasField("shape"):
            yield name, tuple(_size(dim) for dim in tensor_type.shape.dim)


def _shapes_around(scope: Scope, around: Graph | None) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """What the graph around a branch or body has learnt of the values that are read inside."""
    if around is None:
        return
    made = {name for node in scope.nodes for name in node.output} | scope.inputs
    for name in {name for node in scope.nodes for name in node.input} - made:
        shape = around.shape(name)
        if shape is not None:
            yield name, shape


def _size(dim: onnx.TensorShapeProto.Dimension) -> Size:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None


Signature = tuple[str, int, tuple[Size, ...] | None]
"""Name, ONNX element type and dimensions; None where the rank is unknown."""


def signature(model: Model) -> tuple[list[Signature], list[Signature]]:
    """A model's inputs, without initializers that are listed among them, and its outputs."""
    stored = {tensor.name for tensor in model.proto.graph.initializer}
    inputs = [value for value in model.proto.graph.input if value.name not in stored]
    return [_signature(value) for value in inputs], [_signature(value) for value in model.proto.graph.output]


def _signature(value: onnx.ValueInfoProto) -> Signature:
    tensor = value.type.tensor_type
    dims = tuple(map(_size, tensor.shape.dim)) if tensor.HasField("shape") else None
    return value.name, tensor.elem_type, dims


def element_readers(value: gs.Tensor) -> list[gs.Node]:
    """The nodes that read a value's elements: all of its readers but those that ask how large it is."""
    return [reader for reader in value.outputs if reader.op != "Shape"]


def node_label(node: gs.Node) -> str:
    """A node's name, or its first output's where it has none."""
    return str(node.name or (node.outputs[0].name if node.outputs else node.op))
