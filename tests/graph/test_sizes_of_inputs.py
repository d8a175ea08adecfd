"""Sizes of a product's result are read of the graph's input: the same numbers; what is made of them is an operand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnxfuse.device import resolve
from onnxfuse.graph.load import load_model
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder, run
from tests.tools import sweep

COLUMNS, ROWS = 16, 32
Form = Callable[[Builder, str], str]
ZERO = helper.make_tensor("zero", TensorProto.INT64, (), [0])


def size(b: Builder, t: str, axis: int) -> str:
    return b("Gather", b("Shape", t), b.scalar(axis))


def vector_of(b: Builder, *sizes: str) -> str:
    return b("Concat", *(b("Unsqueeze", each, b.integers(0)) for each in sizes), axis=0)


def projected(b: Builder, x: str) -> str:
    return b("Add", b.array(draw(COLUMNS, seed=1)), b("MatMul", x, b.array(draw(COLUMNS, COLUMNS))))


def positions(b: Builder, t: str) -> str:
    """As TorchScript has `t + table[:, :t.shape[1]]`, and an activation behind it."""
    table = b.array(draw(1, ROWS, COLUMNS, seed=2), "table")
    return b("Tanh", b("Add", t, b("Slice", table, b.integers(0), vector_of(b, size(b, t, 1)), b.integers(1))))


def counted(b: Builder, t: str) -> str:
    """An embedding of as many positions as there are."""
    count = b("Range", b.scalar(0), size(b, t, -2), b.scalar(1))
    return b("Relu", b("Add", t, b("Gather", b.array(draw(ROWS, COLUMNS, seed=2), "table"), count)))


def zeros(b: Builder, t: str) -> str:
    shape = vector_of(b, size(b, t, 0), size(b, t, 1), b.scalar(COLUMNS))
    return b("Sigmoid", b("Add", t, b("Expand", b.array(0.0), shape)))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("form", [positions, counted, zeros], ids=lambda form: form.__name__)
def test_what_is_made_of_sizes_is_an_operand_of_the_product(form: Form, dtype: int) -> None:
    b = Builder(dtype)
    model = b.model(form(b, projected(b, b.input("x", ("batch", "rows", COLUMNS)))))
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = analysis.sites
    assert site.match.out == model.graph.output[0].name
    feeds = [{"x": draw(batch, rows, COLUMNS).astype(b.numpy)} for batch, rows in ((2, 5), (1, 9))]
    assert not sweep.difference(model, sweep.rewritten(analysis), feeds)


def asked(form: Form, dtype: int = FLOAT, rank: int = 3) -> ModelProto:
    b = Builder(dtype, opset=18)
    names = ("batch", "rows", COLUMNS) if rank == 3 else ("rows", COLUMNS)
    count = b("Range", b.scalar(0), form(b, b.input("x", names)), b.scalar(1))
    return b.model(b("Cast", count, to=dtype))


def asks_the_input(model: ModelProto) -> bool:
    shapes = [node.input[0] for node in load_model(model).proto.graph.node if node.op_type == "Shape"]
    assert shapes
    return shapes == ["x"]


def normalised(b: Builder, t: str) -> str:
    return b("LayerNormalization", projected(b, t), b.array(draw(COLUMNS)), axis=-1)


KEPT: dict[str, Form] = {
    "first": lambda b, x: size(b, projected(b, x), 0),
    "second": lambda b, x: size(b, projected(b, x), 1),
    "from the end": lambda b, x: size(b, projected(b, x), -2),
    "further from the end": lambda b, x: size(b, projected(b, x), -3),
    "of two products": lambda b, x: size(b, projected(b, b("Erf", projected(b, x))), 1),
    "of what is normalised": lambda b, x: size(b, normalised(b, x), 1),
    "scaled": lambda b, x: size(b, b("Mul", projected(b, x), b.array(2.0)), 1),
}
NOT_KEPT: dict[str, Form] = {
    "columns": lambda b, x: size(b, projected(b, x), 2),
    "columns from the end": lambda b, x: size(b, projected(b, x), -1),
    "a product of two inputs": lambda b, x: size(b, b("MatMul", x, b.input("y", (COLUMNS, COLUMNS))), 1),
    "a sum of two": lambda b, x: size(b, b("Add", projected(b, x), b.input("y", ("batch", "rows", COLUMNS))), 1),
    "a larger table": lambda b, x: size(b, b("Add", projected(b, x), b.array(draw(1, 1, COLUMNS))), 1),
    "turned": lambda b, x: size(b, b("Transpose", projected(b, x), perm=[1, 0, 2]), 1),
    "a product of batches": lambda b, x: size(b, b("MatMul", x, b.array(draw(3, COLUMNS, COLUMNS))), 0),
    "two sizes": lambda b, x: b(
        "ReduceMax", b("Gather", b("Shape", projected(b, x)), b.integers(0, 1)), keepdims=0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*KEPT, *NOT_KEPT])
def test_a_size_is_that_of_the_input_where_every_node_keeps_it(name: str) -> None:
    model = asked({**KEPT, **NOT_KEPT}[name])
    assert asks_the_input(model) == (name in KEPT)
    feed = {"x": draw(1, 7, COLUMNS).astype("f"), "y": draw(COLUMNS, COLUMNS).astype("f")}
    if "sum" not in name:
        for before, after in zip(run(model, feed), run(load_model(model).proto, feed), strict=True):
            assert before.tobytes() == after.tobytes()


def test_a_gemm_keeps_its_rows_where_it_does_not_turn_them() -> None:
    def gemm(**attributes: int) -> Form:
        return lambda b, x: size(b, b("Gemm", x, b.array(draw(COLUMNS, COLUMNS)), **attributes), 0)

    assert asks_the_input(asked(gemm(transB=1), rank=2))
    assert not asks_the_input(asked(gemm(transA=1), rank=2))


def test_what_the_runtime_rounds_for_its_shape_keeps_that() -> None:
    assert asks_the_input(asked(normalised_size, FLOAT))
    assert not asks_the_input(asked(normalised_size, FLOAT16))


def normalised_size(b: Builder, x: str) -> str:
    return size(b, normalised(b, x), 1)


def test_sizes_of_a_reshape_alone_stay() -> None:
    b = Builder()
    t = projected(b, b.input("x", ("batch", "rows", COLUMNS)))
    shape = vector_of(b, size(b, t, 0), size(b, t, 1), b.scalar(2), b.scalar(-1))
    assert not asks_the_input(b.model(b("Reshape", t, shape)))


def test_a_second_reading_changes_nothing() -> None:
    once = load_model(asked(KEPT["second"])).proto
    assert load_model(once).proto == once


@pytest.mark.parametrize("op", ["Shape", "Gather", "MatMul", "Add", "Constant"])
def test_a_node_without_inputs_or_outputs_is_not_read(op: str) -> None:
    model = asked(lambda b, x: size(b, projected(b, x), 1))
    for node in (node for node in model.graph.node if node.op_type == op):
        del node.input[:]
    model.graph.node.append(NodeProto(op_type="Constant", attribute=[helper.make_attribute("value", ZERO)]))
    shapes = [node.input for node in load_model(model).proto.graph.node if node.op_type == "Shape"]
    assert ["x"] not in [list(names) for names in shapes] or op == "Constant"


def test_a_mask_of_sizes_is_an_operand() -> None:
    b = Builder()
    t = projected(b, b.input("x", ("batch", "rows", COLUMNS)))
    count = b("Range", b.scalar(0), size(b, t, 1), b.scalar(1))
    mask = b("Less", b("Unsqueeze", count, b.integers(-1)), b.input("length", (), 7))
    model = b.model(b("Where", mask, t, b.array(0.0)))
    (site,) = analyse_model(model, resolve("sm_90a", list)).sites
    assert site.match.out == model.graph.output[0].name
    assert any(tensor.dtype.onnx == BOOL for tensor in site.fusion.inputs)
