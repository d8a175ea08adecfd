"""What the matcher finds, what it refuses and why; every fusion computes what its graph computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import OPS, Fusion
from onnxfuse.graph import Graph, load_model
from onnxfuse.patterns import Match, match_sites
from tests.onnx_build import FLOAT, Builder, run
from tests.reference_fusion import evaluate

K, N = 6, 8  # of the product; the halves have N / 2 columns


def sites(model) -> list[tuple[Match, Fusion] | NotFusable]:
    graph = Graph(load_model(model))
    found = match_sites(graph, lambda match, fusion: (match, fusion))
    return [*found.fused, *(refusal for _, refusal in found.skipped)]


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
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    expected = run_values(model, [tensor.name for tensor in fusion.outputs], feed)
    for wanted, actual in zip(expected, evaluate(fusion, stored | feed | run_inputs(model, fusion, feed)), strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


def run_values(model, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Any values of a model, in ONNX Runtime."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    copy.graph.output.extend(known[name] for name in names)
    return run(copy, feed)


def run_inputs(model, fusion: Fusion, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What other nodes of the model make for a fusion."""
    made = {name for node in model.graph.node for name in node.output}
    names = [tensor.name for tensor in fusion.inputs if tensor.name in made]
    return dict(zip(names, run_values(model, names, feed), strict=True)) if names else {}


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


# -- near misses: no gate, but what they are ---------------------------------------------------------------------------


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


@pytest.mark.parametrize(("build", "parts"), [(quarters, 2), (uneven, 2), (four_way, 4)])
def test_other_column_ranges_are_no_gate_of_two_halves(build, parts: int) -> None:
    b = Builder()
    model = b.model(build(b))
    _, fusion = only(model)
    assert (fusion.pattern, len(fusion.parts), fusion.size("p")) == ("column_ranges", parts, 4)
    check_meaning(model, fusion, FEED)


# -- what must not be fused -------------------------------------------------------------------------------------------


def rows_split(b: Builder) -> str:
    parts = b("Split", linear(b, bias=False, shape=(2, 4, K)), outputs=2, axis=1, num_outputs=2)
    return gate(b, *parts)


def strided(b: Builder) -> str:
    t, ends, axes, two = linear(b, bias=False), b.integers(N), b.integers(-1), b.integers(2)
    return gate(b, b("Slice", t, b.integers(0), ends, axes, two), b("Slice", t, b.integers(1), ends, axes, two))


def overlapping(b: Builder) -> str:
    t, axes = linear(b, bias=False), b.integers(-1)
    return gate(b, b("Slice", t, b.integers(0), b.integers(4), axes), b("Slice", t, b.integers(2), b.integers(6), axes))


def dynamic_bound(b: Builder) -> str:
    t, axes = linear(b, bias=False), b.integers(-1)
    bound = b.input("bound", (1,), 7)
    first = b("Slice", t, b.integers(0), bound, axes)
    return b("Sigmoid", first)


def per_head_chunk(b: Builder) -> str:
    t = b("Reshape", linear(b, bias=False), b.integers(0, 0, 2, 4))
    return gate(b, *b("Split", t, outputs=2, axis=-1, num_outputs=2))


def unknown_operand_shape(b: Builder) -> str:
    return b("Sigmoid", b("Add", linear(b, bias=False), b.input("operand", ("other", "rows", N))))


def weight_from_the_run(b: Builder) -> str:
    return b("Sigmoid", b("MatMul", b.input("x", ("batch", "rows", K)), b.input("weight", (K, N))))


def softmax(b: Builder) -> str:
    return b("Softmax", linear(b, bias=False))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (overlapping, "not_equal_parts"),
        (rows_split, "not_the_last_axis"),
        (strided, "strided_slice"),
        (dynamic_bound, "bounds_not_constant"),
        (per_head_chunk, "unknown_op"),
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


# -- several readers, graph outputs, products that meet ----------------------------------------------------------------


def test_what_others_read_becomes_an_output_of_the_kernel() -> None:
    """A gate whose packed product, first half and result are all read elsewhere."""
    b = Builder()
    t = linear(b)
    first, second = split_num_outputs(b, t)
    model = b.model(b("Concat", gate(b, first, second), first, t, axis=2))
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.outs)) == ("split_gemm", 4)
    assert [out.name for out in match.exits][:2] == [t, first]
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


def test_no_fusion_reads_what_it_makes() -> None:
    b = Builder()
    t = linear(b)
    scale = b("Softmax", t)
    model = b.model(b("Mul", b("Tanh", t), scale))
    match, fusion = only(model)
    assert {out.name for out in match.exits} == {t, "v3_0"}
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


def test_weights_of_different_layouts_are_no_dual_gate() -> None:
    b = Builder()
    x = b.input("x", ("rows", K))
    first = b("Gemm", x, b.array(draw(K, N), "w0"))
    second = b("Gemm", x, b.array(draw(N, K, seed=1), "w1"), transB=1)
    model = b.model(b("Mul", b("Tanh", first), second))
    early, late = sites(model)
    assert early[1].pattern == late[1].pattern == "gemm_epilogue"
    for _, fusion in (early, late):
        check_meaning(model, fusion, {"x": draw(5, K, seed=2).astype(np.float32)})


def test_a_gate_in_one_branch_of_a_wider_split() -> None:
    """Flux2: one product holds q, k and v in its first third and a packed gate in the rest."""
    b = Builder()
    qkv, packed = b("Split", linear(b, n=12), b.integers(4, 8), outputs=2, axis=-1)
    first, second = b("Split", packed, outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Softmax", qkv), gate(b, first, second))
    match, fusion = only(model)
    assert (fusion.pattern, len(fusion.parts), len(match.exits)) == ("column_ranges", 3, 2)
    check_meaning(model, fusion, FEED)


def test_columns_that_nothing_reads_are_not_computed() -> None:
    b = Builder()
    parts = b("Split", linear(b, n=12), outputs=3, axis=-1, num_outputs=3)
    model = b.model(gate(b, parts[2], parts[1]))
    _, fusion = only(model)
    assert [part.part for part in fusion.parts] == [1, 2]
    check_meaning(model, fusion, FEED)


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
            _, fusion = site
            check_meaning(model, fusion, FEED, 1e-4)
            assert all(step.op in OPS and len(step.inputs) == OPS[step.op] for step in fusion.steps)
        else:
            assert site.reason == "several_readers"


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
