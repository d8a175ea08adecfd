"""bench on a GPU: every measure has its figures, launches are counted, sites are timed, and the GPU's state is read."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxfuse
from onnxfuse.bench.bench import MEASURES, BenchResult, bench
from onnxfuse.bench.contender import captured
from onnxfuse.bench.gpu_state import gpu_state
from tests.gpu.test_ort_session import BF16, F16, gate_model
from tests.helpers.matching import gelu_erf_half_last
from tests.helpers.onnx_build import Builder

pytestmark = pytest.mark.gpu

SHAPES = {"x": (512, 320)}


def pair(folder: Path, model: onnx.ModelProto) -> tuple[Path, Path]:
    paths = folder / "model.onnx", folder / "fused.onnx"
    onnx.save(model, paths[0])
    onnx.save(onnxfuse.optimize(model, arch="native")[0], paths[1])
    return paths


def spelled_out_gate() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    b = Builder(F16)
    t = b("MatMul", b.input("x", ("m", 320)), b.array(rng.standard_normal((320, 2560)) / 18))
    first, second = b("Split", b("Add", t, b.array(rng.standard_normal(2560))), outputs=2, axis=-1, num_outputs=2)
    return b.model(b("Mul", first, gelu_erf_half_last(b, second)))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    paths = pair(tmp_path_factory.mktemp("bench"), spelled_out_gate())
    return bench(*paths, shapes=SHAPES, runs=20, warmup=5, per_site=True)


def test_every_measure_has_its_figures(measured: BenchResult) -> None:
    assert [comparison.name for comparison in measured.comparisons] == list(MEASURES)
    for comparison in measured.comparisons:
        assert not comparison.why_not
        for latency in (comparison.original, comparison.optimized):
            assert latency is not None
            assert 0 < latency.p10 <= latency.median <= latency.p90 <= latency.p99
    json.dumps(measured.to_dict())


def test_the_parts_are_less_than_the_whole(tmp_path: Path) -> None:
    """The host returns before the results are there, and the GPU's own time has none of the host's in it."""
    rows = {"x": (65536, 320)}  # so many that the GPU works much longer than the host
    measured = bench(*pair(tmp_path, spelled_out_gate()), shapes=rows, runs=20, warmup=5)
    times = {comparison.name: comparison for comparison in measured.comparisons}
    for model in ("original", "optimized"):
        whole = getattr(times["latency"], model).median
        assert getattr(times["host"], model).median < whole
        assert getattr(times["gpu"], model).median < whole


def test_launches_are_counted(measured: BenchResult, tmp_path: Path) -> None:
    before, after = measured.launches
    assert after == 1
    assert before is not None
    assert before > after
    _, fused = pair(tmp_path, spelled_out_gate())
    x = np.zeros((64, 320), np.float16)
    assert captured(fused, {"x": x}, "cuda").launches == 1


def test_sites_are_timed_beside_their_nodes(measured: BenchResult) -> None:
    (site,) = measured.sites
    assert site.before is not None
    assert site.after is not None
    assert site.floor is not None
    assert site.before > site.after, "eight kernels against one"
    assert 0 < site.floor < site.before
    assert site.flops == 2 * 512 * 320 * 2560


@pytest.mark.parametrize("op", ["Unique", "NonZero"])
def test_what_cannot_be_captured_is_said_and_the_rest_is_measured(op: str, tmp_path: Path) -> None:
    """A run waits for the GPU in its middle: Unique runs on the CPU, and NonZero has its count copied there."""
    b = Builder(F16)
    product = b("MatMul", b.input("x", ("m", 320)), b.array(np.eye(320)))
    t = b("Relu", b("Add", product, b.array(np.ones(320))))
    found = b(op, b("Cast", t, to=TensorProto.FLOAT))
    paths = pair(tmp_path, b.model(b("Cast", found, to=F16)))
    result = bench(*paths, shapes={"x": (16, 320)}, runs=3, warmup=1)
    times = {comparison.name: comparison for comparison in result.comparisons}
    assert result.ratio > 0
    for name in ("graph", "gpu"):
        assert times[name].ratio is None
        assert times[name].why_not
    assert result.launches == (None, None)
    assert bench(*paths, shapes={"x": (16, 320)}, runs=3, warmup=1, measures=()).ratio > 0, "the device is as before"


def test_a_bfloat16_model(tmp_path: Path) -> None:
    paths = pair(tmp_path, gate_model(BF16, "kn", 1, 64, 64))
    result = bench(*paths, shapes={"x": (32, 64)}, runs=3, warmup=1, measures=("host",))
    assert [comparison.name for comparison in result.comparisons] == ["latency", "host"]


def test_the_gpus_state_is_read() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pytest.skip("no NVML on this machine")
    state = gpu_state()
    assert state is not None
    assert state.highest_clock is None or 0 < (state.clock or 0) <= state.highest_clock
    assert state.busy is None or 0 <= state.busy <= 100
