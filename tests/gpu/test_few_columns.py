"""Few rows of few columns in CUDA sessions, where the blocks of a cluster share k: sizes, captured graphs, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
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
    import onnxruntime

    plain, live = live_session(tmp_path), live_session(tmp_path, enable_cuda_graph="1")
    given = [np.random.default_rng(seed).standard_normal((5, DEPTH)).astype(np.float16) for seed in range(4)]
    expected = [plain.run(None, {"x": x})[0] for x in given]
    bound = onnxruntime.OrtValue.ortvalue_from_numpy(given[0], "cuda", 0)
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type([5, DEPTH], np.float16, "cuda", 0)
    binding = live.io_binding()
    binding.bind_ortvalue_input("x", bound)
    binding.bind_ortvalue_output(live.get_outputs()[0].name, out)
    for which in (0, 0, 1, 2, 3, 0):
        bound.update_inplace(given[which])
        live.run_with_iobinding(binding)
        np.testing.assert_array_equal(out.numpy(), expected[which])


def test_threads_share_a_session(tmp_path: Path) -> None:
    live, given = live_session(tmp_path), inputs()
    expected = [live.run(None, {"x": x})[0].tobytes() for x in given]

    def work(index: int) -> bool:
        which = index % len(given)
        return live.run(None, {"x": given[which]})[0].tobytes() == expected[which]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
