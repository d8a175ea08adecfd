"""Epilogues alone in an ONNX Runtime CUDA session, and tuning: what it measures, keeps, chooses and spends."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.patterns import is_anchor, match_site
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.tune.timing_cache import FOLDER
from tests.gpu.test_ort_session import BF16, EPSILON, F16, F32, ULPS, as_float64, gate_model, run_cuda, session
from tests.helpers.reference_fusion import evaluate

pytestmark = pytest.mark.gpu

SIZES = [(1, 1), (7, 5), (64, 24), (33, 41), (320, 1280), (640, 60)]
ROWS = [1, 3, 17, 100, 505, 4100]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_what_follows_a_product_that_stays(tmp_path: Path, dtype: int, order: str, parts: int) -> None:
    for k, n in SIZES:
        model = gate_model(dtype, order, parts, k, n)
        analysis = analyse_model(model, resolve("native", local_architectures))
        epilogue_only = replace(
            analysis, sites=tuple(replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites)
        )
        fused, _ = optimize_model(epilogue_only)
        assert [node.op_type for node in fused.graph.node][-1] == "FusedPointwise_0"
        check(tmp_path, model, fused, dtype, (k, n))


def check(folder: Path, model: onnx.ModelProto, fused: onnx.ModelProto, dtype: int, sizes: tuple[int, int]) -> None:
    """Both sessions round the product, so both may be off by as much as it; float64 is the reference."""
    live = session(fused, folder / "fused.onnx", fused=True)
    graph = Graph(load_model(model))
    _, fusion = match_site(graph, next(node for node in graph.nodes if is_anchor(graph, node)))
    stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer
              if tensor.name in ("weight", "bias")}  # fmt: skip
    stock = session(model, folder / "stock.onnx", fused=False) if dtype != BF16 else None
    for m in ROWS:
        x = np.random.default_rng(m).standard_normal((m, sizes[0])).astype(helper.tensor_dtype_to_np_dtype(dtype))
        (expected,) = evaluate(fusion, stored | {"x": as_float64(x)})
        error = np.abs(run_cuda(live, x, dtype) - expected)
        assert np.isfinite(error).all(), f"m={m} {sizes}"
        # The product's rounding passes through a sum and an activation whose slopes are below 1.1.
        bound = 2 * ULPS * EPSILON[dtype] * max(1.0, np.abs(expected).max())
        if stock is not None:
            bound = max(bound, 2 * np.abs(run_cuda(stock, x, dtype) - expected).max())
        assert error.max() <= bound, f"m={m} {sizes}: error {error.max():.3g} over {bound:.3g}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def times_of(detail: str) -> list[dict[str, float]]:
    """`m=128: one kernel 8.1 us, left alone 26.0 us; ...`, a row for each m."""
    rows = [re.findall(r"(one kernel|behind the product|left alone) ([\d.]+) us", row) for row in detail.split(";")]
    return [{strategy: float(value) for strategy, value in row} for row in rows]


@pytest.mark.parametrize("rows", [1024, "m"])
def test_tuning_takes_what_it_measured_as_fastest(tmp_path: Path, cache: Path, rows: object) -> None:
    model = gate_model(F16, "kn", 2, 320, 1280)
    if isinstance(rows, int):
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = rows
    fused, report = onnxfuse.optimize(model, arch="native", tune=True)
    (site,) = report.fused
    timed = times_of(site.timings)
    assert all(set(row) == {strategy.value for strategy in Strategy} for row in timed)
    assert all(0.5 < value < 1e4 for row in timed for value in row.values())
    if len(timed) == 1:
        assert site.strategy == min(timed[0], key=lambda strategy: timed[0][strategy])
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    shape = (rows if isinstance(rows, int) else 64, 320)
    assert np.isfinite(live.run(None, {"x": np.ones(shape, np.float16)})[0]).all()
    assert len(list((cache / FOLDER).glob("*.json"))) == len(timed)


def test_a_second_run_measures_nothing_and_chooses_the_same(cache: Path) -> None:
    model = gate_model(F16, "kn", 2, 320, 640)
    first, _ = onnxfuse.optimize(model, arch="native", tune=True)
    for path in (cache / FOLDER).glob("*.json"):
        entry = json.loads(path.read_text())
        assert entry["key"]["gpu"]
        assert len(entry["microseconds"]) > 2
    start = time.perf_counter()
    second, _ = onnxfuse.optimize(model, arch="native", tune=True)
    assert time.perf_counter() - start < 3.0
    assert second.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


def test_a_budget_is_kept_and_the_next_run_goes_on(cache: Path) -> None:
    model = gate_model(F16, "kn", 2, 320, 648)
    told: list[tuple[int, int]] = []
    onnxfuse.optimize(model, arch="native", tune=True, budget=0.01, progress=lambda what, *state: told.append(state))
    measured = len(list((cache / FOLDER).glob("*.json")))
    assert measured == 1
    _, report = onnxfuse.optimize(model, arch="native", tune=True)
    assert len(list((cache / FOLDER).glob("*.json"))) > measured
    assert report.fused[0].timings.count("m=") == len(list((cache / FOLDER).glob("*.json")))
