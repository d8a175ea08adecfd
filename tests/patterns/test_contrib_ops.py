"""Graphs that went through ONNX Runtime's optimiser: its own ops and products mean what they compute."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.graph.operators import MICROSOFT, known_operators
from onnxfuse.ir.fusion import Fusion
from onnxfuse.patterns.pointwise_table import MICROSOFT as ROWS
from onnxfuse.pipeline import analyse_model
from tests.helpers import corpus
from tests.helpers.matching import FEED, K, N, draw, linear, only, refusal
from tests.helpers.onnx_build import FLOAT, Builder, run
from tests.helpers.reference_fusion import evaluate
from tests.tools import sweep


def made(b: Builder, out: str) -> ModelProto:
    """The model, in whose types ONNX has no say."""
    graph = helper.make_graph(b.nodes, "test", b.inputs, [helper.make_tensor_value_info(out, b.dtype, None)])
    graph.initializer.extend(b.initializers)
    graph.output[0].type.tensor_type.ClearField("shape")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def check(model: ModelProto, feed: dict[str, np.ndarray]) -> Fusion:
    """All of the model is one fusion, which means what ONNX Runtime computes, and keeps its bits without us."""
    match, fusion = only(model)
    (expected,) = run(model, feed)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (actual,) = evaluate(fusion, stored | feed)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
    assert len(match.nodes) == len(model.graph.node)
    fused = sweep.rewritten(analyse_model(model, resolve("sm_80", list)))
    assert not any(node.domain == "com.microsoft" for node in fused.graph.node)
    assert run(fused, feed)[0].tobytes() == expected.tobytes()
    return fusion


@pytest.mark.parametrize(
    ("op", "operands", "attributes"),
    [
        ("Gelu", (), {}),
        ("BiasGelu", (N,), {}),
        ("FastGelu", (N,), {}),
        ("FastGelu", (), {}),
        ("QuickGelu", (), {}),
        ("QuickGelu", (), {"alpha": 1.0}),
    ],
)
def test_every_row_that_runs_on_the_cpu(op: str, operands: tuple[int, ...], attributes: dict[str, float]) -> None:
    b = Builder()
    bias = [b.array(draw(size, seed=5), "operand") for size in operands]
    out = b(op, linear(b, bias=not operands), *bias, domain="com.microsoft", **attributes)
    assert "activation" in check(made(b, out), FEED).features


def test_bias_add_means_a_sum() -> None:
    """No CPU kernel: computed from the definition."""
    b = Builder()
    skip = b.input("skip", ("batch", "rows", N))
    t = b("BiasAdd", linear(b, bias=False), b.array(draw(N, seed=1), "bias"), skip, domain="com.microsoft")
    model = made(b, b("Relu", t))
    values = FEED | {"skip": draw(2, 5, N, seed=7)} | {"weight": draw(K, N), "bias": draw(N, seed=1)}
    (actual,) = evaluate(only(model)[1], values)
    np.testing.assert_allclose(
        actual, np.maximum(FEED["x"] @ values["weight"] + values["bias"] + values["skip"], 0), rtol=1e-6
    )


def test_bias_split_gelu_is_a_gate() -> None:
    """No CPU kernel: computed from the definition, left half times gelu of the right half."""
    b = Builder()
    out = b("BiasSplitGelu", linear(b, bias=False), b.array(draw(N, seed=1), "bias"), domain="com.microsoft")
    _, fusion = only(made(b, out))
    assert len(fusion.parts) == 2
    assert set(fusion.features) >= {"activation", "bias", "gate"}
    spelled = Builder(opset=20)
    first, second = spelled("Split", linear(spelled), outputs=2, axis=-1, num_outputs=2)
    (expected,) = run(spelled.model(spelled("Mul", first, spelled("Gelu", second))), FEED)
    (actual,) = evaluate(fusion, FEED | {"weight": draw(K, N), "bias": draw(N, seed=1)})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


GATES = {"limit": 0.7, "activation_alpha": 1.702, "activation_beta": 1.0}


def gated(gate: np.ndarray, up: np.ndarray, attributes: dict[str, float]) -> np.ndarray:
    """The definition of SwiGLU."""
    alpha, beta = attributes.get("activation_alpha", 1.0), attributes.get("activation_beta", 0.0)
    if limit := attributes.get("limit", 0.0):
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + beta)


@pytest.mark.parametrize("attributes", [{}, GATES])
@pytest.mark.parametrize("packed", [True, False])
def test_swiglu_is_a_gate(packed: bool, attributes: dict[str, float]) -> None:
    """No CPU kernel: computed from the definition."""
    b = Builder()
    x = b.input("x", ("batch", "rows", K))
    weights = [draw(K, N), draw(K, N, seed=2)]
    if packed:
        inputs = [b("MatMul", x, b.array(np.concatenate(weights, 1), "both"))]
    else:
        inputs = [b("MatMul", x, b.array(weight, f"w{index}")) for index, weight in enumerate(weights)]
    _, fusion = only(made(b, b("SwiGLU", *inputs, domain="com.microsoft", **attributes)))
    assert fusion.pattern == "split_gemm"
    assert len(fusion.parts) == 2
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in b.initializers}
    (actual,) = evaluate(fusion, FEED | stored)
    expected = gated(*(FEED["x"] @ weight for weight in weights), attributes)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_swiglu_of_onnx_is_the_same() -> None:
    b = Builder(opset=28)
    x = b.input("x", ("batch", "rows", K))
    weights = [draw(K, N), draw(K, N, seed=2)]
    inputs = [b("MatMul", x, b.array(weight, f"w{index}")) for index, weight in enumerate(weights)]
    model = made(b, b("SwiGLU", *inputs, alpha=0.5))
    model.opset_import[0].version = 28
    _, fusion = only(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in b.initializers}
    (actual,) = evaluate(fusion, FEED | stored)
    expected = gated(*(FEED["x"] @ weight for weight in weights), {"activation_alpha": 0.5})
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stored", [True, False])
def test_a_pointwise_convolution_with_channels_last_is_a_product(stored: bool) -> None:
    """As ONNX Runtime's optimiser writes it, with the weight transposed in the file or before each run."""
    b = Builder()
    x, weight = b.input("x", ("b", 16, 5, 7)), draw(24, 16, 1, 1)
    last = b("Transpose", x, perm=[0, 2, 3, 1])
    own = b.array(weight.transpose(0, 2, 3, 1) if stored else weight, "weight")
    own = own if stored else b("Transpose", own, perm=[0, 2, 3, 1])
    product = b("NhwcConv", last, own, b.array(draw(24), "bias"), domain="com.microsoft", kernel_shape=[1, 1])
    out = b("Add", b("Relu", product), b.input("skip", ("b", 5, 7, 24)))
    _, fusion = only(made(b, out))
    assert {"bias", "activation", "residual"} <= {*fusion.features}
    values = {"x": draw(2, 16, 5, 7), "skip": draw(2, 5, 7, 24, seed=3), "bias": draw(24)}
    product = np.einsum("bkhw,nk->bhwn", values["x"], weight[:, :, 0, 0]) + values["bias"]
    given = {"weight": numpy_helper.to_array(b.initializers[0])}
    (actual,) = evaluate(fusion, values | given)
    np.testing.assert_allclose(actual, np.maximum(product, 0) + values["skip"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_an_adapter_is_fused_with_its_scale_in_a_fused_matmul(bias: bool) -> None:
    """LoRA: two thin products beside a wide one. The optimizer puts the scale into the second; the sites stay."""

    def adapted(optimized: bool) -> ModelProto:
        b = Builder()
        x = b.input("x", ("batch", "rows", 64))
        base = b("MatMul", x, b.array(draw(64, 128), "base"))
        base = b("Add", base, b.array(draw(128), "bias")) if bias else base
        thin, up = b("MatMul", x, b.array(draw(64, 8), "down")), b.array(draw(8, 128), "up")
        if optimized:
            added = b("FusedMatMul", thin, up, domain="com.microsoft", alpha=2.0)
        else:
            added = b("Mul", b("MatMul", thin, up), b.array(2.0))
        return made(b, b("Add", base, added))

    raw, optimized = (analyse_model(adapted(each), resolve("sm_80", list)) for each in (False, True))
    assert [site.fusion.features for site in optimized.sites] == [site.fusion.features for site in raw.sites]
    assert "residual" in optimized.sites[-1].fusion.features


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.125])
@pytest.mark.parametrize("shape", [(4, K), ("batch", "rows", K)])
def test_fused_matmul(shape, alpha: float, trans_b: int) -> None:
    b = Builder()
    weight = b.array(draw(*((N, K) if trans_b else (K, N))), "weight")
    product = b("FusedMatMul", b.input("x", shape), weight, domain="com.microsoft", alpha=alpha, transB=trans_b)
    feed = {"x": draw(*(4, K) if len(shape) == 2 else (2, 5, K)).astype(np.float32)}
    fusion = check(made(b, b("Tanh", product)), feed)
    assert fusion.rhs[0].einops == ("n k" if trans_b else "k n")


def test_the_batch_that_a_fused_matmul_permutes_is_refused() -> None:
    b = Builder()
    x = b.input("x", (3, K, K))
    product = b("FusedMatMul", x, b.array(draw(K, N), "weight"), domain="com.microsoft", transBatchA=1)
    assert refusal(made(b, b("Tanh", product))).reason == "batch_transposed"


def test_the_lhs_that_a_fused_matmul_transposes_is_read_as_it_lies() -> None:
    b = Builder()
    x = b.input("x", (3, K, 5))
    product = b("FusedMatMul", x, b.array(draw(K, N), "weight"), domain="com.microsoft", transA=1)
    model = made(b, b("Tanh", product))
    _, fusion = only(model)
    (expected,) = run(model, feed := {"x": draw(3, K, 5).astype(np.float32)})
    (actual,) = evaluate(fusion, {"weight": numpy_helper.to_array(b.initializers[0])} | feed)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
    assert fusion.lhs.einops == "b k m"


ACTIVATIONS = {
    "Relu": {},
    "Tanh": {},
    "Sigmoid": {},
    "Softplus": {},
    "Softsign": {},
    "LeakyRelu": {"alpha": 0.3},
    "Elu": {"alpha": 0.7},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "Selu": {"alpha": 1.5, "gamma": 1.1},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("followed", [False, True])
def test_fused_gemm(activation: str, followed: bool) -> None:
    """The activation alone is worth a kernel, and pointwise ops may follow it."""
    b = Builder()
    operands = (b.input("x", (4, K)), b.array(draw(N, K), "weight"), b.array(draw(N), "bias"))
    attributes = {f"activation_{name}": value for name, value in ACTIVATIONS[activation].items()}
    out = b("FusedGemm", *operands, domain="com.microsoft", activation=activation, transB=1, alpha=0.5, **attributes)
    if followed:
        out = b("Mul", out, b.array(draw(N, seed=3), "scale"))
    check(made(b, out), {"x": draw(4, K).astype(np.float32)})


def test_an_activation_that_nobody_knows_is_refused() -> None:
    b = Builder()
    operands = (b.input("x", (4, K)), b.array(draw(K, N), "weight"), b.array(draw(N), "bias"))
    out = b("FusedGemm", *operands, domain="com.microsoft", activation="ThresholdedRelu")
    found = refusal(made(b, out))
    assert (found.reason, "ThresholdedRelu" in found.detail) == ("unknown_op", True)


def test_an_op_of_the_same_name_in_another_domain_is_unknown() -> None:
    b = Builder()
    product = linear(b, bias=False)
    model = made(b, b("Tanh", product, domain="somebody"))
    model.opset_import.append(helper.make_opsetid("somebody", 1))
    found = refusal(model)
    assert (found.reason, "somebody::Tanh" in found.detail) == ("unknown_op", True)


@pytest.mark.parametrize("op", ["Cast", "Identity", "Transpose"])
def test_a_weight_behind_such_an_op_is_none_that_is_stored(op: str) -> None:
    b = Builder()
    weight = b(op, b.array(np.ones((16, 16))), **({"to": FLOAT} if op == "Cast" else {}))
    model = made(b, b("Tanh", b("MatMul", b.input("x", (8, 16)), weight)))
    model.graph.value_info.append(helper.make_tensor_value_info(weight, FLOAT, (16, 16)))
    next(node for node in model.graph.node if node.op_type == op).domain = "somebody"
    model.opset_import.append(helper.make_opsetid("somebody", 1))
    analysis = analyse_model(model, resolve("sm_80", list))
    nodes = sweep.rewritten(analysis).graph.node
    assert all(node.op_type in ("MatMul", "Tanh") or weight in (*node.input, *node.output) for node in nodes)
    assert len(analysis.sites) <= 1


def test_onnx_forgets_the_operators_again() -> None:
    with known_operators(microsoft=True):
        assert all(onnx.defs.has(op, "com.microsoft") for op in MICROSOFT)
    assert not any(onnx.defs.has(op, "com.microsoft") for op in MICROSOFT)
    assert set(ROWS) <= set(MICROSOFT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
@pytest.mark.parametrize(
    "key", [key for key in corpus.families("bert", "btb", "ff_geglu", "ff_swiglu", "llama", "vit", size="tiny")
            if ".fp32.dynamic.onnx" in key],
)  # fmt: skip
def test_sites_survive_the_optimiser(key: str, level: str, tmp_path: Path) -> None:
    """Gates and activations are those of the manifest, and the bits stay. fp16 is fp32 behind Casts on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(corpus.materialize(key).SerializeToString(), options, ["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    analysis = analyse_model(optimized, resolve("sm_80", list))
    found = Counter(kind for site in analysis.sites for kind in sweep.kinds_of(site.fusion))
    expected = corpus.manifest()[key]
    assert {kind: found[kind] for kind in sweep.KINDS[:3]} == {kind: expected[kind] for kind in sweep.KINDS[:3]}
    assert not sweep.difference(optimized, sweep.rewritten(analysis), [corpus.feed(key, 0), corpus.feed(key, 1)])
