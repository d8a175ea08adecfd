"""Weights in another order: what the kernels make of them in a session, in a captured graph, and timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.lowering import plan_site
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.verify.verify import verify
from tests.end_to_end.test_weight_order import (
    IN_TWO_ORDERS,
    WAYS,
    K,
    N,
    built,
    einsum,
    experts_in_turn,
    gate_in_turn,
)
from tests.gpu.test_tune import times_of
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder

pytestmark = pytest.mark.gpu

ROWS = (1, 16, 17, 130)
# ONNX knows no Einsum of bfloat16, and ONNX Runtime's CUDA provider has no Clip of it: the original does not run there.
NO_BFLOAT16 = (einsum, gate_in_turn, experts_in_turn)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_site, "is_faster", lambda other, kept: True)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (way, each)
        for way in [*WAYS, *IN_TWO_ORDERS]
        for each in (FLOAT16, BFLOAT16, FLOAT)
        if each != BFLOAT16 or way not in NO_BFLOAT16
    ],
)
def test_kernels_read_the_stored_order(build: Callable[[Builder, str], list[str]], dtype: int, tmp_path: Path) -> None:
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(built(build, dtype), before)
    report = onnxfuse.optimize_file(before, after, arch="native")
    assert report.transposed
    assert verify(before, after, sizes={"rows": ROWS}, per_site=True, require_gpu=True).passed


@pytest.mark.usefixtures("everywhere")
def test_replays_read_external_weights_in_their_new_file(tmp_path: Path) -> None:
    """Without the original's data; a captured graph makes what a plain run does."""
    import onnxruntime

    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(built(WAYS[0], FLOAT16), before, save_as_external_data=True, location="all.bin", size_threshold=64)
    onnxfuse.optimize_file(before, after, arch="native")
    (tmp_path / "all.bin").unlink()
    captured = onnxfuse.InferenceSession(after, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])
    first, second = (np.random.default_rng(seed).standard_normal((2, 64, K)).astype(np.float16) for seed in range(2))
    bound = onnxruntime.OrtValue.ortvalue_from_numpy(first, "cuda", 0)
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type([2, 64, N], np.float16, "cuda", 0)
    binding = captured.io_binding()
    binding.bind_ortvalue_input("x", bound)
    binding.bind_ortvalue_output(captured.get_outputs()[0].name, out)
    plain = onnxfuse.InferenceSession(after, providers=["CUDAExecutionProvider"])
    for x in (first, first, second):
        bound.update_inplace(x)
        captured.run_with_iobinding(binding)
        np.testing.assert_array_equal(out.numpy(), plain.run(None, {"x": x})[0])


def test_tuning_times_every_strategy_of_a_transposed_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_site, "is_faster", lambda other, kept: True)
    b = Builder(FLOAT)
    x = b.input("x", (512, 640))
    value, gate = b(
        "Split", b("MatMul", x, b.array(np.ones((640, 2560)) / 640, "w")), outputs=2, axis=-1, num_outputs=2
    )
    _, report = onnxfuse.optimize(b.model(b("Mul", value, b("Gelu", gate))), arch="native", tune=True)
    figures = [site.timings for site in report.fused] + [site.detail for site in report.skipped]
    (row,) = times_of(figures[0])
    assert set(row) == {strategy.value for strategy in Strategy}
