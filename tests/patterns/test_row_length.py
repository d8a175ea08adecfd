"""Rows over their own length where that is bounded and repeated: which of them are normalisations, and how exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.ir.normalisation import Normalisation
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_fusion import evaluate
from tests.patterns.test_normalisation import ROWS, N, analysed
from tests.tools import sweep

LENGTHS = [0.0, *(10.0**power for power in range(-15, 16))]


def length_of(b: Builder, x: str) -> str:
    return b("ReduceL2", x, axes=[-1], keepdims=1)


def bounded(b: Builder, x: str, bound: float = 1e-12) -> str:
    return b("Clip", length_of(b, x), b.array(bound))


def bounded_by_attributes(b: Builder, x: str) -> str:
    return b("Clip", length_of(b, x), min=1e-12)


def repeated(b: Builder, x: str, length: str) -> str:
    return b("Div", x, b("Expand", length, b("Shape", x)))


def repeated_to_sizes(b: Builder, x: str, length: str) -> str:
    """As torch.export has it: of several sizes one is the run's."""
    sizes = [b("Gather", b("Shape", x), b.integers(place)) for place in (0, 1)]
    return b("Div", x, b("Expand", length, b("Concat", *sizes, b.integers(N), axis=0)))


def repeated_by_a_number(b: Builder, x: str, length: str) -> str:
    return b("Div", x, b("Expand", length, b.integers(1, 1, N)))


def not_repeated(b: Builder, x: str, length: str) -> str:
    return b("Div", x, length)


REPEATED = (repeated, repeated_to_sizes, repeated_by_a_number, not_repeated)


def model_of(
    end: Callable[[Builder, str, str], str],
    length: Callable[[Builder, str], str] = bounded,
    dtype: int = FLOAT,
    opset: int = 17,
) -> ModelProto:
    b = Builder(dtype, opset=opset)
    x = b.input("x", (*ROWS, N))
    return b.model(end(b, x, length(b, x)))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("end", REPEATED, ids=lambda end: end.__name__)
def test_it_is_one_node_with_the_bits_of_the_model(end: Callable[..., str], dtype: int) -> None:
    model = model_of(end, dtype=dtype)
    analysis = analysed(model)
    fused = sweep.rewritten(analysis)
    assert [node.op_type for node in fused.graph.node] == ["FusedPointwise_0"]
    for rows in (5, 1):
        x = draw(2, rows, N).astype(np.float32 if dtype == FLOAT else np.float16)
        assert not sweep.difference(model, fused, [{"x": x}])


@pytest.mark.parametrize("bound", [1e-12, 1e-6, 2.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_is_as_long_as_the_models(length: float, bound: float) -> None:
    """Shorter than the bound or longer."""
    model = model_of(repeated, partial(bounded, bound=bound))
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Normalisation)
    direction = draw(2, 5, N)
    x = (direction / np.linalg.norm(direction, axis=-1, keepdims=True) * length).astype(np.float32)
    (wanted,), (found,) = run(model, {"x": x}), evaluate(site.fusion, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=2.0**-21, atol=0)


def by_the_larger(b: Builder, length: str, bound: float) -> str:
    """As torch's `dynamo` exporter has a Clip of 16 bits."""
    return b("Max", b.array(bound), length)


def by_a_clip(b: Builder, length: str, bound: float) -> str:
    return b("Clip", length, b.array(bound))


def by_a_sum(b: Builder, length: str, bound: float) -> str:
    return b("Add", b.array(bound), length)


def multiplied(b: Builder, length: str, factor: float) -> str:
    return b("Mul", length, b.array(factor))


def divided(b: Builder, length: str, factor: float) -> str:
    return b("Div", length, b.array(1 / factor))


@pytest.mark.parametrize("scaled", [multiplied, divided])
@pytest.mark.parametrize("limited", [by_the_larger, by_a_clip, by_a_sum])
@pytest.mark.parametrize(("factor", "bound"), [(N**-0.5, 1e-8), (N**-0.5, 1.0), (3.0, 1e-3), (1e-6, 1e-12)])
def test_a_scaled_length_is_the_models(
    scaled: Callable[[Builder, str, float], str],
    limited: Callable[[Builder, str, float], str],
    factor: float,
    bound: float,
) -> None:
    model = model_of(not_repeated, lambda b, x: limited(b, scaled(b, length_of(b, x), factor), bound))
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Normalisation)
    direction = draw(len(LENGTHS), 1, N)
    x = (direction / np.linalg.norm(direction, axis=-1, keepdims=True) * np.reshape(LENGTHS, (-1, 1, 1))).astype("f")
    (wanted,), (found,) = run(model, {"x": x}), evaluate(site.fusion, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=2.0**-21, atol=0)


def test_bounds_were_attributes_once() -> None:
    (site,) = analysed(model_of(repeated, bounded_by_attributes, opset=10)).sites
    assert isinstance(site.fusion, Normalisation)


NEARLY: dict[str, Callable[[Builder, str], str]] = {
    "at most 1": lambda b, x: b("Clip", length_of(b, x), b.array(0.0), b.array(1.0)),
    "at most 0": lambda b, x: b("Clip", length_of(b, x), "", b.array(0.0)),
    "a bound of the run": lambda b, x: b("Clip", length_of(b, x), b.input("bound", ())),
    "by a number of the run": lambda b, x: b("Mul", length_of(b, x), b.input("factor", ())),
    "by a number of less than none": lambda b, x: b("Mul", length_of(b, x), b.array(-1.0)),
    "one over a length": lambda b, x: b("Div", b.array(2.0), length_of(b, x)),
    "one more of the run": lambda b, x: b("Add", length_of(b, x), b.input("added", ())),
    "less than a length": lambda b, x: b("Add", length_of(b, x), b.array(-1.0)),
    "the largest of three": lambda b, x: b("Max", length_of(b, x), b.array(0.0), b.array(1.0)),
    "no bound": lambda b, x: b("Clip", b("Abs", length_of(b, x)), b.array(0.0)),
}


@pytest.mark.parametrize("case", NEARLY)
def test_another_length_is_none(case: str) -> None:
    assert not analysed(model_of(repeated, NEARLY[case])).sites


def test_rows_that_are_repeated_themselves_are_none() -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (1, N))
    assert not analysed(b.model(b("Div", x, b("Expand", bounded(b, x), b.integers(7, N))))).sites


def test_a_length_that_others_read_is_made() -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    length = bounded(b, x)
    assert not analysed(b.model(repeated(b, x, length), length)).sites


def squares_of(b: Builder, x: str) -> str:
    return b("ReduceSum", b("Mul", x, x), b.integers(-1), keepdims=1)


def by_the_root_of_the_larger(b: Builder, x: str, bound: float) -> str:
    """As `tf.math.l2_normalize` has it."""
    return b("Mul", x, b("Reciprocal", b("Sqrt", b("Max", squares_of(b, x), b.array(bound**2)))))


def by_the_root_of_a_clip(b: Builder, x: str, bound: float) -> str:
    return b("Div", x, b("Sqrt", b("Clip", squares_of(b, x), b.array(bound**2))))


def by_a_power_of_the_larger(b: Builder, x: str, bound: float) -> str:
    return b("Mul", b("Pow", b("Max", b.array(bound**2), squares_of(b, x)), b.array(-0.5)), x)


def by_the_smaller_reciprocal(b: Builder, x: str, bound: float) -> str:
    """As Keras' UnitNormalization has it."""
    return b("Mul", x, b("Min", b("Reciprocal", b("Sqrt", squares_of(b, x))), b.array(1 / bound)))


def by_the_larger_mean(b: Builder, x: str, bound: float) -> str:
    """An RMSNorm whose mean of squares is bounded, times the scale of its columns before the rows."""
    mean = b("ReduceMean", b("Mul", x, x), axes=[-1], keepdims=1)
    return b("Mul", b("Mul", b("Reciprocal", b("Sqrt", b("Max", mean, b.array(bound**2)))), b.array(np.ones(N))), x)


BOUNDED_SQUARES = (
    by_the_root_of_the_larger,
    by_the_root_of_a_clip,
    by_a_power_of_the_larger,
    by_the_smaller_reciprocal,
    by_the_larger_mean,
)


@pytest.mark.parametrize("bound", [1e-12, 1e-6, 2.0])
@pytest.mark.parametrize("form", BOUNDED_SQUARES, ids=lambda form: form.__name__)
def test_bounded_squares_are_bounded_lengths(form: Callable[[Builder, str, float], str], bound: float) -> None:
    """Of rows shorter than the bound and longer, by its meaning; the body has the model's own bits."""
    b = Builder(FLOAT, opset=17)
    model = b.model(form(b, b.input("x", (*ROWS, N)), bound))
    analysis = analysed(model)
    (site,) = analysis.sites
    assert isinstance(site.fusion, Normalisation)
    lengths = np.reshape(LENGTHS, (-1, 1, 1))
    direction = draw(len(LENGTHS), 1, N)
    x = (direction / np.linalg.norm(direction, axis=-1, keepdims=True) * lengths).astype(np.float32)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (wanted,), (found,) = run(model, {"x": x}), evaluate(site.fusion, {**stored, "x": x})
    np.testing.assert_allclose(found, wanted, rtol=2.0**-21, atol=0)
    assert not sweep.difference(model, sweep.rewritten(analysis), [{"x": x}])


NEARLY_SQUARES: dict[str, Callable[[Builder, str], str]] = {
    "at most": lambda b, s: b("Reciprocal", b("Sqrt", b("Min", s, b.array(1.0)))),
    "a bound of the run": lambda b, s: b("Reciprocal", b("Sqrt", b("Max", s, b.input("bound", ())))),
    "the largest of three": lambda b, s: b("Reciprocal", b("Sqrt", b("Max", s, b.array(0.0), b.array(1.0)))),
    "at most, and more": lambda b, s: b("Min", b("Reciprocal", b("Sqrt", b("Add", s, b.array(1e-6)))), b.array(10.0)),
    "at most none": lambda b, s: b("Min", b("Reciprocal", b("Sqrt", s)), b.array(0.0)),
    "a most of the run": lambda b, s: b("Min", b("Reciprocal", b("Sqrt", s)), b.input("bound", ())),
    "the smaller root": lambda b, s: b("Reciprocal", b("Min", b("Sqrt", s), b.array(1.0))),
}


@pytest.mark.parametrize("case", NEARLY_SQUARES)
def test_squares_that_are_bounded_otherwise_are_none(case: str) -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    assert not analysed(b.model(b("Mul", x, NEARLY_SQUARES[case](b, squares_of(b, x))))).sites
