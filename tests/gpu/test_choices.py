"""Activations that choose by a comparison, behind a product in CUDA sessions: of every type, for many rows and few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.patterns import is_anchor, match_site
from tests.gpu.test_ort_session import BF16, EPSILON, F16, F32, ROWS, TF32_EPSILON, ULPS, as_float64, run_cuda, session
from tests.helpers.onnx_build import Builder
from tests.helpers.reference_fusion import evaluate
from tests.patterns.test_choices import CONTINUOUS

pytestmark = pytest.mark.gpu

K, N = 256, 328
ACTIVATIONS = CONTINUOUS.keys() - {"of_zeros"}  # another ELU, whose zeros have the sizes of the tests of patterns
STEEPEST = 10.0  # slope of any of them where a sum of K drawn products can lie


def layer(dtype: int, activation: str) -> onnx.ModelProto:
    rng = np.random.default_rng([dtype, len(activation)])
    b = Builder(dtype)
    x, weight = b.input("x", ("m", K)), b.array(rng.standard_normal((K, N)) / K**0.5, "weight")
    return b.model(CONTINUOUS[activation](b, b("Add", b("MatMul", x, weight), b.array(rng.standard_normal(N), "bias"))))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_rows_of_every_number(tmp_path: Path, dtype: int, activation: str) -> None:
    """What a product is off by, the outcome is by the steepest slope as much, on either side of the threshold."""
    model = layer(dtype, activation)
    fused, report = onnxfuse.optimize(model, arch="native", keep_weights=True)
    assert len(report.fused) == 1
    assert len(fused.graph.node) == 1
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    graph = Graph(load_model(model))
    _, fusion = match_site(graph, next(node for node in graph.nodes if is_anchor(graph, node)))
    stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    multiplied = TF32_EPSILON if dtype == F32 else EPSILON[F32]
    for m in ROWS:
        x = np.random.default_rng(m).standard_normal((m, K)).astype(helper.tensor_dtype_to_np_dtype(dtype))
        (expected,) = evaluate(fusion, stored | {"x": as_float64(x)})
        terms = np.abs(as_float64(x)) @ np.abs(stored["weight"]) + np.abs(stored["bias"])
        rounding = EPSILON[dtype] * (1 + np.abs(expected))
        error = np.abs(run_cuda(live, x, dtype) - expected)
        assert (error <= ULPS * rounding + STEEPEST * ULPS * multiplied * terms).all(), (m, error.max())


@pytest.mark.parametrize("dtype", [F16, F32])
def test_nan_takes_the_side_that_the_model_does(tmp_path: Path, dtype: int) -> None:
    model = layer(dtype, "leaky")
    fused, _ = onnxfuse.optimize(model, arch="native")
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    x = np.random.default_rng(0).standard_normal((40, K)).astype(helper.tensor_dtype_to_np_dtype(dtype))
    x[3, 5], x[7, 9] = np.nan, np.inf
    assert (np.isnan(run_cuda(live, x, dtype)) == np.isnan(x).any(axis=1)[:, None]).all()
