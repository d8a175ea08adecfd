"""Few rows of few columns in CUDA sessions, where the blocks of a cluster share k: sizes, captured graphs, threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from tests.gpu.sessions import check_replays, check_threads
from tests.gpu.test_ort_session import BF16, F16, gate_model
from tests.gpu.test_tune import check
from tests.helpers.onnx_build import Builder

pytestmark = pytest.mark.gpu

DEPTH, WIDTH = 4096, 64
ROWS = (1, 2, 7, 16, 17, 40)


def optimized(model: onnx.ModelProto) -> onnx.ModelProto:
    analysis = analyse_model(model, resolve("native", local_architectures), keep_weights=True)
    tiles = [str(variant.tile) for site in analysis.sites for variant in site.plans[0].variants]
    assert any(" blocks" in tile for tile in tiles), tiles
    return optimize_model(analysis)[0]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16])  # of fp32, `check` has no bound for products in TF32
def test_it_computes_both_types_and_orders(tmp_path: Path, dtype: int, order: str, parts: int) -> None:
    for k, n in ((DEPTH, WIDTH), (11008, 328)):
        model = gate_model(dtype, order, parts, k, n)
        check(tmp_path, model, optimized(model), dtype, (k, n))


def adapters(dtype: int, count: int) -> onnx.ModelProto:
    """Products to few columns and back, as adapters have them, each of what the one before it has stored."""
    rng = np.random.default_rng(count)
    b = Builder(dtype)
    t = b.input("x", ("m", DEPTH))
    for index in range(count):
        down = b.array(rng.standard_normal((DEPTH, WIDTH)) / np.sqrt(DEPTH), f"down{index}")
        up = b.array(rng.standard_normal((WIDTH, DEPTH)) / np.sqrt(WIDTH), f"up{index}")
        t = b("Add", b("MatMul", b("Tanh", b("MatMul", t, down)), up), t)
    return b.model(t)


def live_session(folder: Path, **options: str):
    path = folder / "fused.onnx"
    onnx.save(optimized(adapters(F16, 4)), path)
    return onnxfuse.InferenceSession(path, providers=[("CUDAExecutionProvider", options)])


def inputs() -> list[np.ndarray]:
    return [np.random.default_rng(m).standard_normal((m, DEPTH)).astype(np.float16) for m in ROWS]


def test_captured_graphs_replay_it(tmp_path: Path) -> None:
    given = [np.random.default_rng(seed).standard_normal((5, DEPTH)).astype(np.float16) for seed in range(4)]
    check_replays(live_session(tmp_path), live_session(tmp_path, enable_cuda_graph="1"), given)


def test_threads_share_a_session(tmp_path: Path) -> None:
    live = live_session(tmp_path)
    check_threads([(live, x) for x in inputs()])
