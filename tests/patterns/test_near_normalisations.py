"""What is nearly a normalisation: whatever is fused means the model, and what is written in another way still fuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

import onnxfuse
from onnxfuse.graph.graph import all_graphs, load_model
from onnxfuse.limits import MOST_NORMALISED
from onnxfuse.pipeline import Analysis
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.patterns.test_normalisation import (
    OF_LENGTH_ONE,
    ROWS,
    N,
    analysed,
    layer_norm,
    mean,
    root,
    spelled_out,
    vector,
)
from tests.tools import sweep

SIZES = {"batch": 2, "rows": 5}
TOLERANCE = {FLOAT: 2e-5, FLOAT16: 2e-2}
FEED = {
    name: value.astype(np.float32)
    for name, value in {"x": 2 * draw(2, 5, N) + 3, "other": draw(2, 5, N, seed=9) + 1}.items()
}
Form = Callable[[Builder, str], str]


def itself(b: Builder, x: str) -> str:
    return x


def centred(b: Builder, x: str) -> str:
    return b("Sub", x, mean(b, x))


def less_the_mean_of_another(b: Builder, x: str) -> str:
    return b("Sub", x, mean(b, "other"))


def another(b: Builder, x: str) -> str:
    return "other"


def another_centred(b: Builder, x: str) -> str:
    return centred(b, "other")


def mean_less_x(b: Builder, x: str) -> str:
    return b("Sub", mean(b, x), x)


def centred_twice(b: Builder, x: str) -> str:
    return centred(b, centred(b, x))


VALUES = (itself, centred, less_the_mean_of_another, another, another_centred, mean_less_x, centred_twice)


def divided(b: Builder, x: str, squared: str) -> str:
    return b("Div", x, root(b, squared))


def times_the_reciprocal(b: Builder, x: str, squared: str) -> str:
    return b("Mul", x, b("Reciprocal", root(b, squared)))


def times_one_over(b: Builder, x: str, squared: str) -> str:
    return b("Mul", b("Div", b.array(1.0), root(b, squared)), x)


def times_a_power(b: Builder, x: str, squared: str) -> str:
    return b("Mul", x, b("Pow", b("Add", b.array(1e-5), mean(b, squared)), b.array(-0.5)))


def times_a_power_alone(b: Builder, x: str, squared: str) -> str:
    return b("Mul", b("Pow", mean(b, squared), b.array(-0.5)), x)


def times_a_scaled_reciprocal(b: Builder, x: str, squared: str) -> str:
    return b("Mul", b("Mul", b("Reciprocal", root(b, squared)), vector(b)), x)


def over_the_root_alone(b: Builder, x: str, squared: str) -> str:
    return b("Div", x, b("Sqrt", mean(b, squared)))


ENDS = (divided, times_the_reciprocal, times_one_over, times_a_power, times_a_power_alone, times_a_scaled_reciprocal,
        over_the_root_alone)  # fmt: skip


def fused_and_right(model: ModelProto, feed: dict[str, np.ndarray]) -> list[int]:
    """How many nodes each fusion has; all mean in float64 what ONNX Runtime makes, and nodes have the model's bits."""
    analysis = analysed(model)
    for site in analysis.sites:
        check_meaning(model, site.fusion, feed, TOLERANCE[model.graph.output[0].type.tensor_type.elem_type])
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed])
    return [len(site.match.nodes) for site in analysis.sites]


def of(form: Form, dtype: int = FLOAT, opset: int = 17, columns: int | str = N) -> ModelProto:
    b = Builder(dtype, opset=opset)
    b.input("other", (*ROWS, columns))
    return b.model(form(b, b.input("x", (*ROWS, columns))))


ROOTS = [*product(ENDS, (True, False))]


def over_its_root(b: Builder, dividend: str, squared: str, way: tuple[Callable[..., str], bool]) -> str:
    """A value over the root of another's mean of squares, in one of the ways to write that."""
    end, by_power = way
    return end(b, dividend, b("Pow", squared, b.array(2.0)) if by_power else b("Mul", squared, squared))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dividend", VALUES)
@pytest.mark.parametrize("squared", VALUES)
def test_what_is_squared_is_what_is_divided(squared: Form, dividend: Form) -> None:
    """Of values whose nodes are apart: the same row, as it is or less its own mean, or no normalisation."""
    for way in ROOTS:
        model = of(lambda b, x, way=way: over_its_root(b, dividend(b, x), squared(b, x), way))
        found = fused_and_right(model, FEED)
        if squared is dividend and squared in (itself, centred, another, another_centred):
            assert len(found) == 1


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", OF_LENGTH_ONE)
def test_any_value_is_made_one_long(form: Form, value: Form) -> None:
    """By its sum of squares, or by its length; what is centred before that is centred by the kernel."""
    assert len(fused_and_right(of(lambda b, x: form(b, value(b, x))), FEED)) == 1


@pytest.mark.parametrize("dividend", VALUES)
@pytest.mark.parametrize("measured", VALUES)
def test_what_is_measured_is_what_is_divided(measured: Form, dividend: Form) -> None:
    def form(b: Builder, x: str) -> str:
        return b("Div", dividend(b, x), b("ReduceL2", measured(b, x), axes=[-1], keepdims=1))

    found = fused_and_right(of(form), FEED)
    assert len(found) == 1 or measured is not dividend or measured not in (itself, centred, another, another_centred)


@pytest.mark.parametrize("value", VALUES)
def test_any_value_over_its_own_root_is_normalised(value: Form) -> None:
    for way in ROOTS:
        assert len(fused_and_right(of(lambda b, x, way=way: over_its_root(b, *[value(b, x)] * 2, way)), FEED)) == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("which", ["exponent", "epsilon", "one"])
def test_numbers_of_any_rank(which: str, shape: tuple[int, ...]) -> None:
    """A number with a dimension more than the rows gives what it meets that dimension."""

    def form(b: Builder, x: str) -> str:
        number = {
            name: b.array(np.full(shape if name == which else (), value))
            for name, value in (("exponent", 2.0), ("epsilon", 1e-5), ("one", 1.0))
        }
        deviation = b("Sqrt", b("Add", mean(b, b("Pow", x, number["exponent"])), number["epsilon"]))
        return b("Mul", x, b("Div", number["one"], deviation))

    assert len(shape) > len(FEED["x"].shape) or fused_and_right(of(form), FEED) == [6]
    fused_and_right(of(form), FEED)


@pytest.mark.parametrize("epsilon", [np.inf, np.nan, 0.0, 1e-45, 3e38])
@pytest.mark.parametrize("is_op", [True, False])
def test_a_number_that_is_none_stops_nothing(epsilon: float, is_op: bool) -> None:
    def form(b: Builder, x: str) -> str:
        if is_op:
            return b("LayerNormalization", x, vector(b), axis=-1, epsilon=epsilon)
        return b("Div", x, b("Sqrt", b("Add", mean(b, b("Mul", x, x)), b.array(epsilon))))

    fused, _ = onnxfuse.optimize(of(form), arch="sm_90a")
    onnx.checker.check_model(fused)


SHAPES = [
    (1,), (N,), (1, N), (1, 1), (1, 1, N), (1, 1, 1, N), (1, 1, 1, 1), ("batch", 1, N), ("batch", 1, 1),
    ("rows", N), ("rows", 1), ("batch", "rows", 1), ("batch", "rows", N),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_reciprocal_is_multiplied_by_is_a_parameter_of_any_shape_or_none(shape: tuple[int | str, ...]) -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    reciprocal = b("Reciprocal", root(b, b("Mul", x, x)))
    model = b.model(b("Mul", x, b("Mul", reciprocal, b.input("parameter", shape))))
    parameter = draw(*(SIZES.get(size, size) if isinstance(size, str) else size for size in shape))
    found = fused_and_right(model, FEED | {"parameter": parameter.astype(np.float32)})
    assert len(found) == (len(shape) <= len(ROWS) + 1)


@pytest.mark.parametrize("op", ["Mul", "Add"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_parameter_is_taken_in_unless_it_makes_rows_longer(shape: tuple[int | str, ...], op: str) -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    model = b.model(b(op, b.input("parameter", shape), b("LayerNormalization", x, vector(b), axis=-1)))
    parameter = draw(*(SIZES.get(size, size) if isinstance(size, str) else size for size in shape))
    taken = np.broadcast_shapes(parameter.shape, FEED["x"].shape) == FEED["x"].shape
    assert fused_and_right(model, FEED | {"parameter": parameter.astype(np.float32)}) == [1 + taken]


def axes_of(axes: tuple[int, ...], keepdims: int, opset: int) -> Form:
    """A RMSNorm whose mean is along some axes: an attribute, and an input from opset 18 on; none names all."""

    def form(b: Builder, x: str) -> str:
        squares, given = b("Mul", x, x), (b.integers(*axes),) if axes and opset >= 18 else ()
        own: dict[str, object] = {"axes": axes} if axes and opset < 18 else {}
        return b("Div", x, b("Sqrt", b("Add", b("ReduceMean", squares, *given, keepdims=keepdims, **own), "epsilon")))

    return form


@pytest.mark.parametrize("opset", [13, 17, 18, 23])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [(-1,), (2,), (1,), (0,), (1, 2), (-1, -2), ()])
def test_a_mean_is_of_one_axis_that_stays(axes: tuple[int, ...], keepdims: int, opset: int) -> None:
    """Rows are as many as columns and batches, so that a dimension that is missing does broadcast."""
    b = Builder(FLOAT, opset=opset)
    b.array(1e-5, "epsilon")
    model = b.model(axes_of(axes, keepdims, opset)(b, b.input("x", (N, N, N))))
    found = [len(site.match.nodes) for site in analysed(model).sites]
    assert found == ([5] if len(axes) == 1 and keepdims else [])


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("attributes", [{}, {"axis": -1}, {"axis": 2, "epsilon": 1e-6}], ids=str)
def test_the_op_of_opset_23(attributes: dict[str, float], dtype: int) -> None:
    model = of(lambda b, x: b("RMSNormalization", x, vector(b), **attributes), dtype, 23)
    (site,) = analysed(model).sites
    assert not site.fusion.centred
    feed = {name: value.astype(helper.tensor_dtype_to_np_dtype(dtype)) for name, value in FEED.items()}
    assert fused_and_right(model, feed) == [1]


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [("columns", FLOAT), (MOST_NORMALISED + 1, FLOAT), (MOST_NORMALISED, FLOAT), (N, TensorProto.DOUBLE)],
)
def test_a_length_or_type_of_no_kernel_that_is_spelled_out(columns: int | str, dtype: int) -> None:
    model = of(lambda b, x: divided(b, x, b("Mul", x, x)), dtype, columns=columns)
    assert len(analysed(model).sites) == (columns == MOST_NORMALISED)


def test_what_is_computed_in_64_bits_is_left_to_them() -> None:
    def form(b: Builder, x: str) -> str:
        wide, epsilon = b("Cast", x, to=TensorProto.DOUBLE), b.raw(np.float64(1e-6), "epsilon")
        return b("Cast", b("Div", wide, b("Sqrt", b("Add", mean(b, b("Mul", wide, wide)), epsilon))), to=FLOAT)

    assert fused_and_right(of(form), FEED) == []


@pytest.mark.parametrize("which", range(1, 3))
def test_an_op_whose_mean_or_deviation_is_read_is_left(which: int) -> None:
    b = Builder(FLOAT, opset=17)
    made = b("LayerNormalization", b.input("x", (*ROWS, N)), vector(b), axis=-1, outputs=3)
    assert not analysed(b.model(made[0], made[which])).sites


def test_an_epsilon_that_a_run_may_replace_is_not_known() -> None:
    model = of(lambda b, x: divided(b, x, b("Mul", x, x)))
    (epsilon,) = (tensor.name for tensor in model.graph.initializer)
    model.graph.input.append(helper.make_tensor_value_info(epsilon, FLOAT, ()))
    assert not analysed(model).sites


def test_casts_that_two_share_stay() -> None:
    def both(b: Builder, x: str) -> str:
        wide, epsilon = b("Cast", x, to=FLOAT), b.raw(np.float32(1e-6), "epsilon")
        squares = [b("Mul", wide, wide) for _ in range(2)]
        roots = [b("Sqrt", b("Add", mean(b, each), epsilon)) for each in squares]
        return b("Sub", *(b("Cast", b("Div", wide, each), to=FLOAT16) for each in roots))

    feed = {name: value.astype(np.float16) for name, value in FEED.items()}
    assert fused_and_right(of(both, FLOAT16), feed) == [7, 6]  # the difference is the one's that comes first


def test_a_scale_of_what_is_normalised_is_of_columns_or_stays_behind() -> None:
    def scaled_by(b: Builder, y: str, by: str) -> str:
        return b("Mul", y, b("ReduceMax", by, axes=[0, 1], keepdims=0))

    def of_x(b: Builder, x: str) -> str:
        return scaled_by(b, b("LayerNormalization", x, vector(b), axis=-1), x)

    def of_itself(b: Builder, x: str) -> str:
        y = b("LayerNormalization", x, vector(b), axis=-1)
        return scaled_by(b, y, y)

    assert [fused_and_right(of(form), FEED) for form in (of_x, of_itself)] == [[2], [1]]


def test_one_row_times_itself() -> None:
    """A kernel reads what it normalises once, as rows, and the product stays behind it."""
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (1, 1, N))
    model = b.model(b("Mul", b("LayerNormalization", x, vector(b), axis=-1), x))
    assert fused_and_right(model, {"x": FEED["x"][:1, :1]}) == [1]


@pytest.mark.parametrize("form", [layer_norm, spelled_out])
def test_what_was_normalised_is_normalised_again(form: Form) -> None:
    def twice(b: Builder, x: str) -> str:
        return form(b, b("LayerNormalization", x, b.array(draw(N), "first"), axis=-1))

    assert len(fused_and_right(of(twice), FEED)) == 2


def test_a_sum_that_no_product_makes_stays_with_the_op_that_adds_as_well() -> None:
    assert not analysed(of(lambda b, x: layer_norm(b, b("Add", x, "other")))).sites


def within(body: Builder, out: str, op: str) -> ModelProto:
    """A model whose If or Loop has a body, which makes `out` of the outer `x`."""
    b = Builder(FLOAT, opset=17)
    b.input("x", (*ROWS, N))
    values = [helper.make_tensor_value_info(out, FLOAT, (*ROWS, N))]
    if op == "If":
        b.input("flag", (), TensorProto.BOOL)
        branches = [
            helper.make_graph(body.nodes, name, [], values, body.initializers)
            for name in ("then_branch", "else_branch")
        ]
        b.nodes.append(helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1]))
        return b.model("y")
    counter, going, state = (
        helper.make_tensor_value_info("turn", TensorProto.INT64, ()),
        helper.make_tensor_value_info("going", TensorProto.BOOL, ()),
        helper.make_tensor_value_info("state", FLOAT, (*ROWS, N)),
    )
    nodes = [*body.nodes, helper.make_node("Identity", ["going"], ["goes_on"])]
    still = helper.make_tensor_value_info("goes_on", TensorProto.BOOL, ())
    graph = helper.make_graph(nodes, "body", [counter, going, state], [still, *values], body.initializers)
    b.nodes.append(helper.make_node("Loop", [b.scalar(3), "", "x"], ["y"], body=graph))
    return b.model("y")


@pytest.mark.parametrize("form", [layer_norm, spelled_out])
@pytest.mark.parametrize("op", ["If", "Loop"])
def test_in_a_body(op: str, form: Form) -> None:
    body = Builder(FLOAT, opset=17)
    model = within(body, form(body, "x" if op == "If" else "state"), op)
    analysis = analysed(model)
    assert {site.fusion.pattern for site in analysis.sites} == {"normalisation"}
    feed = {"x": FEED["x"], "flag": np.array(True)}
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed])


def test_types_that_inference_leaves_out_are_those_that_ops_keep() -> None:
    """Of the first output alone: indices are no numbers like those that they are of."""
    body = Builder(FLOAT, opset=17)
    largest, indices = body("TopK", "state", body.integers(3), outputs=2, axis=-1)
    for value in (largest, indices):
        body("Neg", value)
    model = within(body, body("ReduceSum", body("Mul", "state", "state"), body.integers(-1), keepdims=1), "Loop")
    _, inside = all_graphs(load_model(model))
    assert inside.dtype(largest) == FLOAT
    assert inside.dtype(indices) in (None, TensorProto.INT64)  # which inference tells where names are apart


def read_in_a_branch(inner: int) -> tuple[Analysis, int]:
    """A normalisation that is spelled out, one of whose values a branch of an If reads."""
    b = Builder(FLOAT, opset=17)
    out = spelled_out(b, b.input("x", (*ROWS, N)))
    name, count = b.nodes[inner].output[0], len(b.nodes)
    b.input("flag", (), TensorProto.BOOL)
    branches = [
        helper.make_graph(
            [helper.make_node("Exp", [name], [made])], made, [], [helper.make_tensor_value_info(made, FLOAT, None)]
        )
        for made in ("yes", "no")
    ]
    b.nodes.append(helper.make_node("If", ["flag"], ["taken"], then_branch=branches[0], else_branch=branches[1]))
    return analysed(b.model(out, "taken")), count


@pytest.mark.parametrize("inner", range(9))
def test_what_a_branch_reads_is_made(inner: int) -> None:
    """Of what is no row a fusion makes nothing else; rows are stored beside what is made of them."""
    analysis, count = read_in_a_branch(inner)
    found = [len(site.match.nodes) for site in analysis.sites]
    assert found == [count] * (inner >= 6)
    for site in analysis.sites:
        read = analysis.model.proto.graph.node[inner].output[0]
        assert read in {out.name for out in site.match.live_outs}
        feed = {"x": FEED["x"], "flag": np.array(True)}
        assert not sweep.difference(analysis.model.proto, sweep.rewritten(analysis), [feed])
