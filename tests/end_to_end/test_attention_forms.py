"""The forms in which exporters write an attention, each by its name: it fuses, and computes what the graph does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention
from onnxfuse.pipeline import analyse_model
from tests.helpers.attention_graphs import (
    FORMS,
    HEAD,
    HEADS,
    SIZES,
    feeds,
    masked_and_guarded,
    merged,
    number,
    scores,
    split_heads,
)
from tests.helpers.matching import run_inputs, run_values
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_attention import evaluate_attention
from tests.tools.sweep import rewritten

Form = Callable[[Builder], list[str]]
ALL = HEADS * HEAD


def softmax_alone(b: Builder) -> list[str]:
    return merged(b, b("Softmax", scores(b), axis=-1))


def axis_of_the_last_dimension(b: Builder) -> list[str]:
    return merged(b, b("Softmax", scores(b), axis=3))


def scale_and_softmax_in_fp32(b: Builder) -> list[str]:
    s = b("Cast", b("Mul", scores(b), number(b, 0.25)), to=FLOAT)
    return merged(b, b("Cast", b("Softmax", s, axis=-1), to=b.dtype))


def products_in_fp32(b: Builder) -> list[str]:
    """GPT-J: q and keys are widened for the product, and the probabilities narrowed for the next."""
    q = b("Cast", split_heads(b, "query", "rows"), to=FLOAT)
    k = b("Transpose", b("Cast", split_heads(b, "key", "keys"), to=FLOAT), perm=(0, 1, 3, 2))
    s = b("Div", b("MatMul", q, k), number(b, 4.0, np.dtype(np.float32)))
    s = b("Add", s, b.input("mask", ("batch", 1, "rows", "keys"), FLOAT))
    return merged(b, b("Cast", b("Softmax", s, axis=-1), to=b.dtype))


def only_keys_in_fp32(b: Builder) -> list[str]:
    """As they come from a cache: what else there is was widened, and is read so."""
    k = b("Transpose", b.input("key", ("batch", HEADS, "keys", HEAD), FLOAT), perm=(0, 1, 3, 2))
    s = b("MatMul", b("Cast", split_heads(b, "query", "rows"), to=FLOAT), k)
    p = b("Softmax", b("Mul", s, number(b, 0.25, np.dtype(np.float32))), axis=-1)
    (out,) = merged(b, p, dtype=FLOAT)
    return [b("Cast", out, to=b.dtype)]


def relative_bias(b: Builder) -> list[str]:
    s = b("Mul", scores(b), number(b, 0.25))
    return merged(b, b("Softmax", b("Add", s, b.input("bias", (1, HEADS, "rows", "keys"))), axis=-1))


def alibi_with_reshape(b: Builder) -> list[str]:
    """Bloom: batch and heads are one dimension of both products, and two for the mask; the slopes are of keys."""

    def one_batch(name: str, tokens: int, perm: tuple[int, ...]) -> str:
        t = b("Reshape", b.input(name, (2, tokens, ALL)), b.integers(2, tokens, HEADS, HEAD))
        t = b("Transpose", t, perm=perm)
        return b("Reshape", t, b.integers(2 * HEADS, *((HEAD, -1) if perm[-1] == 1 else (-1, HEAD))))

    s = b("MatMul", one_batch("query", 40, (0, 2, 1, 3)), one_batch("key", 72, (0, 2, 3, 1)))
    s = b("Add", b.input("bias", (2 * HEADS, 1, 72)), b("Mul", s, number(b, 0.25)))
    s = b("Reshape", s, b.integers(2, HEADS, 40, 72))
    s = b("Cast", b("Add", s, b.input("mask", (2, 1, 40, 72))), to=FLOAT)
    p = b("Cast", b("Softmax", s, axis=-1), to=b.dtype)
    out = b("MatMul", b("Reshape", p, b.integers(2 * HEADS, 40, 72)), one_batch("value", 72, (0, 2, 1, 3)))
    out = b("Transpose", b("Reshape", out, b.integers(2, HEADS, 40, HEAD)), perm=(0, 2, 1, 3))
    return [b("Identity", b("Reshape", out, b.integers(2, 40, ALL)))]


def packed_split(b: Builder) -> list[str]:
    """One projection whose thirds are q, k and v, which heads are taken of."""
    packed = b("MatMul", b.input("x", ("batch", "rows", 24)), b.array(_weight(24, 3 * ALL)))
    return _of_parts(b, b("Split", packed, outputs=3, axis=2, num_outputs=3))


def packed_slices(b: Builder) -> list[str]:
    packed = b("MatMul", b.input("x", ("batch", "rows", 24)), b.array(_weight(24, 3 * ALL)))
    edges = [b.integers(place * ALL) for place in range(4)]
    return _of_parts(b, [b("Slice", packed, start, end, b.integers(2)) for start, end in pairwise(edges)])


def packed_gathers(b: Builder) -> list[str]:
    """timm: heads of all three in one Reshape and Transpose, and then one of three after the other."""
    packed = b("MatMul", b.input("x", ("batch", "rows", 24)), b.array(_weight(24, 3 * ALL)))
    five = b("Transpose", b("Reshape", packed, b.integers(0, 0, 3, HEADS, HEAD)), perm=(2, 0, 3, 1, 4))
    q, k, v = (b("Gather", five, b.scalar(place), axis=0) for place in range(3))
    return _of_heads(b, q, k, v)


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape) / 5


def _of_parts(b: Builder, parts: list[str]) -> list[str]:
    heads = (b("Reshape", part, b.integers(0, 0, HEADS, HEAD)) for part in parts)
    return _of_heads(b, *(b("Transpose", part, perm=(0, 2, 1, 3)) for part in heads))


def _of_heads(b: Builder, q: str, k: str, v: str) -> list[str]:
    s = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), number(b, 0.25))
    out = b("Transpose", b("MatMul", b("Softmax", s, axis=-1), v), perm=(0, 2, 1, 3))
    return [b("Reshape", out, b.integers(0, 0, ALL))]


def keys_transposed_behind_the_heads(b: Builder) -> list[str]:
    q, k = split_heads(b, "query", "rows"), split_heads(b, "key", "keys")
    return merged(b, b("Softmax", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), axis=-1))


def cross_attention(b: Builder) -> list[str]:
    """The 77 tokens of a prompt."""
    return merged(b, b("Softmax", b("Mul", scores(b, 4096, 77), number(b, 0.25)), axis=-1), 77)


def one_row_with_a_past(b: Builder) -> list[str]:
    """A step of a decoder without an operator for it: what the cache holds and one key more."""
    past = [b.input(name, ("batch", HEADS, "past", HEAD)) for name in ("past_key", "past_value")]
    new = [split_heads(b, name, 1) for name in ("key", "value")]
    keys, values = (b("Concat", *pair, axis=2) for pair in zip(past, new, strict=True))
    s = b("MatMul", split_heads(b, "query", 1), b("Transpose", keys, perm=(0, 1, 3, 2)))
    s = b("Add", b("Mul", s, number(b, 0.25)), b.input("mask", ("batch", 1, 1, "total")))
    out = b("Transpose", b("MatMul", b("Softmax", s, axis=-1), values), perm=(0, 2, 1, 3))
    return [b("Reshape", out, b.integers(0, 0, ALL)), keys, values]


def mask_of_unknown_length(b: Builder) -> list[str]:
    """GPT-2 by dynamo: nothing says that the mask is as long as the keys."""
    s = b("Add", b("Mul", scores(b), number(b, 0.25)), b.input("bias", ("batch", 1, "rows", "mask_keys")))
    return merged(b, b("Softmax", s, axis=-1))


def last_of_a_table(b: Builder) -> list[str]:
    """MPT: slopes of the last keys of a table, as many as there are."""
    s = b("Mul", scores(b), number(b, 0.25))
    table = b.array(np.random.default_rng(3).standard_normal((HEADS, 1, 64)), "slopes")
    start = b("Sub", b.integers(64), b("Slice", b("Shape", "key"), b.integers(1), b.integers(2)))
    biased = b("Slice", table, start, b.integers(2**63 - 1), b.integers(2))
    return merged(b, b("Softmax", b("Add", s, biased), axis=-1))


def rows_of_a_table(b: Builder) -> list[str]:
    """GPT-Neo by dynamo: as many rows as a table has at most, and a mask that says nothing of the table."""
    s = b("Mul", scores(b, "Min(64, rows)"), number(b, 0.25))
    return merged(b, b("Softmax", b("Add", s, b.input("bias", ("batch", 1, "rows", "keys"))), axis=-1))


def window(b: Builder) -> list[str]:
    """Keys of at most eight tokens before a row and none behind it, by numbers that the model computes."""
    ends = [b("Gather", b("Shape", name), b.scalar(1), axis=0) for name in ("query", "key")]
    s = b("Mul", scores(b), number(b, 0.25))
    rows, keys = (b("Range", b.scalar(0), end, b.scalar(1)) for end in ends)
    distance = b("Sub", b("Unsqueeze", rows, b.integers(1)), b("Unsqueeze", keys, b.integers(0)))
    near = b("And", b("GreaterOrEqual", distance, b.scalar(0)), b("Less", distance, b.scalar(8)))
    return merged(b, b("Softmax", b("Where", near, s, number(b, np.finfo(b.numpy).min)), axis=-1))


def windows_taken_apart_behind(b: Builder) -> list[str]:
    """Hiera: windows lie before their rows for both products, and behind them in the result, which stays apart."""
    windows, heads = 4, ("batch", HEADS, 4)
    q, k, v = (b.input(name, (*heads, rows, HEAD)) for name, rows in (("query", 11), ("key", 19), ("value", 19)))
    s = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 2, 4, 3))), number(b, 0.25))
    out = b("Transpose", b("MatMul", b("Softmax", s, axis=-1), v), perm=(0, 3, 2, 1, 4))
    return [b("Reshape", out, b.integers(0, 11 * windows, ALL))]


def einsum(first: str, second: str) -> Form:
    """Both products as their letters say, of tensors [batch, tokens, heads, head] or [batch, heads, tokens, head]."""

    def lying(b: Builder, name: str, tokens: str, inside: bool) -> str:
        return b.input(name, ("batch", *((HEADS, tokens) if inside else (tokens, HEADS)), HEAD))

    def build(b: Builder) -> list[str]:
        inside = "..." in first or first.startswith("bh")
        s = b("Einsum", lying(b, "query", "rows", inside), lying(b, "key", "keys", inside), equation=first)
        p = b("Softmax", b("Mul", s, number(b, 0.25)), axis=-1)
        return [b("Identity", b("Einsum", p, lying(b, "value", "keys", inside), equation=second))]

    return build


def added(*shape: int | str, dtype: int | None = None) -> Form:
    """A mask of any rank and broadcast."""

    def build(b: Builder) -> list[str]:
        s = b("Mul", scores(b), number(b, 0.25))
        return merged(b, b("Softmax", b("Add", s, b.input("bias", shape)), axis=-1))

    return build


def chosen(*shape: int | str) -> Form:
    """The same of type bool."""

    def build(b: Builder) -> list[str]:
        s = b("Mul", scores(b), number(b, 0.25))
        kept = b.input("kept", shape, BOOL)
        return merged(b, b("Softmax", b("Where", kept, s, number(b, -60000.0)), axis=-1))

    return build


MASKS = [
    ("rows", "keys"), (1, "keys"), ("keys",), (1, "rows", "keys"), (HEADS, "rows", "keys"), (HEADS, 1, "keys"),
    ("batch", 1, 1, "keys"), ("batch", 1, "rows", "keys"), ("batch", HEADS, 1, "keys"),
    ("batch", HEADS, "rows", "keys"), (1, HEADS, "rows", "keys"), (1, 1, "rows", "keys"), ("batch", 1, "rows", 1),
    ("batch", HEADS, "rows", 1), (HEADS, 1, 1),
]  # fmt: skip
EINSUMS = [
    ("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
    ("bihd,bjhd->bhij", "bhij,bjhd->bihd"),
    ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    ("...qd,...kd->...qk", "...qk,...kd->...qd"),
    ("bihd,bjhd->bhij", "bhij,bjhd->bhid"),
]
TABLE: dict[str, Form] = {
    "Softmax alone": softmax_alone,
    "axis rank - 1": axis_of_the_last_dimension,
    "Cast, Add mask, Softmax, Where(IsNaN)": masked_and_guarded,
    "product of widened q and keys": products_in_fp32,
    "product of fp32 keys": only_keys_in_fp32,
    "Mul scale, Add bias": relative_bias,
    "two biases": FORMS["two_biases"],
    "ALiBi with Reshape": alibi_with_reshape,
    "soft cap and mask": FORMS["soft_cap"],
    "Mul scale, Softmax, Casts": scale_and_softmax_in_fp32,
    **{f"Einsum {first}; {second}": einsum(first, second) for first, second in EINSUMS},
    "packed q, k, v by Split": packed_split,
    "packed q, k, v by Slice": packed_slices,
    "packed q, k, v by Gather": packed_gathers,
    "grouped keys": FORMS["grouped"],
    "keys transposed with their heads": softmax_alone,
    "keys transposed behind their heads": keys_transposed_behind_the_heads,
    **{f"Add mask {list(shape)}": added(*shape) for shape in MASKS},
    **{f"Where mask {list(shape)}": chosen(*shape) for shape in MASKS},
    "a mask of unknown length": mask_of_unknown_length,
    "slopes of the last keys of a table": last_of_a_table,
    "as many rows as a table has": rows_of_a_table,
    "77 keys": cross_attention,
    "one row with a past": one_row_with_a_past,
    "window": window,
    "windows taken apart behind": windows_taken_apart_behind,
}


def fed(model) -> dict[str, np.ndarray]:
    """Random inputs; as many masked keys as a row can do without."""
    drawn = feeds(
        model, {**SIZES, "rows": 11, "Min(64, rows)": 11, "keys": 19, "mask_keys": 19, "past": 18, "total": 19}
    )
    if "kept" in drawn:
        drawn["kept"] = np.random.default_rng(1).random(drawn["kept"].shape) < 0.6
    return drawn


@pytest.mark.parametrize("form", TABLE)
def test_a_form_is_one_kernel(form: str) -> None:
    b = Builder(FLOAT16)
    model = b.model(*TABLE[form](b))
    analysis = analyse_model(model, [ARCHITECTURES["sm_90a"]])
    (site,) = [site for site in analysis.sites if isinstance(site.fusion, Attention)]
    feed = fed(model)
    expected, *_ = run(model, feed)
    np.testing.assert_array_equal(run(rewritten(analysis), feed)[0], expected)
    computed = evaluate_attention(site.fusion, feed | run_inputs(model, site.fusion, feed))
    (made,) = run_values(model, [site.fusion.outs[0].tensor.name], feed)
    np.testing.assert_allclose(computed, made, atol=8e-3, rtol=0)
