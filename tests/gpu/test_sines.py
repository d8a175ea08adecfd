"""Sines and cosines behind a product in CUDA sessions: layers of them, and angles of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.patterns import is_anchor, match_site
from onnxfuse.pipeline import Fp32
from onnxfuse.schedule.plan import SHALLOW
from tests.gpu.test_ort_session import (
    BF16,
    EPSILON,
    F16,
    F32,
    ROWS,
    TF32_EPSILON,
    ULPS,
    as_float64,
    run_cuda,
    session,
)
from tests.helpers.onnx_build import Builder
from tests.helpers.reference_fusion import evaluate
from tests.kernels.test_epilogue_ops import multiples_of_half_pi

pytestmark = pytest.mark.gpu

SIZES = [(2, 256), (256, 256), (72, 40), (65, 34), (1024, 328)]  # k, n
FREQUENCY = 30.0  # of the layers of the paper that these are from
COLUMNS = 64


def layer(dtype: int, order: str, k: int, n: int) -> onnx.ModelProto:
    rng = np.random.default_rng([dtype, k, n])
    b = Builder(dtype, opset=22 if dtype == BF16 else 17)  # before 22 no sine of bfloat16 is valid
    x = b.input("x", ("m", k))
    weight, bias = rng.standard_normal((k, n)) / k**0.5, b.array(rng.standard_normal(n), "bias")
    if order == "kn":
        t = b("Add", b("MatMul", x, b.array(weight, "weight")), bias)
    else:
        t = b("Gemm", x, b.array(weight.T, "weight"), bias, transB=1)
    angle = b("Mul", t, b.array(FREQUENCY))
    return b.model(b("Add", b("Sin", angle), b("Cos", t)))


@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("fp32", ["tf32", "exact"])
def test_layers_of_every_shape(tmp_path: Path, dtype: int, order: str, fp32: Fp32) -> None:
    """What a product is off by, an angle is by a frequency as much: the magnitude of the terms bounds it.

    Where the library multiplies, the product is rounded as the model's own is.
    """
    if fp32 == "exact" and dtype != F32:
        pytest.skip("the fp32 mode concerns fp32 models only")
    for k, n in SIZES:
        rounds = (dtype, fp32) == (F32, "tf32") and k >= SHALLOW
        multiplied = TF32_EPSILON if rounds else EPSILON[F32]
        model = layer(dtype, order, k, n)
        fused, report = onnxfuse.optimize(model, arch="native", fp32=fp32, keep_weights=True)
        assert len(report.fused) == 1, (k, n)
        live = session(fused, tmp_path / "fused.onnx", fused=True)
        graph = Graph(load_model(model))
        _, fusion = match_site(graph, next(node for node in graph.nodes if is_anchor(graph, node)))
        stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
        for m in ROWS:
            x = np.random.default_rng(m).standard_normal((m, k)).astype(helper.tensor_dtype_to_np_dtype(dtype))
            (expected,) = evaluate(fusion, stored | {"x": as_float64(x)})
            weight = stored["weight"] if order == "kn" else stored["weight"].T
            terms = np.abs(as_float64(x)) @ np.abs(weight) + np.abs(stored["bias"])
            error = np.abs(run_cuda(live, x, dtype) - expected)
            rounding = EPSILON[dtype] / 2 * np.abs(as_float64(x) @ weight)
            bound = ULPS * (FREQUENCY * multiplied * terms + EPSILON[dtype]) + (1 + FREQUENCY) * rounding
            assert (error <= bound).all(), f"m={m} k={k} n={n}: {error.max():.3g}, {(error / bound).max():.2f}"


@pytest.mark.parametrize("op", ["Sin", "Cos"])
def test_angles_of_any_size(tmp_path: Path, op: str) -> None:
    """What is added to a product of zeros stays as it is: the kernel's function alone is seen."""
    b = Builder(F32)
    product = b("MatMul", b.input("zeros", ("m", COLUMNS)), b.array(np.eye(COLUMNS), "weight"))
    model = b.model(b(op, b("Add", product, b.input("x", ("m", COLUMNS)))))
    fused, report = onnxfuse.optimize(model, arch="native")
    assert len(report.fused) == 1
    rng = np.random.default_rng(0)
    near = np.array(multiples_of_half_pi(), np.float32)
    drawn = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    around = [near, -near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))]
    edge = np.array([65535.996, 65536, -65536, 65536.01], np.float32)
    small = rng.uniform(-200, 200, 200_000).astype(np.float32)
    x = np.concatenate([drawn[np.isfinite(drawn)], small, *around, edge])
    x = x[: len(x) // COLUMNS * COLUMNS].reshape(-1, COLUMNS)
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    found = run_cuda(live, x, F32, zeros=np.zeros_like(x))
    expected = (np.sin if op == "Sin" else np.cos)(as_float64(x))
    unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    off = np.abs(found - expected) / unit
    assert off.max() <= 3, (off.max(), x.flat[off.argmax()])
    assert np.abs(found).max() <= 1


def test_what_is_no_angle_is_no_number(tmp_path: Path) -> None:
    b = Builder(F32)
    product = b("MatMul", b.input("zeros", ("m", COLUMNS)), b.array(np.eye(COLUMNS), "weight"))
    model = b.model(b("Sin", b("Add", product, b.input("x", ("m", COLUMNS)))))
    live = session(onnxfuse.optimize(model, arch="native")[0], tmp_path / "fused.onnx", fused=True)
    x = np.zeros((5, COLUMNS), np.float32)
    x[0, :3] = np.inf, -np.inf, np.nan
    found = run_cuda(live, x, F32, zeros=np.zeros_like(x))
    assert np.isnan(found[0, :3]).all()
    assert np.isnan(found).sum() == 3
