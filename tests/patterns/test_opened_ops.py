"""ONNX Runtime's ops that add and normalise: behind a product a kernel makes their sums, and another the rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.device import ARCHITECTURES, resolve
from onnxfuse.graph.extract import stock_nodes
from onnxfuse.graph.functions import DOMAIN, walk
from onnxfuse.lowering.fused_node import replacement
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.schedule import cost_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.strategy import Normalising, Strategy, Traffic, estimate_from
from onnxfuse.selection import Selection
from onnxfuse.tune.search import LEFT_ALONE, _trials
from onnxfuse.verify.verify import verify
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.tools import sweep

K, N = 256, 256
SKIP, SIMPLIFIED = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
KINDS = (SKIP, SIMPLIFIED)
VARIANTS = [
    (op, beta, bias, total)
    for op, beta, bias, total in every(KINDS, (True, False), (True, False), (True, False))
    if op == SKIP or not beta
]


def layer(
    op: str = SKIP, beta: bool = True, bias: bool = True, total: bool = True, dtype: int = FLOAT, **attributes: float
) -> Builder:
    """A product and an op behind it; where the sum is wanted, a product behind both reads it as its residual."""
    b = Builder(dtype, opset=17)
    out = b("MatMul", b.input("x", ("b", "s", K)), b.array(draw(K, N) / K**0.5, "weight"))
    vectors = {"gamma": True, "beta": beta, "bias": bias}
    taken = [name for name in vectors if op == SKIP or name != "beta"]
    operands = [b.array(draw(N, seed=len(name)), name) if vectors[name] else "" for name in taken]
    made = ["y", *(["", "", "sum"] if total else [])]
    b.nodes.append(
        helper.make_node(op, [out, b.input("skip", ("b", "s", N)), *operands], made, "norm", domain="com.microsoft",
                         **({"epsilon": 1e-5} | attributes))
    )  # fmt: skip
    if total:
        second = b("MatMul", "y", b.array(draw(N, N, seed=9) / N**0.5, "second"))
        b("Add", second, "sum")
    return b


def model(b: Builder, *outputs: str) -> ModelProto:
    """With opsets of ONNX Runtime, in whose types ONNX has no say."""
    names = outputs or (b.nodes[-1].output[0],)
    graph = helper.make_graph(b.nodes, "test", b.inputs, [], b.initializers)
    for name in names:
        graph.output.add(name=name).type.tensor_type.elem_type = b.dtype
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def analysed(proto: ModelProto, arch: str = "sm_90a") -> Analysis:
    return analyse_model(proto, resolve(arch, list))


def left(op: str) -> list[str]:
    """What an op of which the sum was taken is in the end: the same, of rows to which zeros are added."""
    return ["Constant", "Constant", "Reshape", "ConstantOfShape", op, "Shape", "Reshape"]


def ops(proto: ModelProto) -> list[str]:
    return [node.op_type for node in walk(proto.graph.node) if node.domain != DOMAIN]


def bodies(proto: ModelProto, op: str) -> list[list[str]]:
    """What the fused nodes that have an op stand for."""
    made = [[node.op_type for node in function.node] for function in proto.functions]
    return [body for body in made if op in body]


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize(("op", "beta", "bias", "total"), VARIANTS)
def test_the_sums_are_the_products_kernels(
    op: str, beta: bool, bias: bool, total: bool, dtype: int, tmp_path: Path
) -> None:
    """The rest of the op is a kernel of its own, whose own nodes add zeros; numbers are as good as the original's."""
    original = model(layer(op, beta, bias, total, dtype))
    analysis = analysed(original, "sm_80")  # in 16 bits of so few columns the library may win on sm_90a
    assert not analysis.skipped
    first, norm = (site.fusion for site in analysis.sites[:2])
    assert {"residual", *(["bias"] if bias else [])} <= {*first.features}
    assert [out.name == "sum" for out in first.outputs] == [total]
    fused = sweep.rewritten(analysis)
    assert norm.pattern == "normalisation"
    assert [*norm.features] == [*(["bias"] if beta else []), "scale"]
    assert (norm.inputs[0].name, [out.name for out in norm.outputs]) == (first.outputs[0].name, ["y"])
    assert (ops(fused), bodies(fused, op)) == ([], [left(op)])
    onnx.save(original, tmp_path / "before.onnx")
    onnx.save(fused, tmp_path / "after.onnx")
    result = verify(tmp_path / "before.onnx", tmp_path / "after.onnx", shapes={"x": (2, 5, K), "skip": (2, 5, N)})
    assert all(each.passed for each in result.runs)


def test_an_epsilon_that_is_not_given_is_that_of_the_op() -> None:
    """ONNX Runtime's is 1e-12, LayerNormalization's own 1e-5: on a row of small numbers they differ."""
    b = layer(total=False)
    del b.nodes[-1].attribute[:]
    original = model(b)
    feed = {"x": np.zeros((1, 1, K), np.float32), "skip": np.float32(1e-4) * draw(1, 1, N).astype(np.float32)}
    b.initializers = [tensor for tensor in b.initializers if tensor.name != "bias"]
    b.array(np.zeros(N), "bias")
    original = model(b)
    (before,), (after,) = run(original, feed), run(sweep.rewritten(analysed(original)), feed)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip_first", [True, False])
def test_the_product_may_be_either_addend(skip_first: bool) -> None:
    b = layer(total=False)
    if skip_first:
        norm = b.nodes[-1]
        norm.input[0], norm.input[1] = norm.input[1], norm.input[0]
    product, norm = analysed(model(b)).sites
    assert (len(product.match.nodes), len(norm.match.nodes)) == (3, 1)


def test_an_op_without_a_product_stays_as_it_is() -> None:
    """And so do all others, to the byte, that no fusion reaches into."""
    b = layer(total=False)
    vectors = [b.array(draw(N, seed=3), name) for name in ("other_gamma", "other_beta")]
    out = b(SKIP, "y", "skip", *vectors, domain="com.microsoft", epsilon=1e-3)
    original = model(b, out)
    fused = sweep.rewritten(analysed(original))
    assert (ops(fused), bodies(fused, SKIP)) == ([SKIP], [left(SKIP)])
    assert fused.graph.node[-1].SerializeToString() == original.graph.node[-1].SerializeToString()


def test_an_op_stays_whole_where_its_product_is_not_selected() -> None:
    original = model(layer(total=False))
    analysis = analyse_model(original, resolve("sm_80", list), selection=Selection(skip=("gemm_epilogue",)))
    assert [skipped.reason for skipped in analysis.skipped] == ["not_selected"]
    assert not analysis.sites
    assert not analysis.graphs[0].opened_sums


def test_the_mean_is_nothing_that_an_op_alone_would_make() -> None:
    b = layer(total=False)
    b.nodes[-1].output.extend(["mean"])
    analysis = analysed(model(b, "y", "mean"))
    assert [(skipped.reason, SKIP in skipped.detail) for skipped in analysis.skipped] == [("unknown_op", True)]


def test_all_sums_are_taken_or_none() -> None:
    """Of unknown length, the skip may be no residual; then the bias alone is none either."""
    b = layer(total=False)
    skip = next(value for value in b.inputs if value.name == "skip")
    skip.type.tensor_type.shape.dim[1].dim_param = "other"
    original = model(b)
    analysis = analysed(original)
    assert not analysis.sites
    assert ops(sweep.rewritten(analysis)) == ops(original)


def test_in_a_branch() -> None:
    b = layer(total=False)
    shape = ("b", "s", N)
    value = helper.make_tensor_value_info("y", FLOAT, shape)
    then = helper.make_graph(b.nodes, "then", [], [value])
    other = helper.make_graph(
        [helper.make_node("Identity", ["skip"], ["z"])], "else", [], [helper.make_tensor_value_info("z", FLOAT, shape)]
    )
    choice = helper.make_node("If", ["flag"], ["out"], then_branch=then, else_branch=other)
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    b.nodes = [choice]
    b.inputs.append(flag)
    original = model(b)
    fused = sweep.rewritten(analysed(original))
    assert (sorted(ops(fused)), bodies(fused, SKIP)) == (["Identity", "If"], [left(SKIP)])
    feed = {"x": draw(2, 5, K).astype(np.float32), "skip": draw(2, 5, N).astype(np.float32), "flag": np.array(True)}
    np.testing.assert_allclose(run(fused, feed)[0], run(original, feed)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("op", [SKIP, SIMPLIFIED])
@pytest.mark.parametrize("tensors", [3, 4])
def test_taking_an_op_apart_costs_what_its_ops_cost(op: str, tensors: int) -> None:
    """The kernel has the residual read and the sum stored; the op reads the sum alone."""
    device, m, row, kernel = ARCHITECTURES["sm_90a"], 4096, 2 * 4096, 100.0
    traffic = Traffic(weights=0, lhs=0, product=row, rest=row, passes=0)
    times = estimate_from(
        device, kernel, replace(traffic, normalised=(Normalising(op, tensors * row, 2 * row),)), m, kernel
    )
    plain = estimate_from(device, kernel, traffic, m, kernel)
    saved = calibration(device).normalising[op] * (tensors - 2)
    assert times[Strategy.LEFT_ALONE] - times[Strategy.ONE_KERNEL] == pytest.approx(
        saved * cost_model.from_memory(m * row, device)
    )
    assert plain[Strategy.LEFT_ALONE] == plain[Strategy.ONE_KERNEL]


def test_an_op_whose_kernel_does_not_pay_stays_whole() -> None:
    """The library takes half as long for 64 rows in TF32 with weights [k, n], and nobody else wants the sum."""
    b = Builder(FLOAT, opset=17)
    product = b("MatMul", b.input("x", (64, 4096)), b.raw(np.zeros((4096, 1024), np.float32), "weight"))
    vectors = [b.array(np.ones(1024), name) for name in ("gamma", "beta", "bias")]
    original = model(b, b(SKIP, product, b.input("skip", (64, 1024)), *vectors, domain="com.microsoft"))
    analysis = analyse_model(original, resolve("sm_90a", list), keep_weights=True)
    assert [skipped.reason for skipped in analysis.skipped] == ["slower"]
    assert sweep.rewritten(analysis).SerializeToString() == original.SerializeToString()


def test_tuning_takes_no_word_of_nodes_that_the_model_has_not() -> None:
    product, _ = analysed(model(layer(total=False))).sites
    trials = _trials(product, ARCHITECTURES["sm_90a"])
    assert trials
    names = {name for trial in trials for name in trial.implementations}
    assert not names & {Strategy.LEFT_ALONE.value, Strategy.EPILOGUE_ONLY.value}


def test_a_normalisation_is_measured_beside_the_op_that_adds_zeros() -> None:
    """Which is what the model has where no kernel normalises."""
    _, norm = analysed(model(layer(total=False))).sites
    assert {LEFT_ALONE in trial.implementations for trial in _trials(norm, ARCHITECTURES["sm_90a"])} == {True}
    assert [node.op_type for node in stock_nodes(replacement(norm.one_kernel, ""))] == left(SKIP)
