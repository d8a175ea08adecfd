"""Small models of one product under masks of type bool, and what to feed them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, helper

from tests.helpers.matching import draw
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder

HEADS, DEPTH, COLUMNS = 3, 64, 144


def scores(b: Builder, transposed: bool = True) -> str:
    q = b.input("q", ("batch", HEADS, "rows", DEPTH))
    keys = b.input("keys", ("batch", HEADS, *(("rows", DEPTH) if transposed else (DEPTH, "rows"))))
    return b(
        "Mul", b("MatMul", q, b("Transpose", keys, perm=(0, 1, 3, 2)) if transposed else keys), b.array(DEPTH**-0.5)
    )


def linear(b: Builder) -> str:
    x = b.input("x", ("batch", "rows", DEPTH))
    return b("Add", b("MatMul", x, b.array(draw(DEPTH, COLUMNS) / 8, "weight")), b.array(draw(COLUMNS), "bias"))


def causal(b: Builder) -> str:
    return b("Where", b.input("mask", ("batch", 1, "rows", "rows"), BOOL), scores(b), b.array(-np.inf))


def padding(b: Builder) -> str:
    lowest = b.array(np.finfo(b.numpy).min)
    return b("Where", b.input("mask", ("batch", 1, 1, "rows"), BOOL), lowest, scores(b, transposed=False))


def every_kind(b: Builder) -> str:
    t = linear(b)
    t = b("Where", b.mask(draw(COLUMNS, seed=1) > 0, "stored"), t, b("Tanh", t))
    t = b("Where", b.input("column", ("batch", "rows", 1), BOOL), b.array(-2.0), t)
    t = b("Where", b.input("scalar", (1, 1), BOOL), t, b.input("other", ("batch", "rows", COLUMNS)))
    return b("Where", b.input("tile", ("rows", COLUMNS), BOOL), b("Neg", t), t)


def transposed(b: Builder) -> str:
    t = b("Transpose", linear(b), perm=(0, 2, 1))
    return b("Where", b.input("mask", ("batch", COLUMNS, "rows"), BOOL), t, b.array(0.0))


def scaled_by_a_mask(b: Builder) -> str:
    mask = b("Not", b.input("mask", ("batch", "rows", 1), BOOL))
    return b("Mul", b("Gelu", linear(b)), b("Cast", mask, to=b.dtype))


def expanded(b: Builder) -> str:
    t = linear(b)
    mask = b("Expand", b.input("mask", ("rows", 1), BOOL), b("Shape", t))
    return b("Where", b("Not", mask), t, b.array(-2.0))


def zeros_like(b: Builder) -> str:
    """Zeros of the shape of what they are chosen beside, as TorchScript makes them."""
    t = linear(b)
    zeros = b("ConstantOfShape", b("Shape", t), value=helper.make_tensor("value", b.dtype, [1], [0.0]))
    return b("Tanh", b("Where", b.input("mask", ("batch", "rows", 1), BOOL), t, zeros))


def full_like(b: Builder) -> str:
    """A number of that shape by torch.export, which writes out where a Shape starts."""
    s = scores(b)
    filled = b("Expand", b.array(-100.0), b("Shape", s, start=0))
    return b("Where", b.input("mask", ("batch", 1, "rows", "rows"), BOOL), s, filled)


MODELS: tuple[Callable[[Builder], str], ...] = (
    *(causal, padding, every_kind, transposed, scaled_by_a_mask, expanded, zeros_like, full_like),
)


def feed(model: ModelProto, batch: int, rows: int) -> dict[str, np.ndarray]:
    sizes, made = {"batch": batch, "rows": rows}, {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        numbers = np.asarray(draw(*shape, seed=len(value.name)))
        made[value.name] = numbers > 0 if kind.elem_type == BOOL else numbers.astype(NUMPY[kind.elem_type])
    return made


NUMPY = {FLOAT: np.float32, FLOAT16: np.float16}
SIZES = [(2, 5), (1, 16), (2, 144), (3, 37)]  # pitches that are odd, even, and multiples of 16


def built(graph: Callable[[Builder], str], dtype: int) -> ModelProto:
    b = Builder(dtype)
    return b.model(graph(b))
