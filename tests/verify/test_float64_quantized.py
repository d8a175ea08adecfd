"""Quantised weights in the float64 reference: MatMulNBits and DequantizeLinear of blocks, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.verify.float64_model import float64_model
from tests.helpers.onnx_build import FLOAT, FLOAT16, cpu_session, run
from tests.helpers.quantized import Form, dequantized, nbits_node, quantize
from tests.helpers.tf32 import to_tf32
from tests.verify.test_float64_model import TYPES_OF, assert_exact

K, N = 72, 7


def model_of(form: Form, dtype: int, biased: bool) -> tuple[ModelProto, np.ndarray, np.ndarray]:
    """A product, the matrix [n, k] that it multiplies by, and its bias."""
    rng, element = np.random.default_rng(form.block), helper.tensor_dtype_to_np_dtype(dtype)
    made = quantize(rng.standard_normal((N, K)), form, element)
    bias = rng.standard_normal(N).astype(element)
    names = ["w", "s", "z"][: len(made.tensors)]
    stored = [*map(numpy_helper.from_array, [*made.tensors, bias], [*names, "b"])]
    node = nbits_node("x", "y", names, form, N, K, "b" if biased else "")
    values = [helper.make_tensor_value_info("x", dtype, (3, K)), helper.make_tensor_value_info("y", dtype, (3, N))]
    graph = helper.make_graph([node], "nbits", values[:1], values[1:], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    matrix = dequantized(made.weight, made.scales, made.zero_points, K, form.bits)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), matrix, bias * biased


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block", QUANTIZED_BLOCKS)
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_a_product_of_few_bits_is_exact_in_double(bits: int, block: int, zero_points: bool, dtype: int) -> None:
    model, matrix, bias = model_of(Form(bits, block, zero_points, flat=block == 32), dtype, block > 16)
    x = np.random.default_rng(1).standard_normal((3, K)).astype(helper.tensor_dtype_to_np_dtype(dtype))
    reference = float64_model(model, TYPES_OF)
    assert reference.kept == {}
    (found,) = run(reference.model, {"x": x})
    assert_exact(found, x.astype(np.float64) @ matrix.T + bias.astype(np.float64))


def test_both_of_its_factors_are_rounded_to_tf32() -> None:
    model, matrix, bias = model_of(Form(8, 32, True), FLOAT, True)
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    (found,) = run(float64_model(model, TYPES_OF, tf32=True).model, {"x": x})
    factors = to_tf32(x).astype(np.float64), to_tf32(matrix.astype(np.float32)).astype(np.float64)
    wanted = factors[0] @ factors[1].T + bias
    assert np.abs(found - wanted).max() < 1e-6
    assert np.abs(found - (x.astype(np.float64) @ matrix.T + bias)).max() > 1e-5


@pytest.mark.parametrize("element", [TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("zero_points", [False, True])
def test_blocks_are_dequantized_exactly(element: int, axis: int, zero_points: bool) -> None:
    rng, block, shape = np.random.default_rng(element), 32, (64, 96)
    few = [size // block if place == axis % 2 else size for place, size in enumerate(shape)]
    low, high = {TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16), TensorProto.INT8: (-128, 128),
                 TensorProto.UINT8: (0, 256)}[element]  # fmt: skip
    integers, zeros = rng.integers(low, high, shape), rng.integers(low, high, few)
    scales = rng.standard_normal(few).astype(np.float16)
    stored = [
        helper.make_tensor("x", element, shape, integers.reshape(-1)),
        numpy_helper.from_array(scales, "s"),
        *([helper.make_tensor("z", element, few, zeros.reshape(-1))] if zero_points else []),
    ]
    node = helper.make_node("DequantizeLinear", [each.name for each in stored], ["y"], axis=axis, block_size=block)
    out = helper.make_tensor_value_info("y", FLOAT16, shape)
    graph = helper.make_graph([node], "blocks", [], [out], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    reference = float64_model(model, TYPES_OF)
    assert reference.kept == {}
    (found,) = cpu_session(reference.model).run(None, {})
    wide = np.repeat(scales.astype(np.float64), block, axis)
    assert_exact(found, (integers - np.repeat(zeros, block, axis) * zero_points) * wide)


def test_what_has_another_form_runs_in_its_own_type() -> None:
    model, _, _ = model_of(Form(4, 32), FLOAT, False)
    next(each for each in model.graph.node[0].attribute if each.name == "bits").i = 2
    assert "com.microsoft::MatMulNBits in float32" in float64_model(model, TYPES_OF).kept
