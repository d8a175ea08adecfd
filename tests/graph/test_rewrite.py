"""The rewritten model computes the same bits without us, and what is not fused is untouched."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.graph import all_graphs, load_model
from onnxfuse.graph.op_names import FUSED_POINTWISE, kind_of
from onnxfuse.patterns import is_anchor
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import FEED, K, N, draw, linear, split_num_outputs, split_to_sequence
from tests.helpers.matching import gate as gated
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.tools.sweep import rewritten


def fuse(model, epilogue_only: bool = False) -> onnx.ModelProto:
    return rewritten(analyse_model(model, []), epilogue_only)


def gate(b: Builder, x: str, seed: int, k: int = 6, n: int = 8) -> str:
    weight = np.random.default_rng(seed).standard_normal((k, n))
    t = b("Add", b("MatMul", x, b.array(weight, f"weight{seed}")), b.array(weight[0], f"bias{seed}"))
    last = b("Gather", b("Shape", t), b("Constant", value=numpy_helper.from_array(np.array([-1]))), axis=0)
    half = b("Div", last, b.integers(2))
    end = b("Mul", half, b.integers(2))
    axes = b.integers(-1)
    first, second = b("Slice", t, b.integers(0), half, axes), b("Slice", t, half, end, axes)
    return b("Mul", first, b("Sigmoid", second))


def two_gates(dtype: int = 1) -> onnx.ModelProto:
    b = Builder(dtype)
    x = b.input("x", ("batch", "rows", 6))
    return b.model(b("Concat", gate(b, x, 1), gate(b, x, 2), axis=-1))


def packed_and_halves_read_elsewhere(b: Builder) -> str:
    t = linear(b)
    first, second = split_num_outputs(b, t)
    return b("Concat", gated(b, first, second), first, t, axis=2)


def early_reader_of_an_intermediate(b: Builder) -> str:
    """The reader of the half stands before the gate's last node, so the fused node must stand before both."""
    first, second = split_num_outputs(b, linear(b))
    softmax = b("Softmax", first)
    return b("Concat", softmax, gated(b, first, second), axis=0)


def shared_transposed_weight(b: Builder) -> str:
    weight = b("Transpose", b.array(draw(N, K), "weight"))
    x = b.input("x", ("batch", "rows", K))
    return b("Concat", b("Tanh", b("MatMul", x, weight)), b("Softmax", b("MatMul", b("Softmax", x), weight)), axis=0)


def sequence_of_halves(b: Builder) -> str:
    return gated(b, *split_to_sequence(b, linear(b)))


def shape_read_elsewhere(b: Builder) -> str:
    """As TorchScript splits heads: the number of columns is known, so its reader does not need the product's value."""
    product = linear(b, bias=False)
    columns = b("Div", b("Gather", b("Shape", product), b.integers(2), axis=0), b.integers(2))
    sizes = b("Concat", b.integers(0, 0), columns, b.integers(-1), axis=0)
    return b("Reshape", b("Softmax", b("Tanh", product)), sizes)


def dual(b: Builder) -> str:
    x = b.input("x", ("batch", "rows", K))
    first, second = (b("MatMul", x, b.array(draw(K, N, seed=seed), f"weight{seed}")) for seed in range(2))
    return gated(b, first, second)


def add_of_two_products(b: Builder) -> str:
    x = b.input("x", ("batch", "rows", K))
    first = b("MatMul", x, b.array(draw(K, N), "weight0"))
    second = b("MatMul", b("Softmax", x), b.array(draw(K, N, seed=1), "weight1"))
    return b("Add", b("Tanh", first), second)


def test_shape_arithmetic_that_others_read_is_a_constant() -> None:
    b = Builder()
    fused = fuse(b.model(shape_read_elsewhere(b)))
    assert [node.op_type for node in fused.graph.node] == ["FusedGemm_0", "Softmax", "Reshape"]
    assert len(fused.graph.node[0].output) == 1


@pytest.mark.parametrize(
    "build",
    [
        packed_and_halves_read_elsewhere,
        early_reader_of_an_intermediate,
        shared_transposed_weight,
        sequence_of_halves,
        shape_read_elsewhere,
        dual,
        add_of_two_products,
    ],
)
@pytest.mark.parametrize("epilogue_only", [False, True])
def test_every_shape_of_a_match_falls_back_to_the_same_bits(build, epilogue_only: bool) -> None:
    b = Builder()
    original = b.model(build(b))
    fused = fuse(original, epilogue_only)
    assert (FUSED_POINTWISE in {kind_of(node.op_type) for node in fused.graph.node}) == epilogue_only
    onnx.checker.check_model(fused, full_check=True)
    assert any(node.domain == DOMAIN for node in fused.graph.node)
    for expected, actual in zip(run(original, FEED), run(fused, FEED), strict=True):
        assert expected.tobytes() == actual.tobytes()


FEEDS = [np.random.default_rng(0).standard_normal(shape) for shape in ((2, 5, 6), (1, 1, 6), (3, 7, 6))]


@pytest.mark.parametrize("dtype", [1, FLOAT16])
def test_bits_are_the_same_without_the_library(dtype: int) -> None:
    original = two_gates(dtype)
    fused = fuse(original)
    onnx.checker.check_model(fused)
    for feed in FEEDS:
        x = {"x": feed.astype(helper.tensor_dtype_to_np_dtype(dtype))}
        for expected, actual in zip(run(original, x), run(fused, x), strict=True):
            assert expected.tobytes() == actual.tobytes()


def test_equal_bodies_share_one_function_and_dead_nodes_are_gone() -> None:
    fused = fuse(two_gates())
    assert [node.op_type for node in fused.graph.node] == ["FusedGemm_0", "FusedGemm_0", "Concat"]
    assert len(fused.functions) == 1
    assert fused.functions[0].name == "FusedGemm_0"
    stored = {tensor.name for tensor in fused.graph.initializer}
    assert stored == {"weight1", "bias1", "weight2", "bias2", "onnxfuse.kernels"}
    assert fused.ir_version == two_gates().ir_version
    assert any(opset.domain == DOMAIN for opset in fused.opset_import)


def test_the_callers_model_is_not_changed() -> None:
    original = two_gates()
    before = original.SerializeToString(deterministic=True)
    fuse(original)
    assert original.SerializeToString(deterministic=True) == before


def decorated() -> onnx.ModelProto:
    """A gate amid everything that a careless tool loses: metadata, functions with overloads, doc strings, domains."""
    b = Builder()
    x = b.input("x", ("batch", "rows", 6))
    out = b("Elsewhere", gate(b, x, 1), domain="other")
    b.dtype = 1
    nodes = b.nodes
    values = [helper.make_tensor_value_info(out, 1, ("batch", "rows", 4))]
    graph = helper.make_graph(nodes, "test", b.inputs, values, b.initializers, doc_string="graph doc")
    elsewhere = helper.make_function(
        "other", "Elsewhere", ["a"], ["b"], [helper.make_node("Softmax", ["a"], ["b"])], [helper.make_opsetid("", 20)],
        overload="kept",
    )  # fmt: skip
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("other", 1)], ir_version=10,
        functions=[elsewhere], producer_name="producer", doc_string="model doc",
    )  # fmt: skip
    node = model.graph.node[-1]
    node.overload, node.doc_string = "kept", "node doc"
    for owner in (model, model.graph, node, model.functions[0]):
        owner.metadata_props.add(key="key", value="value")
    return model


def test_what_is_not_fused_stays_byte_for_byte() -> None:
    original = decorated()
    fused = fuse(original)
    assert [node.op_type for node in fused.graph.node] == ["FusedGemm_0", "Elsewhere"]
    assert fused.graph.node[-1] == original.graph.node[-1]
    assert list(fused.functions)[:1] == list(original.functions)
    assert list(fused.metadata_props) == list(original.metadata_props)
    assert (fused.producer_name, fused.doc_string) == ("producer", "model doc")
    assert (fused.graph.doc_string, list(fused.graph.metadata_props)) == (
        "graph doc",
        list(original.graph.metadata_props),
    )
    assert (list(fused.graph.input), list(fused.graph.output)) == (
        list(original.graph.input),
        list(original.graph.output),
    )


def test_fusing_twice_finds_nothing_new_and_keeps_the_first_result() -> None:
    once = fuse(two_gates())
    assert not any(is_anchor(graph, node) for graph in all_graphs(load_model(once)) for node in graph.nodes)


def test_a_constant_that_others_still_read_stays() -> None:
    b = Builder()
    x = b.input("x", (4, 6))
    two = b.array(2.0, "two")
    product = b("Mul", b("Tanh", b("MatMul", x, b.array(np.ones((6, 8)), "weight"))), two)
    fused = fuse(b.model(b("Pow", b("Concat", product, product, axis=0), two)))
    assert "two" in {tensor.name for tensor in fused.graph.initializer}


def test_shape_arithmetic_that_others_still_read_stays() -> None:
    b = Builder()
    x = b.input("x", ("batch", "rows", 6))
    activated = b("Tanh", b("MatMul", x, b.array(np.ones((6, 8)), "weight")))
    model = b.model(b("Expand", activated, b("Shape", activated)))
    assert [node.op_type for node in fuse(model).graph.node] == ["FusedGemm_0", "Shape", "Expand"]


@pytest.mark.parametrize("other", ["a fused node's", "an unrelated node's"])
def test_every_node_has_a_name_of_its_own(other: str) -> None:
    """An anchor without a name is called as its output; another node may be called so too."""
    b = Builder()
    h = b("Relu", b("MatMul", b.input("x", ("rows", K)), b.array(draw(K, N), "first")))
    y = b("Sigmoid", b("MatMul", h, b.array(draw(N, N), "second")))
    model = b.model(y)
    model.graph.node[0].name = ""
    if other == "an unrelated node's":
        model.graph.node.append(helper.make_node("Identity", [y], ["z"], f"{model.graph.node[0].output[0]}/FusedGemm"))
        model.graph.output.append(helper.make_tensor_value_info("z", 1, ["rows", N]))
    else:
        model.graph.node[2].name = model.graph.node[0].output[0]
    fused = fuse(model)
    names = [node.name for node in fused.graph.node]
    assert len(names) == len(set(names)) == (3 if other == "an unrelated node's" else 2)
    feed = {"x": np.float32(draw(3, K))}
    assert [y.tobytes() for y in run(model, feed)] == [y.tobytes() for y in run(fused, feed)]
