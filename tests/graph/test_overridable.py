"""Initializers that are inputs as well: from IR version 4 on a run may give them another value."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnxfuse.graph.op_names import FUSED_GEMM, kind_of
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import K, N, draw
from tests.helpers.onnx_build import FLOAT, Builder, run
from tests.tools.sweep import rewritten

OTHERS = {"scale": np.float32(3), "bias": np.float32(draw(N, seed=2)), "weight": np.float32(draw(K, N, seed=3))}
FEED = {"x": np.float32(draw(3, K))}


def listed(ir_version: int) -> onnx.ModelProto:
    """`tanh(scale * (x @ weight + bias))` with everything that it stores among its inputs."""
    b = Builder()
    product = b("MatMul", b.input("x", ("rows", K)), b.array(draw(K, N), "weight"))
    scaled = b("Mul", b("Add", product, b.array(draw(N, seed=1), "bias")), b.array(np.array(0.5), "scale"))
    model = b.model(b("Tanh", scaled), ir_version=ir_version)
    stored = [(tensor.name, tensor.dims) for tensor in model.graph.initializer]
    model.graph.input.extend(helper.make_tensor_value_info(name, FLOAT, list(dims)) for name, dims in stored)
    return model


@pytest.mark.parametrize("given", [(), ("scale",), ("bias",), ("weight",), tuple(OTHERS)], ids=str)
def test_a_value_that_a_run_gives_is_the_one_that_counts(given: tuple[str, ...]) -> None:
    original = listed(ir_version=8)
    fused = rewritten(analyse_model(original, []))
    assert any(kind_of(node.op_type) == FUSED_GEMM for node in fused.graph.node)
    feed = FEED | {name: OTHERS[name] for name in given}
    assert run(original, feed)[0].tobytes() == run(fused, feed)[0].tobytes()


def test_what_could_not_be_overridden_stays_constant() -> None:
    """Before IR version 4 every initializer had to be an input; a fused model is of a later version."""
    fused = rewritten(analyse_model(listed(ir_version=3), []))
    session = onnxruntime.InferenceSession(fused.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_overridable_initializers() == []
    assert run(listed(ir_version=3), FEED)[0].tobytes() == run(fused, FEED)[0].tobytes()
