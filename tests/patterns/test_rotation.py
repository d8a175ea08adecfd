"""Rotary embeddings behind a product: which forms are one fusion, and what it means."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import PART_AXIS
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning, draw, gate, only, sites
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.rotary_models import (
    HEAD,
    HEADS,
    ROTATIONS,
    TOP,
    K,
    Rotate,
    by_matrices,
    feed,
    half,
    product,
    rotary,
    sliced,
)


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
    whole = "Gather" if rotate is by_matrices else "Concat"
    assert any(model.graph.node[index].op_type == whole for index in match.nodes)


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


def test_projections_of_few_and_of_one_head_share_their_tables() -> None:
    """Grouped queries: the tables lie otherwise beside each of them."""
    b = Builder()
    x = b.input("x", ("batch", "rows", K))
    cos, sin = (b.input(name, (1, 1, "rows", HEAD)) for name in ("cos", "sin"))
    outs = []
    for heads in (HEADS, 1, 2):
        y = b("MatMul", x, b.array(draw(K, heads * HEAD) / K**0.5, f"weight{heads}"))
        y = b("Transpose", b("Reshape", y, b.integers(0, 0, heads, HEAD)), perm=[0, 2, 1, 3])
        first, second = b("Split", y, outputs=2, axis=-1, num_outputs=2)
        outs.append(b("Add", b("Mul", y, cos), b("Mul", b("Concat", b("Neg", second), first, axis=-1), sin)))
    model = b.model(*outs)
    found = sites(model)
    assert len(found) == 3
    for _, fusion in found:  # type: ignore[misc]
        assert fusion.pattern == "rotary_gemm"
        check_meaning(model, fusion, feed(model, 5))


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_what_passes_by_may_have_no_columns(rotate: Rotate) -> None:
    """Exporters write a head of which a part turns, also where the part is all of it."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    turning = half(b, y, 0, HEAD)
    model = b.model(b("Mul", b("Concat", rotate(b, turning, HEAD), half(b, y, HEAD, TOP), axis=-1), b.array(0.5)))
    _, fusion = only(model)
    assert fusion.pattern == "rotary_gemm"
    assert len(fusion.outputs) == 1
    check_meaning(model, fusion, feed(model, 5))


def test_a_value_of_no_columns_that_others_read_is_theirs() -> None:
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    none = half(b, y, HEAD, TOP)
    model = b.model(b("Concat", sliced(b, y, HEAD), none, axis=-1), b("ReduceSum", none))
    for found in sites(model):
        if not isinstance(found, NotFusable):
            check_meaning(model, found[1], feed(model, 5))


@pytest.mark.parametrize("step", [1, 2])
def test_what_needs_no_parts_has_columns_as_they_lie(step: int) -> None:
    """One half of each head, or of its pairs, is read by what no kernel computes."""
    b = Builder()
    y = b("Relu", product(b, "kn", True, HEADS, HEAD, K))
    part = b("Slice", y, b.integers(0), b.integers(HEAD // 2 * step), b.integers(-1), b.integers(step))
    model = b.model(b("CumSum", part, b.scalar(-1)), b("Neg", y))
    _, fusion = only(model)
    assert len(fusion.parts) == 1
    assert [axis.name for axis in fusion.axes] == ["b", "m", "n1", "n2", "k"]
    check_meaning(model, fusion, _x(model))


def test_halves_of_the_heads_change_places() -> None:
    """Neither halves of each head nor pairs: a step along the axis of heads is of one part or the next."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    first, last = b("Split", y, outputs=2, axis=1, num_outputs=2)
    model = b.model(b("Concat", b("Tanh", last), first, axis=1))
    _, fusion = only(model)
    assert len(fusion.parts) == 2
    check_meaning(model, fusion, _x(model))


@pytest.mark.parametrize("shape", [(HEADS, 1, 1), (HEADS, 1, HEAD), (1, 1, HEAD), (1, 1, 1)])
def test_what_is_added_may_be_of_heads_or_of_their_columns(shape: tuple[int, ...]) -> None:
    """One of heads alone is the same of both halves."""
    b = Builder()
    y = product(b, "kn", True, HEADS, HEAD, K)
    first, second = b("Split", y, outputs=2, axis=-1, num_outputs=2)
    together = b("Concat", b("Neg", second), first, axis=-1)
    model = b.model(b("Add", together, b.array(draw(*shape, seed=5), "beside")))
    _, fusion = only(model)
    assert len(fusion.parts) == 2
    check_meaning(model, fusion, _x(model))


def test_heads_that_have_a_number_each_meet_in_halves() -> None:
    b = Builder()
    y = b("Add", product(b, "kn", False, HEADS, HEAD, K), b.array(draw(HEADS, 1, 1), "beside"))
    model = b.model(gate(b, *b("Split", y, outputs=2, axis=1, num_outputs=2)))
    _, fusion = only(model)
    assert len(fusion.parts) == 2
    check_meaning(model, fusion, _x(model))


def test_two_columns_are_no_parts_to_put_together() -> None:
    b = Builder()
    y = b("MatMul", b.input("x", ("batch", "rows", K)), b.array(draw(K, 2), "weight"))
    first, second = b("Split", y, outputs=2, axis=-1, num_outputs=2)
    pairs = [b("Unsqueeze", each, b.integers(-1)) for each in (b("Tanh", second), first)]
    model = b.model(b("Mul", b("Concat", *pairs, axis=-1), b.array(2.0)))
    for found in sites(model):
        if not isinstance(found, NotFusable):
            check_meaning(model, found[1], _x(model))


def test_halves_and_pairs_of_heads_may_meet_in_a_gate() -> None:
    for start, end, step in ((0, HEAD // 2, 1), (0, HEAD, 2)):
        b = Builder()
        y = product(b, "kn", True, HEADS, HEAD, K)
        second = HEAD // 2 if step == 1 else 1
        axes, steps = b.integers(-1), b.integers(step)
        value = b("Slice", y, b.integers(start), b.integers(end), axes, steps)
        other = b("Slice", y, b.integers(second), b.integers(HEAD), axes, steps)
        model = b.model(gate(b, value, other))
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
