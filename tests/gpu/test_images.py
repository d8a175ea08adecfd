"""A 1x1 convolution whose image or batch only the run knows: right at any size, by whatever kernel that size takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.strategy import Strategy
from tests.gpu.test_ort_session import EPSILON, F16, ULPS, as_float64, run_cuda, session
from tests.helpers.onnx_build import Builder

pytestmark = pytest.mark.gpu

K, N = 320, 640
IMAGES = [
    (1, 8, 8), (2, 8, 8), (16, 8, 8), (1, 1, 1), (3, 5, 7), (1, 32, 32), (2, 32, 32), (5, 27, 31), (1, 64, 64),
    (2, 64, 64), (8, 64, 64), (1, 96, 40), (1, 128, 128), (2, 1, 77),
]  # fmt: skip
BATCHES = (1, 2, 3, 5, 8, 16, 33, 64, 130)


def check(folder: Path, image: Sequence[int | str], drawn: Sequence[tuple[int, int, int]]) -> str:
    """Run images of several sizes against float64; the kernels that there were."""
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((N, K, 1, 1)).astype(np.float16) / 16, rng.standard_normal(N).astype(np.float16)
    b = Builder(F16)
    x = b.input("x", ["batch", K, *image])
    model = b.model(b("Relu", b("Conv", x, b.array(weight, "weight"), b.array(bias, "bias"), kernel_shape=[1, 1])))
    fused, report = onnxfuse.optimize(model, arch="native")
    (site,) = report.fused
    live = session(fused, folder / "fused.onnx", fused=True)
    for batch, height, width in drawn:
        pixels = rng.standard_normal((batch, K, height, width)).astype(np.float16)
        sums = np.einsum("nk,bkhw->bnhw", as_float64(weight[:, :, 0, 0]), as_float64(pixels), optimize=True)
        expected = np.maximum(sums + as_float64(bias)[:, None, None], 0)
        error = np.abs(run_cuda(live, pixels, F16) - expected).max()
        bound = ULPS * EPSILON[F16] * max(1.0, expected.max())
        assert error <= bound, f"{batch} x {height} x {width}: error {error:.3g} over {bound:.3g}; {site.kernel}"
    return site.kernel


def check_behind(
    folder: Path, channels: int, image: Sequence[int | str], drawn: Sequence[tuple[int, int, int]]
) -> None:
    """What follows the library's convolution: a residual and SiLU."""
    rng = np.random.default_rng(channels)
    weight = rng.standard_normal((channels, K, 1, 1)).astype(np.float16) / 16
    b = Builder(F16)
    x, residual = b.input("x", ["batch", K, *image]), b.input("residual", ["batch", channels, *image])
    t = b("Add", b("Conv", x, b.array(weight, "weight"), kernel_shape=[1, 1]), residual)
    model = b.model(b("Mul", t, b("Sigmoid", t)))
    analysis = analyse_model(model, resolve("native", local_architectures))
    sites = tuple(replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites)
    live = session(optimize_model(replace(analysis, sites=sites))[0], folder / "fused.onnx", fused=True)
    for batch, height, width in drawn:
        pixels, added = (rng.standard_normal((batch, n, height, width)).astype(np.float16) for n in (K, channels))
        sums = np.einsum("nk,bkhw->bnhw", as_float64(weight[:, :, 0, 0]), as_float64(pixels), optimize=True)
        wanted = as_float64(sums.astype(np.float16)) + as_float64(added)
        expected = wanted / (1 + np.exp(-wanted))
        error = np.abs(run_cuda(live, pixels, F16, residual=added) - expected)
        assert (error <= ULPS * EPSILON[F16] * np.maximum(1, np.abs(wanted))).all(), (batch, height, width, error.max())


@pytest.mark.parametrize("channels", [8, 12, 7, 1152])
def test_rows_of_images_are_joined_behind_a_convolution(tmp_path: Path, channels: int) -> None:
    """Their kernel reads whole accesses, and what is left of the last one of an image of odd size."""
    for height, width in ((7, 7), (14, 14), (3, 5)):
        check_behind(tmp_path, channels, (height, width), [(batch, height, width) for batch in (1, 3, 70)])
    check_behind(tmp_path, channels, ("height", "width"), IMAGES[:6])


def test_a_convolution_of_any_image(tmp_path: Path) -> None:
    check(tmp_path, ("height", "width"), IMAGES)


@pytest.mark.parametrize("image", [(8, 8), (14, 14), (28, 28)])
def test_a_convolution_of_any_number_of_images(tmp_path: Path, image: tuple[int, int]) -> None:
    """As vision models are exported; few and many images have kernels of their own."""
    assert ", " in check(tmp_path, image, [(batch, *image) for batch in BATCHES])
