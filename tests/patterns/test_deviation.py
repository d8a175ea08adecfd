"""Rows over their deviation and a little: which of them are normalisations, and how exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from onnx import ModelProto

from onnxfuse.ir.normalisation import Normalisation
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_fusion import evaluate
from tests.patterns.test_normalisation import ROWS, N, analysed, mean, vector
from tests.tools import sweep

Form = Callable[[Builder, str], str]


def variance(b: Builder, x: str) -> str:
    centred = b("Sub", x, mean(b, x))
    return mean(b, b("Mul", centred, centred))


def of_one_less(b: Builder, x: str) -> str:
    return b("Div", b("Mul", variance(b, x), b.array(N)), b.array(N - 1))


def of_one_less_by_its_shape(b: Builder, x: str) -> str:
    """As TorchScript has it."""
    count = b("ReduceProd", b("Gather", b("Shape", x), b.integers(-1), axis=0), keepdims=0)
    count = b("Cast", count, to=b.dtype)
    return b("Div", b("Mul", variance(b, x), count), b("Sub", count, b.array(1.0)))


def of_one_less_repeated(b: Builder, x: str) -> str:
    """As torch.export has it, one number a row before it has a dimension."""
    centred, shape = b("Sub", x, mean(b, x)), b("Shape", x)
    squares = b("ReduceMean", b("Mul", centred, centred), axes=[-1], keepdims=0)
    less = b("Div", b("Mul", squares, b.array(N)), b.array(N - 1))
    sizes = [b("Gather", shape, b.integers(place)) for place in (0, 1)]
    sizes = b("Concat", *sizes, b.integers(1), axis=0)
    return b("Expand", b("Reshape", less, sizes), sizes)


def behind_the_root(b: Builder, x: str, spread: Form, epsilon: float = 1e-3) -> str:
    root = b("Add", b("Sqrt", spread(b, x)), b.array(epsilon))
    return b("Add", b("Mul", b("Div", b("Sub", x, mean(b, x)), root), vector(b)), vector(b, 1))


def scaled_before(b: Builder, x: str, spread: Form) -> str:
    """As it stands in The Annotated Transformer: `a * (x - mean) / (std + epsilon) + b`."""
    scaled = b("Mul", vector(b), b("Sub", x, mean(b, x)))
    return b("Add", b("Div", scaled, b("Add", b("Sqrt", spread(b, x)), b.array(1e-3))), vector(b, 1))


def before_the_root(b: Builder, x: str, spread: Form) -> str:
    root = b("Sqrt", b("Add", spread(b, x), b.array(1e-3)))
    return b("Div", b("Mul", b("Sub", x, mean(b, x)), vector(b)), root)


SPREADS = (variance, of_one_less, of_one_less_by_its_shape, of_one_less_repeated)
ENDS = (behind_the_root, scaled_before, before_the_root)


def model_of(end: Callable[[Builder, str, Form], str], spread: Form, dtype: int = FLOAT) -> ModelProto:
    b = Builder(dtype, opset=17)
    x = b.input("x", (*ROWS, N))
    return b.model(end(b, x, spread))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("spread", SPREADS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("end", ENDS, ids=lambda form: form.__name__)
def test_it_is_one_node_with_the_bits_of_the_model(end: Callable[..., str], spread: Form, dtype: int) -> None:
    model = model_of(end, spread, dtype)
    fused = sweep.rewritten(analysed(model))
    assert [node.op_type for node in fused.graph.node] == ["FusedPointwise_0"]
    for rows in (5, 1):
        x = draw(2, rows, N).astype(np.float32 if dtype == FLOAT else np.float16)
        assert not sweep.difference(model, fused, [{"x": x}])


@pytest.mark.parametrize("deviation", [1e-5, 1e-3, 0.1, 30.0])
@pytest.mark.parametrize("spread", SPREADS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("end", ENDS, ids=lambda form: form.__name__)
def test_it_means_the_same(end: Callable[..., str], spread: Form, deviation: float) -> None:
    """Of rows around zero, whose deviation what is added counts beside or not."""
    model = model_of(end, spread)
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Normalisation)
    x = (draw(2, 5, N) * deviation).astype(np.float32)
    stored = {f"vector{seed}": np.float32(1 + draw(N, seed=seed) / 8) for seed in range(2)}
    (wanted,), (found,) = run(model, {"x": x}), evaluate(site.fusion, {"x": x, **stored})
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


NEARLY: dict[str, Form] = {
    "less than nothing is added": partial(behind_the_root, spread=variance, epsilon=-1e-3),
    "what is added is the run's": lambda b, x: b(
        "Div", b("Sub", x, mean(b, x)), b("Add", b("Sqrt", variance(b, x)), b.input("epsilon", ()))
    ),
    "more than all": lambda b, x: b(
        "Div", b("Sub", x, mean(b, x)), b("Sqrt", b("Div", b("Mul", variance(b, x), b.array(N)), b.array(-1.0)))
    ),
    "the other way round": lambda b, x: b(
        "Div", b("Add", b("Sqrt", variance(b, x)), b.array(1e-3)), b("Sub", x, mean(b, x))
    ),
    "of others": lambda b, x: b(
        "Div",
        b("Sub", x, mean(b, x)),
        b("Add", b("Sqrt", variance(b, b.input("other", (*ROWS, N)))), b.array(1e-3)),
    ),
    "not centred": lambda b, x: b("Div", x, b("Add", b("Sqrt", variance(b, x)), b.array(1e-3))),
}


@pytest.mark.parametrize("case", NEARLY)
def test_another_quotient_is_none(case: str) -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    assert not analysed(b.model(NEARLY[case](b, x))).sites


def test_a_deviation_that_others_read_is_made() -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    root = b("Sqrt", variance(b, x))
    normal = b("Div", b("Sub", x, mean(b, x)), b("Add", root, b.array(1e-3)))
    assert not analysed(b.model(normal, root)).sites
