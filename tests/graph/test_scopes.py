"""Products inside branches, loop bodies and functions of the model are fused where they stand, and mean the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.errors import ModelError
from onnxfuse.graph.functions import functions_of, walk
from onnxfuse.graph.op_names import FUSED_GEMM, kind_of
from onnxfuse.pipeline import analyse_model
from onnxfuse.verify.float64_model import float64_model
from onnxfuse.verify.node_types import node_types
from tests.helpers.onnx_build import run
from tests.tools.sweep import rewritten

K = 8
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((2, 5, K)).astype(np.float32)


def value(name: str, dtype: int = FLOAT, shape: Sequence[int | str] | None = ("batch", "rows", K)):
    return helper.make_tensor_value_info(name, dtype, shape)


def block(x: str, out: str, op: str = "Tanh", weight: str = "weight", bias: str = "bias") -> list[onnx.NodeProto]:
    """Product, bias and activation."""
    return [
        helper.make_node("MatMul", [x, weight], [f"{out}_product"]),
        helper.make_node("Add", [f"{out}_product", bias], [f"{out}_sum"]),
        helper.make_node(op, [f"{out}_sum"], [out]),
    ]


def weights() -> list[TensorProto]:
    return [
        numpy_helper.from_array(RANDOM.standard_normal((K, K)).astype(np.float32), "weight"),
        numpy_helper.from_array(RANDOM.standard_normal(K).astype(np.float32), "bias"),
    ]


def model(nodes, *inputs, initializers=(), functions=(), output: str = "y") -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "test", [value("x"), *inputs], [value(output)], [*weights(), *initializers])
    opsets = [helper.make_opsetid("", 17)] + [helper.make_opsetid("own", 1)] * bool(functions)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


def branches() -> onnx.ModelProto:
    """Weights outside in one branch, and its own in the other."""
    own = numpy_helper.from_array(RANDOM.standard_normal((K, K)).astype(np.float32), "own_weight")
    then = helper.make_graph(block("x", "a"), "then", [], [value("a")])
    other = helper.make_graph(block("x", "b", "Relu", "own_weight"), "else", [], [value("b")], [own])
    return model([helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other)],
                 value("flag", BOOL, []))  # fmt: skip


def branch_behind_shape_arithmetic() -> onnx.ModelProto:
    """Only symbolic shapes know that the Reshape outside keeps the shape, so that x is a residual inside."""
    two = numpy_helper.from_array(np.array([2, 2, 1]), "two")
    outside = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Mul", ["shape", "two"], ["doubled"]),
        helper.make_node("Div", ["doubled", "two"], ["same"]),
        helper.make_node("Reshape", ["x", "same"], ["reshaped"]),
    ]
    inside = [*block("reshaped", "t"), helper.make_node("Add", ["t", "x"], ["a"])]
    then = helper.make_graph(inside, "then", [], [value("a")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["b"])], "else", [], [value("b")])
    choice = helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other)
    return model([*outside, choice], value("flag", BOOL, []), initializers=[two])


def loop() -> onnx.ModelProto:
    state = [value("step", INT64, []), value("going", BOOL, []), value("state")]
    body = [*block("state", "next"), helper.make_node("Identity", ["going"], ["still"])]
    graph = helper.make_graph(body, "body", state, [value("still", BOOL, []), value("next")])
    count = numpy_helper.from_array(np.array(3), "count")
    return model([helper.make_node("Loop", ["count", "", "x"], ["y"], "steps", body=graph)], initializers=[count])


def scan() -> onnx.ModelProto:
    row = value("row", shape=("rows", K))
    graph = helper.make_graph(block("row", "out"), "body", [row], [value("out", shape=("rows", K))])
    return model([helper.make_node("Scan", ["x"], ["y"], "rows", body=graph, num_scan_inputs=1)])


def branch_in_a_loop() -> onnx.ModelProto:
    then = helper.make_graph(block("state", "a"), "then", [], [value("a")])
    other = helper.make_graph(block("state", "b", "Relu"), "else", [], [value("b")])
    state = [value("step", INT64, []), value("going", BOOL, []), value("state")]
    body = [
        helper.make_node("Greater", ["step", "one"], ["late"]),
        helper.make_node("If", ["late"], ["next"], "choice", then_branch=then, else_branch=other),
        helper.make_node("Identity", ["going"], ["still"]),
    ]
    graph = helper.make_graph(body, "body", state, [value("still", BOOL, []), value("next")])
    numbers = [numpy_helper.from_array(np.array(n), name) for n, name in ((4, "count"), (1, "one"))]
    return model([helper.make_node("Loop", ["count", "", "x"], ["y"], "steps", body=graph)], initializers=numbers)


def function(name: str, nodes, inputs=("x", "w", "b"), **attributes) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, list(inputs), ["y"], nodes, opsets, **attributes)


def call(name: str, x: str, out: str, *more: str, **attributes) -> onnx.NodeProto:
    return helper.make_node(name, [x, *(more or ("weight", "bias"))], [out], out, domain="own", **attributes)


def function_twice() -> onnx.ModelProto:
    body = function("Block", block("x", "y", weight="w", bias="b"))
    return model([call("Block", "x", "h"), call("Block", "h", "y")], functions=[body])


def nested_functions() -> onnx.ModelProto:
    inner = function("Inner", block("x", "y", weight="w", bias="b"))
    outer = function("Outer", [call("Inner", "x", "h", "w", "b"), helper.make_node("Add", ["x", "h"], ["y"])])
    return model([call("Outer", "x", "h"), call("Outer", "h", "y")], functions=[outer, inner])


def function_with_attributes() -> onnx.ModelProto:
    """The epilogue's constant is an attribute of the function, given by both calls or left to the default."""
    nodes = block("x", "h", "Elu", "w", "b")
    nodes[-1].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    nodes.append(helper.make_node("Add", ["h", "x"], ["y"]))
    body = function("Block", nodes, attributes=["slope"])
    return model([call("Block", "x", "h", slope=0.5), call("Block", "h", "y", slope=0.5)], functions=[body])


def function_in_a_branch() -> onnx.ModelProto:
    body = function("Block", block("x", "y", weight="w", bias="b"))
    then = helper.make_graph([call("Block", "x", "a")], "then", [], [value("a")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["b"])], "else", [], [value("b")])
    choice = helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other)
    return model([choice], value("flag", BOOL, []), functions=[body])


def branch_in_a_function() -> onnx.ModelProto:
    then = helper.make_graph(block("x", "a", weight="w", bias="b"), "then", [], [value("a")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["c"])], "else", [], [value("c")])
    choice = helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other)
    body = function("Block", [choice], ("x", "w", "b", "flag"))
    return model([call("Block", "x", "y", "weight", "bias", "flag")], value("flag", BOOL, []), functions=[body])


def function_with_half_of_a_site() -> onnx.ModelProto:
    """The product is the model's own, what follows it is in a function."""
    tail = [helper.make_node("Add", ["x", "b"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    product = helper.make_node("MatMul", ["x", "weight"], ["product"])
    return model([product, call("Tail", "product", "y", "bias")], functions=[function("Tail", tail, ("x", "b"))])


CASES = {
    branches: ["choice/then_branch/a_product", "choice/else_branch/b_product"],
    branch_behind_shape_arithmetic: ["choice/then_branch/t_product"],
    loop: ["steps/body/next_product"],
    scan: ["rows/body/out_product"],
    branch_in_a_loop: ["steps/body/choice/then_branch/a_product", "steps/body/choice/else_branch/b_product"],
    function_twice: ["h/y_product", "y/y_product"],
    nested_functions: ["h/h/y_product", "y/h/y_product"],
    function_with_attributes: ["h/h_product", "y/h_product"],
    function_in_a_branch: ["choice/then_branch/a/y_product"],
    branch_in_a_function: ["y/choice/then_branch/y/a_product"],
    function_with_half_of_a_site: ["product"],
}


@pytest.mark.parametrize("build", CASES)
def test_a_product_is_fused_where_it_stands(build) -> None:
    original = build()
    onnx.checker.check_model(original)
    analysis = analyse_model(original, resolve("sm_80", list))
    assert sorted(site.fusion.anchor for site in analysis.sites) == sorted(CASES[build])
    assert not analysis.skipped
    fused = rewritten(analysis)
    onnx.checker.check_model(fused)
    assert not [function for function in fused.functions if function.domain == "own"]
    for flag in (True, False):
        feed = {"x": X, "flag": np.array(flag)}
        expected, actual = run(original, feed), run(fused, feed)
        assert [array.tobytes() for array in expected] == [array.tobytes() for array in actual]
        for reference, array in zip(run(float64_model(fused, node_types()).model, feed), expected, strict=True):
            np.testing.assert_allclose(reference, array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", CASES)
def test_kernels_and_bodies_are_stored_once(build) -> None:
    fused, _ = onnxfuse.optimize(build(), arch="ptx")
    stored = [tensor.name for tensor in fused.graph.initializer if tensor.name.startswith("onnxfuse.")]
    assert len(stored) == 1
    nodes = [node for node in walk(fused.graph.node) if kind_of(node.op_type) == FUSED_GEMM]
    assert {node.input[0] for node in nodes} == set(stored)
    operators = 2 if build in (branches, branch_in_a_loop) else 1  # Tanh in one branch, Relu in the other
    kernels = {attribute.s for node in nodes for attribute in node.attribute if attribute.name == "kernel"}
    assert (len(nodes), len(kernels), len(fused.functions)) == (len(CASES[build]), operators, operators)


def test_each_call_has_its_own_attributes() -> None:
    original = function_with_attributes()
    original.graph.node[1].attribute[0].f = 0.25
    analysis = analyse_model(original, resolve("sm_80", list))
    assert sorted("0.5" in str(site.fusion) for site in analysis.sites) == [False, True]
    assert run(original, {"x": X})[0].tobytes() == run(rewritten(analysis), {"x": X})[0].tobytes()


def other_operator_set() -> onnx.ModelProto:
    """ReduceSum takes its axes as an attribute in the function's operator set, and as an input in the model's."""
    nodes = [*block("x", "h", weight="w", bias="b"), helper.make_node("ReduceSum", ["h"], ["y"], axes=[-1])]
    body = function("Block", nodes)
    body.opset_import[0].version = 11
    return model([call("Block", "x", "h"), helper.make_node("Add", ["x", "h"], ["y"])], functions=[body])


def test_a_function_of_another_operator_set_stays_and_says_why() -> None:
    original = other_operator_set()
    analysis = analyse_model(original, resolve("sm_80", list))
    (skipped,) = analysis.skipped
    assert (skipped.anchor, skipped.reason) == ("Block/h_product", "function_differs")
    assert "operator set 11" in skipped.detail
    assert rewritten(analysis) == original


def test_a_function_that_no_fusion_reaches_stays() -> None:
    body = function("Other", [helper.make_node("Softmax", ["x"], ["y"])], ("x",))
    one = function("Block", block("x", "y", weight="w", bias="b"))
    original = model([call("Block", "x", "h"), call("Other", "h", "y", "")], functions=[body, one])
    del original.graph.node[1].input[1:]
    fused = rewritten(analyse_model(original, resolve("sm_80", list)))
    assert fused.functions[0] == original.functions[0]
    assert fused.graph.node[-1] == original.graph.node[-1]
    assert run(original, {"x": X})[0].tobytes() == run(fused, {"x": X})[0].tobytes()


def test_a_function_that_calls_itself_is_refused() -> None:
    body = function("Block", [call("Block", "x", "y", "w", "b")])
    with pytest.raises(ModelError, match="'Block' calls itself"):
        analyse_model(model([call("Block", "x", "y")], functions=[body]), [])


def test_functions_may_call_one_another_deeper_than_python_can() -> None:
    """1,200 functions, each of which calls the next."""
    bodies = [function(f"F{index}", [call(f"F{index + 1}", "x", "y", "")], ("x",)) for index in range(1199)]
    for body in bodies:
        del body.node[0].input[1:]
    bodies.append(function("F1199", [helper.make_node("Softmax", ["x"], ["y"])], ("x",)))
    original = model([call("F0", "x", "y", "")], functions=bodies)
    del original.graph.node[0].input[1:]
    assert len(functions_of(original)) == 1200


def test_a_branch_sees_the_shapes_that_were_learnt_around_it() -> None:
    (site,) = analyse_model(branch_behind_shape_arithmetic(), resolve("sm_80", list)).sites
    assert "residual" in site.fusion.features


def test_a_value_that_a_branch_reads_stays() -> None:
    nodes = block("x", "h")
    then = helper.make_graph([helper.make_node("Neg", ["h_sum"], ["a"])], "then", [], [value("a")])
    other = helper.make_graph([helper.make_node("Identity", ["h"], ["b"])], "else", [], [value("b")])
    nodes.append(helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other))
    original = model(nodes, value("flag", BOOL, []))
    analysis = analyse_model(original, resolve("sm_80", list))
    fused = rewritten(analysis)
    for flag in (True, False):
        feed = {"x": X, "flag": np.array(flag)}
        assert run(original, feed)[0].tobytes() == run(fused, feed)[0].tobytes()


def test_an_old_operator_set_is_left_alone() -> None:
    original = model(block("x", "y"))
    original.opset_import[0].version = 8
    analysis = analyse_model(original, resolve("sm_80", list))
    assert [site.reason for site in analysis.skipped] == ["opset_too_old"]
    assert rewritten(analysis) == original
