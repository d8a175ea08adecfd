"""Masks with as many ones as there are scores: what may read the mask itself, and with which elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto

from onnxfuse.device import resolve
from onnxfuse.graph.load import load_model
from onnxfuse.pipeline import analyse_model
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder, run
from tests.tools import sweep

HEADS, TOKENS, HEAD = 4, 6, 8
SCORES = ("batch", HEADS, TOKENS, TOKENS)
MASKS = [("batch", 1, 1, TOKENS), (1, 1, TOKENS, TOKENS), (TOKENS,), (3, "batch", HEADS, TOKENS, TOKENS)]


def ones_and(b: Builder, value: str, mask: str, turned: bool = False, one: bool = True) -> str:
    """As tf2onnx writes `tf.ones_like(value, bool) & mask`."""
    shape = b("Cast", b("Cast", b("Shape", value), to=TensorProto.INT32), to=TensorProto.INT64)
    ones = b("Expand", b.mask(np.bool_(one)), shape)
    return b("And", mask, ones) if turned else b("And", ones, mask)


def selected(b: Builder, scores: str, mask: str) -> str:
    """As tf2onnx writes `tf.where(mask, scores, lowest)`."""
    kept = b("Mul", b("Cast", mask, to=b.dtype), scores)
    return b("Add", kept, b("Mul", b.array(-1e4), b("Cast", b("Not", mask), to=b.dtype)))


def chosen(b: Builder, scores: str, mask: str) -> str:
    return b("Where", mask, scores, b.array(-1e4))


def chosen_of_what_is_made_of_it(b: Builder, scores: str, mask: str) -> str:
    return b("Where", b("Not", mask), b.array(-1e4), b("Mul", scores, b.array(0.5)))


FORMS = (selected, chosen, chosen_of_what_is_made_of_it)


def feed(mask: tuple[int | str, ...], dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = [size if isinstance(size, int) else 2 for size in mask]
    return {"scores": rng.standard_normal((2, *SCORES[1:])).astype(dtype), "mask": rng.random(sizes) > 0.4}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_mask_itself_makes_the_same(
    form: Callable[[Builder, str, str], str], shape: tuple[int | str, ...], turned: bool
) -> None:
    """Also a mask that is larger than the scores."""
    b = Builder(FLOAT)
    scores, mask = b.input("scores", SCORES), b.input("mask", shape, BOOL)
    model = b.model(form(b, scores, ones_and(b, scores, mask, turned)))
    loaded = load_model(model).proto
    assert not {"And", "Expand", "Shape"} & {node.op_type for node in loaded.graph.node}
    np.testing.assert_array_equal(*(run(each, feed(shape))[0] for each in (model, loaded)))


def test_two_of_them_one_behind_the_other() -> None:
    b = Builder(FLOAT)
    scores, mask = b.input("scores", SCORES), b.input("mask", MASKS[0], BOOL)
    model = b.model(chosen(b, scores, ones_and(b, scores, ones_and(b, scores, mask))))
    loaded = load_model(model).proto
    assert "And" not in {node.op_type for node in loaded.graph.node}
    np.testing.assert_array_equal(*(run(each, feed(MASKS[0]))[0] for each in (model, loaded)))


STAYS: dict[str, Callable[[Builder, str, str], tuple[str, ...]]] = {
    "an output": lambda b, scores, mask: (
        b("Cast", large := ones_and(b, scores, mask), to=b.dtype),
        chosen(b, scores, large),
    ),
    "its number": lambda b, scores, mask: (b("ReduceSum", b("Cast", ones_and(b, scores, mask), to=b.dtype)),),
    "its shape": lambda b, scores, mask: (b("Cast", b("Shape", b("Not", ones_and(b, scores, mask))), to=b.dtype),),
    "zeros": lambda b, scores, mask: (chosen(b, scores, ones_and(b, scores, mask, one=False)),),
    "numbers alone": lambda b, scores, mask: (b("Where", ones_and(b, scores, mask), b.array(0.0), b.array(1.0)),),
    "of another value": lambda b, scores, mask: (chosen(b, b("ReduceMax", scores), ones_and(b, scores, mask)),),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_has_to_be_large_stays(case: str) -> None:
    b = Builder(FLOAT)
    scores, mask = b.input("scores", SCORES), b.input("mask", MASKS[0], BOOL)
    model = b.model(*STAYS[case](b, scores, mask))
    loaded = load_model(model).proto
    assert "And" in {node.op_type for node in loaded.graph.node}
    for found, wanted in zip(run(loaded, feed(MASKS[0])), run(model, feed(MASKS[0])), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_an_attention_reads_a_mask_of_keys(dtype: int) -> None:
    """As Keras' MultiHeadAttention has it: what is left beside the kernel is made of the mask alone."""
    b = Builder(dtype, opset=18)
    q, k, v = (b.input(name, ("batch", HEADS, TOKENS, HEAD)) for name in "qkv")
    mask = b.input("mask", MASKS[0], BOOL)
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), b.array(HEAD**-0.5))
    model = b.model(b("MatMul", b("Softmax", selected(b, scores, ones_and(b, scores, mask))), v))
    analysis = analyse_model(model, resolve("sm_90a", list))
    fused = sweep.rewritten(analysis)
    assert {node.op_type for node in fused.graph.node} <= {"FusedAttention_0", "Cast", "Not", "Mul"}
    assert {node.op_type for node in fused.graph.node} & {"FusedAttention_0"}
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((2, HEADS, TOKENS, HEAD)).astype(b.numpy) for name in "qkv"}
    assert not sweep.difference(model, fused, [given | {"mask": rng.random((2, 1, 1, TOKENS)) > 0.4}])
