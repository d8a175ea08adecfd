"""MatMulNBits as a product: what is matched, what it means, how it is printed, and which forms are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import Fusion
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.patterns import Match, match_sites
from tests.helpers.matching import draw, gate, only, refusal, silu
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder, cpu_session
from tests.helpers.quantized import Form, dequantized, quantize, quantized_model
from tests.helpers.reference_fusion import evaluate

K, N = 72, 12  # K fills no block but those of 8
FORMS = [
    Form(bits, block, zero_points, flat)
    for bits in QUANTIZED_BITS
    for block in QUANTIZED_BLOCKS
    for zero_points, flat in ((False, False), (True, False), (True, True))
]


def linear(b: Builder, x: str, name: str, n: int = N) -> str:
    return b("MatMul", x, b.array(draw(K, n, seed=len(name)), name))


def dual_gate(b: Builder, x: str) -> list[str]:
    return [gate(b, linear(b, x, "up"), linear(b, x, "gated"))]


def packed_gate(b: Builder, x: str) -> list[str]:
    return [gate(b, *b("Split", linear(b, x, "both"), outputs=2, axis=-1, num_outputs=2))]


def biased(b: Builder, x: str) -> list[str]:
    return [silu(b, b("Add", linear(b, x, "weight"), b.array(draw(N), "bias")))]


def residual(b: Builder, x: str) -> list[str]:
    return [b("Add", linear(b, x, "weight"), b.input("skip", ("batch", "rows", N)))]


def window(b: Builder, x: str) -> list[str]:
    """Columns that are no equal parts: two thirds and a third."""
    first, second = b("Split", linear(b, x, "weight"), b.integers(8, 4), outputs=2, axis=-1)
    return [b("Relu", first), b("Tanh", second)]


GRAPHS: dict[str, Callable[[Builder, str], list[str]]] = {
    each.__name__: each for each in (dual_gate, packed_gate, biased, residual, window)
}


def model_of(
    graph: Callable[[Builder, str], list[str]], form: Form, dtype: int = FLOAT, bias: bool = False
) -> ModelProto:
    b = Builder(dtype)
    outputs = graph(b, b.input("x", ("batch", "rows", K)))
    return quantized_model(b.model(*outputs), form, bias)


def matched(model: ModelProto) -> list[tuple[Match, Fusion]]:
    found = match_sites(Graph(load_model(model)), lambda match, fusion: (match, fusion))
    assert not found.skipped
    return list(found.fused)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_fusion_means_what_onnx_runtime_computes(name: str, form: Form) -> None:
    model = model_of(GRAPHS[name], form, bias=name == "biased")
    feed = {"x": draw(2, 5, K, seed=2).astype(np.float32), "skip": draw(2, 5, N, seed=3).astype(np.float32)}
    session = cpu_session(model)
    wanted = session.run(None, {entry.name: feed[entry.name] for entry in session.get_inputs()})
    expected = dict(zip([entry.name for entry in session.get_outputs()], wanted, strict=True))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made = {}
    for _, fusion in matched(model):
        assert fusion.quantization is not None
        assert (fusion.quantization.bits, fusion.quantization.block) == (form.bits, form.block)
        made |= dict(zip([out.name for out in fusion.outputs], evaluate(fusion, stored | feed), strict=True))
    assert made.keys() == expected.keys()
    for output, value in expected.items():
        np.testing.assert_allclose(made[output], value, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("bits", QUANTIZED_BITS)
@pytest.mark.parametrize("block", QUANTIZED_BLOCKS)
def test_every_byte_is_unpacked_as_onnx_runtime_does(bits: int, block: int) -> None:
    """Every byte at every place of a block, times 1 or an odd zero point: x is the identity."""
    k = 2 * block
    form = Form(bits, block, True)
    rng = np.random.default_rng(block)
    places = k * bits // 8
    weight = np.stack([np.full(places, byte) for byte in range(256)]).astype(np.uint8).reshape(256, 2, -1)
    zeros = np.arange(256 * (2 * bits // 8)).reshape(256, -1).astype(np.uint8)
    scales = rng.choice([-1.0, 0.5, 2.0, 0.0], (256, 2)).astype(np.float32)
    b = Builder(FLOAT)
    x = b.input("x", (k, k))
    names = [b.raw(value, name) for value, name in ((weight, "w"), (scales, "s"), (zeros, "z"))]
    out = b("MatMulNBits", x, *names, domain="com.microsoft", N=256, K=k, **form.attributes)
    y = b("Relu", b("Sub", out, b.array(0.0)))
    made = helper.make_tensor_value_info(y, FLOAT, (k, 256))
    graph = helper.make_graph(b.nodes, "g", b.inputs, [made], b.initializers)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)], ir_version=9
    )
    (found,) = cpu_session(model).run(None, {"x": np.eye(k, dtype=np.float32)})
    np.testing.assert_array_equal(found, np.maximum(dequantized(weight, scales, zeros, k, bits), 0).T)


def test_quantising_is_unpacked_to_near_the_matrix() -> None:
    for form in FORMS:
        matrix = draw(N, K)
        made = quantize(matrix, form, np.dtype(np.float32))
        again = dequantized(made.weight, made.scales, made.zero_points, K, form.bits)
        assert np.abs(again - matrix).max() <= 1.01 * float(made.scales.max())


def test_a_gate_is_printed_with_stored_types_and_scales() -> None:
    _, fusion = only(model_of(dual_gate, Form(4, 32, True), FLOAT16))
    assert fusion.pattern == "split_gemm"
    rows = [" ".join(line.split()) for line in str(fusion).splitlines()]
    assert rows[1].endswith("k=72 kb=3 kc=32 kq=16 kz=2")
    assert rows[3:6] == ["rhs i4[n, (kb kc)] parts 2", "scale f16[n, kb]", "zero point i4[n, kb]"]
    assert fusion.einops == "b m k, n kb kq, n kb kq, n kb, n kb, n kz, n kz -> b m n"


def test_halves_of_one_weight_are_parts() -> None:
    _, fusion = only(model_of(packed_gate, Form(8, 16, True, flat=True), FLOAT16))
    assert [part.part for part in fusion.parts] == [0, 1]
    assert fusion.einops == "b m k, (p n) kb kq, (p n kb), (p n kz) -> b m n"


def test_products_of_different_forms_are_not_joined() -> None:
    b = Builder()
    x = b.input("x", ("batch", "rows", K))
    model = quantized_model(b.model(b("Mul", linear(b, x, "up"), linear(b, x, "gated"))), Form())
    other = quantized_model(b.model(b("Mul", linear(b, x, "up"), linear(b, x, "gated"))), Form(8))
    by_name = {tensor.name: tensor for tensor in other.graph.initializer}
    for tensor in model.graph.initializer:
        if tensor.name.startswith("up"):
            tensor.CopyFrom(by_name[tensor.name])
    next(node for node in model.graph.node if node.input[1].startswith("up")).attribute[2].i = 8
    assert {each.name for each in model.graph.node[0].attribute} >= {"bits"}
    found = match_sites(Graph(load_model(model)), lambda match, fusion: fusion).fused
    assert all(len(fusion.parts) == 1 for fusion in found)


def changed(change: Callable[[onnx.NodeProto, ModelProto], None], form: Form | None = None) -> NotFusable:
    model = model_of(biased, form or Form(4, 32, True), FLOAT16)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    change(node, model)
    return refusal(model)


def attribute(name: str, value: int) -> Callable[[onnx.NodeProto, ModelProto], None]:
    def change(node: onnx.NodeProto, model: ModelProto) -> None:
        kept = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def with_input(place: int, value: np.ndarray) -> Callable[[onnx.NodeProto, ModelProto], None]:
    def change(node: onnx.NodeProto, model: ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(value, "other"))
        node.input.extend([""] * (place + 1 - len(node.input)))
        node.input[place] = "other"

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (attribute("bits", 2), "2 bits"),
        (attribute("block_size", 512), "512 elements"),
        (attribute("block_size", 24), "24 elements"),
        (attribute("weight_prepacked", 1), "weight_prepacked"),
        (with_input(4, np.zeros(K, np.int32)), "g_idx"),
        (with_input(3, np.zeros((N, 3), np.float16)), "zero points"),
    ],
)
def test_a_form_that_no_kernel_reads_has_a_reason(
    change: Callable[[onnx.NodeProto, ModelProto], None], words: str
) -> None:
    found = changed(change)
    assert (found.reason, found.node) == ("quantized_form", "MatMul_0")
    assert words in found.detail


@pytest.mark.parametrize(
    "change",
    [
        attribute("N", N + 1),
        attribute("N", 0),
        attribute("K", K + 32),
        attribute("K", -1),
        attribute("block_size", 16),
        attribute("bits", 8),
        with_input(1, np.zeros((N, 3, 15), np.uint8)),
        with_input(1, np.zeros((N * 3, 16), np.uint8)),
        with_input(2, np.zeros((N, 2), np.float16)),
        with_input(3, np.zeros((N, 3), np.uint8)),
        with_input(3, np.zeros(N * 2 - 1, np.uint8)),
    ],
)
def test_shapes_that_do_not_fit_name_the_node(change: Callable[[onnx.NodeProto, ModelProto], None]) -> None:
    found = changed(change)
    assert (found.reason, found.node) == ("invalid_model", "MatMul_0")


def test_activations_and_scales_are_of_one_type() -> None:
    assert changed(with_input(2, np.zeros((N, 3), np.float32))).reason == "unsupported_dtype"


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16, BFLOAT16])
def test_every_type_of_activations_is_matched(dtype: int) -> None:
    _, fusion = only(model_of(dual_gate, Form(), dtype))
    assert fusion.quantization is not None
    assert fusion.quantization.scale.onnx == fusion.lhs.dtype.onnx == dtype


def three_heads(b: Builder, x: str) -> list[str]:
    """q, k and v, which nothing pointwise reads."""
    return [b("Softmax", linear(b, x, name)) for name in ("q", "key", "value")]


def test_a_product_that_nothing_follows_is_a_match_of_its_own() -> None:
    found = matched(model_of(three_heads, Form(), FLOAT16))
    assert [fusion.pattern for _, fusion in found] == ["gemm_epilogue"] * 3
    assert [(len(match.nodes), fusion.steps) for match, fusion in found] == [(1, ())] * 3
    b = Builder()
    floats = b.model(b("Softmax", linear(b, b.input("x", ("batch", "rows", K)), "weight")))
    assert refusal(floats).reason == "unknown_op"


def test_bare_products_of_one_input_become_one_where_that_pays() -> None:
    graph = Graph(load_model(model_of(three_heads, Form(8, 16, True), FLOAT16)))
    (site,) = match_sites(graph, lambda match, fusion: fusion, lambda joint, alone: True).fused
    assert (site.pattern, len(site.parts), len(site.outputs)) == ("sibling_gemms", 3, 3)


def test_a_packed_product_stores_its_ranges() -> None:
    def heads(b: Builder, x: str) -> list[str]:
        parts = b("Split", linear(b, x, "qkv"), b.integers(6, 3, 3), outputs=3, axis=-1)
        return [b("Softmax", part) for part in parts]

    found = matched(model_of(heads, Form(), FLOAT16))
    assert [len(fusion.outputs) for _, fusion in found] == [1]


def test_four_bit_floats_are_left_alone_and_what_is_behind_is_not() -> None:
    """As the quantizer of NF4 and FP4 writes them: nobody else declares the type and the shape of what they make."""
    b = Builder(FLOAT16)
    x = b.input("x", ("batch", "rows", 64))
    stored = b.raw(np.zeros(64 * 64 // 2, np.uint8), "w"), b.raw(np.ones(64, np.float16), "absmax")
    y = b("MatMulBnb4", x, *stored, domain="com.microsoft", K=64, N=64, block_size=64, quant_type=1)
    z = b("Relu", b("MatMul", b("Relu", y), b.array(draw(64, 32), "weight")))
    out = helper.make_tensor_value_info(z, FLOAT16, ("batch", "rows", 32))
    graph = helper.make_graph(b.nodes, "g", b.inputs, [out], b.initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    found = match_sites(Graph(load_model(model)), lambda match, fusion: fusion)
    assert [site.anchor for site in found.fused] == ["MatMul_2"]
    assert [(refused.reason, refused.node) for _, refused in found.skipped] == [("quantized", "MatMulBnb4_0")]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_weight_that_the_run_computes_is_left_alone(place: int) -> None:
    """Kernels start to read it while the one before them, which might make it, still runs."""

    def change(node: onnx.NodeProto, model: ModelProto) -> None:
        stored = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[place])
        value = helper.make_tensor_value_info("given", stored.data_type, stored.dims)
        model.graph.input.append(value)
        node.input[place] = "given"

    found = changed(change)
    assert (found.reason, found.node) == ("quantized_form", "MatMul_0")
    assert "computed" in found.detail
