"""MatMulNBits whose columns are parts in turn, as gpt-oss's gate and up: stored part by part, for the kernels' sake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.load import load_model
from onnxfuse.graph.rows_in_turn import RowsInTurn, part_by_part, rows_in_turn_of
from onnxfuse.graph.save import save_model
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.schedule.calibration import calibration, replaced
from onnxfuse.schedule.strategy import Strategy
from tests.end_to_end.test_quantized_models import any_family as any_family
from tests.end_to_end.test_weight_order import in_turn
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.helpers.quantized import Form, dequantized, quantized_model
from tests.helpers.reference_fusion import evaluate
from tests.tools.sweep import rewritten

SM_90A = ARCHITECTURES["sm_90a"]
K, N = 128, 48
FORMS = [Form(4, 32), Form(4, 16, True), Form(4, 32, True, flat=True), Form(8, 128), Form(8, 64, True)]


@pytest.fixture(autouse=True)
def always_a_kernel(any_family: None) -> Iterator[None]:
    known = calibration(SM_90A)
    slow = {name: value * 1000 for name, value in known.library_quantized.items()}
    with replaced(SM_90A, replace(known, library_quantized=slow)):
        yield


def gate(b: Builder, x: str) -> list[str]:
    return in_turn(b, b("Add", b("MatMul", x, b.array(draw(K, 2 * N), "w")), b.array(draw(2 * N), "bias")))


def model_of(form: Form, own_bias: bool = False, plain: bool = False) -> ModelProto:
    """With `plain` another product reads the same integers, and nothing takes its columns apart."""
    b = Builder(FLOAT16)
    x = b.input("x", ("batch", "rows", K))
    model = quantized_model(b.model(*gate(b, x)), form, own_bias)
    if plain:
        node = model.graph.node.add()
        node.CopyFrom(model.graph.node[0])
        node.name, node.output[0] = "plain", "plain"
        model.graph.output.add(name="plain").type.tensor_type.elem_type = FLOAT16
    return model


def feed() -> dict[str, np.ndarray]:
    return {"x": draw(2, 5, K, seed=2).astype(np.float16)}


def analysed(model: ModelProto, keep_weights: bool = False) -> Analysis:
    return analyse_model(model, [SM_90A], keep_weights=keep_weights)


def same_bits(model: ModelProto, analysis: Analysis, epilogue_only: bool = False) -> ModelProto:
    fused = rewritten(analysis, epilogue_only, transposed=True)
    for before, after in zip(run(model, feed()), run(fused, feed()), strict=True):
        assert before.tobytes() == after.tobytes()
    return fused


@pytest.mark.parametrize("own_bias", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_kernel_the_same_bits_and_no_byte_more(form: Form, own_bias: bool) -> None:
    model = model_of(form, own_bias)
    analysis = analysed(model)
    (site,) = analysis.sites
    assert not analysis.skipped
    assert (site.strategy, {*site.fusion.features}) == (Strategy.ONE_KERNEL, {"activation", "bias", "gate"})
    fused = same_bits(model, analysis)
    assert len(fused.graph.node) == 1
    sizes = {tensor.name: len(tensor.raw_data) for tensor in model.graph.initializer}
    for tensor in fused.graph.initializer:
        own = tensor.name.removesuffix(".transposed")
        assert own not in sizes or len(tensor.raw_data) == sizes[own]
    assert sum(tensor.name.endswith(".transposed") for tensor in fused.graph.initializer) == 2 + form.zero_points


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_a_kernel_reads_means_what_the_graph_does(form: Form) -> None:
    """Against the definition, in float64."""
    model = model_of(form)
    (site,) = analysed(model).sites
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    values = {name: numpy_helper.to_array(tensor) for name, tensor in stored.items()}
    parts = [values.get(f"w.{part}") for part in ("q", "scales", "zero_points")]
    t = feed()["x"].astype(np.float64) @ dequantized(*parts, K, form.bits).T + values["bias"]
    active, up = np.minimum(t[..., ::2], 0.5), np.clip(t[..., 1::2], -0.5, 0.5)
    expected = (up + 1) * active / (1 + np.exp(-1.702 * active))
    (actual,) = evaluate(site.fusion, values | as_stored(site, stored) | feed())
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)  # 1.702 is of fp16


def as_stored(site: Site, stored: dict[str, onnx.TensorProto]) -> dict[str, np.ndarray]:
    made = {}
    for name, order in site.implementation.transposed.items():
        assert isinstance(order, RowsInTurn)
        assert rows_in_turn_of(str(order)) == order
        own = numpy_helper.to_array(stored[name])
        made[name] = np.frombuffer(part_by_part(order, own.tobytes()), own.dtype).reshape(own.shape)
    return made


@pytest.mark.parametrize("form", FORMS[1:3], ids=str)
def test_of_weights_that_stay_the_product_stays(form: Form) -> None:
    """Where they are to be kept, or another node reads them in the model's order; one kernel does what follows."""
    for model, keep in ((model_of(form), True), (model_of(form, plain=True), False)):
        analysis = analysed(model, keep)
        site = next(site for site in analysis.sites if "gate" in site.fusion.features)
        assert site.strategy is Strategy.EPILOGUE_ONLY
        fused = same_bits(model, analysis, epilogue_only=True)
        assert {"MatMulNBits"} < {node.op_type for node in fused.graph.node}
        assert not any(tensor.name.endswith(".transposed") for tensor in fused.graph.initializer)


def test_a_file_of_data_is_turned_on_its_way(tmp_path: Path) -> None:
    model = model_of(FORMS[1])
    path, target = tmp_path / "model.onnx", tmp_path / "fused" / "model.onnx"
    target.parent.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1000)
    analysis = analyse_model(path, [SM_90A])
    assert analysis.sites[0].implementation.transposed
    save_model(rewritten(analysis, transposed=True), load_model(path), target)
    assert run(onnx.load(target), feed())[0].tobytes() == run(model_of(FORMS[1]), feed())[0].tobytes()
