"""Models with operators of the user's own: verify and bench are told of a library that has them. On the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxfuse
from onnxfuse.bench.bench import bench
from onnxfuse.errors import DeviceError, ModelError, SettingError
from onnxfuse.runtime.session import CPU, options_with
from onnxfuse.verify import verify
from tests.helpers.bridge_build import custom_op_library
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import Builder


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A product of which a custom operator reads the result, and a product behind that."""
    b = Builder()
    weights = [np.random.default_rng(seed).standard_normal((8, 8)) / 4 for seed in range(2)]
    first = b("Relu", b("MatMul", b.input("x", ["m", 8]), b.array(weights[0])))
    made = b.model(b("Tanh", b("MatMul", b("Identity", first), b.array(weights[1]))))
    for node in made.graph.node:
        if node.op_type == "Identity":
            node.op_type, node.domain = "Double", "own"
    made.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(made, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def fused(model: Path) -> Path:
    made, report = onnxfuse.optimize(model, arch="sm_80")
    assert len(report.fused) == 1, "behind the custom operator no shape is known"
    onnx.save(made, model.with_name("fused.onnx"))
    return model.with_name("fused.onnx")


def test_a_custom_operator_runs_in_its_own_type(model: Path, fused: Path) -> None:
    options = options_with([custom_op_library()])
    level = options.graph_optimization_level
    result = verify.verify(model, fused, per_site=True, session_options=options)
    assert result.passed
    assert result.kept == {"own::Double in float32": 1}
    assert all(0 < check.original.max < 1e-5 for check in result.outputs)
    assert options.graph_optimization_level == level, "the user's options are as they were"


def test_without_its_library_the_model_is_refused(model: Path, fused: Path) -> None:
    with pytest.raises(ModelError, match="Double"):
        verify.verify(model, fused)


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"nothing\.so: no such file"):
        options_with([tmp_path / "nothing.so"])
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(DeviceError, match=r"text\.so: ONNX Runtime cannot load it"):
        options_with([tmp_path / "text.so"])
    assert options_with([]) is None


def test_bench_takes_a_library_too(model: Path, fused: Path) -> None:
    options = options_with([custom_op_library()])
    result = bench(model, fused, device="cpu", runs=2, warmup=0, per_site=True, session_options=options)
    assert len(result.sites) == 1


def test_the_commands_take_a_library(model: Path, fused: Path) -> None:
    library = ("--library", custom_op_library())
    for arguments in (("verify", model, fused), ("bench", model, fused, "--device", "cpu", "--runs", "1")):
        assert command(*arguments, *library).returncode == 0
        assert command(*arguments).returncode == 3
