"""A number that the model computes in 16 bits of shapes is a kernel's, and its nodes are the body's, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from onnxfuse.device import resolve
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten

HEADS, END = 2, 2**63 - 1
WIDTHS = (16, 24, 40, 64, 80)  # of a head: the first has a root that 16 bits hold, as has its root


def heads_of(b: Builder, x: str, columns: int) -> str:
    product = b("Add", b("MatMul", x, b.array(draw(columns, columns) / 8)), b.array(draw(columns) / 8))
    return b("Transpose", b("Reshape", product, b.integers(0, 0, HEADS, columns // HEADS)), perm=[0, 2, 1, 3])


def scaled_dot_product(width: int, dtype: int) -> ModelProto:
    """As torch's TorchScript exporter writes it: the roots of the root of the width scale the query and the key."""
    b, columns = Builder(dtype), HEADS * width
    x = b.input("x", ("batch", "tokens", columns))
    q, k, v = (heads_of(b, x, columns) for _ in range(3))
    size = b("Slice", b("Shape", q), b.integers(-1), b.integers(END))
    root = b("Sqrt", b("Cast", size, to=dtype))
    one = b("Cast", b("Constant", value_floats=[1.0]), to=dtype)
    scale = b("Cast", b("Div", one, root), to=dtype)
    scores = b(
        "MatMul", b("Mul", q, b("Sqrt", scale)), b("Mul", b("Transpose", k, perm=[0, 1, 3, 2]), b("Sqrt", scale))
    )
    return b.model(b("MatMul", b("Softmax", scores, axis=-1), v))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["fp32", "fp16"])
def test_no_node_of_a_scale_is_left_beside_the_kernels(width: int, dtype: int) -> None:
    fused = rewritten(analyse_model(scaled_dot_product(width, dtype), resolve("sm_90a,sm_80", list)))
    assert {node.domain for node in fused.graph.node} == {DOMAIN}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_the_body_makes_the_bits_of_before(width: int, tokens: int) -> None:
    model = scaled_dot_product(width, TensorProto.FLOAT16)
    fused = rewritten(analyse_model(model, resolve("sm_90a,sm_80", list)))
    feed = {"x": draw(3, tokens, HEADS * width, seed=tokens).astype(np.float16)}
    (before,), (after,) = run(model, feed), run(fused, feed)
    assert before.tobytes() == after.tobytes()
