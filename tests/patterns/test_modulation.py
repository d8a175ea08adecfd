"""A product whose columns are more ranges than a kernel has outputs: shifts, scales and gates of adaptive norms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.limits import MAX_OUTS
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw, with_product
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten

K, N = 32, 16


def by_split(b: Builder, t: str, count: int) -> list[str]:
    return b("Split", t, outputs=count, axis=-1, num_outputs=count)


def by_slices(b: Builder, t: str, count: int) -> list[str]:
    return [b("Slice", t, *map(b.integers, (N * part, N * (part + 1), -1))) for part in range(count)]


def by_gemm(b: Builder, t: str, weight: str, bias: str) -> str:
    return b("Gemm", t, weight, bias)


def by_add(b: Builder, t: str, weight: str, bias: str) -> str:
    return b("Add", b("MatMul", t, weight), bias)


def modulated(b: Builder, x: str, ranges: list[str]) -> str:
    """A block for every three ranges; of one that is left over a gate."""
    return by_rows(b, x, [b("Unsqueeze", each, b.integers(1)) for each in ranges])


def by_rows(b: Builder, x: str, beside: list[str]) -> str:
    """The same of ranges that have a dimension of rows."""
    ones, zeros = b.array(np.ones(N)), b.array(np.zeros(N))
    for shift, scale, gate in zip(*[iter(beside)] * 3, strict=False):
        y = b("LayerNormalization", x, ones, zeros)
        y = b("Add", b("Mul", y, b("Add", scale, b.array(1.0))), shift)
        x = b("Add", x, b("Mul", gate, b("Softmax", y)))
    return b("Mul", x, beside[-1]) if len(beside) % 3 else x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("split", [by_split, by_slices])
@pytest.mark.parametrize("linear", [by_gemm, by_add])
@pytest.mark.parametrize("count", [6, 7, 9])
def test_the_product_and_its_bias_are_one_kernel_before_the_ranges(
    count: int, linear: Callable[[Builder, str, str, str], str], split: Callable[..., list[str]], dtype: int
) -> None:
    """And what activates its input belongs to the product before it."""
    assert count > MAX_OUTS
    b = Builder(dtype)
    t = by_gemm(b, b.input("t", ("batch", K)), b.array(draw(K, K) / 8), b.array(draw(K)))
    t = linear(b, b("Mul", t, b("Sigmoid", t)), b.array(draw(K, count * N) / 8), b.array(draw(count * N)))
    model = b.model(modulated(b, b.input("x", ("batch", "rows", N)), split(b, t, count)))
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert not analysis.skipped
    first, second = with_product(analysis)
    assert len(analysis.sites) - 2 == count // 3, "and each normalisation one of its own, before its modulation"
    assert first.fusion.features == ("activation", "bias")
    assert [tensor.einops for tensor in second.fusion.outputs] == ["m n"]
    assert (second.fusion.features, second.fusion.size("n")) == (("bias",), count * N)
    assert second.match.stop.reason == "several_readers"
    feed = {"t": draw(2, K, seed=3).astype(b.numpy), "x": draw(2, 5, N, seed=4).astype(b.numpy)}
    assert run(rewritten(analysis), feed)[0].tobytes() == run(model, feed)[0].tobytes()


@pytest.mark.parametrize("linear", [by_gemm, by_add])
def test_no_range_of_which_nothing_is_moved_is_stored_apart(linear: Callable[[Builder, str, str, str], str]) -> None:
    """As in PRX and Flux 2, where one dimension of rows is made for all ranges: what adds 1 to some needs no kernel."""
    b = Builder()
    t = linear(b, b.input("t", ("batch", K)), b.array(draw(K, 6 * N) / 8), b.array(draw(6 * N)))
    ranges = by_split(b, b("Unsqueeze", t, b.integers(1)), 6)
    model = b.model(by_rows(b, b.input("x", ("batch", "rows", N)), ranges))
    assert not any(site.match.shared for site in analyse_model(model, resolve("sm_90a", list)).sites)
