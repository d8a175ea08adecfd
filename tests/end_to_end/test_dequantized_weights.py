"""A DequantizeLinear of blocks before a product: its integers are stored as a MatMulNBits has them, and come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.packed_data import ELEMENTS, Packing, packed, packing_of
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.calibration import calibration, replaced
from onnxfuse.schedule.strategy import Strategy
from tests.end_to_end.test_quantized_models import any_family as any_family
from tests.helpers.matching import draw, gate
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, cpu_session, run
from tests.helpers.quantized import dequantized, unpacked
from tests.helpers.reference_fusion import evaluate
from tests.helpers.rotary_models import Rotate, in_pairs, sliced
from tests.helpers.rotary_models import feed as rotary_feed
from tests.tools.sweep import rewritten

SM_90A = ARCHITECTURES["sm_90a"]
K, N, BLOCK, HEAD = 128, 48, 32, 16
NAMES = {number: TensorProto.DataType.Name(number) for number in ELEMENTS}
CASES = [
    (element, turned, zero_points)
    for element in ELEMENTS
    for turned in (False, True)
    for zero_points in (False, True)
    if zero_points or ELEMENTS[element][1]
]


@pytest.fixture(autouse=True)
def always_a_kernel(any_family: None) -> Iterator[None]:
    known = calibration(SM_90A)
    slow = {name: value * 1000 for name, value in known.library_quantized.items()}
    with replaced(SM_90A, replace(known, library_quantized=slow)):
        yield


def weight(b: Builder, name: str, element: int, turned: bool, zero_points: bool) -> str:
    """A matrix [k, n] of integers; turned, they lie as it does."""
    bits, signed = ELEMENTS[element]
    low = -(2 ** (bits - 1)) * signed
    rng = np.random.default_rng([element, len(name)])
    shape, few = ((K, N), (K // BLOCK, N)) if turned else ((N, K), (N, K // BLOCK))
    for part, dims in (("q", shape), ("z", few))[: 1 + zero_points]:
        numbers = rng.integers(low, low + 2**bits, dims)
        b.initializers.append(helper.make_tensor(f"{name}.{part}", element, dims, numbers.reshape(-1)))
    inputs = [f"{name}.q", b.array(draw(*few, seed=3), f"{name}.s"), *([f"{name}.z"] if zero_points else [])]
    made = b("DequantizeLinear", *inputs, axis=0 if turned else -1, block_size=BLOCK)
    return made if turned else b("Transpose", made, perm=[1, 0])


def model_of(element: int, turned: bool, zero_points: bool, dtype: int = FLOAT) -> ModelProto:
    b = Builder(dtype, opset=21)
    x = b.input("x", (5, K))  # of any number there would be some ten kernels to compile
    up, down = (b("MatMul", x, weight(b, name, element, turned, zero_points)) for name in ("up", "gate"))
    return b.model(gate(b, up, down), ir_version=10)


def feed(dtype: int = FLOAT) -> dict[str, np.ndarray]:
    return {"x": draw(5, K, seed=1).astype(helper.tensor_dtype_to_np_dtype(dtype))}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize(("element", "turned", "zero_points"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_the_same_bits_and_no_byte_more(element: int, turned: bool, zero_points: bool, dtype: int) -> None:
    model = model_of(element, turned, zero_points, dtype)
    written, report = onnxfuse.optimize(model, arch="sm_90a")
    assert [site.pattern for site in report.fused] == ["split_gemm"]
    before, after = (cpu_session(each).run(None, feed(dtype))[0] for each in (model, written))
    assert np.array_equal(before, after)
    stored = {each.name: each for each in written.graph.initializer if each.name != "onnxfuse.kernels"}
    held = sum(len(numpy_helper.from_array(numpy_helper.to_array(each)).raw_data) for each in stored.values())
    bits = ELEMENTS[element][0]
    assert held == 2 * (N * K * bits // 8 + N * K // BLOCK * (np.dtype(before.dtype).itemsize + zero_points * bits / 8))


def spelled(b: Builder, name: str, block: int) -> str:
    """The same of int8 [n, k] by ops of their own, as torch exports torchao's weights; a block of k is a column's."""
    numbers = np.random.default_rng(len(name)).integers(-128, 128, (N * K // block, block)).astype(np.int8)
    scales = b.array(draw(N * K // block, 1, seed=3) / 64, f"{name}.s")
    floats = b("Cast", b.raw(numbers, f"{name}.q"), to=b.dtype)
    matrix = b("Mul", b("Sub", floats, b.array(np.array(3.0), f"{name}.z")), scales)
    return b("Transpose", matrix if block == K else b("Reshape", matrix, b.integers(N, K)), perm=[1, 0])


@pytest.mark.parametrize("block", [BLOCK, K])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
def test_weights_that_ops_of_their_own_dequantise_meet_in_one_kernel(dtype: int, block: int) -> None:
    """They are as fixed as what they are made of."""
    b = Builder(dtype, opset=21)
    x = b.input("x", (5, K))
    up, down = (b("MatMul", x, spelled(b, name, block)) for name in ("up", "gate"))
    model = b.model(gate(b, up, down), ir_version=10)
    written, report = onnxfuse.optimize(model, arch="sm_90a")
    assert [site.pattern for site in report.fused] == ["split_gemm"]
    before, after = (cpu_session(each).run(None, feed(dtype))[0] for each in (model, written))
    assert np.array_equal(before, after)


@pytest.mark.parametrize(("element", "turned", "zero_points"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_what_a_kernel_reads_is_the_matrix(element: int, turned: bool, zero_points: bool) -> None:
    model = model_of(element, turned, zero_points)
    written, _ = onnxfuse.optimize(model, arch="sm_90a")
    (node,) = (each for each in written.graph.node if each.domain == "onnxfuse")
    values = {each.name: numpy_helper.to_array(each) for each in written.graph.initializer}
    inputs = [values.get(name) for name in node.input[2:]]
    assert [value.shape for value in inputs[:4]] == [(N, K // BLOCK, BLOCK * ELEMENTS[element][0] // 8)] * 2 + [
        (N, K // BLOCK)
    ] * 2
    made = model.graph.node[0 if turned else 1].output[0]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(made, FLOAT, (K, N)))
    (matrix,) = cpu_session(model).run(None, feed())
    zeros = inputs[4] if zero_points else None
    found = dequantized(inputs[0], inputs[2], zeros, K, ELEMENTS[element][0])
    np.testing.assert_allclose(found.T, matrix, rtol=1e-6)


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES.get)
@pytest.mark.parametrize("turned", [False, True])
def test_every_byte_is_packed(element: int, turned: bool) -> None:
    bits, signed = ELEMENTS[element]
    n, k = (256, 8) if turned else (8, 256)
    data = np.stack([np.roll(np.arange(256, dtype=np.uint8), shift) for shift in range(n * k * bits // 2048)])
    packing = Packing(element, n, k, 0, turned)
    assert packing_of(str(packing)) == packing
    stored = np.frombuffer(packed(packing, data.tobytes()), np.uint8).reshape(n, -1)
    numbers = unpacked(data.reshape(-1), bits).reshape(packing.own_dims)
    wanted = numbers.T if turned else numbers
    assert np.array_equal(unpacked(stored, bits), wanted ^ ((1 << (bits - 1)) * signed))


def rotated(element: int, turned: bool, zero_points: bool, dtype: int, rotate: Rotate) -> ModelProto:
    """Heads that turn, of a product whose weight is made of integers, as Llama's q and k after quantisation."""
    b = Builder(dtype, opset=21)
    product = b("MatMul", b.input("x", ("batch", "rows", K)), weight(b, "q", element, turned, zero_points))
    heads = b("Reshape", b("Add", product, b.array(draw(N), "bias")), b.integers(0, 0, N // HEAD, HEAD))
    return b.model(rotate(b, b("Transpose", heads, perm=[0, 2, 1, 3]), HEAD), ir_version=10)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rotate", [sliced, in_pairs])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize(("element", "turned", "zero_points"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_heads_that_turn_are_stored_half_by_half(
    element: int, turned: bool, zero_points: bool, dtype: int, rotate: Rotate
) -> None:
    model = rotated(element, turned, zero_points, dtype, rotate)
    given = rotary_feed(model, 5)
    analysis = analyse_model(model, [SM_90A])
    (site,) = analysis.sites
    assert (site.fusion.pattern, site.strategy) == ("rotary_gemm", Strategy.ONE_KERNEL)
    written = rewritten(analysis, transposed=True)
    (before,), (after,) = run(model, given), run(written, given)
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("rotate", [sliced, in_pairs])
@pytest.mark.parametrize(("element", "turned", "zero_points"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_what_a_kernel_of_heads_that_turn_reads_is_the_matrix(
    element: int, turned: bool, zero_points: bool, rotate: Rotate
) -> None:
    """In float64, within a rounding of fp32 for each step of a sum, of which a rotation takes two."""
    model = rotated(element, turned, zero_points, FLOAT, rotate)
    given = rotary_feed(model, 5)
    analysis = analyse_model(model, [SM_90A])
    values = {each.name: numpy_helper.to_array(each) for each in rewritten(analysis, transposed=True).graph.initializer}
    (site,) = analysis.sites
    stored = {name: values[f"{name}.transposed"] for name in site.implementation.transposed}
    (made,) = evaluate(site.fusion, values | given | stored)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    model.graph.output.append(helper.make_tensor_value_info(product.input[1], FLOAT, (K, N)))
    expected, matrix = run(model, given)
    terms = np.abs(given["x"]) @ np.abs(matrix) + np.abs(values["bias"])
    np.testing.assert_allclose(made, expected, rtol=0, atol=2 * terms.max() * (K + 8) * 2.0**-24)


@pytest.mark.parametrize("element", ELEMENTS, ids=NAMES.get)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("parts", "run_length"), [(2, 1), (2, 4), (4, 3), (3, 8)])
def test_parts_in_turn_are_packed_part_by_part(element: int, turned: bool, parts: int, run_length: int) -> None:
    """By the definition: of each part all turns, and of them all columns."""
    n, k = 48, 8
    plain = Packing(element, n, k, 0, turned)
    data = np.random.default_rng(parts).integers(0, 256, n * k * plain.bits // 8, np.uint8).tobytes()
    by_parts = replace(plain, parts=parts, run=run_length)
    assert packing_of(str(by_parts)) == by_parts
    columns = np.frombuffer(packed(plain, data), np.uint8).reshape(n, -1)
    wanted = [columns[column] for part in range(parts) for column in range(n) if column // run_length % parts == part]
    assert packed(by_parts, data) == np.stack(wanted).tobytes()


def test_a_file_of_data_is_packed_on_its_way(tmp_path: Path) -> None:
    model = model_of(TensorProto.INT4, True, True)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    report = onnxfuse.optimize_file(str(tmp_path / "m.onnx"), str(tmp_path / "fused.onnx"), arch="sm_90a")
    assert len(report.fused) == 1
    before, after = (onnx.load(tmp_path / name) for name in ("m.onnx", "fused.onnx"))
    assert np.array_equal(*(cpu_session(each).run(None, feed())[0] for each in (before, after)))


def test_what_others_read_stays() -> None:
    model = model_of(TensorProto.INT4, True, False)
    report = onnxfuse.optimize(model, arch="sm_90a", keep_weights=True)[1]
    assert {site.reason for site in report.skipped} == {"quantized_form"}
    assert not report.fused
    model.graph.node.append(helper.make_node("Cast", ["up.q"], ["numbers"], to=FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("numbers", FLOAT, (K, N)))
    found = analyse_model(model, [SM_90A])
    assert not any(site.transposed.get("up.q") for site in found.sites)
    assert "quantized_form" in {entry.reason for entry in found.skipped}


@pytest.mark.parametrize("change", ["block", "unsigned", "uneven", "float8"])
def test_other_forms_have_a_reason(change: str) -> None:
    b = Builder(FLOAT, opset=21)
    x = b.input("x", ("rows", K))
    element = TensorProto.UINT4 if change == "unsigned" else TensorProto.INT4
    shape, block = ((K - 8, N) if change == "uneven" else (K, N)), 8 if change == "block" else BLOCK
    few = (-(-shape[0] // block), N)
    b.initializers.append(helper.make_tensor("q", element, shape, np.zeros(shape, np.int64).reshape(-1)))
    x = b.input("y", ("rows", K - 8)) if change == "uneven" else x
    if change == "float8":
        b.initializers[-1] = helper.make_tensor("q", TensorProto.FLOAT8E4M3FN, shape, np.zeros(shape).reshape(-1))
    made = b("DequantizeLinear", "q", b.array(draw(*few)), axis=0, block_size=block)
    found = analyse_model(b.model(b("Relu", b("MatMul", x, made)), ir_version=10), [SM_90A])
    assert [entry.reason for entry in found.skipped] == ["quantized_form"]
