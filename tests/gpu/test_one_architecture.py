"""A fused node that a model of several architectures has for one alone: its kernel runs there, its body elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfuse
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.session import default_providers
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.helpers.quantized import Form, quantized_model

pytestmark = pytest.mark.gpu


def test_a_node_of_one_architecture_runs_on_that_alone(tmp_path: Path) -> None:
    b = Builder(FLOAT16)
    x, weight = b.input("x", ("batch", "rows", 512)), b.array(draw(512, 1024) / 16)
    model = quantized_model(b.model(b("MatMul", x, weight)), Form(4, 32))
    made, _ = onnxfuse.optimize(model, arch="sm_80,sm_90a")
    assert [node.op_type for node in made.graph.node] == ["FusedGemm90_0"]
    path = tmp_path / "after.onnx"
    onnx.save(made, path)
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxfuse.InferenceSession(str(path), options, providers=default_providers())
    feed = {"x": draw(2, 3, 512).astype(np.float16)}
    (found,) = session.run(None, feed)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=default_providers()).run(None, feed)
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=2e-2, atol=2e-2)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = {event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})}
    products = ran & {"FusedGemm90_0", "MatMulNBits"}
    assert products == ({"FusedGemm90_0"} if local_architectures() == ["sm_90a"] else {"MatMulNBits"})
