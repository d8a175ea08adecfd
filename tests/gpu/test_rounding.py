"""`--rounding onnx` on a GPU: the bits of the nodes, wherever the sums of products are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from tests.end_to_end.test_rounding import bits, multiples, node_by_node
from tests.helpers.onnx_build import FLOAT16, Builder

pytestmark = pytest.mark.gpu

K, N = 64, 256  # sums of 64 products of multiples of 2^-6 are exact in fp32


def exact_gate(order: str) -> onnx.ModelProto:
    """A gate of operators that every implementation rounds correctly."""
    b = Builder(FLOAT16)
    x, weight, bias = (
        b.input("x", ("rows", K)),
        multiples(K, 2 * N, seed=1, largest=24),
        multiples(2 * N, seed=2, largest=9),
    )
    if order == "kn":
        t = b("Add", b("MatMul", x, b.array(weight, "w")), b.array(bias, "b"))
    else:
        t = b("Gemm", x, b.array(weight.T.copy(), "w"), b.array(bias, "b"), transB=1)
    first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    bent = b("Add", b("Div", b("Mul", second, b.array(0.7)), b.array(1.1)), b.array(0.3))
    return b.model(b("Mul", first, b("Relu", bent)))


@pytest.mark.parametrize("order", ["kn", "nk"])
def test_every_kernel_makes_the_nodes_bits(order: str, tmp_path: Path) -> None:
    """Small and large M take different kernels."""
    model = exact_gate(order)
    fused, _ = onnxfuse.optimize(model, arch="native", rounding="onnx")
    plain, _ = onnxfuse.optimize(model, arch="native")
    for name, proto in (("fused", fused), ("plain", plain)):
        onnx.save(proto, tmp_path / f"{name}.onnx")
    sessions = [onnxfuse.InferenceSession(tmp_path / f"{name}.onnx") for name in ("fused", "plain")]
    differ = 0
    for rows in (1, 7, 16, 33, 128, 500, 2000):
        x = multiples(rows, K, seed=3, largest=80).astype(np.float16)
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        expected = bits(node_by_node(model, stored | {"x": x})[model.graph.output[0].name])
        actual, loose = (bits(session.run(None, {"x": x})[0]) for session in sessions)
        np.testing.assert_array_equal(actual, expected, err_msg=f"{rows} rows")
        differ += int((loose != expected).sum())
    assert differ, "the sizes are too easy: nothing depends on the rounding"
