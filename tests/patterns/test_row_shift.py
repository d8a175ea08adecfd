"""In front of a softmax, only what subtracts a number of each row from all of it is taken for nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention
from onnxfuse.pipeline import Analysis, Rounding, analyse_model
from tests.helpers.attention_graphs import SIZES, feeds, merged, number, scores
from tests.helpers.onnx_build import FLOAT, Builder, run
from tests.helpers.reference_attention import evaluate_attention
from tests.tools.sweep import rewritten

Shifting = Callable[[Builder, str], str]
ROWS = 40  # as many as keys, so that a row may be taken for a column
KEYS = {"rows": ROWS, "keys": ROWS}


def maximum(b: Builder, s: str, axis: int = -1) -> str:
    """That of each row as one number, and a dimension of 1 behind it."""
    return b("Unsqueeze", b("ReduceMax", s, axes=[axis], keepdims=0), b.integers(-1))


def below_one(b: Builder, s: str) -> str:
    """LayoutLMv3: a 32nd, less the maximum of that, times 32."""
    s = b("Div", s, number(b, 32.0))
    return b("Mul", b("Sub", s, maximum(b, s)), number(b, 32.0))


def in_fp32(b: Builder, s: str) -> str:
    """The same from torch.export: the maximum is that of wider numbers."""
    kept = b("ReduceMax", b("Cast", s, to=FLOAT), axes=[3], keepdims=1)
    return b("Sub", s, b("Cast", kept, to=b.dtype))


def of_columns(b: Builder, s: str) -> str:
    return b("Sub", s, maximum(b, s, axis=-2))


def less_of_itself(b: Builder, s: str) -> str:
    return b("Sub", maximum(b, s), s)


def of_others(b: Builder, s: str) -> str:
    return b("Sub", s, b("ReduceMax", b("Abs", s), axes=[-1], keepdims=1))


def squared(b: Builder, s: str) -> str:
    s = b("Sub", s, maximum(b, s))
    return b("Mul", s, s)


def capped(b: Builder, s: str) -> str:
    return b("Tanh", b("Sub", s, maximum(b, s)))


NOTHING = (below_one, in_fp32)
SOMETHING = (of_columns, less_of_itself, of_others, squared, capped)


def model_of(shift: Shifting) -> ModelProto:
    b = Builder(TensorProto.FLOAT16, opset=17)
    return b.model(*merged(b, b("Softmax", shift(b, scores(b, ROWS, ROWS)), axis=-1), ROWS))


def analysed(model: ModelProto, rounding: Rounding = "fp32") -> tuple[Analysis, list[Attention]]:
    analysis = analyse_model(model, [ARCHITECTURES["sm_90a"]], rounding=rounding)
    return analysis, [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]


def attends_as_before(model: ModelProto, tolerance: float) -> None:
    """One attention means what the model does, and the rewritten model has its bits."""
    analysis, (attention,) = analysed(model)
    feed = feeds(model, SIZES | KEYS)
    (expected,) = run(model, feed)
    wide = expected.astype(np.float64)
    np.testing.assert_allclose(evaluate_attention(attention, feed), wide, rtol=tolerance, atol=tolerance)
    assert run(rewritten(analysis), feed)[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("shift", NOTHING, ids=lambda shift: shift.__name__)
def test_the_maximum_of_each_row_changes_nothing(shift: Shifting) -> None:
    attends_as_before(model_of(shift), 2**-9)


@pytest.mark.parametrize("shift", SOMETHING, ids=lambda shift: shift.__name__)
def test_other_differences_stay(shift: Shifting) -> None:
    assert analysed(model_of(shift))[1] == []


def test_as_the_model_rounds_it_stays() -> None:
    assert analysed(model_of(below_one), "onnx")[1] == []
