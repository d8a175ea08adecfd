"""Rotary embeddings behind a product: which forms are one fusion, and what it means."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.ir.fusion import PART_AXIS
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning, only
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.rotary_models import HEAD, HEADS, ROTATIONS, K, Rotate, feed, half, product, rotary, sliced


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_rotation_is_one_fusion(rotate: Rotate, order: str, bias: bool, scaled: bool) -> None:
    model = rotary(rotate, order, bias, scaled=scaled)
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.rhs), len(fusion.parts)) == ("rotary_gemm", 1, 2)
    assert fusion.size(PART_AXIS) == 2
    (out,) = fusion.outputs
    assert out.name == model.graph.output[0].name
    check_meaning(model, fusion, feed(model, 5))
    assert any(model.graph.node[index].op_type == "Concat" for index in match.nodes)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_of_one_head_and_of_three(rotate: Rotate, heads: int) -> None:
    model = rotary(rotate, heads=heads)
    _, fusion = only(model)
    assert fusion.pattern == "rotary_gemm"
    check_meaning(model, fusion, feed(model, 5))


def test_a_part_of_each_head_leaves_what_was_fused_before() -> None:
    """A quarter of a head's columns turns: no equal halves, and what needs none of them is still a fusion."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    turning, rest = half(b, y, 0, HEAD // 4), half(b, y, HEAD // 4, HEAD)
    model = b.model(b("Concat", sliced(b, turning, HEAD // 4), rest, axis=-1))
    _, fusion = only(model)
    assert (fusion.pattern, len(fusion.parts)) == ("gemm_epilogue", 1)
    check_meaning(model, fusion, feed(model, 5))


def test_halves_that_others_read_stay_apart() -> None:
    """A half of each head is no output of a kernel that stores both as one."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    first = half(b, y, 0, HEAD // 2)
    model = b.model(sliced(b, y, HEAD), b("Exp", first))
    _, fusion = only(model)
    check_meaning(model, fusion, feed(model, 5))


def test_three_ranges_put_together_are_no_halves() -> None:
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    first, second = half(b, y, 0, HEAD // 2), half(b, y, HEAD // 2, HEAD)
    model = b.model(b("Relu", b("Concat", second, first, second, axis=-1)))
    _, fusion = only(model)
    check_meaning(model, fusion, feed(model, 5) if len(model.graph.input) > 1 else _x(model))


def _x(model) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((2, 5, K)).astype(np.float32)}


def test_ranges_in_another_order_are_put_where_they_belong() -> None:
    """No rotation: the halves of each head change places, and one is squashed."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    first, second = half(b, y, 0, HEAD // 2), half(b, y, HEAD // 2, HEAD)
    model = b.model(b("Relu", b("Concat", b("Tanh", second), first, axis=-1)))
    _, fusion = only(model)
    assert len(fusion.parts) == 2
    check_meaning(model, fusion, _x(model))


def test_halves_and_pairs_of_heads_may_meet_in_a_gate() -> None:
    for start, end, step in ((0, HEAD // 2, 1), (0, HEAD, 2)):
        b = Builder()
        y = product(b, "kn", True, HEADS, HEAD, K)
        second = HEAD // 2 if step == 1 else 1
        axes, steps = b.integers(-1), b.integers(step)
        value = b("Slice", y, b.integers(start), b.integers(end), axes, steps)
        gate = b("Slice", y, b.integers(second), b.integers(HEAD), axes, steps)
        model = b.model(b("Mul", value, b("Sigmoid", gate)))
        _, fusion = only(model)
        assert (fusion.pattern, len(fusion.parts)) == ("split_gemm", 2)
        check_meaning(model, fusion, _x(model))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_every_architecture_has_kernels(rotate: Rotate, dtype: int) -> None:
    analysis = analyse_model(rotary(rotate, dtype=dtype), resolve("sm_80,sm_89,sm_90a,sm_120", list))
    (site,) = analysis.sites
    assert len(site.plans) == 4
    assert site.fusion.pattern == "rotary_gemm"
