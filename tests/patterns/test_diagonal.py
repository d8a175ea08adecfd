"""Which masks have a diagonal, behind which there is nothing, at whatever length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Diagonal
from onnxfuse.patterns.diagonal import LOW
from onnxfuse.pipeline import analyse_model
from tests.helpers.attention_graphs import feeds, merged, model_of, number, scores
from tests.helpers.onnx_build import BFLOAT16, BOOL, FLOAT16, Builder, run

Mask = Callable[[Builder], str]
SIZES = [
    {"batch": 2, "rows": 40, "keys": 72},
    {"batch": 1, "rows": 1, "keys": 9},
    {"batch": 1, "rows": 30, "keys": 30},
    {"batch": 1, "rows": 20, "keys": 8},
]


def length(b: Builder, name: str) -> str:
    """How many tokens an input has."""
    return b("Squeeze", b("Slice", b("Shape", name), b.integers(1), b.integers(2)), b.integers(0))


def arange(b: Builder, start: str, limit: str, along_keys: bool) -> str:
    return b("Unsqueeze", b("Range", start, limit, b.scalar(1)), b.integers(0) if along_keys else b.integers(1))


def keys_and_rows(b: Builder) -> tuple[str, str]:
    zero = b.scalar(0)
    return arange(b, zero, length(b, "key"), True), arange(b, zero, length(b, "query"), False)


def chosen(b: Builder, condition: str, first: float, second: float) -> str:
    return b("Where", condition, number(b, first), number(b, second))


def up_to_the_row(b: Builder) -> str:
    return chosen(b, b("LessOrEqual", *keys_and_rows(b)), 0.0, -np.inf)


def before_the_row(b: Builder) -> str:
    return chosen(b, b("Less", *keys_and_rows(b)), 0.0, -65504.0)


def behind_the_row(b: Builder) -> str:
    keys, rows = keys_and_rows(b)
    return chosen(b, b("Less", rows, keys), -np.inf, 0.0)


def negated(b: Builder) -> str:
    return chosen(b, b("Not", b("GreaterOrEqual", *keys_and_rows(b))), 0.0, -np.inf)


def with_a_past(b: Builder) -> str:
    """The last rows of all tokens: as many stand before them as there are keys more."""
    keys, rows = length(b, "key"), length(b, "query")
    of_rows = arange(b, b("Sub", keys, rows), keys, False)
    return chosen(b, b("LessOrEqual", arange(b, b.scalar(0), keys, True), of_rows), 0.0, -np.inf)


def moved(b: Builder) -> str:
    keys, rows = keys_and_rows(b)
    return chosen(b, b("LessOrEqual", keys, b("Add", rows, b.scalar(5))), 0.0, -np.inf)


def with_padding(b: Builder) -> str:
    """Of each batch some keys are none; the whole is given the dimensions of the scores."""
    causal = b("Unsqueeze", b("LessOrEqual", *keys_and_rows(b)), b.integers(0, 1))
    return chosen(b, b("And", causal, b.input("mask", ("batch", 1, 1, "keys"), BOOL)), 0.0, -65504.0)


def upper_part(b: Builder) -> str:
    shape = b(
        "Concat",
        b("Unsqueeze", length(b, "query"), b.integers(0)),
        b("Unsqueeze", length(b, "key"), b.integers(0)),
        axis=0,
    )
    return b("Trilu", b("Expand", number(b, -np.inf), shape), b.scalar(1), upper=1)


def added_to_another(b: Builder) -> str:
    return b("Add", up_to_the_row(b), b.input("bias", ("rows", "keys")))


def beside_a_constant(b: Builder) -> str:
    zero = numpy_helper.from_array(np.zeros((1, 1), b.numpy))
    return b("Add", b("Unsqueeze", b("Constant", value=zero), b.integers(0)), up_to_the_row(b))


def window(b: Builder) -> str:
    """Causal, and of the last eight keys alone."""
    keys, rows = keys_and_rows(b)
    near = b("Greater", keys, b("Add", rows, b.raw(np.array(-8, np.int64), "past")))
    return chosen(b, b("And", b("LessOrEqual", keys, rows), near), 0.0, -65504.0)


def window_by_a_difference(b: Builder) -> str:
    """The same as an exporter writes `key > row - 8`."""
    keys, rows = keys_and_rows(b)
    near = b("Greater", keys, b("Sub", rows, b.raw(np.array(8, np.int64), "past")))
    return chosen(b, b("And", b("LessOrEqual", keys, rows), near), 0.0, -65504.0)


def window_of_rows(b: Builder) -> str:
    keys, rows = keys_and_rows(b)
    far = b("Or", b("Less", rows, keys), b("Less", keys, b("Add", rows, b.raw(np.array(-8, np.int64), "past"))))
    return chosen(b, far, -np.inf, 0.0)


def in_slices(b: Builder) -> str:
    """As dynamo writes `positions[None, :]` before it optimises: of everything a Slice."""

    def everything(x: str, axis: int) -> str:
        return b("Slice", x, b.integers(0), b.integers(2**63 - 1), b.integers(axis), b.integers(1))

    keys, rows = keys_and_rows(b)
    return everything(chosen(b, b("LessOrEqual", everything(keys, 1), everything(rows, 0)), 0.0, -np.inf), 1)


def near_the_row(b: Builder) -> str:
    """ModernBERT."""
    keys, rows = keys_and_rows(b)
    near = b("LessOrEqual", b("Abs", b("Sub", rows, keys)), b.scalar(6))
    return chosen(b, near, 0.0, -np.inf)


def not_far_from_the_row(b: Builder) -> str:
    keys, rows = keys_and_rows(b)
    return chosen(b, b("GreaterOrEqual", b("Abs", b("Sub", keys, rows)), b.scalar(6)), -np.inf, 0.0)


def two_parts(b: Builder) -> str:
    shape = b(
        "Concat",
        b("Unsqueeze", length(b, "query"), b.integers(0)),
        b("Unsqueeze", length(b, "key"), b.integers(0)),
        axis=0,
    )
    empty = b("Expand", number(b, -np.inf), shape)
    return b("Add", b("Trilu", empty, b.scalar(3), upper=1), b("Trilu", empty, b.scalar(-4), upper=0))


def every_other_row(b: Builder) -> str:
    keys, rows = keys_and_rows(b)
    return chosen(b, b("LessOrEqual", keys, b("Mul", rows, b.scalar(2))), 0.0, -np.inf)


def behind_a_window(b: Builder) -> str:
    return chosen(b, b("GreaterOrEqual", *keys_and_rows(b)), 0.0, -np.inf)


def barely_masked(b: Builder) -> str:
    return chosen(b, b("LessOrEqual", *keys_and_rows(b)), 0.0, -100.0)


def either(b: Builder) -> str:
    causal = b("Unsqueeze", b("LessOrEqual", *keys_and_rows(b)), b.integers(0, 1))
    return chosen(b, b("Or", causal, b.input("mask", ("batch", 1, 1, "keys"), BOOL)), 0.0, -np.inf)


def given(b: Builder) -> str:
    return b.input("mask", ("rows", "keys"))


FOUND: dict[Mask, Diagonal] = {
    up_to_the_row: Diagonal(0, False, -np.inf),
    before_the_row: Diagonal(-1, False, -65504.0),
    behind_the_row: Diagonal(0, False, -np.inf),
    negated: Diagonal(-1, False, -np.inf),
    with_a_past: Diagonal(0, True, -np.inf),
    moved: Diagonal(5, False, -np.inf),
    with_padding: Diagonal(0, False, -65504.0),
    upper_part: Diagonal(0, False, -np.inf),
    added_to_another: Diagonal(0, False, -np.inf),
    beside_a_constant: Diagonal(0, False, -np.inf),
    window: Diagonal(0, False, -65504.0, -7),
    window_by_a_difference: Diagonal(0, False, -65504.0, -7),
    window_of_rows: Diagonal(0, False, -np.inf, -8),
    in_slices: Diagonal(0, False, -np.inf),
    near_the_row: Diagonal(6, False, -np.inf, -6),
    not_far_from_the_row: Diagonal(5, False, -np.inf, -5),
    two_parts: Diagonal(2, False, -np.inf, -3),
}
NONE: list[Mask] = [every_other_row, behind_a_window, barely_masked, either, given]


def attention(b: Builder, mask: Mask, scaled: bool = True) -> tuple[list[str], str]:
    s = scores(b)
    added = mask(b)
    s = b("Mul", s, number(b, 0.25)) if scaled else s
    return merged(b, b("Softmax", b("Add", s, added), axis=-1)), added


def diagonal(model: onnx.ModelProto) -> Diagonal | None:
    (site,) = [site for site in analyse_model(model, [ARCHITECTURES["sm_90a"]], attention=True).sites if site.whole]
    return site.fusion.diagonal


@pytest.mark.parametrize("mask", FOUND)
def test_it_is_found_and_nothing_lies_behind_it(mask: Mask) -> None:
    b = Builder(FLOAT16)
    outs, added = attention(b, mask)
    assert diagonal(b.model(*outs)) == FOUND[mask]
    model = b.model(added)
    for sizes in SIZES:
        (values,) = run(model, feeds(model, sizes))
        values = np.broadcast_to(values, (*values.shape[:-2], sizes["rows"], sizes["keys"]))
        last = FOUND[mask].offset + (sizes["keys"] - sizes["rows"] if FOUND[mask].from_end else 0)
        distance = np.arange(sizes["keys"]) - np.arange(sizes["rows"])[:, None]
        first = FOUND[mask].first
        behind = (distance > last) | (distance < (-np.inf if first is None else first))
        assert (values[..., behind] <= LOW).all()
        assert (values[..., behind] <= FOUND[mask].fill / 2).all()


@pytest.mark.parametrize("mask", NONE)
def test_what_is_none_is_none(mask: Mask) -> None:
    b = Builder(FLOAT16)
    assert diagonal(b.model(*attention(b, mask)[0])) is None


@pytest.mark.parametrize(("scale", "found"), [(0.5, True), (0.01, False)])
def test_a_scale_behind_the_mask_may_leave_too_little_of_it(scale: float, found: bool) -> None:
    b = Builder(FLOAT16)
    s, mask = scores(b), before_the_row(b)
    p = b("Softmax", b("Mul", b("Add", s, mask), number(b, scale)), axis=-1)
    assert (diagonal(b.model(*merged(b, p))) is not None) is found


@pytest.mark.parametrize("step", [1, -1])
def test_a_slice_of_as_many_may_turn_them_round(step: int) -> None:
    b = Builder(FLOAT16)
    s, zero, one = scores(b, 40, 72), b.scalar(0), b.scalar(1)
    keys = b("Unsqueeze", b("Range", zero, b.scalar(72), one), b.integers(0))
    bounds = (0, 2**63 - 1) if step > 0 else (-1, -(2**63))
    keys = b("Slice", keys, *map(b.integers, bounds), b.integers(1), b.integers(step))
    rows = b("Unsqueeze", b("Range", zero, b.scalar(40), one), b.integers(1))
    mask = chosen(b, b("LessOrEqual", keys, rows), 0.0, -np.inf)
    found = diagonal(b.model(*merged(b, b("Softmax", b("Add", s, mask), axis=-1), 72)))
    assert found == (Diagonal(0, False, -np.inf) if step > 0 else None)


def test_a_fill_of_bfloat16_is_a_number() -> None:
    b = Builder(BFLOAT16)
    outs, _ = attention(b, before_the_row)
    assert diagonal(b.model(*outs)) == Diagonal(-1, False, -65536.0)


def test_a_choice_of_scores_is_read() -> None:
    b = Builder(FLOAT16)
    s, mask = scores(b), b("LessOrEqual", *keys_and_rows(b))
    s = b("Where", mask, s, number(b, -np.inf))
    assert diagonal(b.model(*merged(b, b("Softmax", s, axis=-1)))) == Diagonal(0, False, -np.inf)
    assert diagonal(model_of("two_biases")) is None
