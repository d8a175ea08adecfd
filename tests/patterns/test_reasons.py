"""Every reason of docs/reasons.md is given for some model: for its product, or for where its fusion ends."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from onnxfuse.selection import Selection
from tests.docs.test_readme import raised_reasons
from tests.graph.test_scopes import block, other_operator_set
from tests.graph.test_scopes import model as model_of_nodes
from tests.helpers.matching import K, N, draw, gate, linear
from tests.helpers.onnx_build import Builder
from tests.patterns.test_contrib_ops import made

SHAPE = ("batch", "rows", K)


def product(b: Builder, n: int = N, shape=SHAPE) -> str:
    return linear(b, n=n, bias=False, shape=shape)


def sliced(b: Builder, t: str, start: int, end: int, step: int = 1, axis: int = -1) -> str:
    return b("Slice", t, b.integers(start), b.integers(end), b.integers(axis), b.integers(step))


def many_broadcasts(b: Builder) -> str:
    return b("Add", product(b, shape=(2, 3, 2, 3, 4, K)), b.input("operand", (2, 1, 2, 1, 4, 1)))


def permuted_batch(b: Builder) -> str:
    return b("FusedMatMul", b.input("x", (3, 4, K)), b.array(draw(K, N)), domain="com.microsoft", transBatchA=1)


def bound_of_the_run(b: Builder) -> str:
    return b("Slice", product(b), b.integers(0), b.input("end", (1,), TensorProto.INT64), b.integers(-1))


def two_widths(b: Builder) -> str:
    t = product(b, n=2)
    return b("Add", t, sliced(b, t, 0, 1))


def graph_output(b: Builder) -> list[str]:
    """A reduction follows the inner value, so that it cannot be an output of the kernel."""
    t = product(b)
    return [t, b("ReduceMax", b("Add", t, b.array(draw(N))), keepdims=0)]


def needs_its_own_result(b: Builder) -> str:
    t = product(b)
    return b("Add", b("Tanh", t), b("Softmax", t))


def several_readers(b: Builder) -> str:
    t = product(b)
    return b("Add", b("ReduceMax", b("Add", t, b.array(draw(N)))), b("Softmax", t))


def overlapping(b: Builder) -> str:
    t = product(b)
    return gate(b, sliced(b, t, 0, 4), sliced(b, t, 2, 6))


def taken(b: Builder) -> str:
    x = b.input("x", SHAPE)
    first, second = (b("MatMul", b("Softmax", x, axis=i), b.array(draw(K, N, seed=i), f"w{i}")) for i in (1, 2))
    return b("Add", first, second)


def many_operands(b: Builder) -> str:
    t = product(b)
    for index in range(14):
        t = b("Mul", t, b.array(draw(N, seed=index)))
    return b("Tanh", t)


def many_steps(b: Builder) -> str:
    t = product(b)
    for _ in range(25):
        t = b("Tanh", b("Neg", t))
    return t


def five_parts(b: Builder) -> str:
    parts = b("Split", product(b, n=10), outputs=5, axis=-1)
    return b("Sum", *parts)


def bias_of_another_split(b: Builder) -> str:
    """An operand as wide as two of the product's four ranges."""
    first, second = b("Split", product(b, n=12), outputs=2, axis=-1)
    biased = b("Add", first, b.array(draw(6), "operand"))
    return b("Mul", b("Split", biased, outputs=2, axis=-1)[0], b("Split", second, outputs=2, axis=-1)[0])


def unknown_arithmetic(b: Builder) -> str:
    t = product(b)
    sizes = b("Mul", b("Shape", t), b.input("factor", (3,), TensorProto.INT64))
    return b("Cast", sizes, to=TensorProto.FLOAT)


def reshaped_by_the_run(b: Builder) -> str:
    return b("Reshape", product(b), b.input("sizes", (3,), TensorProto.INT64))


def two_orders(b: Builder) -> str:
    t = product(b, n=4, shape=(2, 4, K))
    return b("Add", b("Transpose", t, perm=[0, 2, 1]), t)


def ten_dimensions(b: Builder) -> str:
    return b("Relu", product(b, shape=(1, 1, 1, 1, 1, 1, 1, 1, 2, K)))


def dequantized(b: Builder) -> str:
    b.initializers.append(helper.make_tensor("bytes", TensorProto.INT8, (K, N), bytes(K * N), raw=True))
    return b("Relu", b("MatMul", b.input("x", SHAPE), b("DequantizeLinear", "bytes", b.array(0.1))))


def of_doubles(b: Builder) -> str:
    b.dtype = TensorProto.DOUBLE
    return b("Relu", product(b))


def of_unknown_rank(b: Builder) -> str:
    x = b.input("x", SHAPE)
    reshaped = b("Reshape", x, b.input("sizes", ("rank",), TensorProto.INT64))
    return b("Relu", b("MatMul", reshaped, b.array(draw(K, N))))


def of_stored_tensors(b: Builder) -> str:
    """A table that every run projects alike, as relative positions are, beside a product of the input."""
    table = b("Relu", b("MatMul", b("Tanh", b.array(draw(4, K))), b.array(draw(K, N))))
    return b("Add", product(b, shape=(4, K)), table)


def outer_product(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("x", (3, 4, 1)), b.input("y", (3, 1, 5))))


def small_gate_in_two_orders(b: Builder) -> str:
    """Of weights that are no larger than what is never stored otherwise."""
    x = b.input("x", (4, K))
    value, gate = b("Gemm", x, b.array(draw(K, N))), b("Gemm", x, b.array(draw(N, K)), transB=1)
    return b("Mul", value, b("Tanh", gate))


CASES = {
    "axes_do_not_flatten": many_broadcasts,
    "batch_transposed": permuted_batch,
    "bounds_not_constant": bound_of_the_run,
    "broadcasts_the_product": lambda b: b("Add", product(b), b.array(draw(3, 1, 1, 1))),
    "constant": of_stored_tensors,
    "cast_to_non_float": lambda b: b("Cast", b("Cast", product(b), to=TensorProto.INT32), to=TensorProto.FLOAT),
    "columns_differ": two_widths,
    "empty_slice": lambda b: sliced(b, product(b), 3, 3),
    "exponent_not_constant": lambda b: b("Pow", product(b), b.input("exponent", (1,))),
    "graph_output": graph_output,
    "lhs_transposed": lambda b: b("Relu", b("Einsum", b.input("x", (3, 4, 2)), b.input("y", (2, 4, 5)),
                                            equation="mkb,bkn->bmn")),
    "needs_its_own_result": needs_its_own_result,
    "not_equal_parts": overlapping,
    "not_the_last_axis": lambda b: sliced(b, product(b, shape=(2, 4, K)), 0, 2, axis=1),
    "nothing_follows": product,
    "operand_split_differs": bias_of_another_split,
    "operand_without_effect": lambda b: b("Relu", b("Gemm", b.input("x", (4, K)), b.array(draw(K, N)),
                                                    b.input("c", (4, N)), beta=0.0)),
    "orders_differ": small_gate_in_two_orders,
    "outer_product": outer_product,
    "quantized": dequantized,
    "rank_too_high": ten_dimensions,
    "reshape_does_not_factor": lambda b: b("Reshape", product(b, n=9, shape=(2, 4, K)), b.integers(3, 24)),
    "several_readers": several_readers,
    "strided_slice": lambda b: sliced(b, product(b), 0, N, step=3),
    "taken": taken,
    "too_many_operands": many_operands,
    "too_many_parts": five_parts,
    "too_many_steps": many_steps,
    "unknown_broadcast": lambda b: b("Add", product(b), b.input("operand", ("other", "rows", N))),
    "unknown_op": lambda b: b("Softmax", product(b)),
    "unknown_rank": of_unknown_rank,
    "unknown_shape_arithmetic": unknown_arithmetic,
    "unknown_shape": reshaped_by_the_run,
    "unsupported_dtype": of_doubles,
    "unsupported_product": lambda b: b("Einsum", b.input("x", (4, 4)), b.input("y", (4,)), equation="ii,i->i"),
    "views_differ": two_orders,
}  # fmt: skip
# ONNX's checker finds a contradiction first, and every architecture that is known has room for the smallest tile.
# test_behind_product.py and test_tuning.py; test_op_names.py; test_quantized.py; test_quantized_models.py
ELSEWHERE = {"slower", "slower_elsewhere", "too_many_bodies", "quantized_form"}
OF_ATTENTION = {"no_attention_kernel", "probability_is_read", "score_is_read"}  # test_attention.py
UNREACHED = {"invalid_model", "no_tile_fits"}


def reasons(model: ModelProto, selection: Selection | None = None) -> set[str]:
    analysis = analyse_model(model, resolve("sm_80", list), "tf32", selection or Selection())
    stops = {site.match.stop.reason for site in analysis.sites if site.match.stop is not None}
    return stops | {entry.reason for entry in analysis.skipped}


def model_of(reason: str) -> ModelProto:
    b = Builder()
    outputs = CASES[reason](b)
    return made(b, outputs) if isinstance(outputs, str) else b.model(*outputs)


@pytest.mark.parametrize("reason", CASES)
def test_a_reason_is_given(reason: str) -> None:
    assert reason in reasons(model_of(reason))


def test_a_function_of_another_operator_set() -> None:
    assert reasons(other_operator_set()) == {"function_differs"}


def test_the_users_choice_and_an_old_operator_set() -> None:
    model = model_of_nodes(block("x", "y"))
    assert reasons(model, Selection(skip=("gemm_epilogue",))) == {"not_selected"}
    model.opset_import[0].version = 8
    assert reasons(model) == {"opset_too_old"}


def test_no_reason_is_missing_here() -> None:
    elsewhere = {"function_differs", "not_selected", "opset_too_old", *UNREACHED, *ELSEWHERE, *OF_ATTENTION}
    assert not elsewhere & CASES.keys()
    assert CASES.keys() | elsewhere == raised_reasons()
