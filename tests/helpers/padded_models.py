"""Models of weights whose rows of k begin on no cache line, nor on 16 bytes."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from tests.end_to_end.test_weight_order import silu, weight
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, Builder

K, N = 150, 64  # of rows that begin on multiples of 4 bytes in 16 bits, of 8 in 32
Build = Callable[[Builder, str], list[str]]


def plain(b: Builder, x: str) -> list[str]:
    return [silu(b, b("Add", b("MatMul", x, weight(b, K, N)), b.array(draw(N))))]


def as_it_lies(b: Builder, x: str) -> list[str]:
    """Rows of k already: zeros alone are new."""
    flat = b("Reshape", x, b.integers(-1, K))
    return [b("Relu", b("Gemm", flat, weight(b, N, K), b.array(draw(N)), transB=1))]


def packed_gate(b: Builder, x: str) -> list[str]:
    value, gate = b("Split", b("MatMul", x, weight(b, K, 2 * N)), outputs=2, axis=-1, num_outputs=2)
    return [b("Mul", value, b("Gelu", gate))]


def gate_of_two(b: Builder, x: str) -> list[str]:
    value, gate = (b("MatMul", x, weight(b, K, N, name=name)) for name in ("up", "gate"))
    return [b("Mul", value, silu(b, gate))]


def siblings(b: Builder, x: str) -> list[str]:
    return [b("Relu", b("MatMul", x, weight(b, K, N, name=name))) for name in "qkv"]


def batched(b: Builder, x: str) -> list[str]:
    return [b("Relu", b("MatMul", b("Unsqueeze", x, b.integers(1)), weight(b, 3, K, N)))]


WAYS = [plain, as_it_lies, packed_gate, gate_of_two, siblings, batched]


def built(build: Build, dtype: int = FLOAT, opset: int = 20) -> onnx.ModelProto:
    b = Builder(dtype, opset=opset)
    return b.model(*build(b, b.input("x", ("batch", "rows", K))))
