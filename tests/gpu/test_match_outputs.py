"""Several outputs, several weights and residuals in an ONNX Runtime CUDA session, on every kernel that a plan takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.graph.op_names import FUSED_GEMM, kind_of
from onnxfuse.pipeline import Fp32
from onnxfuse.verify.verify import verify
from tests.helpers.matching import gate, silu, split_num_outputs
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.patterns.test_column_ranges import HEAD, Parts, attended, sliced, split

pytestmark = pytest.mark.gpu

SIZES = [(128, 256), (72, 40), (65, 34)]  # k, n: for TMA, for narrow copies, for single elements
ROWS = [3, 40, 300]


def linear(b: Builder, k: int, n: int, number: int = 0) -> str:
    rng = np.random.default_rng([k, n, number])
    weight = b.array(rng.standard_normal((k, n)) / np.sqrt(k), f"weight{number}")
    return b("Add", b("MatMul", "x", weight), b.array(rng.standard_normal(n), f"bias{number}"))


def packed_gate_read_elsewhere(b: Builder, k: int, n: int) -> list[str]:
    t = linear(b, k, n)
    first, second = split_num_outputs(b, t)
    return [gate(b, first, second), first, t]


def dual_gate(b: Builder, k: int, n: int) -> list[str]:
    return [b("Mul", silu(b, linear(b, k, n)), linear(b, k, n, 1))]


def residuals_and_their_sum(b: Builder, k: int, n: int) -> list[str]:
    first = b("Add", b.input("residual", (2, "rows", n)), linear(b, k, n))
    return [first, b("Mul", b("Tanh", first), b.input("scale", (2, 1, n)))]


def gate_beside_other_columns(b: Builder, k: int, n: int) -> list[str]:
    rest, packed = b("Split", linear(b, k, 3 * n), b.integers(n, 2 * n), outputs=2, axis=-1)
    return [rest, gate(b, *b("Split", packed, outputs=2, axis=-1, num_outputs=2))]


def heads_of_siblings(b: Builder, k: int, n: int) -> list[str]:
    """q, k and v, the second with rows contiguous."""
    split = [b("Reshape", linear(b, k, n, number), b.integers(0, 0, 2, n // 2)) for number in range(3)]
    return [
        b("Transpose", t, perm=perm) for t, perm in zip(split, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
    ]


def heads_of_grouped_queries(b: Builder, k: int, n: int) -> list[str]:
    """As wide a q as three k or v: windows of one weight, biased before they are taken."""
    ranges = b("Split", linear(b, k, 5 * n), b.integers(3 * n, n, n), outputs=3, axis=-1)
    split = [b("Reshape", t, b.integers(0, 0, -1, n // 2)) for t in ranges]
    return [b("Transpose", t, perm=(0, 2, 1, 3)) for t in split]


def gate_beside_grouped_queries(b: Builder, k: int, n: int) -> list[str]:
    """PaLM's parallel block: one weight of q, of k, of v and of a gate, whose parts are two windows of it."""
    *ranges, packed = b("Split", linear(b, k, 7 * n), b.integers(3 * n, n, n, 2 * n), outputs=4, axis=-1)
    split = [b("Reshape", t, b.integers(0, 0, -1, n // 2)) for t in ranges]
    heads = [b("Transpose", t, perm=(0, 2, 1, 3)) for t in split]
    return [*heads, gate(b, *b("Split", packed, outputs=2, axis=-1, num_outputs=2))]


def gate_behind_an_odd_range(b: Builder, k: int, n: int) -> list[str]:
    """Of a weight [n, k]: both parts of the gate begin at odd columns."""
    sizes, rng = (n // 8 * 2 - 1, n, n), np.random.default_rng([k, n])
    weight = b("Transpose", b.array(rng.standard_normal((sum(sizes), k)) / np.sqrt(k), "weight"), perm=(1, 0))
    t = b("Add", b("MatMul", "x", weight), b.array(rng.standard_normal(sum(sizes)), "bias"))
    first, value, gated = sliced(b, t, sizes)
    return [b("Tanh", first), gate(b, value, gated)]


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
@pytest.mark.parametrize("fp32", ["tf32", "exact"])
@pytest.mark.parametrize("build", [heads_of_grouped_queries, gate_beside_grouped_queries, gate_behind_an_odd_range])
def test_windows_of_one_weight_in_a_session(build, fp32: Fp32, dtype: int, k: int, n: int, tmp_path: Path) -> None:
    b = Builder(dtype)
    b.input("x", (2, "rows", k))
    model = b.model(*build(b, k, n))
    fused, report = onnxfuse.optimize(model, arch="native", fp32=fp32)
    if (dtype, fp32) != (FLOAT, "tf32"):  # where the library may be faster
        assert len(report.fused) >= 2
        assert {kind_of(node.op_type) for node in fused.graph.node} == {FUSED_GEMM}
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model, before)
    onnx.save(fused, after)
    assert verify(before, after, sizes={"rows": ROWS}).passed


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
@pytest.mark.parametrize(
    "build",
    [
        packed_gate_read_elsewhere,
        dual_gate,
        residuals_and_their_sum,
        gate_beside_other_columns,
        heads_of_siblings,
    ],
)
def test_every_output_in_a_session(build, dtype: int, k: int, n: int, tmp_path: Path) -> None:
    b = Builder(dtype)
    b.input("x", (2, "rows", k))
    model = b.model(*build(b, k, n))
    fused, report = onnxfuse.optimize(model, arch="native")
    assert len(report.fused) == 1
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model, before)
    onnx.save(fused, after)
    assert verify(before, after, sizes={"rows": ROWS}).passed


@pytest.mark.parametrize("parts", [split, sliced])
@pytest.mark.parametrize("of_values", [HEAD, 2 * HEAD])
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT])
def test_a_range_as_the_product_makes_it_in_a_session(parts: Parts, of_values: int, dtype: int, tmp_path: Path) -> None:
    """Values that an attention reads, stored beside the keys or by a kernel of their own."""
    b = Builder(dtype)
    model = b.model(*attended(b, parts, depth=128, of_values=of_values))
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model, before)
    report = onnxfuse.optimize_file(before, after, arch="native")
    if dtype == FLOAT16:
        assert len(report.fused) == (3 if of_values == HEAD else 4)
    assert verify(before, after, sizes={"rows": ROWS, "batch": [2]}).passed
