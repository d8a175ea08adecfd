"""`--rounding onnx`: a kernel rounds every intermediate as the model's own nodes do, and so makes their bits.

The inputs are multiples of 2^-6 so small that every sum of products is exact in fp32, in whatever order; rounded to
16 bits it is not. So nothing but the rounding of intermediates can tell a kernel from the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnxfuse
from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.errors import SettingError
from onnxfuse.ir.fusion import ROUNDS
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime import disassemble
from onnxfuse.runtime.compile import compile_source
from tests.end_to_end.test_whole_way_on_cpu import compute
from tests.helpers.matching import gelu_erf_half_last, gelu_tanh_cube_by_mul, silu_spelled_out
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_fusion import evaluate

SM_80, SM_90A = ARCHITECTURES["sm_80"], ARCHITECTURES["sm_90a"]
BFLOAT16 = onnx.TensorProto.BFLOAT16
ROWS, K, N = 24, 32, 16
STEP = 2.0**-6

Activation = Callable[[Builder, str], str]


def multiples(*shape: int, seed: int, largest: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(-largest, largest + 1, shape) * STEP


def gate_model(activation: Activation = gelu_erf_half_last, dtype: int = FLOAT16, gemm: bool = False) -> ModelProto:
    """From x `[rows, K]`: first * activation(second), as exporters write it."""
    b = Builder(dtype)
    x, weight, bias = (
        b.input("x", ("rows", K)),
        multiples(K, 2 * N, seed=1, largest=24),
        multiples(2 * N, seed=2, largest=40),
    )
    if gemm:
        t = b("Gemm", x, b.array(weight), b.array(bias), alpha=0.75)
    else:
        t = b("Add", b.array(bias), b("MatMul", x, b.array(weight)))
    first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    return b.model(b("Mul", first, activation(b, second)))


def only_site(model: ModelProto, rounding: str, device: DeviceSpec = SM_80) -> Site:
    (site,) = analyse_model(model, [device], rounding=rounding).sites
    return site


def values_of(model: ModelProto, dtype: np.dtype) -> dict[str, np.ndarray]:
    x = multiples(ROWS, K, seed=3, largest=80).astype(dtype)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer} | {"x": x}


def node_by_node(model: ModelProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value of a model, each node in a session of its own: what it makes is stored before it is read."""
    values = dict(values)
    for node in model.graph.node:
        known = [(name, values[name]) for name in dict.fromkeys(node.input)]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for name, v in known
        ]
        element = helper.np_dtype_to_tensor_dtype(known[0][1].dtype)
        outputs = [helper.make_tensor_value_info(name, element, None) for name in node.output]
        graph = helper.make_graph([node], "node", inputs, outputs)
        single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=9)
        values |= dict(zip(node.output, run(single, dict(known)), strict=True))
    return values


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("epilogue_only", [False, True], ids=["one kernel", "behind the product"])
@pytest.mark.parametrize("activation", [gelu_erf_half_last, gelu_tanh_cube_by_mul, silu_spelled_out])
def test_a_gate_has_the_bits_of_its_nodes(activation: Activation, epilogue_only: bool, tmp_path: Path) -> None:
    model = gate_model(activation)
    values = node_by_node(model, values_of(model, np.dtype(np.float16)))
    implementations = {
        rounding: implementation_of(only_site(model, rounding), epilogue_only) for rounding in ("fp32", "onnx")
    }
    results = {}
    for rounding, implementation in implementations.items():
        (tmp_path / rounding).mkdir()
        (results[rounding],) = compute(implementation, values, tmp_path / rounding)
    expected = bits(values[model.graph.output[0].name])
    np.testing.assert_array_equal(bits(results["onnx"]), expected)
    assert (bits(results["fp32"]) != expected).any(), "the sizes are too easy: nothing depends on the rounding"


def implementation_of(site: Site, epilogue_only: bool) -> Implementation:
    implementation = site.epilogue_only if epilogue_only else site.one_kernel
    assert implementation is not None
    return implementation


def test_a_gemm_is_rounded_once(tmp_path: Path) -> None:
    """Its factor and bias are part of the node: what it makes is rounded once, behind them."""
    model = gate_model(gemm=True)
    values = values_of(model, np.dtype(np.float16))
    fusion = only_site(model, "onnx").fusion
    assert {step.op for step in fusion.steps if {"acc0", "acc1"} & set(step.inputs)} == {"mul"}
    exact = 0.75 * (values["x"].astype(np.float64) @ values["c0"].astype(np.float64)) + values["c1"].astype(np.float64)
    stored = node_by_node(model, values)[model.graph.node[0].output[0]]
    np.testing.assert_array_equal(bits(stored), bits(exact.astype(np.float16)))
    (actual,) = compute(only_site(model, "onnx").one_kernel, values, tmp_path)
    (expected,) = evaluate(fusion, values)
    np.testing.assert_array_equal(bits(actual), bits(expected.astype(np.float16)))


def test_bfloat16(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider has no bfloat16, so the reference is NumPy's, straight from the steps."""
    model = gate_model(dtype=BFLOAT16)
    site = only_site(model, "onnx")
    values = values_of(model, np.dtype("bfloat16"))
    (actual,) = compute(site.one_kernel, values, tmp_path)
    (expected,) = evaluate(site.fusion, values)
    np.testing.assert_array_equal(bits(actual), bits(expected.astype(actual.dtype)))


@pytest.mark.parametrize(("dtype", "op"), [(FLOAT, "round_f32"), (FLOAT16, "round_f16"), (BFLOAT16, "round_bf16")])
def test_steps_stay_as_written_and_each_is_rounded(dtype: int, op: str) -> None:
    """One rounding behind every node but Split, the product among them; without the option there is none."""
    model = gate_model(dtype=dtype)
    fusion = only_site(model, "onnx").fusion
    rounded = [step.inputs[0] for step in fusion.steps if step.op == op]
    arithmetic = [step.result for step in fusion.steps if step.op not in ROUNDS]
    assert sorted(map(str, rounded)) == sorted([*arithmetic, "acc0", "acc1"])
    assert "rounded" in fusion.features
    assert "erf" in [step.op for step in fusion.steps], "gelu is not put in its place"
    plain = only_site(model, "fp32").fusion
    assert not any(step.op in ROUNDS for step in plain.steps)
    assert "rounded" not in plain.features


def test_a_cast_rounds_to_its_own_type_once() -> None:
    b = Builder(FLOAT16)
    t = b("Cast", b("MatMul", b.input("x", ("rows", K)), b.array(np.ones((K, N)))), to=FLOAT)
    t = b("Cast", b("Exp", t), to=FLOAT16)
    model = b.model(b("Identity", t))
    steps = [step.op for step in only_site(model, "onnx").fusion.steps]
    assert steps == ["round_f16", "exp", "round_f32", "round_f16"]


def test_the_kernel_is_another_one() -> None:
    """The text is the key of the cache and of the archive."""
    for device in (SM_80, SM_90A):
        sources = [
            {
                kernel_source(variant, device)
                for _, variant in only_site(gate_model(), rounding, device).implementation.variants
            }
            for rounding in ("fp32", "onnx")
        ]
        assert not sources[0] & sources[1]
        assert not any("pointwise::fast_" in source.split("struct Epilogue")[1].split("};")[0] for source in sources[1])


def test_fp32_steps_are_not_contracted() -> None:
    """A product and a sum in two nodes are rounded twice; one fma would round once."""
    b = Builder()
    t = b("MatMul", b.input("x", ("rows", K)), b.array(multiples(K, N, seed=1, largest=9)))
    t = b("Mul", t, b.array(multiples(N, seed=4, largest=99)))
    model = b.model(b("Add", t, b.array(multiples(N, seed=5, largest=99))))
    counts = {}
    for rounding in ("fp32", "onnx"):
        implementation = only_site(model, rounding).one_kernel
        variant = implementation.plans[0].variants[-1]
        code = disassemble.sass(compile_source(kernel_source(variant, SM_80), SM_80).data)
        counts[rounding] = code.count("FFMA")
    assert counts["fp32"] > 0
    assert counts["onnx"] == 0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SettingError, match="rounding 'half'"):
        onnxfuse.optimize(gate_model(), arch="sm_80", rounding="half")
