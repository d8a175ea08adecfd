"""Parts of pairs times operands: what has a number for each part makes columns of both, and all else what it did."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning, draw, only
from tests.helpers.onnx_build import Builder
from tests.helpers.rotary_models import HEAD, HEADS, K, product

Meet = Callable[[Builder, list[str]], str]
PAIRS = HEAD // 2


def parts_of(b: Builder, count: int) -> list[str]:
    """`y.reshape(..., -1, 1, count)[..., i]` of the heads of a product, each."""
    heads = product(b, "kn", True, HEADS, HEAD, K)
    grouped = b("Reshape", heads, b.integers(0, 0, 0, HEAD // count, 1, count))
    return [b("Gather", grouped, b.scalar(index), axis=-1) for index in range(count)]


def summed(*shape: int | str, count: int = 2) -> Meet:
    """The sum of parts, each times an input of a shape."""

    def meet(b: Builder, parts: list[str]) -> str:
        inputs = [b.input(f"f{index}", shape) for index in range(count)]
        total, *others = (b("Mul", *each) for each in zip(inputs, parts, strict=True))
        for other in others:
            total = b("Add", total, other)
        return total

    return meet


def first_alone(b: Builder, parts: list[str]) -> str:
    """Both columns are made of one part."""
    return b("Mul", parts[0], b.input("f", (PAIRS, 2)))


def chosen(b: Builder, parts: list[str]) -> str:
    """Which part each of both columns is of."""
    return b("Where", b("Greater", b.input("f", ("rows", PAIRS, 2)), b.array(0.0)), *parts)


def beside_a_part(b: Builder, parts: list[str]) -> str:
    """Both columns have the other part added."""
    return b("Add", b("Mul", parts[0], b.input("f", ("rows", PAIRS, 2))), parts[1])


def meeting(meet: Meet, count: int = 2) -> onnx.ModelProto:
    b = Builder(opset=18)
    flat = b("Reshape", meet(b, parts_of(b, count)), b.integers(0, 0, 0, HEAD))
    return b.model(b("Tanh", flat))


def check(model: onnx.ModelProto) -> None:
    """All that is fused computes what the model does, with batches of as many as there are parts too."""
    sizes = {"batch": 2, "rows": 5}
    shapes = {
        value.name: [sizes.get(dim.dim_param) or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    feed = {name: draw(*shape, seed=7).astype(np.float32) for name, shape in shapes.items()}
    for site in analyse_model(model, resolve("sm_90a", list), keep_weights=True).sites:
        check_meaning(model, site.fusion, feed)


WHOLE: list[Meet] = [
    summed("rows", PAIRS, 2), summed(PAIRS, 2), summed(1, 1, "rows", PAIRS, 2), summed(1, HEADS, 1, PAIRS, 2),
    summed("batch", 1, "rows", PAIRS, 2), summed("batch", HEADS, "rows", PAIRS, 2), chosen,
]  # fmt: skip


@pytest.mark.parametrize("meet", WHOLE)
def test_two_parts_make_both_columns_of_each_pair(meet: Meet) -> None:
    model = meeting(meet)
    _, fusion = only(model)
    assert (fusion.pattern, len(fusion.parts), len(fusion.outs)) == ("rotary_gemm", 2, 2)
    assert fusion.outputs[0].name == model.graph.output[0].name
    check(model)


OTHERS: list[Meet] = [
    summed(2), summed(1, 2), summed("rows", 1, 2), summed("batch", 1, 1, 1, 2), first_alone, beside_a_part,
]  # fmt: skip


@pytest.mark.parametrize("meet", OTHERS)
def test_whatever_else_a_part_is_multiplied_by(meet: Meet) -> None:
    check(meeting(meet))


def test_four_columns_take_turns() -> None:
    check(meeting(summed("rows", HEAD // 4, 4, count=4), 4))


@pytest.mark.parametrize("columns", [3, 4])
def test_more_numbers_than_parts_repeat_the_product(columns: int) -> None:
    """Neither of two parts has a column for each of them."""
    b = Builder(opset=18)
    total = summed("rows", PAIRS, columns)(b, parts_of(b, 2))
    check(b.model(b("Tanh", total)))
