"""An activation behind the normalisation of rows is the same kernel's: what it means, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, helper

from onnxfuse.ir.normalisation import Normalisation
from tests.helpers.group_models import SPELLED
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.patterns.test_normalisation import FORMS, ROWS, N, analysed, layer_norm, the_norm
from tests.tools import sweep

ACTIVATIONS: dict[str, Callable[[Builder, str], str]] = {
    **{op: lambda b, x, op=op: b(op, x) for op in ("Relu", "Sigmoid", "Tanh", "Softplus", "HardSwish", "LeakyRelu")},
    **{name: SPELLED[name] for name in ("silu", "gelu", "mish", "clip")},
    "Gelu": lambda b, x: b("Gelu", x, approximate="tanh"),
    "chosen": lambda b, x: b("Where", b("Less", x, b.array(0.0)), b("Mul", x, b.array(0.1)), x),
    "squared": lambda b, x: b("Mul", b("Relu", x), b("Relu", x)),
    "in fp32": lambda b, x: b("Cast", b("Sigmoid", b("Cast", x, to=FLOAT)), to=b.dtype),
}


def model_of(
    activation: Callable[[Builder, str], str], form: Callable[[Builder, str], str] = layer_norm, dtype: int = FLOAT
) -> ModelProto:
    b = Builder(dtype, opset=20 if activation is ACTIVATIONS["Gelu"] else 17)
    return b.model(activation(b, form(b, b.input("x", (*ROWS, N)))))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_the_same_kernel_s(name: str, dtype: int) -> None:
    model = model_of(ACTIVATIONS[name], dtype=dtype)
    analysis = analysed(model)
    fused = sweep.rewritten(analysis)
    assert [node.op_type for node in fused.graph.node] == ["FusedPointwise_0"]
    x = draw(2, 5, N).astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert not sweep.difference(model, fused, [{"x": x}])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_means_the_same(name: str) -> None:
    model = model_of(ACTIVATIONS[name])
    _, fusion = the_norm(model)
    assert [out.name for out in fusion.outputs] == [model.graph.output[0].name]
    check_meaning(model, fusion, {"x": draw(2, 5, N).astype(np.float32)})


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_behind_every_form(form: Callable[[Builder, str], str]) -> None:
    """What a form holds outside of its kernel, as one plus a parameter, is no activation."""
    model = model_of(SPELLED["silu"], form)
    analysis = analysed(model)
    (site,) = analysis.sites
    assert site.match.out == model.graph.output[0].name
    assert "sigmoid" in site.fusion.features
    assert not sweep.difference(model, sweep.rewritten(analysis), [{"x": draw(2, 5, N).astype(np.float32)}])


def turned(b: Builder, y: str) -> str:
    return b("Relu", b("Transpose", y, perm=[0, 2, 1]))


def compared(b: Builder, y: str) -> str:
    return b("Where", b("Greater", y, b.array(0.0)), b.array(1.0), b.array(0.0))


def to_a_longer_tensor(b: Builder, y: str) -> str:
    return b("Max", y, b.array(np.zeros((2, 1, 1, 1))))


@pytest.mark.parametrize("behind", [turned, compared, to_a_longer_tensor])
def test_what_is_none_stays_behind(behind: Callable[[Builder, str], str]) -> None:
    b = Builder(FLOAT, opset=17)
    y = layer_norm(b, b.input("x", (*ROWS, N)))
    norms = [site for site in analysed(b.model(behind(b, y))).sites if isinstance(site.fusion, Normalisation)]
    assert [site.match.out for site in norms] == [y]


def test_where_intermediates_are_rounded_it_stays_a_node() -> None:
    model = model_of(ACTIVATIONS["Relu"])
    (site,) = analysed(model, rounding="onnx").sites
    assert [site.graph.nodes[index].op for index in site.match.nodes] == ["LayerNormalization"]
