"""The pointwise table: ONNX op -> IR ops. A new op is one row.

A chain of pointwise nodes becomes a graph of IR ops, so no spelling of an activation is special: `x * 0.5 * (1 +
erf(x / 1.41))` and `Gelu(x)` differ only in how many rows they take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.patterns.epilogue_graph import CONSTANT, EpilogueGraph, Ref

Attributes = Mapping[str, Any]
Lower = Callable[[EpilogueGraph, list[Ref], Attributes], Ref]

FLOATS = (1, 10, 16)  # TensorProto float, float16, bfloat16: the types that an epilogue computes in fp32
LARGEST = float("inf")


def _op(name: str) -> Lower:
    return lambda graph, inputs, attributes: graph.apply(name, *inputs)


def _with_attributes(name: str, **defaults: float) -> Lower:
    """ONNX attributes become trailing constant inputs."""

    def lower(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
        constants = [graph.constant(float(attributes.get(key, default))) for key, default in defaults.items()]
        return graph.apply(name, *inputs, *constants)

    return lower


def _fold(name: str) -> Lower:
    """Min, Max and Sum take any number of inputs."""

    def lower(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
        result = inputs[0]
        for other in inputs[1:]:
            result = graph.apply(name, result, other)
        return result

    return lower


def _gelu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    return graph.apply("gelu_tanh" if attributes.get("approximate", "none") == "tanh" else "gelu", inputs[0])


def _clip(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    """Bounds are attributes up to opset 10 and optional inputs (here: -1 where left out) from 11 on."""
    low, high = (*inputs[1:], -1, -1)[:2]
    if low < 0:
        low = graph.constant(float(attributes.get("min", -LARGEST)))
    if high < 0:
        high = graph.constant(float(attributes.get("max", LARGEST)))
    return graph.apply("clip", inputs[0], low, high)


def _pow(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    if graph.expressions[inputs[1]].op != CONSTANT:
        raise NotFusable("exponent_not_constant", "Pow", "the exponent of Pow is not a constant")
    return graph.apply("pow", *inputs)


def _swish(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    scaled = graph.apply("mul", inputs[0], graph.constant(float(attributes.get("alpha", 1.0))))
    return graph.apply("mul", inputs[0], graph.apply("sigmoid", scaled))


def _selu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    alpha, gamma = attributes.get("alpha", 1.6732632423543772), attributes.get("gamma", 1.0507009873554805)
    return graph.apply("mul", graph.apply("elu", inputs[0], graph.constant(float(alpha))), graph.constant(float(gamma)))


def _celu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    alpha = graph.constant(float(attributes.get("alpha", 1.0)))
    scaled = graph.apply("elu", graph.apply("div", inputs[0], alpha), graph.constant(1.0))
    return graph.apply("mul", scaled, alpha)


def _softsign(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    return graph.apply("div", inputs[0], graph.apply("add", graph.apply("abs", inputs[0]), graph.constant(1.0)))


def _biased(lower: Lower) -> Lower:
    """An activation of the sum of its inputs; a bias that is left out is -1."""

    def with_bias(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
        given = [ref for ref in inputs if ref >= 0]
        return lower(graph, [_fold("add")(graph, given, attributes)], attributes)

    return with_bias


def _quick_gelu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    return _swish(graph, inputs, {"alpha": attributes.get("alpha", 1.702)})


def _swiglu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    """ONNX Runtime's, with clamps where its limit is above 0; ONNX's is the same without."""
    gate, up = inputs
    limit = float(attributes.get("limit", 0.0))
    if limit > 0.0:
        high, low = graph.constant(limit), graph.constant(-limit)
        gate, up = graph.apply("min", gate, high), graph.apply("clip", up, low, high)
    beta = float(attributes.get("activation_beta", 0.0))
    alpha = attributes.get("activation_alpha", attributes.get("alpha", 1.0))
    linear = graph.apply("add", up, graph.constant(beta)) if beta else up
    return graph.apply("mul", _swish(graph, [gate], {"alpha": alpha}), linear)


def _prelu(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    below = graph.apply("mul", inputs[1], graph.apply("min", inputs[0], graph.constant(0.0)))
    return graph.apply("add", graph.apply("relu", inputs[0]), below)


def _batch_normalization(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    """What inference makes of stored statistics."""
    if attributes.get("training_mode", 0):
        raise NotFusable("unknown_op", "", "a BatchNormalization that trains is not pointwise")
    x, scale, bias, mean, variance = inputs
    epsilon = graph.constant(float(attributes.get("epsilon", 1e-5)))
    factor = graph.apply("div", scale, graph.apply("sqrt", graph.apply("add", variance, epsilon)))
    return graph.apply("add", graph.apply("mul", graph.apply("sub", x, mean), factor), bias)


def _identity(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    return inputs[0]


def _cast(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    if int(attributes["to"]) not in FLOATS:
        raise NotFusable("cast_to_non_float", "Cast", "a Cast to a type that is not float, float16 or bfloat16")
    return inputs[0]


def _dropout(graph: EpilogueGraph, inputs: list[Ref], attributes: Attributes) -> Ref:
    """Nothing but in training, which is an input from opset 12 on."""
    training = (*inputs, -1, -1)[2]
    if training >= 0 and graph.expressions[training] != graph.expressions[graph.constant(0.0)]:
        raise NotFusable("unknown_op", "Dropout", "a Dropout that may train is not pointwise")
    return inputs[0]


POINTWISE: dict[str, Lower] = {
    "Add": _op("add"),
    "Sub": _op("sub"),
    "Mul": _op("mul"),
    "Div": _op("div"),
    "Sum": _fold("add"),
    "Pow": _pow,
    "Neg": _op("neg"),
    "Abs": _op("abs"),
    "Sqrt": _op("sqrt"),
    "Exp": _op("exp"),
    "Log": _op("log"),
    "Reciprocal": _op("reciprocal"),
    "Erf": _op("erf"),
    "Tanh": _op("tanh"),
    "Sin": _op("sin"),
    "Cos": _op("cos"),
    "Sigmoid": _op("sigmoid"),
    "Softplus": _op("softplus"),
    "Relu": _op("relu"),
    "PRelu": _prelu,
    "LeakyRelu": _with_attributes("leaky_relu", alpha=0.01),
    "Elu": _with_attributes("elu", alpha=1.0),
    "HardSigmoid": _with_attributes("hard_sigmoid", alpha=0.2, beta=0.5),
    "HardSwish": _op("hard_swish"),
    "Mish": _op("mish"),
    "Gelu": _gelu,
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Selu": _selu,
    "Celu": _celu,
    "Softsign": _softsign,
    "Clip": _clip,
    "Min": _fold("min"),
    "Max": _fold("max"),
    "Where": _op("where"),
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Identity": _identity,
    "Dropout": _dropout,
}
"""Rows by ONNX op of the default domain; a lowering takes the inputs' expressions and the node's attributes."""

CHANNELS = {"BatchNormalization": 1}
"""Ops whose further inputs are vectors along one dimension of the first, and which; others broadcast."""

MICROSOFT: dict[str, Lower] = {
    "Gelu": _op("gelu"),
    "BiasGelu": _biased(_op("gelu")),
    "FastGelu": _biased(_op("gelu_tanh")),
    "QuickGelu": _quick_gelu,
    "BiasAdd": _biased(_identity),
    "SwiGLU": _swiglu,
}
"""The same of the domain com.microsoft: what ONNX Runtime's optimiser writes."""

_DOMAINS = {None: POINTWISE, "": POINTWISE, "ai.onnx": POINTWISE, "com.microsoft": MICROSOFT}


def pointwise_row(node: gs.Node) -> Lower | None:
    """The row of a node's op; None for one that is not pointwise."""
    return _DOMAINS.get(node.domain, {}).get(node.op)
