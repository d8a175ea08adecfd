"""The float64 reference: it is double throughout, it agrees with NumPy in double, and it leaves the model alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.verify.float64_model import float64_model as converted
from onnxfuse.verify.float64_model import write_float64
from onnxfuse.verify.node_types import node_types
from tests.helpers import corpus
from tests.helpers.onnx_build import run
from tests.helpers.tf32 import to_tf32

FAMILIES = ("btb", "ff_geglu", "ff2d_geglu", "ff_swiglu", "sd15_unet_mini", "bert", "vit", "ff_gelu")
TYPES_OF = node_types()
EXACT = 1e-13  # relative to the largest value: some tens of roundings in double
X = np.random.default_rng(0).standard_normal((2, 6, 9, 8)).astype(np.float32) * 2


def float64_model(model: ModelProto, tf32: bool = False) -> ModelProto:
    return converted(model, TYPES_OF, tf32).model


def one_node(
    op: str, arrays: Sequence[np.ndarray], opset: int = 22, weights: int = 0, **attributes: object
) -> ModelProto:
    """A model of one node; the last `weights` of its operands are initializers."""
    names = [f"x{index}" for index in range(len(arrays))]
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    constants = [numpy_helper.from_array(arrays[i], names[i]) for i in range(len(arrays) - weights, len(arrays))]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    out.type.tensor_type.ClearField("shape")
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)], op, values[: len(arrays) - weights], [out], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def exact(model: ModelProto, *arrays: np.ndarray) -> np.ndarray:
    (result,) = run(float64_model(model), {f"x{index}": array for index, array in enumerate(arrays)})
    assert result.dtype == np.float64
    return result


def assert_exact(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= EXACT * np.abs(expected).max()


def f32(value: float) -> float:
    return float(np.float32(value))


erf = np.vectorize(math.erf)
softplus = np.vectorize(lambda v: math.log1p(math.exp(-abs(v))) + max(v, 0))
ELEMENTWISE = {
    "Erf": erf,
    "Gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Exp": np.exp,
    "HardSigmoid": lambda x: np.clip(f32(0.2) * x + 0.5, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "LeakyRelu": lambda x: np.where(x < 0, f32(0.01) * x, x),
    "Elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "Softplus": softplus,
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Mish": lambda x: x * np.tanh(softplus(x)),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_operators_are_exact_in_double(op: str) -> None:
    assert_exact(exact(one_node(op, [X]), X), ELEMENTWISE[op](X.astype(np.float64)))


OLD = [(op, opset) for op in ELEMENTWISE for opset in (9, 11) if onnx.defs.has(op, opset)]


@pytest.mark.parametrize(("op", "opset"), OLD)
def test_elementwise_operators_are_exact_in_double_of_old_operator_sets(op: str, opset: int) -> None:
    assert_exact(exact(one_node(op, [X], opset), X), ELEMENTWISE[op](X.astype(np.float64)))


def test_tanh_gelu_and_swish() -> None:
    x = X.astype(np.float64)
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert_exact(exact(one_node("Gelu", [X], approximate="tanh"), X), tanh)
    if onnx.defs.onnx_opset_version() >= 24:
        assert_exact(exact(one_node("Swish", [X], opset=24, alpha=0.5), X), x / (1 + np.exp(-x / 2)))


def test_erf_is_exact_far_out_and_near_zero() -> None:
    x = np.linspace(-9, 9, 10001).astype(np.float32)
    assert np.abs(exact(one_node("Erf", [x]), x) - erf(x.astype(np.float64))).max() < 1e-14


def numpy_conv(x: np.ndarray, w: np.ndarray, b: np.ndarray, strides, pads, dilations, group: int) -> np.ndarray:
    x, w = (array.astype(np.float64) for array in (x, w))
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    parts = zip(np.split(windows, group, 1), np.split(w, group, 0), strict=True)
    return np.concatenate([np.einsum("nchwij,mcij->nmhw", part, own) for part, own in parts], 1) + b[:, None, None]


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "dilations", "group"),
    [
        ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
        ((3, 2), (2, 1), (0, 1, 2, 0), (2, 3), 2),
        ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        ((3, 3), (2, 3), (1, 2, 0, 1), (1, 1), 6),
    ],
)
@pytest.mark.parametrize("opset", [10, 11, 13, 22])
def test_conv_is_exact_in_double(kernel, strides, pads, dilations, group: int, opset: int) -> None:
    random = np.random.default_rng(1)
    w, b = (random.standard_normal(s).astype(np.float32) for s in ((12, 6 // group, *kernel), (12,)))
    model = one_node("Conv", [X, w, b], opset, 2, strides=strides, pads=pads, dilations=dilations, group=group)
    assert_exact(exact(model, X), numpy_conv(X, w, b, strides, pads, dilations, group))


def test_normalisations_are_exact_in_double() -> None:
    scale, bias = np.linspace(0.5, 2, 6, dtype=np.float32), np.linspace(-1, 1, 6, dtype=np.float32)
    x = X.astype(np.float64)

    def normalised(groups: int, scale: np.ndarray = scale, bias: np.ndarray = bias) -> np.ndarray:
        rows = x.reshape(2, groups, -1)
        rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + f32(1e-5))
        return rows.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]

    for opset in (9, 11, 13, 22):
        assert_exact(exact(one_node("InstanceNormalization", [X, scale, bias], opset, 2), X), normalised(6))
    assert_exact(exact(one_node("GroupNormalization", [X, scale, bias], 21, 2, num_groups=3), X), normalised(3))
    by_group = one_node("GroupNormalization", [X, scale[:3], bias[:3]], 18, 2, num_groups=3)
    assert_exact(exact(by_group, X), normalised(3, np.repeat(scale[:3], 2), np.repeat(bias[:3], 2)))
    last = np.linspace(1, 2, 8, dtype=np.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + f32(1e-5)) * last
    assert_exact(exact(one_node("RMSNormalization", [X, last], 23, 1), X), expected)


def test_resize_nearest_keeps_48_bits() -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    model = one_node("Resize", [X, np.zeros(0, np.float32), scales], weights=2, mode="nearest",
                     coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    third = helper.make_node("Div", ["x0", "three"], ["third"])
    model.graph.node[0].input[0] = "third"
    model.graph.node.insert(0, third)
    model.graph.initializer.append(numpy_helper.from_array(np.array(3, np.float32), "three"))
    assert_exact(exact(model, X), (X.astype(np.float64) / 3).repeat(2, 2).repeat(2, 3))


def test_a_conv_is_exact_where_no_slice_takes_steps_unless_it_has_some() -> None:
    random = np.random.default_rng(1)
    w, b = (random.standard_normal(s).astype(np.float32) for s in ((12, 6, 3, 3), (12,)))
    plain = one_node("Conv", [X, w, b], 9, 2, pads=(1, 1, 1, 1))
    assert_exact(exact(plain, X), numpy_conv(X, w, b, (1, 1), (1, 1, 1, 1), (1, 1), 1))
    stepping = one_node("Conv", [X, w, b], 9, 2, strides=(2, 2))
    assert np.array_equal(exact(stepping, X), run(stepping, {"x0": X})[0])


def test_what_has_no_double_form_runs_in_float32_between_casts() -> None:
    model = float64_model(one_node("GlobalAveragePool", [X]))
    assert [node.op_type for node in model.graph.node] == ["Cast", "Cast", "GlobalAveragePool", "Cast"]
    assert run(model, {"x0": X})[0].dtype == np.float64


def test_casts_and_constants_become_double() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Constant", [], ["low"], value=numpy_helper.from_array(np.array(1 / 3, np.float16))),
        helper.make_node("Add", ["half", "low"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT16, [3]),
    )
    model = helper.make_model(
        helper.make_graph(nodes, "casts", [x], [y]), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    values = np.array([1.0001, 2.0002, 3e5], np.float32)
    (result,) = run(float64_model(model), {"x": values})
    assert np.array_equal(result, values.astype(np.float64) + float(np.float16(1 / 3)))


def branch(name: str, op: str) -> onnx.GraphProto:
    out = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op, ["x", "w"], [f"{name}_y"])], name, [], [out])


def test_branches_and_loops() -> None:
    body_values = [helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("go", 9))]
    carried = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in ("c", "next")]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Mul", ["c", "w"], ["next"])],
        "body", [*body_values, carried[0]], [helper.make_tensor_value_info("again", TensorProto.BOOL, []), carried[1]],
    )  # fmt: skip
    nodes = [
        helper.make_node(
            "If", ["condition"], ["chosen"], then_branch=branch("then", "Add"), else_branch=branch("else", "Mul")
        ),
        helper.make_node("Loop", ["trips", "", "chosen"], ["looped"], body=body),
        helper.make_node("Erf", ["looped"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]),
    ]
    weight = np.array([1.1, 0.9, 0.7], np.float32)
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(2), "trips")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    graph = helper.make_graph(nodes, "flow", inputs, [out], constants)
    model = float64_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    x = np.array([0.3, -0.2, 0.1], np.float32)
    for condition, chosen in ((True, x.astype(float) + weight), (False, x.astype(float) * weight)):
        (result,) = run(model, {"condition": np.array(condition), "x": x})
        assert_exact(result, erf(chosen * weight.astype(float) ** 2))


def test_functions_are_inlined() -> None:
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Twice", ["x"], ["y"], domain="own")], "f", [x], [y])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = float64_model(helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8))
    values = np.array([1, 2, 40000], np.float16)
    assert run(model, {"x": values})[0].tolist() == [2.0, 4.0, 80000.0 if values[2] == 40000 else 2 * float(values[2])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", corpus.families(*FAMILIES, size="tiny"))
def test_real_exports(key: str) -> None:
    model, feed = corpus.materialize(key), corpus.feed(key, 0)
    before = model.SerializeToString(deterministic=True)
    reference = run(float64_model(model), feed)
    assert model.SerializeToString(deterministic=True) == before
    tolerance = 3e-3 if ".fp16." in key else 1e-5
    for result, expected in zip(run(model, feed), reference, strict=True):
        assert expected.dtype == np.float64
        assert np.abs(result - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("key", corpus.families(*FAMILIES, size="tiny"))
def test_no_operator_of_these_exports_stays_in_float32(key: str) -> None:
    casts = [n for n in float64_model(corpus.materialize(key)).graph.node if n.op_type == "Cast"]
    singles = [n for n in casts if helper.get_attribute_value(n.attribute[0]) == TensorProto.FLOAT]
    assert not singles or "sd15_unet" in key  # a Resize moves a high and a low half


def test_a_reference_file_runs_and_large_weights_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.ones((8, 300), np.float32)
    onnx.save(one_node("MatMul", [X, w], weights=1), tmp_path / "model.onnx")
    monkeypatch.setattr("onnxfuse.verify.float64_model.EXTERNAL_BYTES", 1000)
    folder = tmp_path / "folder"
    folder.mkdir()
    target = write_float64(tmp_path / "model.onnx", folder, TYPES_OF)[0]
    assert (folder / "reference.data").stat().st_size >= w.nbytes
    assert_exact(run(onnx.load(target), {"x0": X})[0], X.astype(np.float64) @ w.astype(np.float64))


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff\xff")
    for name in ("bad.onnx", "absent.onnx"):
        with pytest.raises(ModelError, match=name):
            write_float64(tmp_path / name, tmp_path, TYPES_OF)


def in_tf32(values: np.ndarray) -> np.ndarray:
    return to_tf32(values).astype(np.float64)


def tf32_of(model: ModelProto, *arrays: np.ndarray) -> np.ndarray:
    (result,) = run(float64_model(model, tf32=True), {f"x{index}": array for index, array in enumerate(arrays)})
    assert result.dtype == np.float64
    return result


def test_factors_are_rounded_to_tf32_to_the_bit() -> None:
    last = np.float32(2.0**-10)
    steps = np.arange(-4096, 4096, dtype=np.float32) * last / 64  # each 64th between neighbours, halfway among them
    near = np.concatenate([1 + steps[steps >= 0], 1.5 + steps, np.float32(2) + steps])
    random = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    tiny, huge = np.finfo(np.float32).tiny, np.float32(2.0**126)
    x = np.concatenate([near, -near, random, near * tiny, near * huge, np.zeros(1, np.float32)])
    one = np.ones((1, 1), np.float32)
    rounded = tf32_of(one_node("MatMul", [x[:, None], one], weights=1), x[:, None])[:, 0]
    assert np.array_equal(rounded, to_tf32(x))
    assert (rounded != x).mean() > 0.5


def test_both_factors_of_every_kind_of_product_are_rounded_and_nothing_else() -> None:
    lhs, rhs, bias = (np.random.default_rng(seed).standard_normal((9, 9)).astype(np.float32) for seed in range(3))
    exact_bias, image = bias.astype(np.float64), X[0, :, :, :].reshape(1, 6, 9, 8)
    weight = np.random.default_rng(4).standard_normal((4, 6, 1, 1)).astype(np.float32)
    product = in_tf32(lhs) @ in_tf32(rhs)
    assert_exact(tf32_of(one_node("MatMul", [lhs, rhs]), lhs, rhs), product)
    assert_exact(tf32_of(one_node("Gemm", [lhs, rhs, bias]), lhs, rhs, bias), product + exact_bias)
    assert_exact(tf32_of(one_node("Einsum", [lhs, rhs], equation="mk,kn->mn"), lhs, rhs), product)
    convolved = np.einsum("oi,bihw->bohw", in_tf32(weight)[:, :, 0, 0], in_tf32(image))
    assert_exact(tf32_of(one_node("Conv", [image, weight], weights=1), image), convolved)
    fused = one_node("FusedMatMul", [lhs, rhs], domain="com.microsoft", transB=1)
    fused.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    found = tf32_of(fused, lhs, rhs)  # which ONNX Runtime computes in float32
    assert np.abs(found - in_tf32(lhs) @ in_tf32(rhs).T).max() < 1e-5
    assert np.abs(found - exact(fused, lhs, rhs)).max() > 1e-4
    assert_exact(tf32_of(one_node("Mul", [lhs, rhs]), lhs, rhs), lhs.astype(np.float64) * rhs)


@pytest.mark.parametrize(("before", "rounds"), [(TensorProto.FLOAT, True), (TensorProto.FLOAT16, False)])
def test_products_of_the_models_own_float32_are_rounded(before: int, rounds: bool) -> None:
    """The type is that of the model, behind Casts and in a branch, not that of the double that takes its place."""
    x, w = (np.random.default_rng(seed).standard_normal((5, 5)).astype(np.float32) for seed in range(2))
    product = helper.make_graph([helper.make_node("MatMul", ["cast", "c"], ["p"])], "then", [],
                                [helper.make_tensor_value_info("p", before, None)])  # fmt: skip
    constant = numpy_helper.from_array(w.astype(helper.tensor_dtype_to_np_dtype(before)))
    nodes = [
        helper.make_node("Cast", ["x"], ["cast"], to=before),
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=product, else_branch=product),
        helper.make_node("Cast", ["chosen"], ["y"], to=TensorProto.FLOAT),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5, 5]) for name in "xy"]
    yes = numpy_helper.from_array(np.array(True), "yes")
    graph = helper.make_graph(nodes, "types", values[:1], values[1:], [yes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    stored = numpy_helper.to_array(constant).astype(np.float64)
    (found,) = run(float64_model(model, tf32=True), {"x": x})
    assert_exact(found, in_tf32(x) @ in_tf32(stored) if rounds else x.astype(np.float64) @ stored)


@pytest.mark.parametrize("key", corpus.families("bert", "ff2d_geglu", "ff_swiglu", size="tiny"))
def test_tf32_changes_the_fp32_products_of_real_exports_alone(key: str) -> None:
    model, feed = corpus.materialize(key), corpus.feed(key, 0)
    exact, rounded = (run(float64_model(model, tf32), feed)[0] for tf32 in (False, True))
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 2.0**-20 < error < 2.0**-7 if ".fp32." in key else error == 0
