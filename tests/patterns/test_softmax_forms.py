"""Exponentials over the sums of their rows, or of a LogSoftmax, are a softmax; nothing else is that looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, TensorProto

from tests.helpers.attention_graphs import merged, number, scores
from tests.helpers.onnx_build import FLOAT, Builder
from tests.patterns.test_row_shift import ROWS, analysed, attends_as_before

Probabilities = Callable[[Builder, str], str]


def powers(b: Builder, s: str) -> str:
    return b("Exp", b("Sub", s, b("ReduceMax", s, axes=[-1], keepdims=1)))


def sums(b: Builder, e: str, axis: int = -1, keepdims: int = 1) -> str:
    return b("ReduceSum", e, b.integers(axis), keepdims=keepdims)


def divided(b: Builder, s: str) -> str:
    """jax.nn.softmax as primitives."""
    e = powers(b, b("Mul", s, number(b, 0.25)))
    return b("Div", e, sums(b, e))


def of_one_number_a_row(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", e, b("Unsqueeze", sums(b, e, keepdims=0), b.integers(-1)))


def times_the_reciprocal(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Mul", e, b("Reciprocal", sums(b, e, axis=3)))


def times_one_over(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Mul", b("Div", number(b, 1.0), sums(b, e)), e)


def summed_in_fp32(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", e, b("Cast", sums(b, b("Cast", e, to=FLOAT)), to=b.dtype))


def whole_in_fp32(b: Builder, s: str) -> str:
    e = powers(b, b("Cast", s, to=FLOAT))
    return b("Cast", b("Div", e, sums(b, e)), to=b.dtype)


def of_logarithms(b: Builder, s: str) -> str:
    return b("Exp", b("LogSoftmax", b("Mul", s, number(b, 0.25)), axis=-1))


def of_logarithms_of_columns(b: Builder, s: str) -> str:
    return b("Exp", b("LogSoftmax", s, axis=-2))


def of_scaled_logarithms(b: Builder, s: str) -> str:
    """A temperature behind it, whose rows have other sums than one."""
    return b("Exp", b("Mul", b("LogSoftmax", s, axis=-1), number(b, 0.5)))


def logarithms(b: Builder, s: str) -> str:
    return b("LogSoftmax", s, axis=-1)


def without_a_maximum(b: Builder, s: str) -> str:
    """Which is infinity over infinity where the op is a number."""
    e = b("Exp", s)
    return b("Div", e, sums(b, e))


def of_columns(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", e, sums(b, e, axis=-2))


def times_sums(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Mul", e, sums(b, e))


def sums_over(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", sums(b, e), e)


def two_over_sums(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Mul", e, b("Div", number(b, 2.0), sums(b, e)))


def over_the_reciprocal(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", e, b("Reciprocal", sums(b, e)))


def with_a_place_for_none(b: Builder, s: str) -> str:
    """softmax1: one more in each sum."""
    e = powers(b, s)
    return b("Div", e, b("Add", sums(b, e), number(b, 1.0)))


def of_squares(b: Builder, s: str) -> str:
    e = powers(b, s)
    return b("Div", e, sums(b, b("Mul", e, e)))


SOFTMAXES = (
    divided, of_one_number_a_row, times_the_reciprocal, times_one_over, summed_in_fp32, whole_in_fp32, of_logarithms
)  # fmt: skip
OTHERS = (
    without_a_maximum, of_columns, times_sums, sums_over, two_over_sums, over_the_reciprocal, with_a_place_for_none,
    of_squares, of_logarithms_of_columns, of_scaled_logarithms, logarithms,
)  # fmt: skip


def model_of(form: Probabilities) -> ModelProto:
    b = Builder(TensorProto.FLOAT16, opset=17)
    return b.model(*merged(b, form(b, scores(b, ROWS, ROWS)), ROWS))


@pytest.mark.parametrize("form", SOFTMAXES, ids=lambda form: form.__name__)
def test_exponentials_over_their_sums_are_a_softmax(form: Probabilities) -> None:
    attends_as_before(model_of(form), 2**-8)


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_what_is_like_it_is_none(form: Probabilities) -> None:
    assert analysed(model_of(form))[1] == []


def test_logarithms_that_others_read_stay() -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    log = logarithms(b, scores(b, ROWS, ROWS))
    assert analysed(b.model(*merged(b, b("Exp", log), ROWS), log))[1] == []


@pytest.mark.parametrize("which", ["powers", "sums"])
def test_what_others_read_of_it_keeps_it(which: str) -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    e = powers(b, scores(b, ROWS, ROWS))
    total = sums(b, e)
    outs = merged(b, b("Div", e, total), ROWS)
    model = b.model(*outs, {"powers": e, "sums": total}[which])
    assert analysed(model)[1] == []


def test_a_missing_maximum_is_the_reason() -> None:
    reasons = [(skipped.reason, skipped.detail) for skipped in analysed(model_of(without_a_maximum))[0].skipped]
    assert any(reason == "no_attention_kernel" and "no maximum of their row" in detail for reason, detail in reasons)


@pytest.mark.parametrize("form", [divided, of_logarithms], ids=lambda form: form.__name__)
def test_as_the_model_rounds_it_stays(form: Probabilities) -> None:
    assert analysed(model_of(form), "onnx")[1] == []
