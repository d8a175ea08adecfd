"""Operands of scores that have some axes of a kernel's loop and lack others: they are expanded in front of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.attention_graphs import HEAD, HEADS, feeds, number
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten

WINDOWS, TOKENS = 4, 16
SIDE = 4  # of the image that the tokens are
Operand = Callable[[Builder, str, tuple[int | str, ...]], str]


def analysed(b: Builder, outputs: list[str]) -> Analysis:
    return analyse_model(b.model(*outputs), [ARCHITECTURES["sm_90a"]])


def attentions(analysis: Analysis) -> list[Attention]:
    return [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]


def given(b: Builder, name: str, shape: tuple[int | str, ...]) -> str:
    return b.input(name, shape)


def stored(b: Builder, name: str, shape: tuple[int | str, ...]) -> str:
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    return b.array(np.random.default_rng(len(name)).normal(size=sizes), name)


def computed(b: Builder, name: str, shape: tuple[int | str, ...]) -> str:
    return b("Mul", b.input(name, shape), number(b, 1.3))


def moved(b: Builder, name: str, shape: tuple[int | str, ...]) -> str:
    place = len(shape) - 1 - shape[::-1].index(1)
    return b("Unsqueeze", computed(b, name, (*shape[:place], *shape[place + 1 :])), b.integers(place))


def windows(b: Builder, images: int | str = "images") -> tuple[str, str, str]:
    """Query, keys and values of [images * windows, heads, tokens, size]."""

    def of_heads(name: str, *perm: int) -> str:
        whole = b.input(name, (images, WINDOWS, TOKENS, HEADS * HEAD))
        return b("Transpose", b("Reshape", whole, b.integers(-1, TOKENS, HEADS, HEAD)), perm=perm)

    return of_heads("query", 0, 2, 1, 3), of_heads("key", 0, 2, 3, 1), of_heads("value", 0, 2, 1, 3)


def shifted(b: Builder, mask: Operand, images: int | str = "images") -> list[str]:
    """Swin v2: the mask is of windows, the relative position bias of heads."""
    query, keys, values = windows(b, images)
    s = b("Add", b("MatMul", query, keys), b.input("bias", (HEADS, TOKENS, TOKENS)))
    s = b("Reshape", s, b.integers(-1, WINDOWS, HEADS, TOKENS, TOKENS))
    s = b("Add", s, mask(b, "mask", (1, WINDOWS, 1, TOKENS, TOKENS)))
    s = b("Reshape", s, b.integers(-1, HEADS, TOKENS, TOKENS))
    return [b("Identity", b("Transpose", b("MatMul", b("Softmax", s, axis=-1), values), perm=(0, 2, 1, 3)))]


def decomposed(b: Builder, bias: Operand) -> list[str]:
    """ViTDet: the bias is one of a key's row and one of its column in the image."""
    query = b.input("query", ("batch", SIDE * SIDE, HEAD))
    keys = b("Transpose", b.input("key", ("batch", SIDE * SIDE, HEAD)), perm=(0, 2, 1))
    s = b("Reshape", b("MatMul", query, keys), b.integers(-1, SIDE, SIDE, SIDE, SIDE))
    s = b("Add", s, bias(b, "vertical", ("batch", SIDE, SIDE, SIDE, 1)))
    s = b("Add", s, bias(b, "horizontal", ("batch", SIDE, SIDE, 1, SIDE)))
    p = b("Softmax", b("Reshape", s, b.integers(-1, SIDE * SIDE, SIDE * SIDE)), axis=-1)
    return [b("Identity", b("MatMul", p, b.input("value", ("batch", SIDE * SIDE, HEAD))))]


FORMS = {"shifted": shifted, "decomposed": decomposed}


def check(analysis: Analysis) -> None:
    """The fused model has the bits of the original."""
    model, fused = analysis.model.proto, rewritten(analysis)
    for count in (1, 3):
        feed = feeds(model, {"batch": count, "images": count})
        assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
@pytest.mark.parametrize("operand", [given, stored, computed, moved], ids=lambda operand: operand.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_an_operand_with_a_part_of_a_loop_is_expanded(form: str, operand: Operand, dtype: int) -> None:
    b = Builder(dtype)
    analysis = analysed(b, FORMS[form](b, operand))
    assert len(attentions(analysis)) == 1
    assert not analysis.skipped
    check(analysis)


def test_it_reads_the_axes_that_it_lacked() -> None:
    b = Builder(FLOAT16)
    (attention,) = attentions(analysed(b, shifted(b, given)))
    bias, mask = attention.operands
    assert str(bias) == "f16[g, m, n]"
    assert str(mask) == "f16[b, h, 1, m, n]"
    b = Builder(FLOAT16)
    (attention,) = attentions(analysed(b, decomposed(b, given)))
    assert [str(operand) for operand in attention.operands] == ["f16[b, h, m, n1, n2]"] * 2


def test_a_mask_of_a_batch_of_one_is_read_as_it_is() -> None:
    """Nothing is stepped along an axis of size 1."""
    b = Builder(FLOAT16)
    analysis = analysed(b, shifted(b, given, images=1))
    assert len(attentions(analysis)) == 1
    assert not {"Tile", "Expand"} & {node.op_type for node in rewritten(analysis).graph.node}


@pytest.mark.parametrize("operand", [given, stored], ids=lambda operand: operand.__name__)
def test_a_mask_of_fewer_dimensions(operand: Operand) -> None:
    b = Builder(FLOAT16)
    analysis = analysed(b, shifted(b, lambda b, name, shape: operand(b, name, shape[1:])))
    assert len(attentions(analysis)) == 1
    check(analysis)


def test_a_computed_mask_of_fewer_dimensions() -> None:
    """A Tile adds no dimensions, and beside an Expand the CPU provider may round otherwise."""
    for dtype, found in ((FLOAT16, 0), (FLOAT, 1)):
        b = Builder(dtype)
        analysis = analysed(b, shifted(b, lambda b, name, shape: computed(b, name, shape[1:])))
        assert len(attentions(analysis)) == found
        check(analysis)


def test_a_mask_of_windows_by_a_condition() -> None:
    b = Builder(FLOAT16)
    query, keys, values = windows(b)
    s = b("Reshape", b("MatMul", query, keys), b.integers(-1, WINDOWS, HEADS, TOKENS, TOKENS))
    s = b("Where", b.input("mask", (1, WINDOWS, 1, TOKENS, TOKENS), BOOL), s, number(b, -np.inf))
    p = b("Softmax", b("Reshape", s, b.integers(-1, HEADS, TOKENS, TOKENS)), axis=-1)
    analysis = analysed(b, [b("Identity", b("MatMul", p, values))])
    assert len(attentions(analysis)) == 1
    check(analysis)
