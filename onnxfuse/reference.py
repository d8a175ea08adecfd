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
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import erfc, exp
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.polynomial import Chebyshev, Polynomial
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    checker,
    defs,
    helper,
    inliner,
    numpy_helper,
)

from onnxfuse.errors import ModelError
from onnxfuse.inline import reads

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
_END = 2**63 - 1
_DTYPE_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype",
                     "RandomNormalLike": "dtype", "RandomUniformLike": "dtype", "SequenceEmpty": "dtype"}  # fmt: skip


def float64_model(model: ModelProto) -> ModelProto:
    """The same model computed in double precision; the argument is not changed.

    The copy shares no memory with the model, so it costs the weights once more. Weights in files that are not loaded
    stay references to these files.

    Raises:
        ModelError: the model's functions cannot be inlined.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    return _to_float64(copy)


def write_float64(source: Path, folder: Path) -> Path:
    """Write the float64 form of the model at `source` into `folder` and return its path; large weights lie beside it.

    Raises:
        ModelError: `source` cannot be read as an ONNX model.
    """
    try:
        model = onnx.load(source)
    except (OSError, DecodeError, checker.ValidationError) as error:
        raise ModelError(f"{source}: cannot be read as an ONNX model: {error}") from error
    target = folder / "reference.onnx"
    model = _to_float64(model)
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > EXTERNAL_BYTES
    onnx.save(model, target, save_as_external_data=large, location="reference.data" if large else None)
    return target


def _to_float64(model: ModelProto) -> ModelProto:
    """Convert in place, except that a model with functions is replaced by its inlined form."""
    if model.functions:
        try:
            model = inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the functions of the model cannot be inlined: {error}") from error
    opset = next((entry.version for entry in model.opset_import if entry.domain in _ONNX_DOMAINS), 1)
    dims = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    _Converter(opset, dims).main(model.graph)
    return model


class _Converter:
    """Rewrites graphs; knows of every value in scope whether it is floating point, and where it got another name."""

    def __init__(self, opset: int, dims: dict[str, tuple[int, ...]]) -> None:
        self.opset = opset
        self.dims = dims
        self.floating: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.pending: dict[str, str] = {}
        self.fresh = (f"float64_reference_{number}" for number in itertools.count())

    def main(self, graph: GraphProto) -> None:
        """Convert the main graph: inputs and weights stay as they are, with a Cast behind each."""
        outputs = {value.name for value in graph.output}
        sources = [value.name for value in graph.input if _is_float(value.type)]
        sources += [tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS]
        self.pending = {name: next(self.fresh) for name in sources if name not in outputs}
        kept = set(sources) & outputs
        self._body(graph)
        for value in graph.output:
            if value.name not in kept:
                _to_double_type(value.type)

    def subgraph(self, graph: GraphProto) -> None:
        """Convert a branch or a loop's body, whose inputs, weights and outputs become double themselves."""
        for tensor in graph.initializer:
            _to_double_tensor(tensor)
            self._mark(tensor.name, tensor.data_type == TensorProto.DOUBLE)
        for value in graph.input:
            self._mark(value.name, _is_float(value.type))
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
        for attribute in node.attribute:
            self._attribute(node, attribute)
        for name, floats in zip(node.output, self._outputs_float(node), strict=True):
            self._mark(name, floats)
        yield from self._in_double(node)

    def _casts_of(self, node: NodeProto) -> Iterator[NodeProto]:
        for name in reads(node):
            if name in self.pending:
                target = self.renamed[name] = self.pending.pop(name)
                self._mark(target, True)
                if name in self.dims:
                    self.dims[target] = self.dims[name]
                yield helper.make_node("Cast", [name], [target], to=TensorProto.DOUBLE)

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

    def _outputs_float(self, node: NodeProto) -> Sequence[bool]:
        """Whether each output is floating point, from the attributes and the operator's schema."""
        if node.op_type == "Constant":
            return [_attribute(node, "value", TensorProto()).data_type == TensorProto.DOUBLE]
        if node.op_type == "ConstantOfShape":
            value = _attribute(node, "value", helper.make_tensor("", TensorProto.DOUBLE, [1], [0.0]))
            _set(node, "value", value)
            return [value.data_type == TensorProto.DOUBLE]
        if node.op_type in _DTYPE_ATTRIBUTES and _DTYPE_ATTRIBUTES[node.op_type] in _attributes(node):
            return [_attribute(node, _DTYPE_ATTRIBUTES[node.op_type], 0) == TensorProto.DOUBLE]
        graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        if graphs:
            results = [value.name in self.floating for value in graphs[0].output]
            return results[len(results) - len(node.output) :]
        return self._by_schema(node)

    def _by_schema(self, node: NodeProto) -> Sequence[bool]:
        inputs = [name in self.floating for name in node.input]
        if node.domain not in _ONNX_DOMAINS or not defs.has(node.op_type):
            return [any(inputs)] * len(node.output)
        schema = defs.get_schema(node.op_type, self.opset)
        bound: dict[str, bool] = {}
        for formal, name in zip(_formals(schema.inputs, len(node.input)), node.input, strict=True):
            if name:
                bound.setdefault(formal.type_str, name in self.floating)
        formals = _formals(schema.outputs, len(node.output))
        return [bound.get(f.type_str, any("(float)" in t for t in f.types) and any(inputs)) for f in formals]

    def _in_double(self, node: NodeProto) -> Iterable[NodeProto]:
        if not any(name in self.floating for name in node.input):
            return [node]
        write_out = _WRITTEN_OUT.get(node.op_type) if node.domain in _ONNX_DOMAINS else None
        emit = _Emitter(self.fresh, self.dims)
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
            if name in self.floating:
                node.input[index] = next(self.fresh)
                before.append(helper.make_node("Cast", [name], [node.input[index]], to=TensorProto.FLOAT))
        for index, name in enumerate(node.output):
            if name in self.floating:
                node.output[index] = next(self.fresh)
                after.append(helper.make_node("Cast", [node.output[index]], [name], to=TensorProto.DOUBLE))
        return [*before, node, *after]

    def _mark(self, name: str, floats: bool) -> None:
        if floats and name:
            self.floating.add(name)


class _Emitter:
    """Writes nodes out; a call adds one node and gives the name of its result. Numbers become double constants."""

    def __init__(self, fresh: Iterator[str], dims: dict[str, tuple[int, ...]]) -> None:
        self.fresh = fresh
        self.dims = dims
        self.nodes: list[NodeProto] = []

    def __call__(self, op: str, *inputs: str | float | Sequence[int], **attributes: Any) -> str:
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        result = next(self.fresh)
        self.nodes.append(helper.make_node(op, names, [result], **attributes))
        return result

    def constant(self, value: float | Sequence[int]) -> str:
        """A scalar in double, or a list of int64."""
        array = np.array(value, np.float64 if isinstance(value, int | float) else np.int64)
        return self("Constant", value=numpy_helper.from_array(array))


_WriteOut = Callable[[_Emitter, NodeProto], bool]


@cache
def erfc_polynomial() -> tuple[float, ...]:
    """Coefficients, highest power first, of exp(z*z) * erfc(z) over s = (z - 2.5) / (z + 2.5) for z in [0, 6].

    erf(z) = 1 - exp(-z*z) * polynomial(s) is then exact to 5e-15, and beyond 6 the double nearest to erf is 1.
    """

    def scaled(s: np.ndarray) -> np.ndarray:
        return np.array([erfc(z) * exp(z * z) for z in 2.5 * (1 + s) / (1 - s)])

    fitted = Chebyshev.interpolate(scaled, 18, domain=[-1, 3.5 / 8.5])
    powers = fitted.convert(kind=Polynomial, domain=[-1, 1], window=[-1, 1])
    return tuple(float(coefficient) for coefficient in powers.coef[::-1])


def _erf(e: _Emitter, x: str) -> str:
    z = e("Min", e("Abs", x), 6.0)
    s = e("Div", e("Sub", z, 2.5), e("Add", z, 2.5))
    first, *rest = erfc_polynomial()
    value = e.constant(first)
    for coefficient in rest:
        value = e("Add", e("Mul", value, s), coefficient)
    return e("Mul", e("Sign", x), e("Sub", 1.0, e("Mul", e("Exp", e("Neg", e("Mul", z, z))), value)))


def _gelu(e: _Emitter, node: NodeProto) -> bool:
    x = node.input[0]
    if _attribute(node, "approximate", b"none") == b"tanh":
        cubic = e("Add", x, e("Mul", 0.044715, e("Mul", x, e("Mul", x, x))))
        inner = e("Tanh", e("Mul", (2 / np.pi) ** 0.5, cubic))
    else:
        inner = _erf(e, e("Mul", x, 0.5**0.5))
    e("Mul", e("Mul", 0.5, x), e("Add", 1.0, inner))
    return True


def _softplus(e: _Emitter, x: str) -> str:
    return e("Add", e("Max", x, 0.0), e("Log", e("Add", 1.0, e("Exp", e("Neg", e("Abs", x))))))


def _hard_sigmoid(e: _Emitter, x: str, alpha: float, beta: float) -> str:
    return e("Max", 0.0, e("Min", 1.0, e("Add", e("Mul", alpha, x), beta)))


def _signs(e: _Emitter, x: str, negative: Callable[[str], str]) -> str:
    """max(x, 0) + negative(min(x, 0))."""
    return e("Add", e("Max", x, 0.0), negative(e("Min", x, 0.0)))


def _exp_minus_1(e: _Emitter, x: str, alpha: float) -> str:
    return e("Mul", alpha, e("Sub", e("Exp", x), 1.0))


def _always(write: Callable[[_Emitter, NodeProto], str]) -> _WriteOut:
    def write_out(e: _Emitter, node: NodeProto) -> bool:
        return bool(write(e, node))

    return write_out


def _selu(e: _Emitter, node: NodeProto) -> str:
    alpha, gamma = _number(node, "alpha", 1.67326319217681884765625), _number(node, "gamma", 1.05070102214813232421875)
    return e("Mul", gamma, _signs(e, node.input[0], lambda low: _exp_minus_1(e, low, alpha)))


def _swish(e: _Emitter, node: NodeProto) -> str:
    x = node.input[0]
    return e("Mul", x, e("Sigmoid", e("Mul", _number(node, "alpha", 1.0), x)))


def _normalised(e: _Emitter, x: str, groups: str, epsilon: float) -> str:
    """`[n, c, ...]` -> `[n, g, rest]`, each row of `rest` with mean 0 and variance 1."""
    rows = e("Reshape", x, e("Concat", [0], groups, [-1], axis=0))
    count = e("Cast", e("Slice", e("Shape", rows), [2], [3], [0]), to=TensorProto.DOUBLE)
    centred = e("Sub", rows, e("Div", e("ReduceSum", rows, [2]), count))
    variance = e("Div", e("ReduceSum", e("Mul", centred, centred), [2]), count)
    return e("Div", centred, e("Sqrt", e("Add", variance, epsilon)))


def _grouped(e: _Emitter, node: NodeProto, groups: str) -> str:
    x, scale, bias = node.input
    rows = _normalised(e, x, groups, _number(node, "epsilon", 1e-5))
    # One scale a channel, or in GroupNormalization before opset 21 one a group: the rows follow the scale.
    rows = e("Reshape", rows, e("Concat", [0], e("Shape", scale), [-1], axis=0))
    scaled = e("Add", e("Mul", rows, e("Unsqueeze", scale, [1])), e("Unsqueeze", bias, [1]))
    return e("Reshape", scaled, e("Shape", x))


def _rms_normalization(e: _Emitter, node: NodeProto) -> bool:
    axis = _attribute(node, "axis", -1)
    if axis >= 0:
        return False
    x, scale = node.input
    axes = list(range(axis, 0))
    count = e("Cast", e("ReduceProd", e("Slice", e("Shape", x), [axis], [_END], [0])), to=TensorProto.DOUBLE)
    mean = e("Div", e("ReduceSum", e("Mul", x, x), axes), count)
    e("Mul", e("Div", x, e("Sqrt", e("Add", mean, _number(node, "epsilon", 1e-5)))), scale)
    return True


def _resize(e: _Emitter, node: NodeProto) -> bool:
    """Nearest moves values without changing them, so the value and what float32 lost of it can be moved one by one."""
    crops = _attribute(node, "coordinate_transformation_mode", b"half_pixel") == b"tf_crop_and_resize"
    if crops or _attribute(node, "mode", b"nearest") != b"nearest":
        return False
    x, *rest = node.input
    # roi and scales are float32 by definition; sizes are integers and stay.
    rest = [e("Cast", name, to=TensorProto.FLOAT) if name and index < 2 else name for index, name in enumerate(rest)]
    attributes = {name: helper.get_attribute_value(a) for name, a in _attributes(node).items()}
    high = e("Cast", x, to=TensorProto.FLOAT)
    low = e("Cast", e("Sub", x, e("Cast", high, to=TensorProto.DOUBLE)), to=TensorProto.FLOAT)
    halves = [e("Cast", e("Resize", half, *rest, **attributes), to=TensorProto.DOUBLE) for half in (high, low)]
    e("Add", *halves)
    return True


def _conv(e: _Emitter, node: NodeProto) -> bool:
    """One matrix product for each position of the filter, summed."""
    x, weight, *bias = node.input
    kernel = list(_attribute(node, "kernel_shape", ()) or e.dims.get(weight, ())[2:])
    if not kernel or _attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return False
    rank = len(kernel)
    pads = list(_attribute(node, "pads", [0] * 2 * rank))
    strides = list(_attribute(node, "strides", [1] * rank))
    dilations = list(_attribute(node, "dilations", [1] * rank))
    groups, axes = [int(_attribute(node, "group", 1))], list(range(2, rank + 2))
    padded = e("Pad", x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]) if any(pads) else x
    depth = e("Slice", e("Shape", weight), [1], [2], [0])
    rows, columns = e("Concat", groups, [-1], depth, axis=0), e("Concat", [0], groups, depth, [-1], axis=0)
    total, window = "", ""
    for place in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilations, strict=True)]
        ends = [d * (p + 1 - k) or _END for p, d, k in zip(place, dilations, kernel, strict=True)]
        window = e("Slice", padded, starts, ends, axes, strides)
        tap = e("Slice", weight, list(place), [p + 1 for p in place], axes)
        product = e("MatMul", e("Reshape", tap, rows), e("Reshape", window, columns))
        total = e("Add", total, product) if total else product
    sizes = [e("Slice", e("Shape", tensor), [low], [high], [0]) for tensor, low, high in (
        (x, 0, 1), (weight, 0, 1), (window, 2, _END))]  # fmt: skip
    out = e("Reshape", total, e("Concat", *sizes, axis=0))
    if bias and bias[0]:
        e("Add", out, e("Unsqueeze", bias[0], [axis - 1 for axis in axes]))
    return True


_WRITTEN_OUT: dict[str, _WriteOut] = {
    "Conv": _conv,
    "Elu": _always(lambda e, n: _signs(e, n.input[0], lambda low: _exp_minus_1(e, low, _number(n, "alpha", 1.0)))),
    "Erf": _always(lambda e, n: _erf(e, n.input[0])),
    "Gelu": _gelu,
    "GroupNormalization": _always(lambda e, n: _grouped(e, n, e.constant([_attribute(n, "num_groups", 1)]))),
    "HardSigmoid": _always(
        lambda e, n: _hard_sigmoid(e, n.input[0], _number(n, "alpha", 0.2), _number(n, "beta", 0.5))
    ),
    "HardSwish": _always(lambda e, n: e("Mul", n.input[0], _hard_sigmoid(e, n.input[0], 1 / 6, 0.5))),
    "InstanceNormalization": _always(lambda e, n: _grouped(e, n, e("Shape", n.input[1]))),
    "LeakyRelu": _always(lambda e, n: _signs(e, n.input[0], lambda low: e("Mul", _number(n, "alpha", 0.01), low))),
    "Mish": _always(lambda e, n: e("Mul", n.input[0], e("Tanh", _softplus(e, n.input[0])))),
    "PRelu": _always(lambda e, n: _signs(e, n.input[0], lambda low: e("Mul", n.input[1], low))),
    "RMSNormalization": _rms_normalization,
    "Resize": _resize,
    "Selu": _always(_selu),
    "Softplus": _always(lambda e, n: _softplus(e, n.input[0])),
    "Softsign": _always(lambda e, n: e("Div", n.input[0], e("Add", 1.0, e("Abs", n.input[0])))),
    "Swish": _always(_swish),
}


def _attributes(node: NodeProto) -> dict[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    attribute = _attributes(node).get(name)
    return default if attribute is None else helper.get_attribute_value(attribute)


def _number(node: NodeProto, name: str, default: float) -> float:
    """A float attribute; ONNX stores defaults as float32 too, so 0.01 means the float32 nearest to it."""
    return float(np.float32(_attribute(node, name, default)))


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


def _is_float(value: TypeProto) -> bool:
    tensor = _tensor_type(value)
    return tensor is not None and tensor.elem_type in _FLOATS


def _to_double_type(value: TypeProto) -> None:
    tensor = _tensor_type(value)
    if tensor is not None and tensor.elem_type in _FLOATS:
        tensor.elem_type = TensorProto.DOUBLE


def _to_double_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS - {TensorProto.DOUBLE}:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
