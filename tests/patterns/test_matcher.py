"""What the matcher finds, what it refuses and why; every fusion computes what its graph computes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import (
    ACTIVATIONS,
    FEED,
    SPLITS,
    K,
    N,
    check_meaning,
    draw,
    elu_of_numbers_alike,
    every_second,
    gate,
    linear,
    only,
    refusal,
    split_num_outputs,
)
from tests.helpers.onnx_build import BFLOAT16, BOOL, FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten


@pytest.mark.parametrize("activated", [0, 1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_gate_is_found_however_it_is_spelled(split, activation, activated: int) -> None:
    b = Builder()
    halves = split(b, linear(b))
    activated_half = activation(b, halves[activated])
    operands = [halves[1 - activated], activated_half] if activated else [activated_half, halves[1 - activated]]
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


@pytest.mark.parametrize("taken", [1, 2])
@pytest.mark.parametrize(("width", "parts"), [(3, 4), (4, 3), (2, 4), (3, 3)])
def test_parts_in_turn_may_be_more_than_the_columns_of_one(width: int, parts: int, taken: int) -> None:
    b = Builder()
    columns = b("Reshape", linear(b, n=width * parts, bias=False), b.integers(0, 0, width, parts))
    first, *others = (b("Gather", columns, b.scalar(index), axis=3) for index in range(taken))
    model = b.model(gate(b, first, *others) if others else b("Tanh", first))
    _, fusion = only(model)
    (rhs,) = fusion.rhs
    assert [fusion.size(axis) for axis in rhs.dims[1]] == [width, parts]
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_one_column_are_parts(count: int) -> None:
    b = Builder()
    first, second, *rest = b("Split", linear(b, n=count), outputs=count, axis=-1, num_outputs=count)
    value = b("Mul", first, b("Sigmoid", second))
    model = b.model(b("Add", value, b("Tanh", *rest)) if rest else value)
    match, fusion = only(model)
    assert (len(fusion.parts), len(match.nodes)) == (count, len(model.graph.node))
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


WEIGHTS = {
    "identity": lambda b: b("Identity", b.array(draw(K, N), "weight")),
    "transpose": lambda b: b("Transpose", b.array(draw(N, K), "weight"), perm=[1, 0]),
    "transpose_without_perm": lambda b: b("Transpose", b("Identity", b.array(draw(N, K), "weight"))),
    "two_transposes": lambda b: b("Transpose", b("Transpose", b.array(draw(K, N), "weight"))),
    "constant": lambda b: b("Constant", value=numpy_helper.from_array(draw(K, N).astype(np.float32))),
}


@pytest.mark.parametrize("spelling", WEIGHTS)
def test_a_weight_behind_views_is_read_as_it_lies(spelling: str) -> None:
    b = Builder()
    weight = WEIGHTS[spelling](b)
    product = b("MatMul", b.input("x", ("batch", "rows", K)), weight)
    halves = split_num_outputs(b, b("Add", b.array(draw(N, seed=1), "bias"), product))
    model = b.model(gate(b, *halves))
    _, fusion = only(model)
    assert fusion.rhs[0].einops == ("(p n) k" if spelling.startswith("transpose") else "k (p n)")
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
         "Sin", "Cos",
         "Elu", "HardSigmoid", "HardSwish", "Mish", "Gelu", "Selu", "Celu", "Softsign",
         "Identity"]  # fmt: skip


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


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16, BFLOAT16])
def test_numbers_alike_are_numbers_of_every_type(dtype: int) -> None:
    b = Builder(dtype, opset=22)
    model = b.model(elu_of_numbers_alike(b, linear(b)))
    match, fusion = only(model)
    assert len(match.nodes) + 2 == len(model.graph.node)  # but for the two Constant nodes
    assert [step.op for step in fusion.steps] == ["add", "mul", "elu", "mul"]
    assert fusion.steps[1].inputs[1] == 1.5


def test_prelu_with_a_slope_for_every_column() -> None:
    b = Builder()
    model = b.model(b("PRelu", linear(b), b.array(draw(N, seed=7), "slope")))
    _, fusion = only(model)
    assert "activation" in fusion.features
    check_meaning(model, fusion, FEED)


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


MASK_SHAPES = [
    (), (1,), (N,), (1, 1, N), ("rows", 1), ("batch", 1, 1), ("batch", 1, N), ("batch", "rows", N), ("rows", N),
]  # fmt: skip


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("other", [-np.inf, -65504.0, np.finfo(np.float32).min])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_a_mask_that_only_the_run_knows(shape, other: float, branch: int) -> None:
    b = Builder()
    mask = b.input("mask", shape, BOOL)
    branches = [linear(b), b.array(other)]
    model = b.model(b("Where", mask, *(reversed(branches) if branch else branches)))
    _, fusion = only(model)
    assert (fusion.features, fusion.operands[-1].dtype.name) == (("bias", "mask"), "bool")
    sizes = {"batch": 2, "rows": 5}
    check_meaning(model, fusion, FEED | {"mask": np.asarray(draw(*(sizes.get(size, size) for size in shape)) > 0)})


def test_a_mask_chooses_between_values_and_tensors() -> None:
    b = Builder()
    first, second = split_num_outputs(b, linear(b))
    chosen = b("Where", b.mask(draw(N // 2, seed=3) > 0), first, b("Tanh", second))
    model = b.model(b("Where", b.mask(draw(5, 1, seed=4) > 0), b.array(draw(5, N // 2, seed=5)), chosen))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    _, fusion = only(model)
    assert (len(fusion.parts), [operand.dtype.name for operand in fusion.operands]) == (
        2,
        ["f32", "bool", "bool", "f32"],
    )
    check_meaning(model, fusion, FEED)


def test_a_transposed_product_under_its_mask() -> None:
    b = Builder()
    t = b("Transpose", linear(b), perm=(0, 2, 1))
    model = b.model(b("Where", b.input("mask", ("batch", N, "rows"), BOOL), t, b.array(0.0)))
    _, fusion = only(model)
    assert fusion.operands[-1].einops == "b n m"
    check_meaning(model, fusion, FEED | {"mask": draw(2, N, 5, seed=6) > 0})


MASK_SPELLINGS = {
    "cast": (lambda b, mask, t: b("Mul", t, b("Cast", mask, to=FLOAT)), 1),
    "cast to half and back": (lambda b, mask, t: b("Mul", t, b("Cast", b("Cast", mask, to=10), to=FLOAT)), 0),
    "not": (lambda b, mask, t: b("Where", b("Not", mask), b.array(-np.inf), t), 1),
    "cast of not": (lambda b, mask, t: b("Add", b("Cast", b("Not", mask), to=FLOAT), t), 2),
    "not of not": (lambda b, mask, t: b("Where", b("Not", b("Not", mask)), t, b.array(0.0)), 2),
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("spelling", MASK_SPELLINGS)
def test_a_mask_is_read_as_it_is_stored(spelling: str, elsewhere: bool) -> None:
    """Its Cast and its Not go with the fusion, and stay where somebody else needs them."""
    b = Builder()
    t, mask = linear(b), b.input("mask", ("batch", "rows", 1), BOOL)
    masked, count = MASK_SPELLINGS[spelling][0](b, mask, t), MASK_SPELLINGS[spelling][1]
    makers = [node for node in b.nodes if node.op_type in ("Cast", "Not")]
    is_number = makers[-1].op_type == "Cast"
    other = [b("Where", makers[-1].output[0], b.array(1.0), b.array(2.0))] if elsewhere and not is_number else []
    model = b.model(masked, *other, *([makers[-1].output[0]] if elsewhere and is_number else []))
    match, fusion = only(model)
    assert (fusion.operands[-1].dtype.name, len(match.copied)) == (("bool", count) if count else ("f32", 0))
    feed = FEED | {"mask": draw(2, 5, 1, seed=9) > 0}
    check_meaning(model, fusion, feed)
    for epilogue_only in (False, True):
        fused = rewritten(analyse_model(model, resolve("sm_80", list)), epilogue_only)
        left = sum(node.op_type in ("Cast", "Not") for node in fused.graph.node)
        assert left == (len(makers) if elsewhere or not count else 0)
        for expected, actual in zip(run(model, feed), run(fused, feed), strict=True):
            assert expected.tobytes() == actual.tobytes()


def test_a_bool_is_no_number() -> None:
    """What the product is compared to makes a bool, which no kernel stores."""
    b = Builder()
    model = b.model(b("Cast", b("Greater", b("Tanh", linear(b)), b.array(0.0)), to=1))
    _, fusion = only(model)
    assert fusion.steps[-1].op == "tanh"


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
    assert "gate" not in fusion.features
    check_meaning(model, fusion, FEED)


def test_columns_that_are_gathered_one_after_another_are_a_range() -> None:
    b = Builder()
    t = linear(b)
    half, rest = b("Gather", t, b.integers(0, 1, 2, 3), axis=2), b("Gather", t, b.integers(-4, -3, -2, -1), axis=-1)
    model = b.model(gate(b, half, rest))
    match, fusion = only(model)
    assert len(match.nodes) == 6
    assert len(fusion.parts) == 2
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize("opset", [11, 13, 20])
@pytest.mark.parametrize("mode", ["left out", "false"])
def test_a_dropout_that_does_not_train_is_a_copy(opset: int, mode: str) -> None:
    b = Builder(opset=opset)
    told = [b.array(0.5), b.mask(np.array(False))] if mode == "false" and opset > 11 else []
    ratio = {"ratio": 0.5} if opset == 11 else {}
    model = b.model(b("Relu", b("Dropout", linear(b), *told, **ratio)))
    match, fusion = only(model)
    assert len(match.nodes) == 4
    check_meaning(model, fusion, FEED)


# -- what must not be fused -------------------------------------------------------------------------------------------


def rows_split(b: Builder) -> str:
    parts = b("Split", linear(b, bias=False, shape=(2, 4, K)), outputs=2, axis=1, num_outputs=2)
    return gate(b, *parts)


def strided(b: Builder) -> str:
    """Every third of eight columns."""
    t, ends, axes, three = linear(b, bias=False), b.integers(N), b.integers(-1), b.integers(3)
    return gate(b, b("Slice", t, b.integers(0), ends, axes, three), b("Slice", t, b.integers(1), ends, axes, three))


def backwards(b: Builder) -> str:
    t, ends, axes, back = linear(b, bias=False), b.integers(-(2**63)), b.integers(-1), b.integers(-2)
    return gate(b, b("Slice", t, b.integers(-1), ends, axes, back), b("Slice", t, b.integers(-2), ends, axes, back))


def of_each_head(b: Builder) -> str:
    """Of each head's columns the first and the last one, and not those between."""
    t, axes = linear(b, n=2 * N, bias=False), b.integers(-1)
    t = b("Reshape", t, b.integers(0, 0, 2, N))
    first, last = ((start, start + 1) for start in (0, N - 1))
    return gate(b, *(b("Slice", t, b.integers(start), b.integers(end), axes) for start, end in (first, last)))


def in_turn_and_apart(b: Builder) -> str:
    """The two halves of every second column."""
    first, _ = every_second(b, linear(b, bias=False))
    return gate(b, *b("Split", first, outputs=2, axis=-1, num_outputs=2))


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


def softmax(b: Builder) -> str:
    return b("Softmax", linear(b, bias=False))


def gathered_apart(b: Builder) -> str:
    t = linear(b, bias=False)
    return gate(b, b("Gather", t, b.integers(0, 2, 4, 6), axis=-1), b("Gather", t, b.integers(1, 3, 5, 7), axis=-1))


def trained(b: Builder) -> str:
    return b("Relu", b("Dropout", linear(b, bias=False), b.array(0.5), b.mask(np.array(True))))


def squeezed_of_unknown(b: Builder) -> str:
    """A run whose batch is 1 has one dimension less."""
    return b("Relu", b("Squeeze", linear(b, bias=False)))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (overlapping, "not_equal_parts"),
        (rows_split, "not_the_last_axis"),
        (strided, "strided_slice"),
        (backwards, "strided_slice"),
        (of_each_head, "strided_slice"),
        (in_turn_and_apart, "not_equal_parts"),
        (dynamic_bound, "bounds_not_constant"),
        (per_head_chunk, "strided_slice"),
        (unknown_operand_shape, "unknown_broadcast"),
        (softmax, "unknown_op"),
        (gathered_apart, "strided_slice"),
        (trained, "unknown_op"),
        (squeezed_of_unknown, "unknown_shape"),
    ],
)
def test_refusals_carry_their_reason(build, reason: str) -> None:
    b = Builder()
    found = refusal(b.model(build(b)))
    assert found.reason == reason
    assert found.node
    assert found.detail


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


def test_a_layer_of_sines_is_one_kernel() -> None:
    """As implicit neural representations have them: a frequency, a Linear, a sine, a residual of cosines."""
    b = Builder()
    angle = b("Mul", linear(b), b.array(30.0))
    model = b.model(b("Add", b("Sin", angle), b("Cos", angle)))
    match, fusion = only(model)
    assert len(match.nodes) == len(model.graph.node)
    assert [step.op for step in fusion.steps] == ["add", "mul", "sin", "cos", "add"]
    assert "activation" in fusion.features
    check_meaning(model, fusion, FEED, 30 * 2e-5)  # the frequency times what the product is off by
