"""Models that normalise groups of channels, as exporters write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import ModelProto

from tests.helpers.onnx_build import FLOAT16, Builder

CHANNELS, GROUPS = 12, 4
SIZES = ("batch", CHANNELS, "h", "w")


def group_model(
    form: str = "views",
    sizes: Sequence[int | str] = SIZES,
    groups: int = GROUPS,
    element: int = FLOAT16,
    opset: int = 17,
    affine: bool = True,
    activation: str = "silu",
) -> ModelProto:
    """Input `x` of some sizes, one output.

    Args:
        form: `views` as TorchScript writes torch's GroupNorm, or an op: `instance`, `group`.
        sizes: batch, channels, and axes of pixels.
        groups: of channels.
        element: type of all numbers.
        opset: version of the operators.
        affine: channels are scaled and shifted behind the views; an op does so itself.
        activation: behind it: one of `SPELLED`, or an op.
    """
    b, rng, channels = Builder(element, opset), np.random.default_rng(4), int(sizes[1])
    x = b.input("x", tuple(sizes))
    weight, bias = (rng.standard_normal(channels) for _ in range(2))
    if form == "views":
        rows = b("Reshape", x, b.integers(0, groups, -1))
        y = b("InstanceNormalization", rows, b.array(np.ones(groups)), b.array(np.zeros(groups)), epsilon=1e-5)
        y = b("Reshape", y, b("Shape", x))
        if affine:
            column = (channels, *([1] * (len(sizes) - 2)))
            y = b("Add", b("Mul", y, b.array(weight.reshape(column))), b.array(bias.reshape(column)))
    else:
        op = {"instance": "InstanceNormalization", "group": "GroupNormalization"}[form]
        more = {"num_groups": groups} if form == "group" else {}
        y = b(op, x, b.array(weight), b.array(bias), epsilon=1e-5, **more)
    return b.model(SPELLED[activation](b, y) if activation in SPELLED else b(activation, y))


def _gelu(b: Builder, x: str) -> str:
    return b("Mul", b("Mul", x, b("Add", b("Erf", b("Div", x, b.array(2**0.5))), b.array(1.0))), b.array(0.5))


def _slopes(b: Builder, x: str) -> str:
    return b("PRelu", x, b.array(np.linspace(-1, 1, CHANNELS).reshape(CHANNELS, 1, 1)))


SPELLED: dict[str, Callable[[Builder, str], str]] = {
    "": lambda b, x: x,
    "silu": lambda b, x: b("Mul", x, b("Sigmoid", x)),
    "gelu": _gelu,
    "mish": lambda b, x: b("Mul", x, b("Tanh", b("Softplus", x))),
    "clip": lambda b, x: b("Clip", x, b.array(-0.5), b.array(0.5)),
    "prelu": _slopes,
}
