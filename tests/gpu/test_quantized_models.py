"""Models with weights of few bits in an ONNX Runtime CUDA session: every form, type and number of rows, verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import onnxfuse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.schedule.calibration import calibration, replaced
from onnxfuse.verify.verify import verify
from tests.gpu.test_ort_session import session
from tests.helpers.matching import draw, silu
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder
from tests.helpers.optimized_layers import Sizes, layers
from tests.helpers.quantized import Form, quantized_model

pytestmark = pytest.mark.gpu

K, HIDDEN = 288, 208  # K fills neither blocks of 64 nor of 128
ROWS = [1, 2, 5, 16, 17, 32, 64, 129, 300]
FORMS = [
    Form(bits, block, zero_points, flat=block == 32)
    for bits in QUANTIZED_BITS
    for block in QUANTIZED_BLOCKS
    for zero_points in (False, True)
    if (bits, block) != (4, 256)  # ONNX Runtime's own kernel of 4 bits takes blocks of 128 at most, on CUDA
]


@pytest.fixture(autouse=True)
def always_a_kernel() -> Iterator[None]:
    """Stock is thought slow, so that small models are fused as well."""
    with ExitStack() as stack:
        for device in ARCHITECTURES.values():
            known = calibration(device)
            slow = {name: value * 1000 for name, value in known.library_quantized.items()}
            stack.enter_context(replaced(device, replace(known, library_quantized=slow)))
        yield


def mlp(b: Builder) -> ModelProto:
    """Gate, up, down and the residual."""
    x = b.input("x", ("rows", K))

    def product(value: str, n: int, k: int, name: str) -> str:
        return b("MatMul", value, b.array(draw(k, n, seed=n + len(name)) / k**0.5, name))

    hidden = b("Mul", silu(b, product(x, HIDDEN, K, "gate")), product(x, HIDDEN, K, "up"))
    return b.model(b("Add", x, product(hidden, K, HIDDEN, "down")))


def packed(b: Builder, in_turn: bool) -> ModelProto:
    """Both halves of one weight with their bias, side by side or in turn; and a bare product of the same input."""
    x = b.input("x", ("rows", K))
    t = b("MatMul", x, b.array(draw(K, 2 * HIDDEN) / K**0.5, "both"))
    t = b("Add", t, b.array(draw(2 * HIDDEN, seed=1), "bias"))
    if in_turn:
        first, second = (b("Slice", t, *map(b.integers, (start, 2 * HIDDEN, 1, 2))) for start in range(2))
    else:
        first, second = b("Split", t, outputs=2, axis=1, num_outputs=2)
    bare = b("Softmax", b("MatMul", x, b.array(draw(K, 40, seed=2) / K**0.5, "bare")))
    return b.model(b("Mul", first, b("Sigmoid", second)), bare)


def written(model: ModelProto, folder: Path) -> tuple[Path, Path, int]:
    """The model and the fused model, and its fused products."""
    onnx.save(model, folder / "before.onnx")
    made, report = onnxfuse.optimize(model, arch="native")
    assert "quantized_form" not in {site.reason for site in report.skipped}
    onnx.save(made, folder / "after.onnx")
    count = sum(site.pattern != "normalisation" for site in report.fused)
    return folder / "before.onnx", folder / "after.onnx", count


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_mlp_is_as_good_as_stock(form: Form, dtype: int, tmp_path: Path) -> None:
    before, after, count = written(quantized_model(mlp(Builder(dtype)), form), tmp_path)
    assert count == 2
    result = verify(before, after, sizes={"rows": ROWS}, require_gpu=True)
    assert result.passed, str(result)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("form", [Form(4, 32), Form(4, 128, True), Form(8, 16, True, flat=True)], ids=str)
def test_halves_of_one_weight_and_a_bare_product(form: Form, in_turn: bool, tmp_path: Path) -> None:
    before, after, count = written(quantized_model(packed(Builder(FLOAT16), in_turn), form, bias=True), tmp_path)
    assert count == 2
    result = verify(before, after, sizes={"rows": ROWS}, require_gpu=True)
    assert result.passed, str(result)


@pytest.mark.parametrize("form", [Form(4, 32), Form(4, 128, True)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 9)], ids=str)
def test_layers_of_a_llama(form: Form, shape: tuple[int, int], tmp_path: Path) -> None:
    model = quantized_model(layers("llama", Sizes(256, 704, 4, 2), shape, 2), form)
    before, after, count = written(model, tmp_path)
    assert count >= 6
    result = verify(before, after, require_gpu=True)
    assert result.passed, str(result)


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan], ids=str)
def test_unusual_scales_are_as_the_original_computes(value: float, tmp_path: Path) -> None:
    model = quantized_model(mlp(Builder(FLOAT16)), Form(4, 32, True))
    for tensor in model.graph.initializer:
        if tensor.name == "down.scales":
            scales = numpy_helper.to_array(tensor).copy()
            scales[3, 1] = scales[20] = value
            tensor.CopyFrom(numpy_helper.from_array(scales, tensor.name))
    before, after, _ = written(model, tmp_path)
    for rows in (1, 7, 100):
        x = draw(rows, K).astype(np.float16)
        wanted, found = (
            session(onnx.load(path), path, path is after).run(None, {"x": x})[0].astype(np.float32)
            for path in (before, after)
        )
        assert np.array_equal(np.isnan(wanted), np.isnan(found))
        np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2)
