"""Columns that ScatterND writes in turn are put together as a Concat of pairs does: rotations that assign to slices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.rotary_models import layer_norm, root_mean_square
from tests.tools import sweep

BATCH, ROWS, HEADS, HEAD, K = 2, 5, 3, 8, 12
WIDTH = HEADS * HEAD


def of_a_value(b: Builder) -> str:
    return b("Tanh", b.input("x", (BATCH, ROWS, HEADS, HEAD)))


def of_a_product(b: Builder) -> str:
    y = b("MatMul", b.input("x", (BATCH, ROWS, K)), b.array(draw(K, WIDTH) / K**0.5, "weight"))
    return b("Reshape", y, b.integers(BATCH, ROWS, HEADS, HEAD))


def of_normalised_rows(b: Builder) -> str:
    """Of all heads together, as Wan's."""
    y = root_mean_square(b, b.input("x", (BATCH, ROWS, WIDTH)), WIDTH)
    return b("Reshape", y, b.integers(BATCH, ROWS, HEADS, HEAD))


def of_normalised_heads(b: Builder) -> str:
    return layer_norm(b, b.input("x", (BATCH, ROWS, HEADS, HEAD)), HEAD)


VALUES = [of_a_value, of_a_product, of_normalised_rows, of_normalised_heads]


def turned(b: Builder, x: str) -> list[str]:
    """The halves `x1 * cos - x2 * sin` and `x1 * sin + x2 * cos` of pairs."""
    pairs = b("Reshape", x, b.integers(BATCH, ROWS, HEADS, HEAD // 2, 2))
    ranges = (b("Slice", pairs, b.integers(start), b.integers(start + 1), b.integers(-1)) for start in (0, 1))
    first, second = (b("Squeeze", each, b.integers(-1)) for each in ranges)
    cos, sin = (b.array(draw(1, ROWS, 1, HEAD // 2, seed=seed), f"table{seed}") for seed in (7, 8))
    left = b("Sub", b("Mul", first, cos), b("Mul", second, sin))
    return [left, b("Add", b("Mul", first, sin), b("Mul", second, cos))]


def blank(b: Builder) -> str:
    """`torch.empty_like(x)`, with columns in front."""
    empty = b("Expand", b.array(np.zeros(())), b.integers(BATCH, ROWS, HEADS, HEAD))
    return b("Transpose", empty, perm=[3, 1, 2, 0])


def written(b: Builder, into: str, places: list[int], x: str, **attributes: str) -> str:
    """`into[places] = x`, both with columns in front."""
    front = b("Transpose", x, perm=[3, 1, 2, 0])
    return b("ScatterND", into, b.array(np.array(places).reshape(-1, 1), integer=True), front, **attributes)


def assigned(b: Builder, x: str) -> str:
    """`out[..., ::2], out[..., 1::2] = left, right`, as torch.export writes it."""
    left, right = turned(b, x)
    first = b("Identity", written(b, blank(b), [*range(0, HEAD, 2)], left))
    return b("Transpose", written(b, first, [*range(1, HEAD, 2)], right), perm=[3, 1, 2, 0])


def given(model: onnx.ModelProto, dtype: type = np.float32) -> dict[str, np.ndarray]:
    (x,) = model.graph.input
    return {"x": draw(*(dim.dim_value for dim in x.type.tensor_type.shape.dim), seed=3).astype(dtype)}


def analysed(model: onnx.ModelProto) -> Analysis:
    return analyse_model(model, resolve("sm_90a,sm_80", list), keep_weights=True)


@pytest.mark.parametrize("value", VALUES)
def test_a_rotation_that_assigns_to_slices_is_one_kernel(value: Callable[[Builder], str]) -> None:
    b = Builder(FLOAT, opset=18)
    model = b.model(assigned(b, value(b)))
    (site,) = analysed(model).sites
    check_meaning(model, site.fusion, given(model))
    left = {node.op_type for node in sweep.rewritten(analysed(model)).graph.node if not node.domain}
    assert left <= {"Tanh"}


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("value", VALUES)
def test_without_us_the_file_computes_the_same_bits(value: Callable[[Builder], str], dtype: int) -> None:
    b = Builder(dtype, opset=18)
    model = b.model(assigned(b, value(b)))
    feed = given(model, np.float16 if dtype == FLOAT16 else np.float32)
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [feed])


def some_are_kept(b: Builder, left: str, right: str) -> str:
    """Those that nobody writes are zeros."""
    return written(b, blank(b), [*range(0, HEAD, 2)], left)


def some_of_an_input_are_kept(b: Builder, left: str, right: str) -> str:
    return written(b, b("Transpose", right, perm=[3, 1, 2, 0]), [0, 1], b("Slice", left, *map(b.integers, (0, 2, 3))))


def written_twice(b: Builder, left: str, right: str) -> str:
    return written(b, written(b, blank(b), [*range(0, HEAD, 2)], left), [*range(0, HEAD, 2)], right)


def added(b: Builder, left: str, right: str) -> str:
    first = written(b, blank(b), [*range(0, HEAD, 2)], left, reduction="add")
    return written(b, first, [*range(1, HEAD, 2)], right, reduction="add")


def in_halves(b: Builder, left: str, right: str) -> str:
    first = written(b, blank(b), [*range(HEAD // 2)], left)
    return written(b, first, [*range(HEAD // 2, HEAD)], right)


def read_in_between(b: Builder, left: str, right: str) -> str:
    first = written(b, blank(b), [*range(0, HEAD, 2)], left)
    return b("Add", written(b, first, [*range(1, HEAD, 2)], right), first)


NEAR = [some_are_kept, some_of_an_input_are_kept, written_twice, added, in_halves, read_in_between]


@pytest.mark.parametrize("value", [of_a_value, of_normalised_heads])
@pytest.mark.parametrize("near", NEAR)
def test_what_keeps_something_or_writes_elsewhere_stays(
    near: Callable[..., str], value: Callable[[Builder], str]
) -> None:
    b = Builder(FLOAT, opset=18)
    model = b.model(b("Transpose", near(b, *turned(b, value(b))), perm=[3, 1, 2, 0]))
    rewritten = sweep.rewritten(analysed(model))
    assert "ScatterND" not in {node.op_type for body in rewritten.functions for node in body.node}
    assert not sweep.difference(model, rewritten, [given(model)])


def test_columns_that_were_scattered_are_read_behind_rows() -> None:
    """An attention would else read keys whose columns lie in front, element by element."""
    b = Builder(FLOAT16, opset=18)
    left, right = turned(b, of_normalised_heads(b))
    first = written(b, blank(b), [*range(0, HEAD, 2)], left)
    scattered = written(b, first, [*range(1, HEAD, 2)], right)
    q = b.input("q", (BATCH, HEADS, ROWS, HEAD))
    keys = b("Transpose", scattered, perm=[3, 2, 1, 0])
    scores = b("MatMul", q, b("Transpose", keys, perm=[0, 1, 3, 2]))
    model = b.model(b("MatMul", b("Softmax", scores, axis=-1), b.input("v", (BATCH, HEADS, ROWS, HEAD))))
    sites = analysed(model).sites
    assert any("rotary" in site.fusion.features for site in sites)
    assert scattered not in {tensor.name for site in sites for tensor in site.fusion.inputs}


def test_keys_of_which_some_were_scattered_are_read_before_their_transpose() -> None:
    """A range of their rows, as CogView assigns; what turns them for the product is no way back from columns first."""
    b = Builder(FLOAT16, opset=18)
    q, k, v = (b.input(name, (BATCH, HEADS, ROWS, HEAD)) for name in "qkv")
    some = b("Slice", k, *map(b.integers, (0, 1, 0)))
    keys = b("ScatterND", b("Tanh", k), b.array([[0]], integer=True), b("Tanh", some))
    scores = b("MatMul", q, b("Transpose", keys, perm=[0, 1, 3, 2]))
    model = b.model(b("MatMul", b("Softmax", scores, axis=-1), v))
    (site,) = analyse_model(model, resolve("sm_90a", list)).sites
    assert keys in {tensor.name for tensor in site.fusion.inputs}
