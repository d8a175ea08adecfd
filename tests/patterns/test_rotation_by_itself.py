"""Rotary embeddings of any value: one kernel that turns halves or pairs, whatever made them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.ir.attention import Attention
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
    TOP,
    K,
    Rotate,
    Turning,
    by_halves,
    feed,
    half,
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


def block_of_patches(dtype: int, rows: int | str) -> onnx.ModelProto:
    """An attention over the patches of images as Qwen-VL's have it: no batch, heads behind the rows, turned in fp32."""
    b = Builder(dtype, opset=18)
    x = b.input("x", (rows, K))
    packed = b("MatMul", x, b.array(draw(K, 3 * HEADS * HEAD) / K**0.5, "weight"))
    parts = b("Transpose", b("Reshape", packed, b.integers(-1, 3, HEADS, HEAD)), perm=[1, 0, 2, 3])
    q, k, v = (b("Squeeze", part, b.integers(0)) for part in b("Split", parts, outputs=3, axis=0, num_outputs=3))
    q, k = (b("Cast", turned_in_fp32(b, each, rows), to=dtype) for each in (q, k))
    q, k, v = (b("Unsqueeze", b("Transpose", each, perm=[1, 0, 2]), b.integers(0)) for each in (q, k, v))
    scale = b.array(np.array(HEAD**-0.25))
    scores = b("MatMul", b("Mul", q, scale), b("Mul", b("Transpose", k, perm=[0, 1, 3, 2]), scale))
    out = b("Transpose", b("MatMul", b("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return b.model(b("Reshape", out, b.integers(-1, HEADS * HEAD)))


def turned_in_fp32(b: Builder, x: str, rows: int | str) -> str:
    """`x.float() * cos + rotate_half(x.float()) * sin`, of tables without heads."""
    known = {value.name for value in b.inputs}
    cos, sin = (name if name in known else b.input(name, (rows, 1, HEAD), FLOAT) for name in ("cos", "sin"))
    wide = b("Cast", x, to=FLOAT)
    first, second = half(b, wide, 0, HEAD // 2), half(b, wide, HEAD // 2, TOP)
    other = b("Concat", b("Neg", second), first, axis=-1)
    return b("Add", b("Mul", wide, cos), b("Mul", other, sin))


@pytest.mark.parametrize("rows", [24, "rows"])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_an_attention_reads_through_what_is_behind_what_turns(dtype: int, rows: int | str) -> None:
    """What moves and scales keys is the attention's, and no kernel stores them with their columns apart."""
    model = block_of_patches(dtype, rows)
    analysis = analyse_model(model, resolve("sm_90a", list), keep_weights=True)
    assert sorted(site.fusion.pattern for site in analysis.sites) == [
        *("attention", "column_ranges", "rotation", "rotation")
    ]
    (attention,) = [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]
    assert attention.keys.axes[-1] == "k"
    fused = rewritten(analysis)
    assert not {node.op_type for node in fused.graph.node if not node.domain}
    given = {value.name: draw(24, *((K,) if value.name == "x" else (1, HEAD))) for value in model.graph.input}
    given = {name: value.astype(np.float16 if name == "x" and dtype == FLOAT16 else np.float32)
             for name, value in given.items()}  # fmt: skip
    for before, after in zip(run(model, given), run(fused, given), strict=True):
        assert before.tobytes() == after.tobytes()


def keys_in_three_dimensions(dtype: int) -> onnx.ModelProto:
    """An attention as torch.export writes it: keys that turned lose a dimension for their Transpose, and are scaled."""
    b = Builder(dtype, opset=18)
    packed = b("MatMul", b.input("x", (2, 24, K)), b.array(draw(K, 3 * HEADS * HEAD) / K**0.5, "weight"))
    for table in ("cos", "sin"):
        b.input(table, (1, 1, 24, HEAD))
    ranges = b("Split", packed, outputs=3, axis=-1, num_outputs=3)
    heads = [b("Transpose", b("Reshape", each, b.integers(2, 24, HEADS, HEAD)), perm=[0, 2, 1, 3]) for each in ranges]
    q, k, v = (*(sliced(b, each, HEAD) for each in heads[:2]), heads[2])
    keys = b("Transpose", b("Reshape", k, b.integers(-1, 24, HEAD)), perm=[0, 2, 1])
    keys = b("Reshape", keys, b.integers(2, HEADS, HEAD, 24))
    scale = b.array(np.array(HEAD**-0.25))
    scores = b("MatMul", b("Mul", q, scale), b("Mul", keys, scale))
    return b.model(b("Transpose", b("MatMul", b("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3]))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_an_attention_scales_keys_that_a_rotation_stores_without_a_batch(dtype: int) -> None:
    """A Reshape that the rotation has in front is not read through; the Transpose and the scale behind it are."""
    model = keys_in_three_dimensions(dtype)
    analysis = analyse_model(model, resolve("sm_90a", list), keep_weights=True)
    (attention,) = [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]
    assert attention.keys.axes[-1] == "k"
    fused = rewritten(analysis)
    assert not {"MatMul", "Mul", "Softmax"} & {node.op_type for node in fused.graph.node}
    given = feed(model, 24)
    for before, after in zip(run(model, given), run(fused, given), strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("op", ["Mul", "Add"])
@pytest.mark.parametrize("shape", [(), (HEADS * HEAD,)])
def test_a_range_may_be_adjusted_in_front_of_what_turns_it(shape: tuple[int, ...], op: str, dtype: int) -> None:
    """A scale, a bias of q alone, what an adapter scales keys by: steps of the product, which turns nothing."""
    b = Builder(dtype, opset=18)
    packed = b("MatMul", b.input("x", ("batch", "rows", K)), b.array(draw(K, 3 * HEADS * HEAD) / K**0.5, "weight"))
    q, k, v = b("Split", packed, outputs=3, axis=-1, num_outputs=3)
    k = b(op, k, b.array(draw(*shape, seed=3)))
    q, k = (b("Reshape", each, b.integers(0, 0, HEADS, HEAD)) for each in (q, k))
    q, k = (sliced(b, b("Transpose", each, perm=[0, 2, 1, 3]), HEAD) for each in (q, k))
    model = b.model(q, k, v)
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert [site.fusion.pattern for site in analysis.sites] == ["column_ranges", "rotation", "rotation"]
    fused = rewritten(analysis)
    assert not {"Neg", "Split", op} & {node.op_type for node in fused.graph.node}
    given = feed(model, 5)
    for before, after in zip(run(model, given), run(fused, given), strict=True):
        assert before.tobytes() == after.tobytes()


def test_a_product_turns_what_is_added_to_it() -> None:
    """A range of another value beside its bias: its kernel has the sum, and the rotation as it always had."""
    b = Builder(opset=18)
    x = b.input("x", ("batch", "rows", K))
    beside, _ = b(
        "Split", b("Tanh", b.input("y", ("batch", "rows", 2 * HEADS * HEAD))), outputs=2, axis=-1, num_outputs=2
    )
    y = b("Add", b("MatMul", x, b.array(draw(K, HEADS * HEAD) / K**0.5, "weight")), beside)
    y = b("Add", y, b.array(draw(HEADS * HEAD, seed=1), "bias"))
    y = b("Transpose", b("Reshape", y, b.integers(0, 0, HEADS, HEAD)), perm=[0, 2, 1, 3])
    analysis = analyse_model(b.model(sliced(b, y, HEAD)), resolve("sm_90a", list))
    assert [site.fusion.pattern for site in analysis.sites] == ["rotary_gemm"]
