"""Normalisations of groups of channels in ONNX Runtime's CUDA sessions, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfuse
from tests.gpu.sessions import check_replays, check_threads
from tests.gpu.test_ort_session import EPSILON, F16, F32, ULPS, as_float64, run_cuda, session
from tests.helpers.group_models import group_model

pytestmark = pytest.mark.gpu

NUMPY = {F16: np.float16, F32: np.float32}
SMALL = 1e-5
# Groups and channels of an image, and its sides; the first have a cluster of 8, 4 or 2 blocks, or none, by the images.
IMAGES = (
    (4, 40, (64, 64)),
    (32, 320, (64, 64)),
    (32, 1280, (8, 8)),
    (32, 96, (7, 7)),
    (32, 128, (256, 256)),
    (3, 3, (33, 5)),
)
COUNTS = (1, 2, 5, 9)


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    found, report = onnxfuse.optimize(model, arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    assert "groups of channels" in report.fused[0].kernel
    return found


def expected(given: np.ndarray, groups: int, model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """What the model computes, and digits of fp32 by which sums and steps may be off."""
    values = as_float64(given)
    rows = values.reshape(len(values), groups, -1)
    centred = rows - rows.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + SMALL)
    normal = (centred / deviation).reshape(values.shape)
    far = (np.abs(rows).max(-1, keepdims=True) / deviation * np.ones_like(rows)).reshape(values.shape)
    weight, bias = (
        as_float64(onnx.numpy_helper.to_array(each))
        for each in model.graph.initializer
        if each.dims and each.dims[0] == given.shape[1] and len(each.dims) == 3
    )
    scaled = normal * weight + bias
    digits = EPSILON[F32] * (1 + np.abs(normal) + far) * (1 + np.abs(weight)) * (1 + np.abs(scaled))
    return scaled / (1 + np.exp(-scaled)), digits


@pytest.mark.parametrize("dtype", [F16, F32])  # an InstanceNormalization has no other ones
@pytest.mark.parametrize(("groups", "channels", "sides"), IMAGES)
def test_any_number_of_images(tmp_path: Path, groups: int, channels: int, sides: tuple[int, int], dtype: int) -> None:
    """By one session, of any sizes; then by one that knows them."""
    rng = np.random.default_rng(channels)
    model = group_model(sizes=("batch", channels, "h", "w"), groups=groups, element=dtype)
    live = session(fused(model), tmp_path / "fused.onnx", fused=True)
    for count in COUNTS:
        given = (rng.standard_normal((count, channels, *sides)) * 2 + 3).astype(NUMPY[dtype])
        wanted, digits = expected(given, groups, model)
        known = group_model(sizes=given.shape, groups=groups, element=dtype)
        for each in (live, session(fused(known), tmp_path / "known.onnx", fused=True)):
            error = np.abs(run_cuda(each, given, dtype) - wanted)
            bound = ULPS * (EPSILON[dtype] * np.abs(wanted) / 4 + 8 * digits)
            assert (error <= bound).all(), f"{given.shape}: {(error / bound).max():.2f} of the bound"


def test_an_odd_size_after_an_even_one(tmp_path: Path) -> None:
    """The kernel looks at the pixels of each run."""
    model = group_model(sizes=("batch", 64, "h", "w"), groups=32)
    live = session(fused(model), tmp_path / "fused.onnx", fused=True)
    rng = np.random.default_rng(0)
    for sides in ((16, 16), (15, 15), (1, 1), (1, 3), (8, 1)):
        given = rng.standard_normal((2, 64, *sides)).astype(np.float16)
        wanted, digits = expected(given, 32, model)
        error = np.abs(run_cuda(live, given, F16) - wanted)
        assert (error <= ULPS * (EPSILON[F16] * np.abs(wanted) / 4 + 8 * digits)).all(), sides


def opened(folder: Path, **options: str) -> Any:
    onnx.save(fused(group_model(sizes=("batch", 64, "h", "w"), groups=8)), folder / "fused.onnx")
    providers: list[str | tuple[str, dict[str, str]]] = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    return onnxfuse.InferenceSession(folder / "fused.onnx", providers=providers)


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_captured_graphs_replay_with_new_images(tmp_path: Path, count: int) -> None:
    given = [np.random.default_rng(seed).standard_normal((count, 64, 24, 24)).astype(np.float16) for seed in range(4)]
    check_replays(opened(tmp_path), opened(tmp_path, enable_cuda_graph="1"), given)


def test_threads_share_a_session(tmp_path: Path) -> None:
    live = opened(tmp_path)
    given = [
        np.random.default_rng(side).standard_normal((2, 64, side, side)).astype(np.float16) for side in (7, 16, 40)
    ]
    check_threads([(live, x) for x in given])
