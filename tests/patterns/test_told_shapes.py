"""Shapes of scores and probabilities that others read: no kernel stores them, factors of the product tell the sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.attention_graphs import HEAD, HEADS, feeds, merged, number, scores, split_heads
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten

LONGEST = 128


def analysed(b: Builder, outputs: list[str]) -> Analysis:
    return analyse_model(b.model(*outputs), [ARCHITECTURES["sm_90a"]])


def attentions(analysis: Analysis) -> list[Attention]:
    return [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]


def size(b: Builder, value: str, axis: int) -> str:
    return b("Slice", b("Shape", value), b.integers(axis), b.integers(axis + 1 or np.iinfo(np.int64).max))


def of_table(b: Builder) -> list[str]:
    """OpenAI's GPT by TorchScript: the mask is as much of a table as the scores are long."""
    s = b("Div", scores(b), number(b, 4.0))
    there = b.array(np.tril(np.ones((LONGEST, LONGEST)))[None, None], "table")
    rows = b("Slice", there, b.integers(0), size(b, s, -2), b.integers(2))
    there = b("Slice", rows, b.integers(0), size(b, s, -1), b.integers(3))
    s = b("Add", b("Mul", s, there), b("Mul", b("Sub", number(b, 1.0), there), number(b, -10000.0)))
    return merged(b, b("Softmax", s, axis=-1))


def of_bias(b: Builder) -> list[str]:
    """SAM by TorchScript: the bias gets the scores' own shape."""
    s = scores(b)
    bias = b("Reshape", b.input("bias", ("batch", "rows", HEADS, "keys")), b("Shape", s))
    return merged(b, b("Softmax", b("Add", s, bias), axis=-1))


def elsewhere(b: Builder) -> list[str]:
    s = b("Mul", scores(b), number(b, 0.25))
    return [*merged(b, b("Softmax", s, axis=-1)), b("Cast", b("Shape", s), to=b.dtype)]


def in_part(b: Builder) -> list[str]:
    s = scores(b)
    ends = b("Concat", b("Shape", s, start=-1), b("Shape", s, start=1, end=-1), axis=0)
    return [*merged(b, b("Softmax", s, axis=-1)), b("Cast", ends, to=b.dtype)]


def of_projections(b: Builder) -> list[str]:
    """What tells the sizes is what other fusions make."""
    x, weight = b.input("x", ("batch", "rows", HEADS * HEAD)), np.eye(HEADS * HEAD)

    def projected(name: str, *perm: int) -> str:
        y = b("Add", b("MatMul", x, b.array(weight, name)), b.array(np.ones(HEADS * HEAD), f"{name}_bias"))
        return b("Transpose", b("Reshape", y, b.integers(0, 0, HEADS, HEAD)), perm=perm)

    s = b("MatMul", projected("q", 0, 2, 1, 3), projected("k", 0, 2, 3, 1))
    bias = b("Reshape", b.input("bias", ("batch", "rows", HEADS, "rows")), b("Shape", s))
    o = b("MatMul", b("Softmax", b("Add", s, bias), axis=-1), projected("v", 0, 2, 1, 3))
    return [b("Identity", b("Transpose", o, perm=(0, 2, 1, 3)))]


def of_probabilities(b: Builder) -> list[str]:
    p = b("Softmax", b("Mul", scores(b), number(b, 0.25)), axis=-1)
    return [*merged(b, p), b("Cast", b("Shape", p), to=b.dtype)]


def of_equation(b: Builder) -> list[str]:
    """Keras' MultiHeadAttention by tf2onnx: an equation whose sizes come from the Shapes of what it multiplies."""
    p = b("Unsqueeze", b("Softmax", scores(b), axis=-1), b.integers(3))
    v = b("Unsqueeze", split_heads(b, "value", "keys", perm=(0, 2, 3, 1)), b.integers(2))
    (left, right), minus_one = [b("Shape", each) for each in (p, v)], b.integers(-1)

    def sizes(shape: str, *axes: int) -> str:
        return b("Gather", shape, b.integers(*axes))

    def matrices(value: str, shape: str) -> str:
        batches = b("ReduceProd", sizes(shape, 0, 1), keepdims=1)
        return b("Reshape", value, b("Concat", batches, minus_one, sizes(shape, 4), axis=0))

    out = b("MatMul", matrices(p, left), b("Transpose", matrices(v, right), perm=(0, 2, 1)))
    largest = b("Max", sizes(left, 0, 1), sizes(right, 0, 1))
    out = b("Reshape", out, b("Concat", largest, sizes(left, 2), sizes(right, 3), b.integers(1), axis=0))
    out = b("Transpose", b("Squeeze", out, b.integers(4)), perm=(0, 2, 1, 3))
    return [b("Reshape", out, b.integers(0, 0, HEADS * HEAD))]


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
@pytest.mark.parametrize(
    "build",
    [of_table, of_bias, elsewhere, in_part, of_projections, of_probabilities, of_equation],
    ids=lambda form: form.__name__,
)
def test_scores_whose_shape_is_read_are_those_of_an_attention(
    build: Callable[[Builder], list[str]], dtype: int
) -> None:
    b = Builder(dtype)
    analysis = analysed(b, build(b))
    assert len(attentions(analysis)) == 1
    model, fused = analysis.model.proto, rewritten(analysis)
    for sizes in ({"batch": 2, "rows": 40, "keys": 72}, {"batch": 1, "rows": 1, "keys": 3}):
        feed = feeds(model, sizes)
        assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


def repeated(b: Builder, name: str, times: int) -> str:
    """Heads that several of a query share, `[batch, heads, keys, head]`, as `repeat_interleave` is exported."""
    few = split_heads(b, name, "keys", heads=HEADS // times)
    beside = b("Expand", b("Unsqueeze", few, b.integers(2)), b.integers(1, 1, times, 1, 1))
    sizes = [b.integers(HEADS), b("Shape", few, start=2)]
    return b("Reshape", beside, b("Concat", b("Shape", few, end=1), *sizes, axis=0))


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
def test_keys_are_not_repeated_for_somebody_who_asks_how_many_there_are(dtype: int) -> None:
    """A causal mask by torch.export, of grouped queries: of the repeated keys but a Shape would be read."""
    b = Builder(dtype, opset=18)
    query, keys = split_heads(b, "query", "rows"), repeated(b, "key", 2)
    s = b("Mul", b("MatMul", query, b("Transpose", keys, perm=(0, 1, 3, 2))), number(b, 0.25))
    there = b.array(np.triu(np.full((LONGEST, LONGEST), -100.0), 1)[None, None], "table")
    rows = b("Slice", there, b.integers(0), size(b, query, -2), b.integers(2))
    s = b("Add", s, b("Slice", rows, b.integers(0), size(b, keys, -2), b.integers(3)))
    out = b("MatMul", b("Softmax", s, axis=-1), repeated(b, "value", 2))
    analysis = analysed(b, [b("Transpose", out, perm=(0, 2, 1, 3))])
    (attention,) = attentions(analysis)
    assert attention.keys.name == "key"
    model, fused = analysis.model.proto, rewritten(analysis)
    assert not {"Expand", "Transpose"} & {node.op_type for node in fused.graph.node}
    feed = feeds(model, {"batch": 2, "rows": 40, "keys": 72})
    assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


def test_nothing_is_made_that_nobody_reads() -> None:
    """The only reader of the shape dies with it."""
    b = Builder(FLOAT16)
    s = scores(b)
    s = b("Reshape", b("Reshape", s, b.integers(0, HEADS, -1)), b("Shape", s))
    fused = rewritten(analysed(b, merged(b, b("Softmax", s, axis=-1))))
    assert "Shape" not in [node.op_type for node in fused.graph.node]


def test_a_size_that_nothing_tells() -> None:
    """The query is read as [batch, rows, heads * head], and no dimension of it is `heads * rows`."""
    b = Builder(FLOAT16)
    s = b("Reshape", scores(b), b("Concat", b.integers(-1), size(b, "key", 1), axis=0))
    p = b(
        "Reshape",
        b("Softmax", s, axis=-1),
        b("Concat", b("Shape", "query", end=1), b.integers(HEADS, -1), size(b, "key", 1), axis=0),
    )
    analysis = analysed(b, [*merged(b, p), b("Cast", b("Shape", s), to=TensorProto.FLOAT)])
    assert not attentions(analysis)
    assert {entry.reason for entry in analysis.skipped} == {"score_is_read"}


def test_what_else_reads_them_still_counts() -> None:
    b = Builder(FLOAT16)
    s = scores(b)
    analysis = analysed(
        b, [*merged(b, b("Softmax", s, axis=-1)), b("Cast", b("Shape", s), to=b.dtype), b("ReduceMax", s)]
    )
    assert not attentions(analysis)
    assert "score_is_read" in {entry.reason for entry in analysis.skipped}


def test_keys_that_the_model_stores_tell_nothing() -> None:
    """Their length is a number; a weight that is stored in another order has another name."""
    b = Builder(FLOAT16)
    keys = b.array(np.random.default_rng(0).normal(size=(1, HEADS, HEAD, 24)), "keys")
    s = b("MatMul", split_heads(b, "query", "rows"), keys)
    outputs = [*merged(b, b("Softmax", s, axis=-1), 24), b("Cast", b("Shape", s), to=b.dtype)]
    analysis = analysed(b, outputs)
    assert len(attentions(analysis)) == 1
    model, feed = analysis.model.proto, feeds(analysis.model.proto, {"batch": 2, "rows": 9})
    assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(rewritten(analysis), feed)]


def test_inputs_tell_what_a_factor_may_not() -> None:
    """A Slice of what is computed in fp16 is rounded for being read. An input that nobody reads is no value to tell."""
    b = Builder(FLOAT16)
    b.input("aside", ("batch", "rows"))

    def part(name: str, tokens: str) -> str:
        whole = b("Mul", b.input(name, ("batch", HEADS, tokens, 2 * HEAD)), number(b, 1.3))
        return b("Slice", whole, b.integers(0), b.integers(HEAD), b.integers(-1))

    s = b("MatMul", part("query", "rows"), b("Transpose", part("key", "keys"), perm=(0, 1, 3, 2)))
    outputs = [*merged(b, b("Softmax", s, axis=-1)), b("Cast", b("Shape", s), to=b.dtype)]
    analysis = analysed(b, outputs)
    assert len(attentions(analysis)) == 1
    (told,) = (shape for site in analysis.sites for shape in site.match.told.values())
    assert "query" in dict(told.bases)
    assert "aside" not in dict(told.bases)
    model, feed = analysis.model.proto, feeds(analysis.model.proto, {"batch": 2, "rows": 9, "keys": 12})
    assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(rewritten(analysis), feed)]
