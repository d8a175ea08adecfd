"""Models whose products have Transpose, Reshape and their kind before and behind them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse.device import resolve
from onnxfuse.errors import NotFusable
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning, draw, only, refusal, sites
from tests.helpers.onnx_build import Builder, run
from tests.tools.sweep import rewritten

DEVICES = resolve("ptx", list)

HEADS, DEPTH = 2, 64
WIDTH = HEADS * DEPTH
ROWS = ("batch", "rows")


def projection(b: Builder, x: str, bias: bool = True, n: int = WIDTH, seed: int = 0) -> str:
    product = b("MatMul", x, b.array(draw(WIDTH, n, seed=seed) / 16, f"weight{seed}"))
    return b("Add", product, b.array(draw(n, seed=seed + 1), f"bias{seed}")) if bias else product


def split_heads(b: Builder, t: str, perm=(0, 2, 1, 3), shape: str = "") -> str:
    return b("Transpose", b("Reshape", t, shape or b.integers(0, 0, HEADS, DEPTH)), perm=perm)


def computed_shape(b: Builder, of: str, *tail: int) -> str:
    sizes = [b("Unsqueeze", b("Gather", b("Shape", of), b.array(i, integer=True)), b.integers(0)) for i in (0, 1)]
    return b("Concat", *sizes, b.integers(*tail), axis=0)


def head_split(b: Builder, x: str) -> str:
    return split_heads(b, projection(b, x))


def head_split_only(b: Builder, x: str) -> str:
    return split_heads(b, projection(b, x, bias=False))


def head_split_of_its_own_shape(b: Builder, x: str) -> str:
    t = projection(b, x)
    return split_heads(b, t, shape=computed_shape(b, t, -1, DEPTH))


def head_split_of_its_own_sizes(b: Builder, x: str) -> str:
    """As ONNX Runtime's optimiser takes a shape apart that is read in several places."""
    t = projection(b, x)
    batch, rows, _ = b("Split", b("Shape", t), outputs=3, axis=0, num_outputs=3)
    return split_heads(b, t, shape=b("Concat", batch, rows, b.integers(-1, DEPTH), axis=0))


def head_split_of_the_inputs_shape(b: Builder, x: str) -> str:
    return split_heads(b, projection(b, x), shape=computed_shape(b, x, HEADS, -1))


def keys(b: Builder, x: str) -> str:
    return b("Mul", split_heads(b, projection(b, x), perm=(0, 2, 3, 1)), b.array(0.5))


def keys_in_steps(b: Builder, x: str) -> str:
    """As PyTorch's newer exporter writes scaled_dot_product_attention."""
    heads = split_heads(b, projection(b, x))
    shape = b("Shape", heads)
    last = b("Slice", shape, b.integers(-1), b.integers(2**63 - 1))
    rows = b("Slice", shape, b.integers(-2), b.integers(-1))
    lead = b("Slice", shape, b.integers(-(2**63) + 1), b.integers(-2))
    flat = b("Reshape", heads, b("Concat", b.integers(-1), rows, last, axis=0))
    return b("Reshape", b("Transpose", flat, perm=(0, 2, 1)), b("Concat", lead, last, rows, axis=0))


def residual_behind_views(b: Builder, x: str) -> str:
    heads = split_heads(b, projection(b, x))
    return b("Add", heads, b.input("residual", ("batch", HEADS, "rows", DEPTH)))


def scale_of_one_head(b: Builder, x: str) -> str:
    return b("Mul", split_heads(b, projection(b, x)), b.array(draw(DEPTH, seed=9), "scale"))


def scale_of_each_head(b: Builder, x: str) -> str:
    return b("Mul", split_heads(b, projection(b, x)), b.array(draw(HEADS, 1, 1, seed=9), "scale"))


def flat_product(b: Builder, x: str) -> str:
    """GPT-2's Conv1D: Reshape, Gemm, Reshape."""
    flat = b("Reshape", x, b.integers(-1, WIDTH))
    product = b("Gemm", flat, b.array(draw(WIDTH, 12) / 16, "weight0"), b.array(draw(12, seed=1), "bias0"))
    return b("Tanh", b("Reshape", product, computed_shape(b, x, 12)))


def qkv(b: Builder, x: str) -> list[str]:
    packed = projection(b, x, n=3 * WIDTH)
    parts = b("Split", packed, outputs=3, axis=-1, num_outputs=3)
    return [split_heads(b, part) for part in parts]


def gate_behind_flat_product(b: Builder, x: str) -> str:
    """Onnxsim's Reshape, Gemm, Reshape between a product and its halves."""
    flat = b("Reshape", x, b.integers(-1, WIDTH))
    product = b("Gemm", flat, b.array(draw(WIDTH, 24) / 16, "weight0"), b.array(draw(24, seed=1), "bias0"))
    first, second = b("Split", b("Reshape", product, computed_shape(b, x, 24)), outputs=2, axis=-1, num_outputs=2)
    return b("Mul", first, b("Gelu", second))


def qkv_in_front(b: Builder, x: str) -> str:
    """As timm's attention, or the indexing of other exporters: q, k and v become a leading axis, which is split."""
    packed = b("Reshape", projection(b, x, n=3 * WIDTH), b.integers(0, 0, 3, HEADS, DEPTH))
    return b("Transpose", packed, perm=(2, 0, 3, 1, 4))


def unbound_by_split(b: Builder, x: str) -> list[str]:
    parts = b("Split", qkv_in_front(b, x), b.integers(1, 1, 1), outputs=3, axis=0)
    return [b("Squeeze", part, b.integers(0)) for part in parts]


def unbound_by_slices(b: Builder, x: str) -> list[str]:
    packed, axes = qkv_in_front(b, x), b.integers(0)
    parts = [b("Slice", packed, b.integers(i), b.integers(i + 1), axes) for i in range(3)]
    return [b("Squeeze", part, axes) for part in parts]


def unbound_by_gathers(b: Builder, x: str) -> list[str]:
    q, k, v = (b("Gather", qkv_in_front(b, x) if i == 0 else "v3_0", b.scalar(i), axis=0) for i in (0, 1, -1))
    return [b("Mul", q, b.array(0.5)), b("Transpose", k, perm=(0, 1, 3, 2)), v]


def heads_of_a_gate(b: Builder, x: str) -> str:
    """Half of the heads gate the other half."""
    heads = b("Reshape", projection(b, x), b.integers(0, 0, HEADS, DEPTH))
    first, second = b("Split", heads, outputs=2, axis=2, num_outputs=2)
    return b("Mul", first, b("Sigmoid", second))


def scaled_by_its_own_width(b: Builder, x: str) -> str:
    """As torch's older exporter scales queries: the fourth root of the width of heads, read off their shape."""
    heads = split_heads(b, projection(b, x))
    width = b("Slice", b("Shape", heads), b.integers(-1), b.integers(2**63 - 1))
    root = b("Sqrt", b("Cast", width, to=b.dtype))
    return b("Mul", heads, b("Sqrt", b("Div", b.array([1.0]), root)))


def to_images(b: Builder, x: str) -> str:
    t = b("Transpose", projection(b, x), perm=(0, 2, 1))
    return b("Add", t, b.input("image", ("batch", WIDTH, "rows")))


def squeezed(b: Builder, x: str) -> str:
    t = b("Unsqueeze", projection(b, x), b.integers(1, 3))
    return b("Tanh", b("Squeeze", t, b.integers(1, -2)))


FORMS = [
    head_split, head_split_only, head_split_of_its_own_shape, head_split_of_its_own_sizes,
    head_split_of_the_inputs_shape, keys, keys_in_steps,
    residual_behind_views, scale_of_one_head, scale_of_each_head, flat_product, qkv, gate_behind_flat_product,
    to_images, squeezed, unbound_by_split, unbound_by_slices, unbound_by_gathers, heads_of_a_gate,
    scaled_by_its_own_width,
]  # fmt: skip
STATIC = {"batch": 2, "rows": 5}


def built(form, static: bool, dtype: int = 1) -> onnx.ModelProto:
    b = Builder(dtype)
    out = form(b, b.input("x", (*ROWS, WIDTH)))
    if static:
        for value in b.inputs:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = STATIC[dim.dim_param]
    return b.model(*out) if isinstance(out, list) else b.model(out)


def feed_of(model: onnx.ModelProto, batch: int = 2, rows: int = 5) -> dict[str, np.ndarray]:
    known = {"batch": batch, "rows": rows}
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    shapes = {name: [known.get(dim.dim_param, dim.dim_value) for dim in shape] for name, shape in dims.items()}
    numpy = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    return {name: draw(*shape, seed=3).astype(numpy) for name, shape in shapes.items()}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_fusion_means_what_the_graph_computes(form, static: bool) -> None:
    model = built(form, static)
    _, fusion = only(model)
    check_meaning(model, fusion, feed_of(model))


@pytest.mark.parametrize("dtype", [1, 10], ids=["f32", "f16"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_bits_are_the_same_without_the_library_and_one_node_is_left(form, dtype: int) -> None:
    model = built(form, static=False, dtype=dtype)
    fused = rewritten(analyse_model(model, DEVICES))
    assert [node.op_type for node in fused.graph.node] == ["FusedGemm_0"]
    for batch, rows in ((2, 5), (1, 1), (3, 8)):
        feed = feed_of(model, batch, rows)
        for expected, actual in zip(run(model, feed), run(fused, feed), strict=True):
            assert expected.shape == actual.shape
            assert expected.tobytes() == actual.tobytes()


# ---- views before the product


def merged_heads(b: Builder) -> str:
    x = b.input("x", ("batch", HEADS, "rows", DEPTH))
    flat = b("Reshape", b("Transpose", x, perm=(0, 2, 1, 3)), b.integers(0, 0, WIDTH))
    return b("Tanh", projection(b, flat))


def merged_heads_of_computed_shape(b: Builder) -> str:
    x = b.input("x", ("batch", HEADS, "rows", DEPTH))
    shape = computed_shape(b, b.input("hidden_states", (*ROWS, 1)), -1)
    return b("Tanh", projection(b, b("Reshape", b("Transpose", x, perm=(0, 2, 1, 3)), shape)))


def flattened(b: Builder) -> str:
    x = b.input("x", ("batch", HEADS, DEPTH))
    return b("Tanh", projection(b, b("Flatten", x)))


def squeezed_lhs(b: Builder) -> str:
    x = b.input("x", ("batch", 1, "rows", WIDTH))
    return b("Tanh", projection(b, b("Squeeze", x, b.integers(1))))


@pytest.mark.parametrize("form", [merged_heads, merged_heads_of_computed_shape, flattened, squeezed_lhs])
def test_views_of_lhs_become_its_axes(form) -> None:
    b = Builder()
    model = b.model(form(b))
    _, fusion = only(model)
    assert fusion.lhs.name == "x"
    check_meaning(model, fusion, feed_of(model))
    fused = rewritten(analyse_model(model, DEVICES))
    assert [node.op_type for node in fused.graph.node] == ["FusedGemm_0"]
    for expected, actual in zip(run(model, feed_of(model)), run(fused, feed_of(model)), strict=True):
        assert expected.tobytes() == actual.tobytes()


def test_a_view_that_no_kernel_walks_stays_outside() -> None:
    b = Builder()
    x = b.input("x", ("batch", "rows", DEPTH, HEADS))  # merged, k is of two groups of which neither is contiguous
    flat = b("Reshape", b("Transpose", x, perm=(0, 1, 3, 2)), b.integers(0, 0, WIDTH))
    model = b.model(b("Tanh", projection(b, flat)))
    match, fusion = only(model)
    assert fusion.lhs.name != "x"
    assert len(match.nodes) == 3
    check_meaning_of_rest(model)


def test_an_image_is_read_with_its_rows_contiguous() -> None:
    b = Builder()
    x = b.input("x", ("batch", WIDTH, "rows"))
    model = b.model(b("Tanh", projection(b, b("Transpose", x, perm=(0, 2, 1)))))
    _, fusion = only(model)
    assert fusion.lhs.einops == "b k m"
    check_meaning(model, fusion, feed_of(model))
    check_meaning_of_rest(model)


def test_a_view_stays_in_its_place_for_those_who_read_it_too() -> None:
    b = Builder()
    rows = b("Transpose", b.input("x", ("batch", WIDTH, 48)), perm=(0, 2, 1))
    q, v = projection(b, rows), projection(b, rows, seed=4)
    out = b("MatMul", b.input("p", ("batch", HEADS, 48, 48)), split_heads(b, v))
    model = b.model(b("Tanh", q), b("Relu", out))
    fused = rewritten(analyse_model(model, DEVICES))
    assert sum(node.domain == "onnxfuse" for node in fused.graph.node) == 2, "q and v share a kernel"
    for expected, actual in zip(run(model, feed_of(model)), run(fused, feed_of(model)), strict=True):
        assert expected.tobytes() == actual.tobytes()


def check_meaning_of_rest(model: onnx.ModelProto) -> None:
    fused = rewritten(analyse_model(model, DEVICES))
    feed = feed_of(model)
    assert run(model, feed)[0].tobytes() == run(fused, feed)[0].tobytes()


def test_a_view_that_others_read_stays_outside() -> None:
    b = Builder()
    x = b.input("x", ("batch", HEADS, "rows", DEPTH))
    flat = b("Reshape", b("Transpose", x, perm=(0, 2, 1, 3)), b.integers(0, 0, WIDTH))
    out = b("Concat", b("Tanh", projection(b, flat)), flat, axis=-1)
    _, fusion = only(b.model(out))
    assert fusion.lhs.name == flat


@pytest.mark.parametrize("indices", [0, -1, [0]])
def test_the_only_token_of_a_recurrence_is_a_view(indices: int | list[int]) -> None:
    """RWKV's key and value, of which each token is taken by itself."""
    b = Builder()
    t = projection(b, b.input("x", ("batch", 1, WIDTH)), bias=False)
    token = b("Gather", t, b.array(indices, integer=True), axis=1)
    state = b.input("state", ("batch", WIDTH) if isinstance(indices, int) else ("batch", 1, WIDTH))
    model = b.model(b("Exp", b("Sub", b("Add", token, b.array(draw(WIDTH), "time_first")), state)))
    match, fusion = only(model)
    assert len(match.nodes) == len(model.graph.node)
    made = {"x": draw(3, 1, WIDTH, seed=2), "state": draw(3, *([1] * isinstance(indices, list)), WIDTH, seed=3)}
    feed = {name: value.astype(np.float32) for name, value in made.items()}
    check_meaning(model, fusion, feed)
    assert run(rewritten(analyse_model(model, DEVICES)), feed)[0].tobytes() == run(model, feed)[0].tobytes()


# ---- what is refused


def test_a_view_alone_is_not_worth_a_fusion() -> None:
    b = Builder()
    out = b("Reshape", projection(b, b.input("x", (*ROWS, WIDTH)), bias=False), b.integers(0, 0, HEADS, DEPTH))
    assert refusal(b.model(out)).reason == "nothing_follows"


def test_an_operand_of_q_k_and_v_beside_all_of_them_is_left_outside() -> None:
    b = Builder()
    scaled = b("Mul", qkv_in_front(b, b.input("x", (*ROWS, WIDTH))), b.array(np.arange(3.0).reshape(3, 1, 1, 1, 1)))
    model = b.model(b("Tanh", b("Gather", scaled, b.scalar(1), axis=0)))
    check_meaning_of_rest(model)


@pytest.mark.parametrize(
    ("count", "taken", "reason"),
    [(5, (1,), "strided_slice"), (3, (1, 2), "not_equal_parts"), (3, (0, 1), "not_equal_parts")],
)
def test_columns_that_lie_apart_are_no_range(count: int, taken: tuple[int, ...], reason: str) -> None:
    """One of few parts of each head is a range where they are numbered part by part; two of three are none anywhere."""
    b = Builder()
    packed = projection(b, b.input("x", (*ROWS, WIDTH)), bias=False, n=count * WIDTH)
    heads = b("Reshape", packed, b.integers(0, 0, HEADS, count, DEPTH))
    assert refusal(b.model(b("Tanh", b("Gather", heads, b.integers(*taken), axis=3)))).reason == reason


def test_values_in_two_orders_do_not_meet() -> None:
    b = Builder()
    t = projection(b, b.input("x", (4, 4, WIDTH)), n=4)
    model = b.model(b("Add", t, b("Transpose", t, perm=(2, 1, 0))))
    (found,) = sites(model)
    assert isinstance(found, NotFusable) or len(found[0].nodes) < len(model.graph.node)


def test_swapped_symbols_are_not_a_view() -> None:
    """[batch, rows, n] reshaped to [rows, batch, n] has the sizes of a Transpose and is none."""
    b = Builder()
    x = b.input("x", (*ROWS, WIDTH))
    sizes = [b("Gather", b("Shape", x), b.integers(index)) for index in (1, 0)]
    shape = b("Concat", *sizes, b.integers(WIDTH), axis=0)
    model = b.model(b("Tanh", b("Reshape", projection(b, x), shape)))
    match, _ = only(model)
    assert len(match.nodes) == 2
    check_meaning_of_rest(model)
