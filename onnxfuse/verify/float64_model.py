"""The same model in double precision: the oracle of `onnxfuse verify`.

Every floating-point value becomes float64, and every operator is computed in float64 by ONNX Runtime's CPU provider.
ONNX Runtime's ops that add and normalise are taken apart, and norms inside of an attention put in front of it. An
operator that the provider lacks in double is written out in operators that it has: Conv, Erf, Gelu,
InstanceNormalization, GroupNormalization, RMSNormalization, HardSigmoid, HardSwish, LeakyRelu, PRelu, Elu, Selu,
Softplus, Softsign, Mish, Swish, MatMulNBits of 4 and 8 bits, DequantizeLinear of blocks, and Resize of mode nearest
(moved as a high and a low half, exact to 48 bits).

Which others it lacks is asked of ONNX Runtime: a model of the node alone is opened in double, then in float32, then in
the types of the model. What is not opened in double runs so between two Casts, by itself, and is counted in
`Reference.kept`: its own rounding is then part of the reference. An operator that opens and refuses double when it runs
is named by the caller as `refused`.

Weights keep their dtype in the file and are cast where they are read, so the reference is no larger than the model.
Graph inputs keep their dtype as well, so that one feed serves both, and so does an output that is an input or a weight;
other float outputs become double. Model-local functions are inlined first. A `Cast` to float16 or bfloat16 in the model
rounds nothing here: it becomes a cast to double.

A second form tells what TF32 makes of the model: it differs from the first in one point, that both factors of each
product that the model computes in float32 are rounded to the 10 explicit bits of TF32 first, to nearest. Factors of 16
bits are not rounded: TF32 holds those of float16 and bfloat16 exactly. Below the smallest normal number of float32 the
rounding is finer than TF32's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    defs,
    helper,
    inliner,
    numpy_helper,
)

from onnxfuse.errors import ModelError
from onnxfuse.graph.external_data import load_whole
from onnxfuse.graph.functions import inline, reads
from onnxfuse.graph.load import put_in_order
from onnxfuse.graph.opened_ops import openings
from onnxfuse.graph.operators import PRODUCTS
from onnxfuse.graph.value_types import (
    DOUBLE,
    FLOAT,
    FLOAT_TENSORS,
    in_double,
    lone_node,
    tensor_text,
    type_proto,
    type_text,
)
from onnxfuse.verify.float64_ops import WRITTEN_OUT, Emitter, attribute_of, attributes_of, round_to_tf32
from onnxfuse.verify.opened_norms import open_norms

EXTERNAL_BYTES = 1_500_000_000
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_ONNX_DOMAINS = frozenset({"", "ai.onnx"})
_DTYPE_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype",
                     "RandomNormalLike": "dtype", "RandomUniformLike": "dtype", "SequenceEmpty": "dtype"}  # fmt: skip

_CONSTANT_ELEMENTS = {
    "value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT, "value_int": TensorProto.INT64,
    "value_ints": TensorProto.INT64, "value_string": TensorProto.STRING, "value_strings": TensorProto.STRING,
}  # fmt: skip

TypesOf = Callable[[bytes], tuple[str, ...] | None]
"""The types of a model's outputs, as ONNX Runtime writes them; None where it refuses the model."""


@dataclass(frozen=True)
class Reference:
    """A model in double precision.

    Attributes:
        model: its message.
        kept: how many nodes do not run in double, by operator and type: `LSTM in float32`.
    """

    model: ModelProto
    kept: dict[str, int]


def float64_model(model: ModelProto, types_of: TypesOf, tf32: bool = False, refused: Collection[str] = ()) -> Reference:
    """The same model computed in double precision; the argument is not changed.

    The copy shares no memory with the model, so it costs the weights once more. Weights in files that are not loaded
    stay references to these files.

    Args:
        model: of any element types.
        types_of: what the runtime that will run it makes of a model of one node.
        tf32: round both factors of float32 products to TF32.
        refused: operators that do not run in double although they open.

    Raises:
        ModelError: the model's functions cannot be inlined.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    return _to_float64(copy, types_of, tf32, refused)


def write_float64(
    source: Path, folder: Path, types_of: TypesOf, tf32: bool = False, refused: Collection[str] = ()
) -> tuple[Path, dict[str, int]]:
    """Write the float64 form of the model at `source` into `folder`; large weights lie beside it.

    Args:
        source: the model.
        folder: where `reference.onnx` is written.
        types_of: as in `float64_model`, like the next two.
        tf32: round both factors of float32 products to TF32.
        refused: operators that do not run in double although they open.

    Returns:
        The path, and `Reference.kept`.

    Raises:
        ModelError: `source` or its external data cannot be read.
    """
    target = folder / "reference.onnx"
    reference = _to_float64(load_whole(source), types_of, tf32, refused)
    large = sum(len(tensor.raw_data) for tensor in reference.model.graph.initializer) > EXTERNAL_BYTES
    (folder / "reference.data").unlink(missing_ok=True)
    onnx.save(reference.model, target, save_as_external_data=large, location="reference.data" if large else None)
    return target, reference.kept


def _to_float64(model: ModelProto, types_of: TypesOf, tf32: bool, refused: Collection[str]) -> Reference:
    """Convert in place, except that a model with functions is replaced by its inlined form."""
    if model.functions:
        try:
            model = inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the functions of the model cannot be inlined: {error}") from error
    inline(model, openings(model, everywhere=True))
    open_norms(model.graph)
    put_in_order(model.graph)
    converter = _Converter(model, types_of, tf32, refused)
    converter.main(model.graph)
    return Reference(model, dict(sorted(converter.kept.items())))


class _Converter:
    """Rewrites graphs; knows each value's type in the model and in the reference, and where it got another name."""

    def __init__(self, model: ModelProto, types_of: TypesOf, tf32: bool, refused: Collection[str]) -> None:
        self.opsets = list(model.opset_import)
        self.opset = next((entry.version for entry in self.opsets if entry.domain in _ONNX_DOMAINS), 1)
        self.ir_version = model.ir_version
        self.types_of, self.tf32, self.refused = types_of, tf32, refused
        self.dims = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        self.own: dict[str, str] = {}
        self.now: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.pending: dict[str, str] = {}
        self.kept = Counter[str]()
        self.fresh = (f"float64_reference_{number}" for number in itertools.count())

    def main(self, graph: GraphProto) -> None:
        """Convert the main graph: inputs and weights stay as they are, with a Cast behind each."""
        sources = {value.name: type_text(value.type) for value in graph.input}
        sources |= {tensor.name: tensor_text(tensor.data_type) for tensor in _stored(graph)}
        for name, text in sources.items():
            self._mark(name, text, text)
            if text in FLOAT_TENSORS:
                self.pending[name] = next(self.fresh)
        self._body(graph)
        for value in graph.output:
            self._type_output(value)

    def subgraph(self, graph: GraphProto) -> None:
        """Convert a branch or a loop's body, whose inputs, weights and outputs become double themselves."""
        for tensor in _stored(graph):
            self._mark(tensor.name, tensor_text(tensor.data_type))
            _to_double_tensor(tensor)
        for value in graph.input:
            text = type_text(value.type)
            if text:
                self._mark(value.name, text)
                value.type.CopyFrom(_with_double(value.type))
        self._body(graph)
        for value in graph.output:
            self._type_output(value)

    def _type_output(self, value: onnx.ValueInfoProto) -> None:
        """Declare what the reference makes; the shape of a tensor stays."""
        text = self.now.get(value.name) or in_double(type_text(value.type))
        if value.type.HasField("tensor_type") and text in FLOAT_TENSORS:
            value.type.tensor_type.elem_type = type_proto(text).tensor_type.elem_type
        elif text:
            value.type.CopyFrom(type_proto(text))

    def _body(self, graph: GraphProto) -> None:
        nodes = [new for node in list(graph.node) for new in self._node(node)]
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.value_info[:]

    def _node(self, node: NodeProto) -> Iterator[NodeProto]:
        """What replaces a node. A weight is cast right before its first reader, to be alive for a short time only."""
        yield from self._casts_of(node)
        for index, name in enumerate(node.input):
            node.input[index] = self.renamed.get(name, name)
        if node.op_type == "ConstantOfShape" and not node.attribute:
            _set(node, "value", helper.make_tensor("", TensorProto.FLOAT, [1], [0.0]))
        stated = _stated_type(node)
        graphs = [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]
        if stated is not None or graphs:
            yield from self._stated(node, [stated] if stated is not None else None, graphs)
            return
        original = NodeProto()
        original.CopyFrom(node)
        own = self._own_types(original)
        for attribute in node.attribute:
            _attribute_to_double(node, attribute)
        yield from self._rounded(node)
        yield from self._computed(node, original, own)

    def _stated(
        self, node: NodeProto, types: Sequence[str] | None, graphs: Sequence[GraphProto]
    ) -> Iterator[NodeProto]:
        """A node whose outputs have the types that an attribute states, or those of the graphs inside."""
        self._give_inputs(node, graphs)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                self.subgraph(attribute.g)
            _attribute_to_double(node, attribute)
        if types is None:
            types = [self.own.get(value.name, "") for value in graphs[0].output][-len(node.output) :]
        for name, text in zip(node.output, types, strict=True):
            self._mark(name, text)
        yield node

    def _give_inputs(self, node: NodeProto, graphs: Sequence[GraphProto]) -> None:
        """The types of a loop's or a scan's inputs, which the body need not repeat."""
        for graph in graphs:
            given = node.input if node.op_type != "Loop" else ["", "", *node.input[2:]]
            for value, name in zip(graph.input, given, strict=False):
                self._mark(value.name, self.own.get(name, ""), self.now.get(name, ""))

    def _casts_of(self, node: NodeProto) -> Iterator[NodeProto]:
        for name in reads(node):
            if name in self.pending:
                self.renamed[name] = self.pending.pop(name)
                self._alias(self.renamed[name], name)
                yield helper.make_node("Cast", [name], [self.renamed[name]], to=TensorProto.DOUBLE)

    def _rounded(self, node: NodeProto) -> Iterator[NodeProto]:
        """What rounds the factors of a product to TF32, if the model computes it in float32."""
        factors = [self.own.get(name) for name in node.input[:2]]
        if self.tf32 and _qualified(node) in PRODUCTS and factors == [FLOAT] * 2:
            for index, name in enumerate(node.input[:2]):
                emit = Emitter(self.fresh, self.dims, opset=self.opset)
                node.input[index] = round_to_tf32(emit, name)
                self._alias(node.input[index], name)
                yield from emit.nodes

    def _own_types(self, node: NodeProto) -> Sequence[str]:
        """The type of each output in the model; empty where it is unknown."""
        found = self._try(node, [self.own.get(name, "") for name in node.input])
        return self._by_schema(node) if found is None else found

    def _by_schema(self, node: NodeProto) -> Sequence[str]:
        """What the operator's schema tells, for types that the CPU provider knows nothing of."""
        first = next((self.own[name] for name in node.input if self.own.get(name) in FLOAT_TENSORS), "")
        if node.domain not in _ONNX_DOMAINS or not defs.has(node.op_type):
            return [first] * len(node.output)
        schema = defs.get_schema(node.op_type, self.opset)
        bound: dict[str, str] = {}
        for formal, name in zip(_formals(schema.inputs, len(node.input)), node.input, strict=True):
            if name:
                bound.setdefault(formal.type_str, self.own.get(name, ""))
        return [_of_formal(formal, bound, first) for formal in _formals(schema.outputs, len(node.output))]

    def _try(self, node: NodeProto, types: Sequence[str]) -> Sequence[str] | None:
        """The type of each output of a node with inputs of some types; None where it does not run on them."""
        data = lone_node(node, types, self.opsets, self.ir_version)
        found = None if data is None else self.types_of(data)
        if found is None:
            return None
        made = iter(found)
        return [next(made) if name else "" for name in node.output]

    def _computed(self, node: NodeProto, original: NodeProto, own: Sequence[str]) -> Iterable[NodeProto]:
        """The node in double, written out where the provider lacks it, or between Casts in another type."""
        inexact = any(self.now.get(name) == DOUBLE for name in node.input)
        write_out = WRITTEN_OUT.get(_qualified(node)) if inexact else None
        emit = Emitter(self.fresh, self.dims, self.tf32 and self.own.get(node.input[0]) == FLOAT, self.opset)
        if write_out is not None and write_out(emit, node):
            emit.nodes[-1].output[0] = node.output[0]
            self._mark(node.output[0], own[0])
            return emit.nodes
        if _qualified(node) not in self.refused:
            found = self._try(node, [self.now.get(name, "") for name in node.input])
            if found is not None:
                return self._between_casts(node, [None] * len(node.input), own, found)
        single = [FLOAT if self.now.get(name) == DOUBLE else None for name in node.input]
        in_own = [self.own.get(name) if self.now.get(name) == DOUBLE else None for name in node.input]
        for casts in (single, in_own):
            types = [cast or self.now.get(name, "") for cast, name in zip(casts, node.input, strict=True)]
            found = self._try(original, types)
            if found is not None:
                self._use(original, node)
                return self._between_casts(original, casts, own, found)
        if node.domain in _ONNX_DOMAINS and _qualified(node) not in self.refused:
            return self._between_casts(node, [None] * len(node.input), own, [in_double(text) for text in own])
        self._use(original, node)
        found = [FLOAT if text in FLOAT_TENSORS else text for text in own]
        return self._between_casts(original, single, own, found)

    @staticmethod
    def _use(original: NodeProto, node: NodeProto) -> None:
        """Read what the node reads: factors rounded to TF32."""
        del original.input[:]
        original.input.extend(node.input)

    def _between_casts(
        self, node: NodeProto, casts: Sequence[str | None], own: Sequence[str], found: Sequence[str]
    ) -> Iterable[NodeProto]:
        """The node with inputs cast where a type is given, and its outputs cast to double where they are not."""
        before, after, other = [], [], {text for text in casts if text is not None}
        for index, (name, text) in enumerate(zip(list(node.input), casts, strict=True)):
            if text is not None:
                node.input[index] = next(self.fresh)
                element = type_proto(text).tensor_type.elem_type
                before.append(helper.make_node("Cast", [name], [node.input[index]], to=element))
        for index, (name, text, made) in enumerate(zip(list(node.output), own, found, strict=True)):
            self._mark(name, text or made, DOUBLE if made in FLOAT_TENSORS else made)
            if made in FLOAT_TENSORS and made != DOUBLE:
                other.add(made)
                node.output[index] = next(self.fresh)
                after.append(helper.make_node("Cast", [node.output[index]], [name], to=TensorProto.DOUBLE))
        if other:
            names = {FLOAT: "float32"}
            types = ", ".join(sorted(names.get(text, text[len("tensor(") : -1]) for text in other))
            self.kept[f"{_qualified(node)} in {types}"] += 1
        return [*before, node, *after]

    def _mark(self, name: str, own: str, now: str | None = None) -> None:
        """Note a value's types; in the reference floats are double unless it is said otherwise."""
        if name and own:
            self.own[name], self.now[name] = own, in_double(own) if now is None else now

    def _alias(self, name: str, of: str) -> None:
        """Note a new name of a value, whose dimensions it has."""
        self._mark(name, self.own[of])
        if of in self.dims:
            self.dims[name] = self.dims[of]


def _stored(graph: GraphProto) -> Iterator[TensorProto]:
    """The tensors of a graph's initializers; of a sparse one its values, which have its name and type."""
    yield from graph.initializer
    yield from (tensor.values for tensor in graph.sparse_initializer)


def _attribute_to_double(node: NodeProto, attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.TENSOR:
        _to_double_tensor(attribute.t)
    elif attribute.type == AttributeProto.SPARSE_TENSOR:
        _to_double_tensor(attribute.sparse_tensor.values)
    elif attribute.name == _DTYPE_ATTRIBUTES.get(node.op_type) and attribute.i in _FLOATS:
        attribute.i = TensorProto.DOUBLE
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        value = np.array(helper.get_attribute_value(attribute), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))


def _of_formal(formal: Any, bound: dict[str, str], first: str) -> str:
    """The type of an output: of the input that shares its parameter, or the only one that the schema allows."""
    if formal.type_str in bound:
        return bound[formal.type_str]
    if len(formal.types) == 1:
        return str(next(iter(formal.types)))
    return first if any("(float)" in text for text in formal.types) else ""


def _qualified(node: NodeProto) -> str:
    return node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


def _stated_type(node: NodeProto) -> str | None:
    """The type of a constant node's output in the model; None where its inputs decide."""
    if node.op_type not in ("Constant", "ConstantOfShape"):
        return None
    held = attributes_of(node)
    for name, element in _CONSTANT_ELEMENTS.items():
        if name in held:
            return tensor_text(element)
    if "sparse_value" in held:
        return tensor_text(held["sparse_value"].sparse_tensor.values.data_type)
    return tensor_text(int(attribute_of(node, "value", TensorProto()).data_type))


def _set(node: NodeProto, name: str, value: Any) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _formals(formals: Sequence[Any], count: int) -> list[Any]:
    """The schema's parameter for each of `count` values; a variadic one, always the last, is repeated."""
    return [formals[min(index, len(formals) - 1)] for index in range(count)]


def _with_double(value: onnx.TypeProto) -> onnx.TypeProto:
    """The type in double; the shape of a tensor stays."""
    made = onnx.TypeProto()
    made.CopyFrom(value if value.HasField("tensor_type") else type_proto(in_double(type_text(value))))
    if made.HasField("tensor_type") and made.tensor_type.elem_type in _FLOATS:
        made.tensor_type.elem_type = TensorProto.DOUBLE
    return made


def _to_double_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS - {TensorProto.DOUBLE}:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
