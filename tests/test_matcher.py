"""What the matcher finds, what it refuses and why; every fusion computes what its graph computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import OPS, Fusion
from onnxfuse.graph import Graph, load_model
from onnxfuse.patterns import Match, is_anchor, match_site
from tests.onnx_build import FLOAT, Builder, run
from tests.reference_fusion import evaluate

K, N = 6, 8  # of the product; the halves have N / 2 columns


def sites(model) -> list[tuple[Match, Fusion] | NotFusable]:
    graph = Graph(load_model(model))
    found: list[tuple[Match, Fusion] | NotFusable] = []
    for node in filter(is_anchor, graph.nodes):
        try:
            found.append(match_site(graph, node))
        except NotFusable as refusal:
            found.append(refusal)
    return found


def only(model) -> tuple[Match, Fusion]:
    (site,) = sites(model)
    if isinstance(site, NotFusable):
        raise site
    return site


def refusal(model) -> NotFusable:
    (site,) = sites(model)
    assert isinstance(site, NotFusable), f"fused: {site[1]}"
    return site


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def linear(b: Builder, n: int = N, bias: bool = True, shape=("batch", "rows", K)) -> str:
    x = b.input("x", shape)
    product = b("MatMul", x, b.array(draw(K, n), "weight"))
    return b("Add", product, b.array(draw(n, seed=1), "bias")) if bias else product


def check_meaning(model, fusion: Fusion, feed: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    """The fusion, computed straight from the IR in float64, is what ONNX Runtime makes of the original graph."""
    (expected,) = run(model, feed)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (actual,) = evaluate(fusion, stored | feed)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


FEED = {"x": draw(2, 5, K, seed=2).astype(np.float32)}

# -- the spellings of one gate ----------------------------------------------------------------------------------------


def split_num_outputs(b: Builder, t: str) -> list[str]:
    return b("Split", t, outputs=2, axis=2, num_outputs=2)


def split_sizes(b: Builder, t: str) -> list[str]:
    return b("Split", t, b.integers(N // 2, N // 2), outputs=2, axis=-1)


def slice_pair(b: Builder, t: str) -> list[str]:
    half, axes = b.integers(N // 2), b.integers(-1)
    top = b.integers(2**63 - 1)
    return [b("Slice", t, b.integers(0), half, axes), b("Slice", t, half, top, axes, b.integers(1))]


def negative_bounds(b: Builder, t: str) -> list[str]:
    axes = b.integers(2)
    return [
        b("Slice", t, b.integers(-N), b.integers(-N // 2), axes),
        b("Slice", t, b.integers(-N // 2), b.integers(N), axes),
    ]


def computed_chunk(b: Builder, t: str) -> list[str]:
    last = b("Gather", b("Shape", t), b.integers(-1), axis=0)
    half = b("Mul", b("Div", b("Add", last, b.integers(1)), b.integers(2)), b.integers(1))
    end = b("Mul", b("Div", b("Add", last, b.integers(1)), b.integers(2)), b.integers(2))
    axes = b.integers(-1)
    return [b("Slice", t, b.integers(0), half, axes), b("Slice", t, half, end, axes)]


def gelu_op(b: Builder, t: str) -> str:
    return b("Gelu", t)


def gelu_tanh_op(b: Builder, t: str) -> str:
    return b("Gelu", t, approximate="tanh")


def gelu_erf_half_last(b: Builder, t: str) -> str:
    inner = b("Add", b("Erf", b("Div", t, b.array(2**0.5))), b.array(1.0))
    return b("Mul", b("Mul", t, inner), b.array(0.5))


def gelu_erf_half_first(b: Builder, t: str) -> str:
    inner = b("Add", b("Erf", b("Mul", t, b.array(0.5**0.5))), b.array(1.0))
    return b("Mul", b("Mul", b.array(0.5), t), inner)


def gelu_tanh_cube_by_mul(b: Builder, t: str) -> str:
    cube = b("Mul", t, b("Mul", t, t))
    inner = b("Mul", b.array(0.7978845608), b("Add", t, b("Mul", b.array(0.044715), cube)))
    return b("Mul", b.array(0.5), b("Mul", t, b("Add", b.array(1.0), b("Tanh", inner))))


def gelu_tanh_cube_by_pow(b: Builder, t: str) -> str:
    cube = b("Mul", b("Pow", t, b.array(3.0)), b.array(0.044715))
    inner = b("Mul", b("Add", t, cube), b.array(0.7978845608))
    return b("Mul", b("Mul", t, b.array(0.5)), b("Add", b("Tanh", inner), b.array(1.0)))


def silu(b: Builder, t: str) -> str:
    return b("Mul", t, b("Sigmoid", t))


def silu_spelled_out(b: Builder, t: str) -> str:
    return b("Mul", t, b("Div", b.array(1.0), b("Add", b("Exp", b("Neg", t)), b.array(1.0))))


def quick_gelu(b: Builder, t: str) -> str:
    return b("Mul", t, b("Sigmoid", b("Mul", t, b.array(1.702))))


def sigmoid(b: Builder, t: str) -> str:
    return b("Sigmoid", t)


def relu(b: Builder, t: str) -> str:
    return b("Relu", t)


SPLITS = [split_num_outputs, split_sizes, slice_pair, negative_bounds, computed_chunk]
ACTIVATIONS = [
    gelu_op, gelu_tanh_op, gelu_erf_half_last, gelu_erf_half_first, gelu_tanh_cube_by_mul, gelu_tanh_cube_by_pow,
    silu, silu_spelled_out, quick_gelu, sigmoid, relu,
]  # fmt: skip


@pytest.mark.parametrize("activated", [0, 1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_gate_is_found_however_it_is_spelled(split, activation, activated: int) -> None:
    b = Builder()
    halves = split(b, linear(b))
    gate = activation(b, halves[activated])
    operands = [halves[1 - activated], gate] if activated else [gate, halves[1 - activated]]
    model = b.model(b("Mul", *operands))
    match, fusion = only(model)
    assert fusion.pattern == "split_gemm"
    assert set(fusion.features) >= {"bias", "gate"}
    assert len(match.nodes) + sum(node.op_type in ("Constant",) for node in model.graph.node) == len(model.graph.node)
    check_meaning(model, fusion, FEED)


def test_three_equal_parts_are_one_product() -> None:
    b = Builder()
    first, second, third = b("Split", linear(b, n=12), outputs=3, axis=-1, num_outputs=3)
    model = b.model(b("Add", b("Mul", first, b("Sigmoid", second)), b("Tanh", third)))
    _, fusion = only(model)
    assert len(fusion.parts) == 3
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize("bias_first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_found_however_it_is_spelled(activation, bias_first: bool) -> None:
    b = Builder()
    product, bias = linear(b, bias=False), b.array(draw(N, seed=1), "bias")
    model = b.model(activation(b, b("Add", *((bias, product) if bias_first else (product, bias)))))
    _, fusion = only(model)
    assert (fusion.pattern, fusion.features) == ("gemm_epilogue", ("activation", "bias"))
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0)])
@pytest.mark.parametrize("bias_shape", [None, (N,), (1, N), (4, 1), (1, 1), ()])
def test_gemm(trans_b: int, alpha: float, beta: float, bias_shape) -> None:
    b = Builder()
    x = b.input("x", (4, K))
    weight = b.array(draw(*((N, K) if trans_b else (K, N))), "weight")
    bias = () if bias_shape is None else (b.array(draw(*bias_shape), "bias"),)
    model = b.model(b("Tanh", b("Gemm", x, weight, *bias, transB=trans_b, alpha=alpha, beta=beta)))
    _, fusion = only(model)
    assert fusion.rhs[0].einops == ("n k" if trans_b else "k n")
    check_meaning(model, fusion, {"x": draw(4, K).astype(np.float32)})


UNARY = ["Neg", "Abs", "Sqrt", "Exp", "Log", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Softplus", "Relu", "LeakyRelu",
         "Elu", "HardSigmoid", "HardSwish", "Mish", "Gelu", "Identity"]  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_every_unary_row_of_the_pointwise_table(op: str) -> None:
    b = Builder()
    positive = b("Add", b("Abs", linear(b, bias=False)), b.array(0.1))
    signed = b("Sub", positive, b.array(1.0)) if op not in ("Sqrt", "Log", "Reciprocal") else positive
    model = b.model(b("Tanh", b(op, signed)))
    _, fusion = only(model)
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [("Min", 3), ("Max", 3), ("Sum", 3), ("Clip", 3), ("Add", 2), ("Sub", 2), ("Mul", 2), ("Div", 2), ("Pow", 2)],
)
def test_every_wider_row_of_the_pointwise_table(op: str, inputs: int) -> None:
    b = Builder()
    x = b("Exp", linear(b))
    model = b.model(b(op, x, *(b.array(0.5 + i) for i in range(inputs - 1))))
    _, fusion = only(model)
    check_meaning(model, fusion, FEED, 1e-4)


def test_casts_and_clip_bounds_left_out() -> None:
    b = Builder()
    half = b("Cast", linear(b), to=10)
    model = b.model(b("Clip", b("Tanh", b("Cast", half, to=1)), "", b.array(0.5)))
    _, fusion = only(model)
    assert "cast" in fusion.features
    check_meaning(model, fusion, FEED, 1e-3)


def test_constant_condition_of_where() -> None:
    b = Builder()
    condition = helper.make_tensor("condition", 9, (), [False])
    b.initializers.append(condition)
    t = linear(b)
    model = b.model(b("Where", "condition", t, b("Tanh", t)))
    _, fusion = only(model)
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), "scalar"), ((1,), "scalar"), ((N,), "row"), ((1, 1, N), "row"), (("rows", 1), "column"),
     (("batch", 1, N), "tile"), (("batch", "rows", N), "tile"), (("rows", N), "tile"), (("batch", 1, 1), "column")],
)  # fmt: skip
def test_operands_that_only_the_run_knows(shape, kind: str) -> None:
    b = Builder()
    t = linear(b)
    operand = b.input("operand", shape)
    model = b.model(b("Mul", b("Sigmoid", t), operand))
    _, fusion = only(model)
    sizes = {"batch": 2, "rows": 5}
    value = draw(*(sizes.get(size, size) for size in shape), seed=3).astype(np.float32)
    check_meaning(model, fusion, FEED | {"operand": value})


# -- what must not be fused -------------------------------------------------------------------------------------------


def gate(b: Builder, first: str, second: str) -> str:
    return b("Mul", first, b("Sigmoid", second))


def quarters(b: Builder) -> str:
    """The first two of four chunks look like two halves but for one constant."""
    t = linear(b)
    last = b("Gather", b("Shape", t), b.integers(-1), axis=0)
    quarter = b("Div", b("Add", last, b.integers(3)), b.integers(4))
    axes = b.integers(-1)
    first = b("Slice", t, b.integers(0), quarter, axes)
    return gate(b, first, b("Slice", t, quarter, b("Mul", quarter, b.integers(2)), axes))


def uneven(b: Builder) -> str:
    parts = b("Split", linear(b), b.integers(2, 2, 4), outputs=3, axis=-1)
    return gate(b, parts[0], parts[1])


def four_way(b: Builder) -> str:
    parts = b("Split", linear(b), outputs=4, axis=-1, num_outputs=4)
    return b("Add", gate(b, parts[0], parts[1]), gate(b, parts[2], parts[3]))


def rows_split(b: Builder) -> str:
    parts = b("Split", linear(b, shape=(2, 4, K)), outputs=2, axis=1, num_outputs=2)
    return gate(b, *parts)


def strided(b: Builder) -> str:
    t, ends, axes, two = linear(b), b.integers(N), b.integers(-1), b.integers(2)
    return gate(b, b("Slice", t, b.integers(0), ends, axes, two), b("Slice", t, b.integers(1), ends, axes, two))


def overlapping(b: Builder) -> str:
    t, axes = linear(b), b.integers(-1)
    return gate(b, b("Slice", t, b.integers(0), b.integers(4), axes), b("Slice", t, b.integers(2), b.integers(6), axes))


def dynamic_bound(b: Builder) -> str:
    t, axes = linear(b), b.integers(-1)
    bound = b.input("bound", (1,), 7)
    first = b("Slice", t, b.integers(0), bound, axes)
    return b("Sigmoid", first)


def third_reader(b: Builder) -> str:
    t = linear(b)
    first, second = split_num_outputs(b, t)
    return b("Add", b("Concat", gate(b, first, second), first, axis=2), t)


def per_head_chunk(b: Builder) -> str:
    t = b("Reshape", linear(b), b.integers(0, 0, 2, 4))
    return gate(b, *b("Split", t, outputs=2, axis=-1, num_outputs=2))


def only_sums(b: Builder) -> str:
    return b("Add", linear(b), b.array(1.0))


def unknown_operand_shape(b: Builder) -> str:
    return b("Sigmoid", b("Add", linear(b, bias=False), b.input("operand", ("other", "rows", N))))


def weight_from_the_run(b: Builder) -> str:
    return b("Sigmoid", b("MatMul", b.input("x", ("batch", "rows", K)), b.input("weight", (K, N))))


def softmax(b: Builder) -> str:
    return b("Softmax", linear(b, bias=False))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (quarters, "not_equal_parts"),
        (uneven, "not_equal_parts"),
        (overlapping, "not_equal_parts"),
        (four_way, "not_equal_parts"),
        (rows_split, "not_the_last_axis"),
        (strided, "strided_slice"),
        (dynamic_bound, "bounds_not_constant"),
        (third_reader, "several_readers"),
        (per_head_chunk, "no_activation"),
        (only_sums, "no_activation"),
        (unknown_operand_shape, "unknown_broadcast"),
        (weight_from_the_run, "weight_not_constant"),
        (softmax, "unknown_op"),
    ],
)
def test_refusals_carry_their_reason(build, reason: str) -> None:
    b = Builder()
    found = refusal(b.model(build(b)))
    assert found.reason == reason
    assert found.node
    assert found.detail


def test_a_value_that_is_a_graph_output_stays_outside() -> None:
    b = Builder()
    t = linear(b)
    found = refusal(b.model(t, b("Sigmoid", t)))
    assert found.reason == "graph_output"


def test_growth_stops_before_a_value_that_somebody_else_reads() -> None:
    b = Builder()
    activated = b("Tanh", linear(b))
    out = b("Concat", b("Mul", activated, b.array(2.0)), activated, axis=0)
    match, _ = only(b.model(out))
    assert match.out == activated


@settings(max_examples=60, deadline=None)
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
            match, fusion = site
            if match.out == model.graph.output[0].name:
                check_meaning(model, fusion, FEED, 1e-4)
                assert all(step.op in OPS and len(step.inputs) == OPS[step.op] for step in fusion.steps)
            return
    assert {site.reason for site in sites(model)} <= {"several_readers"}


def test_the_ir_prints_as_the_documentation_does() -> None:
    b = Builder(FLOAT)
    halves = split_num_outputs(b, linear(b))
    _, fusion = only(b.model(b("Mul", halves[0], b("Gelu", halves[1]))))
    assert str(fusion).splitlines() == [
        "fusion  MatMul_0",
        "axes    b=?  m=?  n=4  k=6  p=2",
        "lhs     f32[b, m, k]",
        "rhs     f32[k, (p n)]  parts 2",
        "in0     f32[(p n)]  bias",
        "        t0 = acc0 + in0[p=0]",
        "        t1 = acc1 + in0[p=1]",
        "        t2 = gelu(t1)",
        "        t3 = t0 * t2",
        "out     f32[b, m, n] <- t3",
    ]
