"""The same model in double precision: the oracle of `onnxfuse verify`.

Every floating-point value becomes float64, and every operator is computed in float64 by ONNX Runtime's CPU provider.
An operator that the provider lacks in double is written out in operators that it has: Conv, Erf, Gelu,
InstanceNormalization, GroupNormalization, RMSNormalization, HardSigmoid, HardSwish, LeakyRelu, PRelu, Elu, Selu,
Softplus, Softsign, Mish, Swish, and Resize of mode nearest (moved as a high and a low half, exact to 48 bits).

What stays float32, between two Casts: the operators in `FLOAT32_ONLY`, operators of other domains (`com.microsoft`),
Resize of other modes, Conv with `auto_pad` SAME, RMSNormalization over a non-negative axis, and LayerNormalization that
also returns its statistics. Their own rounding, 2^-24 relative, is then part of the reference.

Weights keep their dtype in the file and are cast where they are read, so the reference is no larger than the model.
Graph inputs keep their dtype as well, so that one feed serves both; float outputs become double. Model-local functions
are inlined first. A `Cast` to float16 or bfloat16 in the model rounds nothing here: it becomes a cast to double.

A second form tells what TF32 makes of the model: it differs from the first in one point, that both factors of each
product that the model computes in float32 are rounded to the 10 explicit bits of TF32 first, to nearest. Factors of 16
bits are not rounded: TF32 holds those of float16 and bfloat16 exactly. Below the smallest normal number of float32 the
rounding is finer than TF32's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
    TypeProto,
    defs,
    helper,
    inliner,
    numpy_helper,
)

from onnxfuse.double_ops import WRITTEN_OUT, Emitter, attribute_of, attributes_of, round_to_tf32
from onnxfuse.errors import ModelError
from onnxfuse.external_data import load_whole
from onnxfuse.inline import reads
from onnxfuse.operators import PRODUCTS

# Operators of opset 13 and later for which the CPU provider of ONNX Runtime 1.31 registers float but not double.
FLOAT32_ONLY = frozenset(
    {
        *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "Celu", "Hardmax"),
        *("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxRoiPool", "MaxUnpool"),
        *("Attention", "RotaryEmbedding", "ConvTranspose", "Col2Im", "GridSample", "Upsample", "RNN", "LRN", "Det"),
        *("DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear"),
        *("Mean", "MeanVarianceNormalization", "MelWeightMatrix", "Multinomial", "NonMaxSuppression", "NonZero"),
        *("OneHot", "TfIdfVectorizer", "ThresholdedRelu"),
    }
)
EXTERNAL_BYTES = 1_500_000_000
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_ONNX_DOMAINS = frozenset({"", "ai.onnx"})
_DTYPE_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype",
                     "RandomNormalLike": "dtype", "RandomUniformLike": "dtype", "SequenceEmpty": "dtype"}  # fmt: skip


def float64_model(model: ModelProto, tf32: bool = False) -> ModelProto:
    """The same model computed in double precision; the argument is not changed.

    The copy shares no memory with the model, so it costs the weights once more. Weights in files that are not loaded
    stay references to these files.

    Args:
        model: of any element types.
        tf32: round both factors of float32 products to TF32.

    Raises:
        ModelError: the model's functions cannot be inlined.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    return _to_float64(copy, tf32)


def write_float64(source: Path, folder: Path, tf32: bool = False) -> Path:
    """Write the float64 form of the model at `source` into `folder` and return its path; large weights lie beside it.

    Args:
        source: the model.
        folder: where `reference.onnx` is written.
        tf32: round both factors of float32 products to TF32.

    Raises:
        ModelError: `source` or its external data cannot be read.
    """
    target = folder / "reference.onnx"
    model = _to_float64(load_whole(source), tf32)
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > EXTERNAL_BYTES
    onnx.save(model, target, save_as_external_data=large, location="reference.data" if large else None)
    return target


def _to_float64(model: ModelProto, tf32: bool) -> ModelProto:
    """Convert in place, except that a model with functions is replaced by its inlined form."""
    if model.functions:
        try:
            model = inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the functions of the model cannot be inlined: {error}") from error
    opset = next((entry.version for entry in model.opset_import if entry.domain in _ONNX_DOMAINS), 1)
    dims = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    _Converter(opset, dims, tf32).main(model.graph)
    return model


class _Converter:
    """Rewrites graphs; knows the element type of each float value in scope, and where a value got another name."""

    def __init__(self, opset: int, dims: dict[str, tuple[int, ...]], tf32: bool) -> None:
        self.opset = opset
        self.dims = dims
        self.tf32 = tf32
        self.elements: dict[str, int] = {}
        self.renamed: dict[str, str] = {}
        self.pending: dict[str, tuple[str, int]] = {}
        self.fresh = (f"float64_reference_{number}" for number in itertools.count())

    def main(self, graph: GraphProto) -> None:
        """Convert the main graph: inputs and weights stay as they are, with a Cast behind each."""
        outputs = {value.name for value in graph.output}
        sources = {value.name: _element(value.type) for value in graph.input}
        sources |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        sources = {name: element for name, element in sources.items() if element in _FLOATS}
        self.pending = {name: (next(self.fresh), sources[name]) for name in sources if name not in outputs}
        self._body(graph)
        for value in graph.output:
            if value.name not in sources:
                _to_double_type(value.type)

    def subgraph(self, graph: GraphProto) -> None:
        """Convert a branch or a loop's body, whose inputs, weights and outputs become double themselves."""
        for tensor in graph.initializer:
            self._mark(tensor.name, tensor.data_type)
            _to_double_tensor(tensor)
        for value in graph.input:
            self._mark(value.name, _element(value.type))
        self._body(graph)
        for value in itertools.chain(graph.input, graph.output):
            _to_double_type(value.type)

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
        stated = _stated_element(node)
        for attribute in node.attribute:
            self._attribute(node, attribute)
        elements = self._output_elements(node) if stated is None else [stated]
        for name, element in zip(node.output, elements, strict=True):
            self._mark(name, element)
        yield from self._rounded(node)
        yield from self._in_double(node)

    def _casts_of(self, node: NodeProto) -> Iterator[NodeProto]:
        for name in reads(node):
            if name in self.pending:
                self.renamed[name], element = self.pending.pop(name)
                self._alias(self.renamed[name], name, element)
                yield helper.make_node("Cast", [name], [self.renamed[name]], to=TensorProto.DOUBLE)

    def _rounded(self, node: NodeProto) -> Iterator[NodeProto]:
        """What rounds the factors of a product to TF32, if the model computes it in float32."""
        factors = [self.elements.get(name) for name in node.input[:2]]
        if self.tf32 and _qualified(node) in PRODUCTS and factors == [TensorProto.FLOAT] * 2:
            for index, name in enumerate(node.input[:2]):
                emit = Emitter(self.fresh, self.dims)
                node.input[index] = round_to_tf32(emit, name)
                self._alias(node.input[index], name, TensorProto.FLOAT)
                yield from emit.nodes

    def _attribute(self, node: NodeProto, attribute: AttributeProto) -> None:
        if attribute.type == AttributeProto.TENSOR:
            _to_double_tensor(attribute.t)
        elif attribute.type == AttributeProto.GRAPH:
            self.subgraph(attribute.g)
        elif attribute.name == _DTYPE_ATTRIBUTES.get(node.op_type) and attribute.i in _FLOATS:
            attribute.i = TensorProto.DOUBLE
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            value = np.array(helper.get_attribute_value(attribute), np.float64)
            attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))

    def _output_elements(self, node: NodeProto) -> Sequence[int]:
        """The element type of each output, 0 where it is no float: from a branch, or from the operator's schema."""
        graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        if graphs:
            results = [self.elements.get(value.name, 0) for value in graphs[0].output]
            return results[len(results) - len(node.output) :]
        return self._by_schema(node)

    def _by_schema(self, node: NodeProto) -> Sequence[int]:
        first = next((self.elements[name] for name in node.input if name in self.elements), 0)
        if node.domain not in _ONNX_DOMAINS or not defs.has(node.op_type):
            return [first] * len(node.output)
        schema = defs.get_schema(node.op_type, self.opset)
        bound: dict[str, int] = {}
        for formal, name in zip(_formals(schema.inputs, len(node.input)), node.input, strict=True):
            if name:
                bound.setdefault(formal.type_str, self.elements.get(name, 0))
        formals = _formals(schema.outputs, len(node.output))
        return [bound.get(f.type_str, first if any("(float)" in t for t in f.types) else 0) for f in formals]

    def _in_double(self, node: NodeProto) -> Iterable[NodeProto]:
        if not any(name in self.elements for name in node.input):
            return [node]
        write_out = WRITTEN_OUT.get(node.op_type) if node.domain in _ONNX_DOMAINS else None
        emit = Emitter(self.fresh, self.dims)
        if write_out is not None and write_out(emit, node):
            emit.nodes[-1].output[0] = node.output[0]
            return emit.nodes
        statistics = node.op_type == "LayerNormalization" and len(node.output) > 1
        if write_out is None and not statistics and node.op_type not in FLOAT32_ONLY and node.domain in _ONNX_DOMAINS:
            return [node]
        return self._in_single(node)

    def _in_single(self, node: NodeProto) -> Iterable[NodeProto]:
        """The node itself in float32, between Casts."""
        before, after = [], []
        for index, name in enumerate(node.input):
            if name in self.elements:
                node.input[index] = next(self.fresh)
                before.append(helper.make_node("Cast", [name], [node.input[index]], to=TensorProto.FLOAT))
        for index, name in enumerate(node.output):
            if name in self.elements:
                node.output[index] = next(self.fresh)
                after.append(helper.make_node("Cast", [node.output[index]], [name], to=TensorProto.DOUBLE))
        return [*before, node, *after]

    def _mark(self, name: str, element: int) -> None:
        if element in _FLOATS and name:
            self.elements[name] = element

    def _alias(self, name: str, of: str, element: int) -> None:
        """Note a new name of a value, whose dimensions it has."""
        self._mark(name, element)
        if of in self.dims:
            self.dims[name] = self.dims[of]


def _qualified(node: NodeProto) -> str:
    return node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


def _stated_element(node: NodeProto) -> int | None:
    """The element type that a node's attributes state, those of the model; None where its inputs decide."""
    if node.op_type in ("Constant", "ConstantOfShape"):
        floats = any(name in attributes_of(node) for name in ("value_float", "value_floats"))
        return TensorProto.FLOAT if floats else int(attribute_of(node, "value", TensorProto()).data_type)
    stated = attribute_of(node, _DTYPE_ATTRIBUTES.get(node.op_type, ""), None)
    return None if stated is None else int(stated)


def _set(node: NodeProto, name: str, value: Any) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _formals(formals: Sequence[Any], count: int) -> list[Any]:
    """The schema's parameter for each of `count` values; a variadic one, always the last, is repeated."""
    return [formals[min(index, len(formals) - 1)] for index in range(count)]


def _tensor_type(value: TypeProto) -> TypeProto.Tensor | None:
    """The tensor type inside a type: itself, or what a sequence or an optional holds."""
    while value.WhichOneof("value") in ("sequence_type", "optional_type"):
        value = value.sequence_type.elem_type if value.HasField("sequence_type") else value.optional_type.elem_type
    return value.tensor_type if value.HasField("tensor_type") else None


def _element(value: TypeProto) -> int:
    """The element type; 0 where it is unknown."""
    tensor = _tensor_type(value)
    return 0 if tensor is None else int(tensor.elem_type)


def _to_double_type(value: TypeProto) -> None:
    tensor = _tensor_type(value)
    if tensor is not None and tensor.elem_type in _FLOATS:
        tensor.elem_type = TensorProto.DOUBLE


def _to_double_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS - {TensorProto.DOUBLE}:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
