"""Several readers, graph outputs, products that meet, wider splits: what leaves a fusion, and what stays outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import OPS
from onnxfuse.patterns import match_sites
from tests.helpers.matching import FEED, K, N, check_meaning, draw, gate, linear, only, silu, sites, split_num_outputs
from tests.helpers.onnx_build import Builder


def test_what_others_read_becomes_an_output_of_the_kernel() -> None:
    """A gate whose packed product, first half and result are all read elsewhere."""
    b = Builder()
    t = linear(b)
    first, second = split_num_outputs(b, t)
    model = b.model(b("Concat", gate(b, first, second), first, t, axis=2))
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.outs)) == ("split_gemm", 4)
    assert [out.name for out in match.live_outs][:2] == [t, first]
    assert fusion.outputs[0].einops == "b m (p n)"
    check_meaning(model, fusion, FEED)


def test_a_graph_output_becomes_an_output_of_the_kernel() -> None:
    b = Builder()
    t = linear(b)
    model = b.model(t, b("Sigmoid", t))
    _, fusion = only(model)
    assert "extra_output" in fusion.features
    check_meaning(model, fusion, FEED)


def test_growth_stops_where_a_kernel_has_no_output_left() -> None:
    b = Builder()
    values = [linear(b)]
    for _ in range(5):
        values.append(b("Tanh", values[-1]))
    model = b.model(b("Concat", *values, axis=0))
    match, fusion = only(model)
    assert (len(fusion.outs), match.stop.reason) == (4, "several_readers")
    check_meaning(model, fusion, FEED)


def test_a_normalisation_stays_whole() -> None:
    """The first steps of what the runtime computes in one kernel are no epilogue."""
    b = Builder()
    residual = b("Add", linear(b, n=K), "x")
    mean = b("ReduceMean", b("Mul", residual, residual), b.integers(-1))
    model = b.model(b("Div", residual, b("Sqrt", mean)))
    match, fusion = only(model)
    assert (match.out, fusion.features) == (residual, ("bias", "residual"))


def spelled_out_norm(b: Builder, t: str) -> str:
    mean = b("ReduceMean", b("Pow", t, b.array(2.0)), b.integers(-1))
    return b("Mul", b("Mul", t, b("Reciprocal", b("Sqrt", b("Add", mean, b.array(1e-6))))), b.array(draw(WIDTH)))


NORMS = {
    "LayerNormalization": lambda b, t: b("LayerNormalization", t, b.array(draw(WIDTH)), b.array(draw(WIDTH))),
    "SimplifiedLayerNormalization": lambda b, t: b("SimplifiedLayerNormalization", t, b.array(draw(WIDTH))),
    "LpNormalization": lambda b, t: b("LpNormalization", t),
    "spelled out": spelled_out_norm,
}
WIDTH = N // 2  # of a head


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_behind_a_projection_reads_what_the_kernel_makes(norm: str, heads: bool) -> None:
    """Of queries and keys: of each head by itself, as in Qwen3, or with the heads taken apart by then."""
    b = Builder()
    b.input("x", ("batch", "rows", K))
    made = []
    for number in range(2):
        t = b("Add", b("MatMul", "x", b.array(draw(K, N, seed=number))), b.array(draw(N, seed=number)))
        t = b("Reshape", t, b.integers(0, 0, 2, WIDTH))
        made.append(b("Transpose", t, perm=(0, 2, 1, 3)) if heads else t)
    model = b.model(*(NORMS[norm](b, t) for t in made))
    graph = Graph(load_model(model))
    found = match_sites(graph, lambda match, fusion: (match, fusion), lambda joint, alone: True)
    ((match, fusion),) = found.fused
    assert (fusion.pattern, len(match.products), not found.skipped) == ("sibling_gemms", 2, True)
    assert [out.name for out in match.live_outs] == made
    assert all(graph.tensor(out.name).outputs[0].op not in ("Reshape", "Transpose") for out in match.live_outs)


def test_no_fusion_reads_what_it_makes() -> None:
    b = Builder()
    t = linear(b)
    scale = b("Softmax", t)
    model = b.model(b("Mul", b("Tanh", t), scale))
    match, fusion = only(model)
    assert {out.name for out in match.live_outs} == {t, "v3_0"}
    check_meaning(model, fusion, FEED)


def test_the_later_product_takes_the_add_of_both() -> None:
    b = Builder()
    first = linear(b, bias=False)
    y = b.input("y", ("batch", "rows", K))
    second = b("Relu", b("MatMul", y, b.array(draw(K, N, seed=5), "weight2")))
    model = b.model(b("Add", b("Tanh", first), second))
    early, late = sites(model)
    feed = FEED | {"y": draw(2, 5, K, seed=6).astype(np.float32)}
    assert (early[1].features, late[1].features) == (("activation",), ("activation", "residual"))
    for _, fusion in (early, late):
        check_meaning(model, fusion, feed)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_two_products_of_one_input_are_a_dual_gate(op: str, bias: bool) -> None:
    b = Builder()
    x = b.input("x", ("rows", K))
    halves = []
    for index in range(2):
        weight = b.array(draw(K, N, seed=index), f"weight{index}")
        halves.append(
            b(op, x, weight, *([b.array(draw(N, seed=index), f"bias{index}")] if bias and op == "Gemm" else []))
        )
        if bias and op == "MatMul":
            halves[-1] = b("Add", b.array(draw(N, seed=index), f"bias{index}"), halves[-1])
    model = b.model(b("Mul", silu(b, halves[0]), halves[1]))
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.rhs), len(match.products)) == ("split_gemm", 2, 2)
    assert "gate" in fusion.features
    check_meaning(model, fusion, {"x": draw(5, K, seed=2).astype(np.float32)})


def test_weights_stored_in_another_type_are_weights() -> None:
    """Weights of fp16 in a model that computes in fp32."""
    b = Builder()
    x = b.input("x", ("rows", K))
    halves = []
    for index in range(2):
        b.initializers.append(numpy_helper.from_array(draw(K, N, seed=index).astype(np.float16), f"weight{index}"))
        halves.append(b("MatMul", x, b("Cast", f"weight{index}", to=1)))
    model = b.model(b("Mul", silu(b, halves[0]), halves[1]))
    _, fusion = only(model)
    assert (fusion.pattern, len(fusion.rhs)) == ("split_gemm", 2)
    check_meaning(model, fusion, {"x": draw(5, K, seed=2).astype(np.float32)})


def test_weights_in_two_orders_are_a_dual_gate() -> None:
    """Whether one may be stored otherwise is not for the matcher to say."""
    b = Builder()
    x = b.input("x", ("rows", K))
    first = b("Gemm", x, b.array(draw(K, N), "w0"))
    second = b("Gemm", x, b.array(draw(N, K, seed=1), "w1"), transB=1)
    model = b.model(b("Mul", b("Tanh", first), second))
    _, fusion = only(model)
    assert [rhs.axes for rhs in fusion.rhs] == [("k", "n"), ("n", "k")]
    check_meaning(model, fusion, {"x": draw(5, K, seed=2).astype(np.float32)})


def test_a_gate_in_one_branch_of_a_wider_split() -> None:
    """Flux2: one product holds q, k and v in its first third and a packed gate in the rest."""
    b = Builder()
    qkv, packed = b("Split", linear(b, n=12), b.integers(4, 8), outputs=2, axis=-1)
    first, second = b("Split", packed, outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Softmax", qkv), gate(b, first, second))
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.parts), len(match.live_outs)) == ("split_gemm", 3, 2)
    check_meaning(model, fusion, FEED)


def test_columns_that_nothing_reads_are_not_computed() -> None:
    b = Builder()
    parts = b("Split", linear(b, n=12), outputs=3, axis=-1, num_outputs=3)
    model = b.model(gate(b, parts[2], parts[1]))
    _, fusion = only(model)
    assert [part.part for part in fusion.parts] == [1, 2]
    check_meaning(model, fusion, FEED)


@settings(max_examples=60)
@given(st.data())
def test_any_closed_pointwise_graph_means_what_it_meant(data: st.DataObject) -> None:
    """Random graphs over two halves and operands: the fusion computes what ONNX Runtime computes."""
    b = Builder()
    values = split_num_outputs(b, linear(b))
    for _ in range(data.draw(st.integers(1, 8), "nodes")):
        pick = st.sampled_from(values)
        op = data.draw(
            st.sampled_from(["Add", "Mul", "Sub", "Min", "Max", "Tanh", "Sigmoid", "Relu", "Abs", "Neg", "row"])
        )
        if op == "row":
            row = b.array(draw(N // 2, seed=len(values)), f"row{len(values)}")
            values.append(b("Mul", data.draw(pick), row))
        elif op in ("Add", "Mul", "Sub", "Min", "Max"):
            values.append(b(op, data.draw(pick), data.draw(pick)))
        else:
            values.append(b(op, data.draw(pick)))
    last = b("Tanh", values[-1])
    model = b.model(b("Mul", b("Sigmoid", b("Add", values[0], values[1])), last))
    for site in sites(model):
        if isinstance(site, tuple):
            _, fusion = site
            check_meaning(model, fusion, FEED, 1e-4)
            assert all(step.op in OPS and len(step.inputs) == OPS[step.op] for step in fusion.steps)
        else:
            assert site.reason == "several_readers"
