"""Products of two computed tensors, constants on the left, inputs read through views: what they become and mean."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse.device import resolve
from onnxfuse.graph.op_names import FUSED_GEMM, kind_of
from onnxfuse.ir.fusion import Fusion
from onnxfuse.lowering import plan_site
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.kernel_spec import EXACT
from onnxfuse.schedule.strategy import Strategy
from tests.helpers.matching import check_meaning, draw, only, refusal, sites
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.helpers.thinning import case_id, each_with_one
from tests.tools.sweep import rewritten

HEADS, DEPTH, GROUP = 4, 6, 2
SIZES = {"batch": 2, "rows": 5, "keys": 7, "height": 3, "width": 4}
Q, K, P = ("batch", HEADS, "rows", DEPTH), ("batch", HEADS, "keys", DEPTH), ("batch", HEADS, "rows", "keys")


def scores(b: Builder, q=Q, k=K) -> str:
    return b("MatMul", b.input("q", q), b("Transpose", b.input("k", k), perm=(0, 1, 3, 2)))


def scaled_scores(b: Builder) -> str:
    return b("Mul", scores(b), b.array(0.5))


def masked_scores(b: Builder) -> str:
    return b("Add", scaled_scores(b), b.input("mask", ("batch", 1, "rows", "keys")))


def causal_scores(b: Builder) -> str:
    return b("Add", b("Div", scores(b), b.array(2.0)), b.input("mask", (1, 1, "rows", "keys")))


def padded_scores(b: Builder) -> str:
    return b("Softmax", b("Add", scores(b), b.input("mask", ("batch", 1, 1, "keys"))))


def biased_scores(b: Builder) -> str:
    """T5's position bias, a tile of every head."""
    return b("Add", scores(b), b.input("bias", (1, HEADS, "rows", "keys")))


def flat_scores(b: Builder) -> str:
    return b("Tanh", b("MatMul", b.input("q", ("batch", "rows", DEPTH)), b.input("k", ("batch", DEPTH, "keys"))))


def attention_out(b: Builder) -> str:
    t = b("MatMul", b.input("p", P), b.input("v", K))
    return b("Reshape", b("Transpose", t, perm=(0, 2, 1, 3)), b.integers(0, 0, HEADS * DEPTH))


def attention_out_of_its_own_shape(b: Builder) -> str:
    """Torch's older exporter merges heads to sizes of the product and of the query; after the fusion nobody asks."""
    p = b.input("p", P)
    t = b("MatMul", p, b.input("v", K))
    own, rows = (b("Gather", b("Shape", value), b.integers(index)) for value, index in ((t, 0), (p, 2)))
    split = b("Reshape", t, b("Concat", own, b.integers(-1), rows, b.integers(DEPTH), axis=0))
    return b("Reshape", b("Transpose", split, perm=(0, 2, 1, 3)), b.integers(0, 0, HEADS * DEPTH))


def attention_out_of_computed_shape(b: Builder) -> str:
    p = b.input("p", P)
    t = b("Transpose", b("MatMul", p, b.input("v", K)), perm=(0, 2, 1, 3))
    sizes = [b("Gather", b("Shape", p), b.integers(index)) for index in (0, 2)]
    return b("Reshape", t, b("Concat", *sizes, b.integers(-1), axis=0))


def shared_keys(b: Builder) -> str:
    """One head of keys for all heads of queries."""
    return b("Relu", b("MatMul", b.input("q", Q), b.input("k", ("batch", 1, DEPTH, "keys"))))


def keys_of_all_batches(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("q", Q), b.input("k", (HEADS, DEPTH, "keys"))))


def queries_of_all_batches(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("q", (HEADS, "rows", DEPTH)), b.input("k", ("batch", HEADS, DEPTH, "keys"))))


def constant_left(b: Builder) -> str:
    t = b("MatMul", b.array(draw(8, DEPTH), "weight"), b.input("x", ("batch", DEPTH, "keys")))
    return b("Add", t, b.array(draw(8, 1, seed=1), "bias"))


def constant_left_turned(b: Builder) -> str:
    t = b("MatMul", b.array(draw(8, DEPTH), "weight"), b.input("x", ("batch", DEPTH, "keys")))
    return b("Transpose", b("Relu", t), perm=(0, 2, 1))


def two_matrices(b: Builder) -> str:
    return b("Sigmoid", b("Gemm", b.input("x", ("rows", DEPTH)), b.input("y", ("keys", DEPTH)), transB=1, alpha=0.5))


def batched_weight(b: Builder) -> str:
    """A weight of each head."""
    return b("Relu", b("MatMul", b.input("q", Q), b.array(draw(HEADS, DEPTH, 8), "weight")))


def repeated(b: Builder, kv: str, shape: tuple[int, ...] | None = None) -> str:
    """The heads of keys or values as often as there are queries' heads for each: [b, 2, s, d] -> [b, 4, s, d]."""
    sizes = [b("Gather", b("Shape", kv), b.integers(index)) for index in (0, 2)]
    wide = b("Concat", sizes[0], b.integers(HEADS // GROUP, GROUP), sizes[1], b.integers(DEPTH), axis=0)
    whole = b("Concat", sizes[0], b.integers(HEADS), sizes[1], b.integers(DEPTH), axis=0)
    return b("Reshape", b("Expand", b("Unsqueeze", kv, b.integers(2)), wide), whole)


def grouped_values(b: Builder) -> str:
    v = repeated(b, b.input("v", ("batch", HEADS // GROUP, "keys", DEPTH)))
    return b("Reshape", b("Transpose", b("MatMul", b.input("p", P), v), perm=(0, 2, 1, 3)), b.integers(0, 0, -1))


def tiled_values(b: Builder) -> str:
    """The same, repeated by Tile."""
    v = b("Unsqueeze", b.input("v", ("batch", HEADS // GROUP, "keys", DEPTH)), b.integers(2))
    v = b("Reshape", b("Tile", v, b.integers(1, 1, GROUP, 1, 1)), b.integers(0, HEADS, -1, DEPTH))
    return b("Reshape", b("Transpose", b("MatMul", b.input("p", P), v), perm=(0, 2, 1, 3)), b.integers(0, 0, -1))


def tiled_keys(b: Builder) -> str:
    """As many repetitions as there are heads: no broadcast, so that the Tile stays outside."""
    q = b.input("q", ("batch", GROUP * GROUP, "rows", DEPTH))
    k = b("Tile", b.input("k", ("batch", GROUP, DEPTH, "keys")), b.integers(1, GROUP, 1, 1))
    return b("Tanh", b("MatMul", q, k))


def grouped_keys(b: Builder) -> str:
    k = repeated(b, b.input("k", ("batch", HEADS // GROUP, "keys", DEPTH)))
    t = b("MatMul", b.input("q", Q), b("Transpose", k, perm=(0, 1, 3, 2)))
    return b("Add", t, b.input("mask", ("batch", 1, "rows", "keys")))


def row_vector(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("x", (DEPTH,)), b.input("y", ("batch", DEPTH, "keys"))))


def column_vector(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("x", ("batch", "rows", DEPTH)), b.input("y", (DEPTH,))))


def image(b: Builder, *spatial: str, n: int = 8, biased: bool = True) -> str:
    """A pointwise convolution, with a bias unless it is to have none."""
    x, ones = b.input("x", ("batch", DEPTH, *spatial)), [1] * len(spatial)
    weight, bias = b.array(draw(n, DEPTH, *ones), "weight"), b.array(draw(n, seed=1), "bias")
    return b("Conv", x, weight, *([bias] if biased else []), kernel_shape=ones)


def image_activated(b: Builder) -> str:
    return b("Relu", image(b, "height", "width"))


def image_residual(b: Builder) -> str:
    t = b("Add", image(b, "height", "width"), b.input("residual", ("batch", 8, "height", "width")))
    return b("Div", t, b.array(2.0))


def normalized(b: Builder, t: str, channels: int = 8, **attributes: object) -> str:
    """A BatchNormalization of stored statistics."""
    vectors = [draw(channels, seed=seed) for seed in range(3)]
    variance = b.array(np.abs(draw(channels, seed=3)) + 0.1)
    return b("BatchNormalization", t, *map(b.array, vectors), variance, **attributes)


def image_normalized(b: Builder) -> str:
    return b("Relu", normalized(b, image(b, "height", "width")))


def rows_normalized(b: Builder) -> str:
    x = b.input("x", ("rows", DEPTH))
    return b("Tanh", normalized(b, b("Gemm", x, b.array(draw(DEPTH, 8)), b.array(draw(8))), epsilon=0.1))


def sequence_normalized(b: Builder) -> str:
    """The channels are the columns, in front of the positions."""
    x = b.input("x", ("batch", "rows", DEPTH))
    return normalized(b, b("Transpose", b("MatMul", x, b.array(draw(DEPTH, 8))), perm=(0, 2, 1)))


def positions_normalized(b: Builder) -> str:
    """The channels are rows."""
    return normalized(b, b("MatMul", b.input("x", ("batch", 3, DEPTH)), b.array(draw(DEPTH, 8))), channels=3)


def image_of_scales(b: Builder) -> str:
    return b("Mul", image(b, "height", "width"), b.input("scale", ("batch", 8, 1, 1)))


def sequence_activated(b: Builder) -> str:
    return b("Sigmoid", image(b, "keys"))


def volume_activated(b: Builder) -> str:
    return b("Relu", image(b, "keys", "height", "width"))


def image_to_rows(b: Builder) -> str:
    """The way into a transformer of Stable Diffusion."""
    return b("Reshape", b("Transpose", image(b, "height", "width"), perm=(0, 2, 3, 1)), b.integers(0, -1, 8))


def image_of_the_weights_size(b: Builder) -> str:
    """A convolution that leaves its window to the weight."""
    return b(
        "Relu", b("Conv", b.input("x", ("batch", DEPTH, "height", "width")), b.array(draw(8, DEPTH, 1, 1), "weight"))
    )


def image_of_a_bias_spelled_out(b: Builder) -> str:
    """As a convolution without bias is exported where nothing is optimised: as many zeros as the weight has rows."""
    x, weight = b.input("x", ("batch", DEPTH, "height", "width")), b.array(draw(8, DEPTH, 1, 1), "weight")
    zero, count = b("CastLike", b("Constant", value_float=0.0), x), b("Shape", weight, start=0, end=1)
    bias = b("Expand", zero, b("Expand", count, b.integers(1)))
    return b("Relu", b("Conv", x, weight, bias, kernel_shape=[1, 1]))


def rows_to_image(b: Builder) -> str:
    """And out of it: the convolution reads rows."""
    x = b("Transpose", b.input("x", ("batch", "height", "width", DEPTH)), perm=(0, 3, 1, 2))
    t = b("Conv", x, b.array(draw(8, DEPTH, 1, 1), "weight"), kernel_shape=[1, 1])
    return b("Add", t, b.input("residual", ("batch", 8, "height", "width")))


def rows_to_one_column(b: Builder) -> str:
    """A sequence as an image of one column, which the convolution's other axis of columns is."""
    x = b("Transpose", b.input("x", ("batch", "rows", DEPTH)), perm=(0, 2, 1))
    t = b("Conv", b("Unsqueeze", x, b.integers(-1)), b.array(draw(8, DEPTH, 1, 1), "weight"), kernel_shape=[1, 1])
    return b("Transpose", b("Squeeze", b("Relu", t), b.integers(-1)), perm=(0, 2, 1))


def einsum_scores(b: Builder) -> str:
    t = b("Einsum", b.input("q", Q), b.input("k", K), equation="bhqd,bhkd->bhqk")
    return b("Add", b("Mul", t, b.array(0.5)), b.input("mask", ("batch", 1, "rows", "keys")))


def einsum_out(b: Builder) -> str:
    """P times V, with the heads behind the rows."""
    return b("Relu", b("Einsum", b.input("p", P), b.input("v", K), equation="bhmn,bhnd->bmhd"))


def einsum_scores_of_unsplit_heads(b: Builder) -> str:
    """As Flax writes attention: heads behind the rows of both inputs."""
    q, k = b.input("q", ("batch", "rows", HEADS, DEPTH)), b.input("k", ("batch", "keys", HEADS, DEPTH))
    return b("Mul", b("Einsum", q, k, equation="bqhd,bkhd->bhqk"), b.array(0.5))


def einsum_out_of_unsplit_heads(b: Builder) -> str:
    v = b.input("v", ("batch", "keys", HEADS, DEPTH))
    return b("Relu", b("Einsum", b.input("p", P), v, equation="bhqk,bkhd->bqhd"))


def einsum_linear(b: Builder) -> str:
    x = b.input("x", ("batch", "rows", DEPTH))
    return b("Add", b("Einsum", x, b.array(draw(8, DEPTH)), equation="bmk, nk -> bmn"), b.array(draw(8, seed=1)))


def einsum_of_heads(b: Builder) -> str:
    """An output projection that sums over heads and depth."""
    x = b.input("x", ("batch", "rows", HEADS, DEPTH))
    return b("Relu", b("Einsum", x, b.array(draw(HEADS, DEPTH, 8)), equation="bmhd,hdn->bmn"))


def einsum_without_arrow(b: Builder) -> str:
    return b("Relu", b("Einsum", b.input("x", ("rows", DEPTH)), b.array(draw(8, DEPTH)), equation="ik,jk"))


def einsum_of_any_batch(b: Builder) -> str:
    """Window attention of LongT5, whose windows are a batch beside the heads."""
    equation = "...qd,...kd->...qk"
    return b("Tanh", b("Einsum", b.input("q", Q), b.input("k", K), equation=equation))


def einsum_of_columns_first(b: Builder) -> str:
    """Keras' scores: keys by the query."""
    return b("Relu", b("Einsum", b.input("k", K), b.input("q", Q), equation="bhkd,bhqd->bhqk"))


def einsum_turned(b: Builder) -> str:
    return b("Relu", b("Einsum", b.input("x", ("rows", DEPTH)), b.array(draw(8, DEPTH)), equation="mk,nk->nm"))


def spelled_linear(b: Builder) -> str:
    """A product as elementwise ops: [b, m, 1, k] * [n, k], summed over k."""
    x = b("Unsqueeze", b.input("x", ("batch", "rows", DEPTH)), b.integers(2))
    t = b("ReduceSum", b("Mul", x, b.array(draw(8, DEPTH), "weight")), b.integers(-1), keepdims=0)
    return b("Add", t, b.array(draw(8, seed=1), "bias"))


def spelled_scores(b: Builder) -> str:
    q, k = b("Unsqueeze", b.input("q", Q), b.integers(3)), b("Unsqueeze", b.input("k", K), b.integers(2))
    return b("Tanh", b("ReduceSum", b("Mul", q, k), b.integers(4), keepdims=0))


def spelled_and_squeezed(b: Builder) -> str:
    x = b("Unsqueeze", b.input("x", ("rows", DEPTH)), b.integers(2))
    y = b("Unsqueeze", b.input("y", (DEPTH, "keys")), b.integers(0))
    return b("Relu", b("Squeeze", b("ReduceSum", b("Mul", x, y), b.integers(1)), b.integers(1)))


FORMS = [
    spelled_linear, spelled_scores, spelled_and_squeezed,
    image_activated, image_of_the_weights_size, image_of_a_bias_spelled_out, image_residual, image_of_scales,
    sequence_activated,
    volume_activated, image_to_rows, image_normalized, rows_normalized, sequence_normalized, positions_normalized,
    rows_to_image, rows_to_one_column,
    einsum_scores, einsum_out, einsum_linear, einsum_of_heads, einsum_without_arrow, einsum_turned,
    einsum_of_any_batch, einsum_of_columns_first, einsum_scores_of_unsplit_heads, einsum_out_of_unsplit_heads,
    scaled_scores, masked_scores, causal_scores, padded_scores, biased_scores, flat_scores, attention_out,
    attention_out_of_its_own_shape, attention_out_of_computed_shape,
    shared_keys, keys_of_all_batches, queries_of_all_batches, constant_left,
    constant_left_turned, two_matrices, batched_weight, grouped_values, grouped_keys, tiled_values,
    tiled_keys, row_vector, column_vector,
]  # fmt: skip


FACTORS = ((1, "x"), (2, "y"))  # seeds and names of inputs


def built(form, dtype: int = 1) -> onnx.ModelProto:
    b = Builder(dtype)
    return b.model(form(b))


def feed_of(model: onnx.ModelProto, **sizes: int) -> dict[str, np.ndarray]:
    known = SIZES | sizes
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    shapes = {name: [known.get(dim.dim_param, dim.dim_value) for dim in shape] for name, shape in dims.items()}
    numpy = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    return {name: draw(*shape, seed=len(name)).astype(numpy) for name, shape in shapes.items()}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_fusion_means_what_the_graph_computes(form) -> None:
    model = built(form)
    _, fusion = only(model)
    check_meaning(model, fusion, feed_of(model))


def test_a_normalization_is_no_activation() -> None:
    assert "activation" not in fused(sequence_normalized).features
    assert "activation" in fused(rows_normalized).features


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("form", "dtype"), each_with_one(FORMS, [1, 10]), ids=case_id)
def test_it_is_planned_and_bits_are_the_same_without_the_library(
    form, dtype: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_site, "choose", lambda *_: Strategy.ONE_KERNEL)  # whatever so small a product costs
    model = built(form, dtype)
    feeds = [feed_of(model), feed_of(model, batch=1, rows=1, keys=1), feed_of(model, rows=8, keys=8)]
    expected = [run(model, feed) for feed in feeds]
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    assert len(analysis.sites) == 1, analysis.skipped
    fused = rewritten(analysis)
    assert sum(kind_of(node.op_type) == FUSED_GEMM for node in fused.graph.node) == 1
    for feed, wanted in zip(feeds, expected, strict=True):
        for before, after in zip(wanted, run(fused, feed), strict=True):
            assert before.shape == after.shape
            assert before.tobytes() == after.tobytes()


def merged_by_shape_of(b: Builder, value: str, v: str) -> str:
    """P times V in fp32, the heads merged to a size of some value, as decoders of 16 bits do it."""
    t = b("MatMul", b("Cast", b.input("p", P), to=1), b("Cast", v, to=1))
    sizes = b("Gather", b("Shape", "p"), b.integers(2)), b("Gather", b("Shape", value), b.integers(3))
    split = b("Reshape", t, b("Concat", b.integers(-1, HEADS), *sizes, axis=0))
    return b(
        "Cast", b("Reshape", b("Transpose", split, perm=(0, 2, 1, 3)), b.integers(0, 0, HEADS * DEPTH)), to=FLOAT16
    )


def shape_of_moved(b: Builder) -> list[str]:
    """Repeated heads: what moves elements rounds none."""
    v = repeated(b, b("Tanh", b.input("v", ("batch", HEADS // GROUP, "keys", DEPTH))))
    return [merged_by_shape_of(b, v, v)]


def shape_of_computed(b: Builder) -> list[str]:
    """It is rounded to 16 bits, unless a Cast alone reads it."""
    v = b("Tanh", b.input("v", K))
    return [merged_by_shape_of(b, v, v)]


def shape_of_rotated(b: Builder) -> list[str]:
    """A partial rotary embedding: Concat moves 32 bits between what computes, unless something else reads it."""
    v = b.input("v", K)
    halves = [b("Slice", v, *map(b.integers, (start, start + DEPTH // 2, 3))) for start in (0, DEPTH // 2)]
    rotated = b("Concat", b("Tanh", halves[0]), halves[1], axis=3)
    return [merged_by_shape_of(b, rotated, v), b("Mul", rotated, rotated)]


def shape_of_regrouped(b: Builder) -> list[str]:
    """Axial attention by TorchScript: rows of an image are sequences, whose own Shape splits the heads behind q."""
    x = b("Tanh", b.input("p", ("batch", HEADS, "rows", "keys", DEPTH)))
    sizes = b("Shape", b.input("v", K))
    rows = b("Reshape", x, b("Concat", b.integers(-1), b("Gather", sizes, b.integers(2)), b.integers(DEPTH), axis=0))
    q = b("MatMul", rows, b.array(np.eye(DEPTH) + 0.25, "w"))
    own = [b("Gather", b("Shape", rows), b.integers(axis)) for axis in range(2)]
    return [b("Sigmoid", b("Reshape", q, b("Concat", *own, b.integers(2, DEPTH // 2), axis=0)))]


@pytest.mark.parametrize(
    ("form", "reasons"),
    [
        (shape_of_moved, []),
        (shape_of_computed, ["unknown_shape"]),
        (shape_of_rotated, []),
        (shape_of_regrouped, []),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_reads_a_shape_alone_keeps_its_say_in_how_16_bits_are_rounded(form, reasons: list[str]) -> None:
    b = Builder(FLOAT16)
    model = b.model(*form(b))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    assert [skipped.reason for skipped in analysis.skipped] == reasons
    feed = feed_of(model)
    for before, after in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def fused(form) -> Fusion:
    return only(built(form))[1]


@pytest.mark.parametrize(
    ("form", "lhs", "rhs", "operands", "out"),
    [
        (masked_scores, "b h m k", "b h n k", ["b 1 m n"], "b h m n"),
        (causal_scores, "b h m k", "b h n k", ["1 1 m n"], "b h m n"),
        (padded_scores, "b h m k", "b h n k", ["b 1 1 n"], "b h m n"),
        (attention_out, "b h m k", "b h k n", [], "b m (h n)"),
        (shared_keys, "b h m k", "b 1 k n", [], "b h m n"),
        (queries_of_all_batches, "h m k", "b h k n", [], "b h m n"),
        (constant_left, "m k", "b k n", ["m 1"], "b m n"),
        (constant_left_turned, "m k", "b k n", [], "b n m"),
        (grouped_values, "b (h g) m k", "b h k n", [], "b m (h g n)"),
        (tiled_values, "b (h g) m k", "b h k n", [], "b m (h g n)"),
        (grouped_keys, "b (h g) m k", "b h n k", ["b 1 m n"], "b (h g) m n"),
        (column_vector, "b m k", "k", [], "b m"),
        (image_residual, "m k 1 1", "b k n1 n2", ["m", "b m n1 n2"], "b m n1 n2"),
        (image_to_rows, "m k 1 1", "b k n1 n2", ["m"], "b (n1 n2) m"),
        (rows_to_image, "m k 1 1", "b n1 n2 k", ["b m n1 n2"], "b m n1 n2"),
        (rows_to_one_column, "m k 1 1", "b n k", [], "b n m"),
        (einsum_scores, "b h m k", "b h n k", ["b 1 m n"], "b h m n"),
        (einsum_of_heads, "b m k1 k2", "k1 k2 n", [], "b m n"),
        (einsum_of_columns_first, "b h m k", "b h n k", [], "b h m n"),
        (einsum_turned, "m k", "b k", [], "b m"),
    ],
)
def test_axes_are_shared_by_lhs_and_rhs(form, lhs: str, rhs: str, operands: list[str], out: str) -> None:
    fusion = fused(form)
    assert (fusion.lhs.einops, fusion.rhs[0].einops, fusion.outputs[0].einops) == (lhs, rhs, out)
    assert [operand.einops for operand in fusion.operands] == operands


def test_what_is_spelled_out_is_as_exact_as_before() -> None:
    model = built(spelled_linear)
    (site,) = analyse_model(model, resolve("sm_90a,sm_80", list)).sites
    assert {variant.spec.math for plan in site.plans for variant in plan.variants} <= set(EXACT)


def test_the_factors_of_one_fusion_are_not_swallowed_by_another() -> None:
    b = Builder()
    x = b("MatMul", b.input("x", ("batch", "rows", DEPTH)), b.array(draw(DEPTH, DEPTH), "first"))
    factor = b("Unsqueeze", b("Tanh", x), b.integers(2))
    t = b("ReduceSum", b("Mul", factor, b.array(draw(8, DEPTH), "second")), b.integers(-1), keepdims=0)
    model = b.model(b("Relu", t))
    feed = feed_of(model)
    (expected,) = run(model, feed)
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    assert len(analysis.sites) == 2
    (actual,) = run(rewritten(analysis), feed)
    assert expected.tobytes() == actual.tobytes()


def test_a_shape_that_another_fusion_makes_a_constant_is_there_from_the_start() -> None:
    """Cross attention: the width of heads is computed from the keys, and what the keys meet from the queries."""
    b = Builder()
    q, k = (
        b("MatMul", b.input(name, (2, "rows", DEPTH)), b.array(draw(DEPTH, 8, seed=seed))) for seed, name in FACTORS
    )
    width = b("Unsqueeze", b("Div", b("Gather", b("Shape", k), b.scalar(-1)), b.scalar(2)), b.integers(0))
    shape = b("Concat", b.integers(2, -1, 2), width, axis=0)
    q, k = (b("Transpose", b("Reshape", value, shape), perm=(0, 2, 1, 3)) for value in (q, k))
    model = b.model(b("Softmax", q), b("Div", k, b("ReduceMax", q)))
    feed = {name: draw(2, 5, DEPTH, seed=seed).astype(np.float32) for seed, name in FACTORS}
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list), fp32="exact")
    assert not analysis.skipped
    for expected, actual in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert expected.tobytes() == actual.tobytes()


def test_an_einsum_of_one_input_is_no_product() -> None:
    b = Builder()
    model = b.model(b("Relu", b("Einsum", b.input("x", (2, 3, 4)), equation="abc->cab")))
    assert not sites(model)


def test_channels_that_are_split_are_columns() -> None:
    """Conformer's gate: parts are columns, so the image is the lhs, with its rows contiguous."""

    def form(b: Builder) -> str:
        first, second = b("Split", image(b, "keys", n=12), outputs=2, axis=1, num_outputs=2)
        return b("Mul", first, b("Sigmoid", second))

    model = built(form)
    _, fusion = only(model)
    assert (fusion.lhs.einops, fusion.rhs[0].einops, fusion.pattern) == ("b k m", "(p n) k 1", "split_gemm")
    check_meaning(model, fusion, feed_of(model))


# ---- what is left alone


def alone(b: Builder) -> str:
    return scores(b)


def between_softmaxes(b: Builder) -> str:
    return b("Softmax", scores(b))


def regrouped_only(b: Builder) -> str:
    return b("Reshape", b("MatMul", b.input("p", P), b.input("v", K)), b.integers(0, HEADS, -1, DEPTH))


def outer_product(b: Builder) -> str:
    """Rotary positions: frequencies times positions."""
    t = b("MatMul", b.input("x", ("batch", DEPTH, 1)), b.input("y", ("batch", 1, "rows")))
    return b("Transpose", t, perm=(0, 2, 1))


def angles(b: Builder) -> str:
    """The same of frequencies that the model stores."""
    return b("Cos", b("MatMul", b.input("positions", ("rows", 1)), b.array(draw(1, DEPTH))))


def other_batch(b: Builder) -> str:
    return b("Relu", b("MatMul", b.input("q", ("other", "rows", DEPTH)), b.input("k", ("batch", DEPTH, "keys"))))


def traced(b: Builder) -> str:
    return b("Relu", b("Einsum", b.input("x", (DEPTH, DEPTH)), b.input("y", (DEPTH,)), equation="ii,i->i"))


def three_inputs(b: Builder) -> str:
    x, y = b.input("x", ("rows", DEPTH)), b.array(draw(DEPTH, 8))
    return b("Relu", b("Einsum", x, y, b.array(draw(8, 3)), equation="mk,kn,np->mp"))


def convolved(b: Builder) -> str:
    return b("Softmax", image(b, "keys", biased=False))


def trained(b: Builder) -> str:
    """A BatchNormalization whose statistics are those of the run."""
    vectors = [b.array(draw(8, seed=seed)) for seed in range(3)]
    t = image(b, "height", "width", biased=False)
    return b("BatchNormalization", t, *vectors, b.array(np.ones(8)), outputs=3, training_mode=1)[0]


def split_columns_of_the_run(b: Builder) -> str:
    return b("Split", scores(b), outputs=2, axis=3, num_outputs=2)[0]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (alone, "nothing_follows"),
        (between_softmaxes, "unknown_op"),
        (regrouped_only, "nothing_follows"),
        (outer_product, "outer_product"),
        (angles, "outer_product"),
        (other_batch, "unknown_broadcast"),
        (traced, "unsupported_product"),
        (three_inputs, "unsupported_product"),
        (convolved, "unknown_op"),
        (trained, "unknown_op"),
        (split_columns_of_the_run, "bounds_not_constant"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_left_alone_says_why(form, reason: str) -> None:
    assert refusal(built(form)).reason == reason


@pytest.mark.parametrize("dtype", [TensorProto.INT32, TensorProto.INT64])
def test_numbers_that_are_taken_by_a_sum_are_no_product(dtype: int) -> None:
    """Torch's older exporter writes a gather so before the op: a table of numbers, times where each is wanted."""
    b = Builder(dtype)
    table = b("Unsqueeze", b.input("table", ("rows", DEPTH)), b.integers(2))
    wanted = b("Cast", b.input("wanted", ("rows", DEPTH, 8), TensorProto.BOOL), to=dtype)
    taken = b("ReduceSum", b("Mul", table, wanted), b.integers(1), keepdims=0)
    assert not sites(b.model(b("Add", taken, taken)))


@pytest.mark.parametrize("dtype", [1, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("view", [False, True])
def test_the_bias_of_a_gemm_is_a_fusion_like_that_of_an_add(view: bool, dtype: int) -> None:
    """The runtime writes it in a pass of its own; a kernel is taken by the same estimate as behind a MatMul."""
    b = Builder(dtype)
    t = b("Gemm", b.input("x", (96, 64)), b.array(draw(48, 64) / 8), b.array(draw(48)), transB=1)
    model = b.model(b("Softmax", b("Reshape", t, b.integers(12, 8, 48)) if view else t))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    (site,) = analysis.sites
    assert (site.fusion.pattern, site.fusion.features) == ("gemm_epilogue", ("bias",))
    assert site.epilogue_only is None
    for (times,) in site.estimates.values():
        assert {*times} == {Strategy.ONE_KERNEL, Strategy.LEFT_ALONE}
    fused, feed = rewritten(analysis), {"x": draw(96, 64).astype(b.numpy)}
    assert run(fused, feed)[0].tobytes() == run(model, feed)[0].tobytes()


@pytest.mark.parametrize("bias", [{}, {"beta": 0.0}])
def test_a_gemm_without_a_bias_is_left_alone(bias: dict[str, float]) -> None:
    b = Builder()
    inputs = (b.input("x", (96, 64)), b.array(draw(48, 64)), *([b.array(draw(48))] if bias else []))
    assert refusal(b.model(b("Gemm", *inputs, transB=1, **bias))).reason == "nothing_follows"


@pytest.mark.parametrize("dtype", [1, FLOAT16], ids=["f32", "f16"])
def test_a_convolution_by_itself_is_a_fusion_where_that_was_measured(dtype: int) -> None:
    """The library turns images round before it multiplies; of chips on which nobody saw that, it keeps them."""
    b = Builder(dtype)
    x, weight = b.input("x", (8, 96, 28, 28)), b.array(draw(64, 96, 1, 1) / 8, "weight")
    t = b("Conv", x, weight, b.array(draw(64)), kernel_shape=[1, 1])
    model = b.model(b("MaxPool", t, kernel_shape=[2, 2]))
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = analysis.sites
    assert (len(site.fusion.operands), site.strategy) == (1, Strategy.ONE_KERNEL)
    fused, feed = rewritten(analysis), {"x": draw(8, 96, 28, 28).astype(b.numpy)}
    assert run(fused, feed)[0].tobytes() == run(model, feed)[0].tobytes()
    for architectures, reason in (("sm_80", "slower"), ("sm_90a,sm_80", "slower_elsewhere")):
        left = analyse_model(model, resolve(architectures, list))
        assert not left.sites
        assert [entry.reason for entry in left.skipped] == [reason]


def test_an_image_of_one_row_is_not_taken_apart_along_its_columns() -> None:
    b = Builder()
    t = b("Conv", b.input("x", ("batch", 6, 1, 8)), b.array(draw(4, 6, 1, 1), "weight"), kernel_shape=[1, 1])
    first, second = b("Split", t, b.integers(4, 4), outputs=2, axis=-1)
    model = b.model(b("Mul", first, b("Tanh", second)))
    assert refusal(model).reason in ("not_the_last_axis", "nothing_follows")


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_a_pointwise_convolution_pads_nothing_by_itself(auto_pad: str) -> None:
    b = Builder()
    x = b.input("x", ("batch", DEPTH, 3, 5))
    model = b.model(b("Relu", b("Conv", x, b.array(draw(8, DEPTH, 1, 1), "weight"), auto_pad=auto_pad)))
    match, fusion = only(model)
    assert len(match.nodes) == 2
    check_meaning(model, fusion, {"x": np.float32(draw(2, DEPTH, 3, 5))})
