"""Tools that a fused model goes through: which keep its fused nodes and functions, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import onnx_graphsurgeon
import onnxruntime
import pytest
from google.protobuf import json_format
from onnx import ModelProto
from onnxruntime.quantization import QuantType, quantize_dynamic

from onnxfuse.device import resolve
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.load import load_model
from onnxfuse.pipeline import analyse_model
from onnxfuse.selection import Selection
from onnxfuse.verify.verify import verify
from tests.helpers.matching import draw, gate
from tests.helpers.onnx_build import Builder, run
from tests.tools.sweep import rewritten

K = 16


def original() -> ModelProto:
    """A gate, a product with a residual, and a product that nothing follows."""
    b = Builder(opset=18)
    x = b.input("x", ("batch", "rows", K))
    halves = b("Split", b("MatMul", x, b.array(draw(K, 2 * K), "both")), outputs=2, axis=-1, num_outputs=2)
    y = b("Add", b("MatMul", gate(b, *halves), b.array(draw(K, K), "down")), x)
    return b.model(b("Softmax", b("MatMul", y, b.array(draw(K, K), "last"))))


def fused() -> ModelProto:
    return rewritten(analyse_model(original(), resolve("sm_90a", list)))


def feed() -> dict[str, np.ndarray]:
    return {"x": draw(2, 3, K, seed=1).astype(np.float32)}


def fused_nodes(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == DOMAIN]


def prefixed(model: ModelProto) -> ModelProto:
    made = onnx.compose.add_prefix(model, "a/", rename_functions=False, rename_inputs=False)
    assert any(name.startswith("a/") for node in made.graph.node for name in node.output)
    return made


def merged(model: ModelProto) -> ModelProto:
    b = Builder(opset=18)
    before = b.model(b("Identity", b.input("x", ("batch", "rows", K))), ir_version=model.ir_version)
    second = onnx.compose.add_prefix(model, "second/", rename_functions=False)
    return onnx.compose.merge_models(before, second, io_map=[(before.graph.output[0].name, "second/x")])


def quantized(model: ModelProto) -> ModelProto:
    """What onnxfuse left: one product. A CPU without VNNI saturates sums of two products of signed weights."""
    path = Path("quantized.onnx")
    quantize_dynamic(model, path, weight_type=QuantType.QUInt8)
    return onnx.load(path)


def through_graphsurgeon(model: ModelProto) -> ModelProto:
    graph = onnx_graphsurgeon.import_onnx(model)
    return onnx_graphsurgeon.export_onnx(graph.fold_constants().cleanup().toposort())


KEEPING: dict[str, Callable[[ModelProto], ModelProto]] = {
    "shape inference": lambda model: onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True),
    "a prefix": prefixed,
    "merging": merged,
    "text": lambda model: onnx.parser.parse_model(onnx.printer.to_text(model)),
    "JSON": lambda model: json_format.Parse(json_format.MessageToJson(model), ModelProto()),
    "graphsurgeon": through_graphsurgeon,
}


@pytest.mark.parametrize("tool", KEEPING)
def test_fused_nodes_stay_and_so_do_the_bits(tool: str) -> None:
    model = fused()
    made = KEEPING[tool](model)
    assert fused_nodes(made) == fused_nodes(model) != []
    assert [function.name for function in made.functions] == [function.name for function in model.functions]
    assert run(made, feed())[0].tobytes() == run(model, feed())[0].tobytes()


def test_what_is_left_can_be_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = fused()
    made = quantized(model)
    assert fused_nodes(made) == fused_nodes(model)
    assert {"MatMulInteger"} <= {node.op_type for node in made.graph.node}
    np.testing.assert_allclose(run(made, feed())[0], run(model, feed())[0], atol=0.1)


def test_inlining_gives_the_original_nodes_back() -> None:
    made = onnx.inliner.inline_local_functions(fused())
    assert not fused_nodes(made)
    assert run(made, feed())[0].tobytes() == run(original(), feed())[0].tobytes()


def saved_by_the_runtime(model: ModelProto) -> ModelProto:
    """As its basic level leaves it: no function, and values of their bodies under names of its own."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = "saved.onnx", 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load("saved.onnx")


def test_what_the_runtime_saved_of_it_can_be_fused_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In part, so that values of a body that was inlined stand beside those of one that will be."""
    monkeypatch.chdir(tmp_path)
    made = model = fused()
    for _ in range(2):
        made = saved_by_the_runtime(made)
        assert not fused_nodes(made)
        made = rewritten(analyse_model(made, resolve("sm_90a", list), selection=Selection(skip=("split_gemm",))))
        assert fused_nodes(made)
    np.testing.assert_allclose(run(made, feed())[0], run(model, feed())[0], rtol=1e-5)


def without_functions(model: ModelProto) -> ModelProto:
    made = onnx.version_converter.convert_version(model, 21)
    assert not made.functions
    return made


def without_their_first_input(model: ModelProto) -> ModelProto:
    """As onnxslim leaves functions: what no node of a body reads is no input."""
    for function in model.functions:
        assert function.input.pop(0) == "kernels"
    return model


@pytest.mark.parametrize("tool", [without_functions, without_their_first_input])
def test_a_file_that_lost_functions_is_one_line(tool: Callable[[ModelProto], ModelProto], tmp_path: Path) -> None:
    made = tool(fused())
    assert fused_nodes(made)
    onnx.save(original(), tmp_path / "before.onnx")
    onnx.save(made, tmp_path / "after.onnx")
    with pytest.raises(OnnxfuseError, match="dropped or cut the functions") as raised:
        verify(tmp_path / "before.onnx", tmp_path / "after.onnx")
    assert "\n" not in str(raised.value)


def test_a_file_of_ort_s_own_format_is_named(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.log_severity_level = 3
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(original().SerializeToString(), options, ["CPUExecutionProvider"])
    with pytest.raises(OnnxfuseError, match=r"model.ort: in ONNX Runtime's own format"):
        load_model(tmp_path / "model.ort")


@pytest.mark.parametrize("before", ["shape inference", "a prefix", "text", "graphsurgeon", "version"])
def test_and_before_onnxfuse_they_cost_no_fusion(before: str) -> None:
    tools = KEEPING | {"version": lambda model: onnx.version_converter.convert_version(model, 21)}
    made = tools[before](original())
    analysis = analyse_model(made, resolve("sm_90a", list))
    assert [site.fusion.features for site in analysis.sites] == [("activation", "gate"), ("residual",)]
