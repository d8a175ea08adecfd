"""Normalisations in ONNX Runtime's CUDA sessions: against float64 for any length and number of rows, and in chains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.limits import MOST_ACROSS
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.driver import local_architectures
from tests.gpu.sessions import TURNS, check_replays, check_threads
from tests.gpu.test_ort_session import BF16, EPSILON, F16, F32, ULPS, as_float64, run_cuda, session
from tests.gpu.test_rotation import check
from tests.helpers.matching import run_values
from tests.helpers.onnx_build import Builder
from tests.helpers.reference_fusion import evaluate
from tests.patterns.test_across import CHANNELS, TURNED
from tests.patterns.test_across import FORMS as ACROSS
from tests.patterns.test_across import model_of as across_model
from tests.patterns.test_behind_normalisation import ACTIVATIONS, model_of
from tests.patterns.test_behind_rows import BEHIND
from tests.patterns.test_deviation import ENDS, Form, of_one_less, variance
from tests.patterns.test_deviation import model_of as deviation_model
from tests.patterns.test_normalisation import N

pytestmark = pytest.mark.gpu

NUMPY = {F16: np.float16, BF16: ml_dtypes.bfloat16, F32: np.float32}
COLUMNS = (2, 64, 77, 197, 320, 768, 1026, 4096, 16384)
ROWS = (1, 3, 131, 133, 528, 5000)
SMALL = 1e-5
WIDTH = 768  # of the chain


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("columns", COLUMNS)
def test_any_number_of_rows(tmp_path: Path, columns: int, dtype: int, rms: bool) -> None:
    rng = np.random.default_rng(columns)
    scale, bias = (rng.standard_normal(columns).astype(NUMPY[dtype]) for _ in range(2))
    b = Builder(dtype, opset=17)
    x = b.input("x", ("rows", columns))
    op, parameters = ("SimplifiedLayerNormalization", (scale,)) if rms else ("LayerNormalization", (scale, bias))
    names = [b.array(each, name) for each, name in zip(parameters, ("scale", "bias"), strict=False)]
    fused, report = onnxfuse.optimize(b.model(b(op, x, *names, axis=-1, epsilon=SMALL)), arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for rows in ROWS:
        given = (rng.standard_normal((rows, columns)) * 2 + 0.5).astype(NUMPY[dtype])
        own = as_float64(given) - (0 if rms else as_float64(given).mean(-1, keepdims=True))
        deviation = np.sqrt((own**2).mean(-1, keepdims=True) + SMALL)
        normal = own / deviation
        expected = normal * as_float64(scale) + (0 if rms else as_float64(bias))
        error = np.abs(run_cuda(live, given, dtype) - expected)
        # Sums of fp32 over a row, of which numbers near each other leave few digits, and rounding of what is stored.
        digits = EPSILON[F32] * (1 + np.abs(normal) + np.abs(as_float64(given)).max(-1, keepdims=True) / deviation)
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 8 * digits * np.maximum(np.abs(as_float64(scale)), 1))
        assert (error <= bound).all(), (
            f"{rows} x {columns}: {error.max():.3g}, {(error / bound).max():.2f} of the bound"
        )


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("columns", [64, 77, 320, 1536, 4096])
def test_a_scale_and_a_shift_of_each_image(tmp_path: Path, columns: int, dtype: int) -> None:
    """Of any number of images and of rows of each; what they are multiplied with is near."""
    rng = np.random.default_rng(columns)
    b = Builder(dtype, opset=17)
    shape = ("images", 1, columns)
    x, scale, shift = b.input("x", ("images", "rows", columns)), b.input("scale", shape), b.input("shift", shape)
    normal = b("LayerNormalization", x, b.array(np.ones(columns)), axis=-1, epsilon=SMALL)
    fused, report = onnxfuse.optimize(b.model(b("Add", b("Mul", normal, scale), shift)), arch="native")
    assert [len(site.nodes) for site in report.fused] == [3]
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for images, rows in ((1, 1), (3, 5), (16, 77), (130, 3), (2, 4096)):
        given, *beside = (rng.standard_normal((images, count, columns)).astype(NUMPY[dtype]) for count in (rows, 1, 1))
        values, scales, shifts = map(as_float64, (given, *beside))
        own = values - values.mean(-1, keepdims=True)
        normal_rows = own / np.sqrt((own**2).mean(-1, keepdims=True) + SMALL)
        expected = normal_rows * scales + shifts
        error = np.abs(run_cuda(live, given, dtype, scale=beside[0], shift=beside[1]) - expected)
        digits = EPSILON[F32] * (1 + np.abs(normal_rows) + np.abs(values).max(-1, keepdims=True))
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 8 * digits * np.maximum(np.abs(scales), 1))
        assert (error <= bound).all(), f"{images} x {rows} x {columns}: {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("form", [*ACROSS, *TURNED], ids=lambda form: form.__name__)
def test_channels_in_front_of_pixels(tmp_path: Path, form: Callable[..., str], dtype: int) -> None:
    """The reference is float64, of numbers as the model's type has them."""
    model = across_model(form, dtype)
    fused, report = onnxfuse.optimize(model, arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    assert len(fused.graph.node) == 1
    (site,) = analyse_model(model, resolve("native", local_architectures)).sites
    assert isinstance(site.fusion, Normalisation)
    stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for shape in ((1, 1, 1), (3, 7, 11), (2, 64, 64), (5, 33, 1)):
        size = (shape[0], CHANNELS, *shape[1:])
        rng = np.random.default_rng(size)
        feed = {value.name: rng.standard_normal(size).astype(NUMPY[dtype]) for value in model.graph.input}
        (expected,) = evaluate(site.fusion, stored | {name: as_float64(value) for name, value in feed.items()})
        beside = {name: value for name, value in feed.items() if name != "x"}
        error = np.abs(run_cuda(live, feed["x"], dtype, **beside) - expected)
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 64 * EPSILON[F32])
        assert (error <= bound).all(), f"{size}: {error.max():.3g}, {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("channels", [2, 3, 77, 256, 513, 1000, MOST_ACROSS])
def test_any_number_of_channels(tmp_path: Path, channels: int, dtype: int) -> None:
    b = Builder(dtype, opset=17)
    x = b.input("x", ("images", channels, "pixels"))
    average = b("ReduceMean", x, axes=[1], keepdims=1)
    centred = b("Sub", x, average)
    variance = b("ReduceMean", b("Mul", centred, centred), axes=[1], keepdims=1)
    fused, report = onnxfuse.optimize(b.model(b("Div", centred, b("Sqrt", b("Add", variance, b.array(SMALL))))))
    assert [site.pattern for site in report.fused] == ["normalisation"]
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for images, pixels in ((1, 1), (3, 31), (2, 1025), (70, 4)):
        given = np.random.default_rng(pixels).standard_normal((images, channels, pixels)).astype(NUMPY[dtype])
        own = as_float64(given) - as_float64(given).mean(1, keepdims=True)
        deviation = np.sqrt((own**2).mean(1, keepdims=True) + float(b.numpy.type(SMALL)))
        expected = own / deviation
        error = np.abs(run_cuda(live, given, dtype) - expected)
        largest = 1 + np.abs(as_float64(given)).max(1, keepdims=True) / deviation
        digits = EPSILON[F32] * largest * (1 + np.abs(expected))
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 8 * digits)
        assert (error <= bound).all(), f"{given.shape}: {error.max():.3g}, {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("bound", [2.0**-20, 2.0])
@pytest.mark.parametrize("columns", [77, 512])
def test_lengths_that_are_bounded(tmp_path: Path, columns: int, bound: float, dtype: int) -> None:
    """Rows of zeros, rows that are shorter than the bound and longer ones; one that is not a number stays so alone."""
    b = Builder(dtype, opset=17)
    x = b.input("x", ("rows", columns))
    length = b("Clip", b("ReduceL2", x, axes=[-1], keepdims=1), b.array(bound))
    fused, report = onnxfuse.optimize(b.model(b("Div", x, b("Expand", length, b("Shape", x)))), arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    given = np.random.default_rng(columns).standard_normal((9, columns))
    given *= (np.array([0, 1e-6, 1e-3, 0.05, 0.1, 0.5, 1, 7, 1]) / columns**0.5)[:, None]
    given[-1, 3] = np.nan
    given = given.astype(NUMPY[dtype])
    found = run_cuda(session(fused, tmp_path / "fused.onnx", fused=True), given, dtype)
    lengths = np.linalg.norm(as_float64(given), axis=-1, keepdims=True)
    expected = as_float64(given) / np.maximum(lengths, bound)
    assert np.isnan(found[-1]).all()
    error = np.abs(found - expected)[:-1]
    assert (error <= ULPS * EPSILON[dtype] * (np.abs(expected)[:-1] + 2.0**-14)).all(), error.max()


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_behind_it(tmp_path: Path, name: str, dtype: int) -> None:
    """The reference is the same model in fp32 on the CPU: no activation is steeper than 2 near what is normalised."""
    model, exact = model_of(ACTIVATIONS[name], dtype=dtype), model_of(ACTIVATIONS[name], dtype=F32)
    for given, wide in zip(model.graph.initializer, exact.graph.initializer, strict=True):
        wide.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(given).astype(np.float32), wide.name))
    fused, report = onnxfuse.optimize(model, arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    assert len(fused.graph.node) == 1
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for rows in ((1, 1), (3, 77), (2, 1024)):
        given = np.random.default_rng(rows).standard_normal((*rows, N)).astype(NUMPY[dtype])
        (expected,) = run_values(exact, [exact.graph.output[0].name], {"x": given.astype(np.float32)})
        error = np.abs(run_cuda(live, given, dtype) - expected)
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 64 * EPSILON[F32])
        assert (error <= bound).all(), f"{rows}: {error.max():.3g}, {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("deviation", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("spread", [variance, of_one_less], ids=lambda form: form.__name__)
@pytest.mark.parametrize("end", ENDS, ids=lambda form: form.__name__)
def test_a_deviation_and_what_is_added_to_it(
    tmp_path: Path, end: Callable[..., str], spread: Form, deviation: float, dtype: int
) -> None:
    """Rows whose deviation counts less than what is added to it, as much, and more; the reference is float64."""
    model = deviation_model(end, spread, dtype)
    fused, report = onnxfuse.optimize(model, arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    (site,) = analyse_model(model, resolve("native", local_architectures)).sites
    assert isinstance(site.fusion, Normalisation)
    stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    for rows in ((1, 1), (3, 77), (2, 1024)):
        given = (np.random.default_rng(rows).standard_normal((*rows, N)) * deviation).astype(NUMPY[dtype])
        (expected,) = evaluate(site.fusion, stored | {"x": as_float64(given)})
        error = np.abs(run_cuda(live, given, dtype) - expected)
        bound = ULPS * (EPSILON[dtype] * np.abs(expected) / 4 + 16 * EPSILON[F32] * (1 + np.abs(expected)))
        assert (error <= bound).all(), f"{rows}: {error.max():.3g}, {(error / bound).max():.2f} of the bound"


def chain(folder: Path, **options: str) -> Any:
    """Norm, product, norm, a product with residual: each kernel begins beside the end of the one before it."""
    rng = np.random.default_rng(0)
    b = Builder(F16, opset=17)
    value = b.input("x", ("rows", WIDTH))
    for layer in range(3):
        scale = b.array(1 + rng.standard_normal(WIDTH) / 8, f"scale{layer}")
        normal = b("LayerNormalization", value, scale, b.array(rng.standard_normal(WIDTH), f"bias{layer}"), axis=-1)
        weight = b.array(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, f"weight{layer}")
        value = b("Add", b("Relu", b("MatMul", normal, weight)), value)
    fused, _ = onnxfuse.optimize(b.model(value), arch="native")
    onnx.save(fused, folder / "chain.onnx")
    providers: list[str | tuple[str, dict[str, str]]] = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    return onnxfuse.InferenceSession(folder / "chain.onnx", providers=providers)


@pytest.mark.parametrize("rows", [1, 16, 300, 4000])
def test_captured_chains_replay_with_new_rows(tmp_path: Path, rows: int) -> None:
    given = [np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float16) for seed in range(4)]
    check_replays(chain(tmp_path), chain(tmp_path, enable_cuda_graph="1"), given, TURNS * 20)


def test_threads_share_a_chain(tmp_path: Path) -> None:
    live = chain(tmp_path)
    given = [np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float16) for rows in (1, 7, 130, 900)]
    check_threads([(live, x) for x in given])


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_is_behind_rows(behind: Callable[[Builder], str], dtype: int, tmp_path: Path) -> None:
    b = Builder(dtype, opset=18)
    model = b.model(behind(b))
    fused, report = onnxfuse.optimize(model, arch="native")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    check(tmp_path, model, fused)
