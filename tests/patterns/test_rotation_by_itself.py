"""Rotary embeddings of any value: one kernel that turns halves or pairs, whatever made them."""

from __future__ import annotations

import pytest

from onnxfuse.device import resolve
from onnxfuse.ir.fusion import PART_AXIS
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder, run
from tests.helpers.rotary_models import (
    BY_THEMSELVES,
    HEAD,
    HEADS,
    ROTATIONS,
    K,
    Rotate,
    Turning,
    by_halves,
    feed,
    in_pairs,
    in_rows,
    sliced,
    turning,
)
from tests.tools.sweep import rewritten


def rotation(model) -> Site:
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    (found,) = [site for site in analysis.sites if site.fusion.pattern == "rotation"]
    return found


@pytest.mark.parametrize("value", BY_THEMSELVES)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_value_is_turned_by_one_kernel(rotate: Rotate, value: Turning) -> None:
    model = turning(value, rotate)
    site = rotation(model)
    assert (site.fusion.size(PART_AXIS), len(site.fusion.outs)) == (2, 2)
    check_meaning(model, site.fusion, feed(model, 5))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("value", BY_THEMSELVES)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_rewritten_model_computes_the_same_and_turns_nothing_else(rotate: Rotate, value: Turning, dtype: int) -> None:
    model = turning(value, rotate, dtype)
    fused = rewritten(analyse_model(model, resolve("sm_90a", list)))
    assert not {"Neg", "Mul", "Sub", "Add"} & {node.op_type for node in fused.graph.node}
    given = feed(model, 5)
    for before, after in zip(run(model, given), run(fused, given), strict=True):
        assert before.tobytes() == after.tobytes()


def test_a_transpose_of_rows_is_the_kernels() -> None:
    model = turning(BY_THEMSELVES[0], sliced, BFLOAT16)
    site = rotation(model)
    assert "Transpose" in {site.graph.nodes[index].op for index in site.match.nodes}
    assert site.fusion.operands[0].einops == "b m h (p n)"


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_heads_beside_each_other_turn_in_their_rows(dtype: int) -> None:
    model = in_rows(dtype)
    site = rotation(model)
    assert site.fusion.operands[0].einops == "b m (n1 p n2)"
    if dtype == FLOAT:
        check_meaning(model, site.fusion, feed(model, 5))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("rotate", [sliced, by_halves, in_pairs])
def test_q_and_k_of_one_product_turn_and_no_copy_of_a_range_is_left(rotate: Rotate, dtype: int) -> None:
    """As in Phi-3: the product stores q, k and v apart, from where the rotations read them before their Transposes."""
    b = Builder(dtype, opset=18)
    packed = b("MatMul", b.input("x", ("batch", "rows", K)), b.array(draw(K, 3 * HEADS * HEAD) / K**0.5, "weight"))
    ranges = b("Split", packed, outputs=3, axis=-1, num_outputs=3)
    heads = [b("Reshape", each, b.integers(0, 0, HEADS, HEAD)) for each in ranges]
    q, k, v = (b("Transpose", each, perm=[0, 2, 1, 3]) for each in heads)
    model = b.model(rotate(b, q, HEAD), rotate(b, k, HEAD), v)
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert [site.fusion.pattern for site in analysis.sites] == ["column_ranges", "rotation", "rotation"]
    fused = rewritten(analysis)
    assert not {"Split", "MatMul"} & {node.op_type for node in fused.graph.node}
    given = feed(model, 5)
    for before, after in zip(run(model, given), run(fused, given), strict=True):
        assert before.tobytes() == after.tobytes()


def test_a_value_that_others_read_is_still_theirs() -> None:
    b = Builder(opset=18)
    x = b("Exp", b.input("x", ("batch", HEADS, "rows", HEAD)))
    model = b.model(sliced(b, x, HEAD), b("ReduceMax", x))
    assert x not in [tensor.name for tensor in rotation(model).fusion.outputs]
    check_meaning(model, rotation(model).fusion, feed(model, 5))


def test_what_turns_nothing_is_no_rotation() -> None:
    b = Builder(opset=18)
    x = b("Exp", b.input("x", ("batch", HEADS, "rows", HEAD)))
    first, second = b("Split", x, outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Concat", b("Neg", second), first, axis=-1), b("Neg", first))
    assert not analyse_model(model, resolve("sm_90a", list)).sites
