"""Which attentions are matched, how they read, and why others are none."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from onnxfuse.analysis.attention_mapping import attention_widths, map_attention
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F32
from onnxfuse.ir.attention import Attention
from onnxfuse.kernels.attention import emit
from onnxfuse.limits import MAX_M
from onnxfuse.patterns.contraction import STAGE_DEPTH
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.schedule.attention import ATTENTION, PORTABLE_ATTENTION
from onnxfuse.schedule.attention_plan import attention_spec, make_attention_plan, portable_splits
from onnxfuse.schedule.attention_tile import AttentionSpec, AttentionTile, PortableAttentionTile
from tests.helpers.attention_graphs import (
    FORMS,
    HEAD,
    HEADS,
    LEFT_ALONE_IN_FP32,
    READ_ANYHOW,
    SIZES,
    feeds,
    merged,
    model_of,
    number,
    scores,
    split_heads,
)
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.tools.sweep import rewritten

SM_90A = ARCHITECTURES["sm_90a"]


def analysed(model, *arch: str) -> Analysis:
    return analyse_model(model, [ARCHITECTURES[name] for name in arch or ("sm_90a",)], attention=True)


def attention_of(model) -> Attention:
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Attention)
    return site.fusion


def reason_of(build, *arch: str) -> str:
    """That of the product that makes the scores, which is left alone, and nothing else has a kernel of attention."""
    b = Builder(FLOAT16)
    analysis = analysed(b.model(*build(b)), *arch)
    assert not [site for site in analysis.sites if isinstance(site.fusion, Attention)]
    return analysis.skipped[0].reason


def test_it_prints_both_products() -> None:
    text = str(attention_of(model_of("masked_and_guarded"))).splitlines()
    assert text[0] == "fusion  MatMul_4  attention"
    assert text[2:] == [
        "query   f16[b, m, (h k)]",
        "keys    f16[b, n, (h k)]",
        "values  f16[b, n, (h o)]",
        "in0     f32[b, 1, m, n]  mask",
        "        t0 = acc0 + in0",
        "        p = softmax(t0), 0 where a row is NaN",
        "        acc1 = p * values",
        "out     f16[b, m, (h o)] <- acc1",
    ]


def test_heads_that_share_keys_lie_inside() -> None:
    attention = attention_of(model_of("grouped"))
    mapping = map_attention(attention)
    assert (mapping.batch, mapping.heads) == (("b",), ("h", "g"))
    assert "g" in attention.query.axes
    assert "g" not in attention.keys.axes
    assert str(mapping) == "batch=b heads=h*g m=m n=n k=k o=o"


@pytest.mark.parametrize("scaled", ["query", "key", "value"])
def test_a_number_that_the_run_knows_before_any_of_the_three(scaled: str) -> None:
    """Scores are scaled for the keys; query and values, as a dynamic quantisation makes them, are read as they come."""
    b = Builder(FLOAT16)
    shape = ("batch", HEADS, "rows", HEAD)
    tensors = {name: b.input(name, shape) for name in ("query", "key", "value")}
    product = b("Mul", tensors[scaled], b.input("scale", (1,)))
    tensors[scaled] = b("Reshape", product, b.integers(0, HEADS, -1, HEAD))
    s = b("MatMul", tensors["query"], b("Transpose", tensors["key"], perm=(0, 1, 3, 2)))
    model = b.model(b("MatMul", b("Softmax", s, axis=-1), tensors["value"]))
    attention = attention_of(model)
    read = {"query": attention.query.name, "value": attention.values.name}
    assert [name for name, tensor in read.items() if tensor == product] == ([scaled] if scaled != "key" else [])
    assert ("scale" in [tensor.name for tensor in attention.operands]) == (scaled == "key")
    feed = feeds(model)
    assert run(model, feed)[0].tobytes() == run(rewritten(analysed(model)), feed)[0].tobytes()


@pytest.mark.parametrize("form", ["merged_batch", "masked_in_batches"])
def test_heads_of_a_batch_are_read_as_they_lie(form: str) -> None:
    attention = attention_of(model_of(form))
    assert [tensor.dims for tensor in (attention.query, attention.keys, attention.values)] == [
        (("b",), ("m",), ("h", "k")), (("b",), ("n",), ("h", "k")), (("b",), ("n",), ("h", "o")),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT], ids=["f16", "f32"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in (*LEFT_ALONE_IN_FP32, *READ_ANYHOW)])
def test_every_architecture_has_a_kernel(form: str, dtype: int) -> None:
    """The last one of each reads what lies anyhow; few rows of fp32 are the portable kernel's on any."""
    (site,) = [site for site in analysed(model_of(form, dtype), "sm_90a", "sm_80").sites if site.whole]
    by_wgmma, portable = ([variant.family for variant in plan.variants] for plan in site.whole.plans)
    assert ATTENTION in by_wgmma[:2]
    assert by_wgmma[0] is ATTENTION or dtype == FLOAT
    assert set(portable) == {PORTABLE_ATTENTION}
    for plan in site.whole.plans:
        assert [variant.spec.checked for variant in plan.variants] == [False] * (len(plan.variants) - 1) + [True]
        assert (plan.variants[-1].min_m, plan.variants[-1].max_m) == (0, MAX_M)


def probabilities(b: Builder) -> str:
    """Of as many rows as keys, so that no size tells one from the other."""
    q, k = (b.input(name, ("batch", 64, HEAD)) for name in ("q", "k"))
    return b("Softmax", b("MatMul", q, b("Transpose", k, perm=(0, 2, 1))), axis=-1)


@pytest.mark.parametrize(
    ("equation", "shape", "dims"),
    [
        ("bts,bsc->btc", (64, HEAD), (("b",), ("m",), ("o",))),
        ("bts,bcs->bct", (HEAD, 64), (("b",), ("o",), ("m",))),
        ("bts,bcs->btc", (HEAD, 64), (("b",), ("m",), ("o",))),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_values_lie_and_are_multiplied_in_any_order(equation: str, shape: tuple, dims: tuple, turned: bool) -> None:
    b = Builder(FLOAT16)
    factors, (terms, out) = [probabilities(b), b.input("v", ("batch", *shape))], equation.split("->")
    if turned:
        factors, terms = factors[::-1], ",".join(terms.split(",")[::-1])
    attention = attention_of(b.model(b("Identity", b("Einsum", *factors, equation=f"{terms}->{out}"))))
    assert attention.values.name == "v"
    assert attention.outs[0].tensor.dims == dims


@pytest.mark.parametrize("equation", ["bts,btc->bsc", "btc,bts->bsc", "bts,btc->bcs"])
def test_a_product_that_sums_over_the_rows_of_probabilities_is_no_attention(equation: str) -> None:
    def build(b: Builder) -> list[str]:
        p, v = probabilities(b), b.input("v", ("batch", 64, HEAD))
        factors = (p, v) if equation.startswith("bts") else (v, p)
        return [b("Einsum", *factors, equation=equation)]

    assert reason_of(build) == "no_attention_kernel"


@pytest.mark.parametrize("transposed", [(), (0,), (1,)])
def test_probabilities_that_multiply_themselves_are_no_values(transposed: tuple[int, ...]) -> None:
    def build(b: Builder) -> list[str]:
        p = probabilities(b)
        factors = [b("Transpose", p, perm=(0, 2, 1)) if place in transposed else p for place in range(2)]
        return [b("MatMul", *factors)]

    assert reason_of(build) == "probability_is_read"


def test_a_score_that_is_read() -> None:
    def build(b: Builder) -> list[str]:
        s = scores(b)
        return [*merged(b, b("Softmax", s, axis=-1)), s]

    assert reason_of(build) == "score_is_read"


def test_a_probability_that_is_read() -> None:
    def build(b: Builder) -> list[str]:
        p = b("Softmax", scores(b), axis=-1)
        return [*merged(b, p), b("ReduceMax", p)]

    assert reason_of(build) == "probability_is_read"


def test_a_probability_that_is_rounded_for_its_shape_being_read() -> None:
    """Without that reader ONNX Runtime's CPU provider would hand it on to the Cast as it is."""

    def build(b: Builder) -> list[str]:
        p = b("Softmax", scores(b), axis=-1)
        (out,) = merged(b, b("Cast", p, to=FLOAT), dtype=FLOAT)
        return [b("Cast", out, to=b.dtype), b("Cast", b("Shape", p), to=b.dtype)]

    assert reason_of(build) == "probability_is_read"


def told(build) -> list[str]:
    """What is said of the attentions that are none."""
    b = Builder(FLOAT16)
    skipped = analysed(b.model(*build(b))).skipped
    return [entry.detail for entry in skipped if entry.reason == "no_attention_kernel"]


def test_of_several_products_that_of_the_scores_is_told() -> None:
    """ViTDet: biases of the rows and of the columns of an image are products too, and later ones."""

    def build(b: Builder) -> list[str]:
        s = b("Reshape", scores(b, "rows", 72), b.integers(0, 0, 0, 8, 9))
        bias = b("MatMul", b.input("x", ("batch", HEADS, "rows", HEAD)), b.input("places", (HEAD, 8)))
        s = b("Reshape", b("Add", s, b("Unsqueeze", bias, b.integers(4))), b.integers(0, 0, 0, 72))
        return [b("Identity", b("MatMul", b("Softmax", s, axis=-1), b.input("value", ("batch", HEADS, 72, 20))))]

    (detail,) = told(build)
    assert "(n1 n2) in several groups" in detail


def test_one_key() -> None:
    assert told(lambda b: merged(b, b("Softmax", scores(b, "rows", 1), axis=-1), 1)) == [
        "there is one key, of which every probability is 1"
    ]


def test_scores_that_a_product_of_one_column_makes() -> None:
    """As in DIN: a small network gives each entry of a history its score."""

    def build(b: Builder) -> list[str]:
        entries = b.input("entries", ("batch", 50, HEAD))
        score = b("Squeeze", b("MatMul", entries, b.input("weight", (HEAD, 1))), b.integers(2))
        return [b("MatMul", b("Unsqueeze", b("Softmax", score, axis=-1), b.integers(1)), entries)]

    assert told(build) == ["its scores are one column of a product, and no keys"]


def test_another_axis() -> None:
    assert reason_of(lambda b: merged(b, b("Softmax", scores(b), axis=2))) == "no_attention_kernel"


@pytest.mark.parametrize("op", ["Mul", "Add", "Sub", "Div", "Where"])
@pytest.mark.parametrize("keys", ["keys", 1])
def test_what_changes_probabilities_behind_a_softmax_is_told_of_it(op: str, keys: str | int) -> None:
    b = Builder(FLOAT16)
    p = b("Softmax", b("Mul", scores(b), number(b, 0.25)), axis=-1)
    other = b.input("other", ("batch", 1, "rows", keys), TensorProto.BOOL if op == "Where" else None)
    changed = b("Where", other, p, number(b, 0.0)) if op == "Where" else b(op, p, other)
    found = analysed(b.model(*merged(b, changed)))
    (told,) = (each for each in found.skipped if each.reason == "no_attention_kernel")
    name = next(node.name for node in b.nodes if node.output[0] == changed)
    assert told.detail.startswith(f"{name} makes other numbers of its probabilities")


def test_a_sink_beside_the_scores_is_told_of_the_softmax() -> None:
    """As of gpt-oss: a column more for the softmax, which no value is multiplied by."""
    b = Builder(FLOAT16)
    sink = b.input("sink", ("batch", HEADS, "rows", 1))
    p = b("Softmax", b("Concat", b("Mul", scores(b), number(b, 0.25)), sink, axis=-1), axis=-1)
    kept = b("Slice", p, b.integers(0), b.integers(-1), b.integers(-1))
    analysis = analysed(b.model(*merged(b, kept)))
    assert not [site for site in analysis.sites if isinstance(site.fusion, Attention)]
    (told,) = [entry for entry in analysis.skipped if entry.reason == "no_attention_kernel"]
    assert told.anchor.startswith("Softmax")
    assert "a sink" in told.detail


def test_fp32_is_tf32_and_not_exact() -> None:
    model = model_of("two_biases", FLOAT)
    (site,) = analysed(model).sites
    assert {variant.spec.math for _, variant in site.whole.variants} == {"tf32"}
    analysis = analyse_model(model, [SM_90A], fp32="exact", attention=True)
    assert "no_attention_kernel" in [entry.reason for entry in analysis.skipped]


def test_values_that_are_widened_are_read_before_that() -> None:
    """The product of fp32 is one of 16 bits: what was rounded to them before is exact, and TF32 has no more."""
    attention = attention_of(model_of("values_in_fp32"))
    assert str(attention.values) == "f16[b, n, (h o)]"
    assert str(attention.outs[0].tensor) == "f32[b, m, (h o)]"
    exact = analyse_model(model_of("values_in_fp32"), [SM_90A], fp32="exact", attention=True)
    assert not [site for site in exact.sites if isinstance(site.fusion, Attention)]


def test_keys_that_lie_transposed() -> None:
    """They are read element by element, which is slow."""

    def build(b: Builder) -> list[str]:
        q, k = b.input("q", ("batch", HEADS, "rows", 16)), b.input("k", ("batch", HEADS, 16, "keys"))
        return merged(b, b("Softmax", b("MatMul", q, k), axis=-1))

    assert reason_of(build) == "slower"


def few_rows(b: Builder, rows: int | str, keys: int | str = 4096, heads: int = HEADS) -> ModelProto:
    q, k, v = (b.input(name, (1, heads, n, 64)) for name, n in (("q", rows), ("k", keys), ("v", keys)))
    s = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), number(b, 0.125))
    return b.model(b("Identity", b("MatMul", b("Softmax", s, axis=-1), v)))


def test_few_scores_in_fp32_stay_with_the_library() -> None:
    """The warps of a cluster have as many keys each as one block's warps had of an eighth of them."""
    sites = analysed(few_rows(Builder(FLOAT), 1, keys=32768)).sites
    assert not [site for site in sites if isinstance(site.fusion, Attention)]


# Microseconds of an H200, whole and split as the plan has it: 41.1, 22.6; 17.2, 6.1; 10.0, 5.1; 20.7, 26.3; 68.7, 94.2.
@pytest.mark.parametrize(
    ("heads", "keys", "head", "splits"),
    [(32, 4096, 128, 4), (8, 2048, 64, 8), (12, 1024, 64, 8), (128, 1024, 128, 1), (512, 1024, 128, 1)],
)
def test_keys_of_few_rows_are_split_as_was_measured_to_be_fast(heads: int, keys: int, head: int, splits: int) -> None:
    attention = attention_over(Builder(FLOAT16), heads, 1, keys, head)
    (first, *_) = make_attention_plan(attention, map_attention(attention), SM_90A).variants
    assert isinstance(first.tile, AttentionTile)
    assert first.tile.splits == splits


def attention_over(b: Builder, heads: int, rows: int, keys: int, head: int) -> Attention:
    q, k, v = (b.input(name, (1, heads, n, head)) for name, n in (("q", rows), ("k", keys), ("v", keys)))
    p = b("Softmax", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), axis=-1)
    return attention_of(b.model(b("Identity", b("MatMul", p, v))))


# In fp32, of four warps: 22.6 us for 25.5; 12.2 for 15.1.
@pytest.mark.parametrize(("heads", "keys", "width"), [(128, 1024, 32), (192, 256, 16)])
def test_warps_share_few_rows_of_the_portable_kernel(heads: int, keys: int, width: int) -> None:
    attention = attention_over(Builder(FLOAT), heads, 1, keys, 64)
    (first, *_) = make_attention_plan(attention, map_attention(attention), SM_90A).variants
    assert first.tile == PortableAttentionTile(4, width, splits=4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_blocks_share_few_rows_where_the_device_has_clusters(arch: str) -> None:
    device = ARCHITECTURES[arch]
    clusters = {tile.cluster for tile in portable_splits(AttentionSpec(F32, 64, 64), 1, device)}
    assert clusters == ({1, 2, 4, 8} if device.capability >= 90 else {1})


# Fewer heads than multiprocessors: clusters of 8; where heads are as many as those, none.
@pytest.mark.parametrize(("heads", "keys", "cluster"), [(8, 2048, 8), (12, 1024, 8), (192, 256, 1)])
def test_few_heads_over_many_keys_are_split_over_blocks(heads: int, keys: int, cluster: int) -> None:
    attention = attention_over(Builder(FLOAT), heads, 1, keys, 64)
    (first, *_) = make_attention_plan(attention, map_attention(attention), SM_90A).variants
    assert isinstance(first.tile, PortableAttentionTile)
    assert first.tile.cluster == cluster


def test_few_of_any_number_of_rows_have_a_kernel_of_their_own() -> None:
    attention = attention_of(few_rows(Builder(FLOAT16), "rows", "keys"))
    first, second, *_ = make_attention_plan(attention, map_attention(attention), SM_90A).variants
    assert isinstance(first.tile, AttentionTile)
    assert isinstance(second.tile, AttentionTile)
    assert (first.min_m, first.max_m, second.tile.splits) == (0, 16, 1)
    assert first.tile.splits > 1


def test_a_softmax_of_an_older_operator_set_is_over_the_last_axis_alone() -> None:
    b = Builder(FLOAT16, opset=12)
    q, k, v = (b.input(name, (4, n, 16)) for name, n in (("q", 40), ("k", 72), ("v", 72)))
    s = b("MatMul", q, b("Transpose", k, perm=(0, 2, 1)))
    for axis, fused in ((2, True), (1, False)):
        nodes = len(b.nodes)
        model = b.model(b("Identity", b("MatMul", b("Softmax", s, axis=axis), v)))
        found = [site for site in analysed(model).sites if isinstance(site.fusion, Attention)]
        assert bool(found) is fused
        del b.nodes[nodes:]


# Microseconds on an H200, of the tiles that were measured: the chosen one is within a few percent of the fastest.
MEASURED = {
    "3x128 lazy 8": (2, 8, 4096, 4096, 40),
    "3x80 lazy 8": (2, 8, 4096, 77, 40),
    "2x128": (2, 8, 1024, 1024, 80),
    "1x128": (2, 8, 256, 256, 160),
    "2x128 lazy 8": (1, 32, 2048, 2048, 128),
    "2x208": (64, 12, 197, 197, 64),
}


@pytest.mark.parametrize("tile", MEASURED)
def test_the_tile_is_one_that_was_measured_to_be_fast(tile: str) -> None:
    batch, heads, m, n, d = MEASURED[tile]
    b = Builder(FLOAT16)
    q, k, v = (b.input(name, (batch, heads, rows, d)) for name, rows in (("q", m), ("k", n), ("v", n)))
    p = b("Softmax", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), axis=-1)
    attention = attention_of(b.model(b("Identity", b("MatMul", p, v))))
    plan = make_attention_plan(attention, map_attention(attention), SM_90A)
    shape, _, lazy = tile.partition(" lazy ")
    groups, width = map(int, shape.split("x"))
    assert plan.variants[0].tile == AttentionTile(groups, width, rescale_above=int(lazy or 0))


def test_huge_constants_are_beside_the_scale_as_they_are() -> None:
    """A fill of the lowest number of fp32 times the scale would be minus infinity, and a row of them NaN."""

    def build(fill: float) -> str:
        b = Builder(FLOAT16)
        s = b("Cast", scores(b), to=TensorProto.FLOAT)
        mask = b.input("mask", ("rows", "keys"), TensorProto.BOOL)
        s = b("Where", mask, s, number(b, fill, np.dtype(np.float32)))
        attention = attention_of(b.model(*merged(b, b("Cast", b("Softmax", s, axis=-1), to=FLOAT16))))
        mapping = map_attention(attention)
        spec = attention_spec(attention, mapping, attention_widths(attention, mapping))
        return emit(spec, AttentionTile(2, 64))

    assert "HUGE_SCORES = true" in build(float(np.finfo(np.float32).min))
    assert "HUGE_SCORES = false" in build(-np.inf)


@pytest.mark.parametrize("head", [HEAD, STAGE_DEPTH], ids=lambda head: f"heads of {head}")
@pytest.mark.parametrize("merge", [(0, 1), (1, 0)], ids=["batch first", "tokens first"])
def test_a_projection_behind_it_still_has_its_residual(merge: tuple[int, int], head: int) -> None:
    """As nn.MultiheadAttention is exported: rows of both are one dimension for a Gemm, and two again behind it.

    Heads that a kernel could merge as it reads them are those of the attention, whose Transpose merges them.
    """
    b = Builder(FLOAT16)
    width = HEADS * head
    p = b("Softmax", b("Mul", scores(b, head=head), number(b, 0.25)), axis=-1)
    values = split_heads(b, "value", "keys", head=head)
    o = b("Transpose", b("MatMul", p, values), perm=(*(2 * axis for axis in merge), 1, 3))
    rows = b("Reshape", o, b.integers(-1, width))
    weight, bias = b.array(np.ones((width, width)), "w"), b.array(np.ones(width), "bias")
    sizes = b("Shape", b.input("residual", ("batch", "rows", width)))
    dims = [b("Slice", sizes, b.integers(axis), b.integers(axis + 1)) for axis in merge]
    out = b("Reshape", b("Gemm", rows, weight, bias), b("Concat", *dims, b.integers(width), axis=0))
    model = b.model(b("Add", "residual", b("Transpose", out, perm=(*merge, 2))))
    analysis = analysed(model)
    assert [site.fusion.pattern for site in analysis.sites] == ["attention", "gemm_epilogue"]
    assert "residual" in [tensor.name for tensor in analysis.sites[1].fusion.inputs]
    assert not analysis.skipped
    fused = rewritten(analysis)
    for sizes in (SIZES, {"batch": 3, "rows": 5, "keys": 7}):
        feed = feeds(model, sizes)
        assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


def test_heads_that_only_the_run_counts_with_the_batch_are_one_axis() -> None:
    """nn.MultiheadAttention that gives its weights, with queries that the model stores: batch and heads are "4*batch".

    The merge of (tokens, batch) behind it tells how those heads divide; the product's own rows do not depend on it.
    """
    b = Builder(FLOAT16)
    tokens, heads, head = 8, 4, 16

    def of_heads(name: str, length: int) -> tuple[str, str]:
        whole = b.input(name, (length, "batch", heads * head))
        batch = b("Slice", b("Shape", whole), b.integers(1), b.integers(2))
        sizes = b("Concat", b.integers(length), b("Mul", batch, b.integers(heads)), b.integers(head), axis=0)
        return b("Reshape", whole, sizes), batch

    (q, batch), (k, _), (v, _) = of_heads("query", tokens), of_heads("key", 12), of_heads("value", 12)
    s = b("MatMul", b("Transpose", q, perm=(1, 0, 2)), b("Transpose", k, perm=(1, 2, 0)))
    o = b("MatMul", b("Softmax", b("Mul", s, number(b, 0.25)), axis=-1), b("Transpose", v, perm=(1, 0, 2)))
    rows = b("Concat", b("Mul", b.integers(tokens), batch), b.integers(heads * head), axis=0)
    model = b.model(b("Reshape", b("Transpose", o, perm=(1, 0, 2)), rows))
    analysis = analysed(model)
    assert [site.fusion.pattern for site in analysis.sites] == ["attention"]
    fused = rewritten(analysis)
    for size in (1, 3):
        feed = feeds(model, {"batch": size})
        assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


@pytest.mark.parametrize("hand_on", ["Cast", "Not", None])
def test_a_mask_expanded_to_the_shape_of_the_scores_is_read_as_it_is(hand_on: str | None) -> None:
    """DistilBERT and XLM by TorchScript, `mask.expand_as(scores)`: the Shape is of what the kernel does not store."""

    def build(b: Builder, expands: bool) -> Analysis:
        s, mask = scores(b), b.input("mask", ("batch", 1, 1, "keys"), TensorProto.BOOL)
        mask = b("Expand", mask, b("Shape", s)) if expands else mask
        if hand_on is not None:
            mask = b(hand_on, mask, **({"to": TensorProto.BOOL} if hand_on == "Cast" else {}))
        s = b("Where", mask, number(b, -np.inf), s)
        return analysed(b.model(*merged(b, b("Softmax", s, axis=-1))))

    as_it_is, expanded = build(Builder(FLOAT16), False), build(Builder(FLOAT16), True)
    assert [str(site.fusion).partition("\n")[2] for site in expanded.sites] == [
        str(site.fusion).partition("\n")[2] for site in as_it_is.sites
    ]
    assert isinstance(expanded.sites[0].fusion, Attention)
    assert not expanded.skipped
    model = expanded.model.proto
    fused, feed = rewritten(expanded), feeds(model)
    assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]


def test_a_mask_expanded_to_another_shape_is_none_of_the_scores() -> None:
    """The Shape is of the product; the mask meets the product transposed."""

    def build(b: Builder) -> list[str]:
        query, key = (b.input(name, ("batch", 40, HEAD)) for name in ("query", "key"))
        s = b("MatMul", query, b("Transpose", key, perm=(0, 2, 1)))
        mask = b("Expand", b.input("mask", ("batch", 1, 40), TensorProto.BOOL), b("Shape", s))
        s = b("Where", mask, number(b, -np.inf), b("Transpose", s, perm=(0, 2, 1)))
        return [b("MatMul", b("Softmax", s, axis=-1), b.input("value", ("batch", 40, HEAD)))]

    b = Builder(FLOAT16)
    analysis = analysed(b.model(*build(b)))
    assert not [site for site in analysis.sites if isinstance(site.fusion, Attention)]


def test_a_mask_of_keys_that_others_were_put_in_front_of() -> None:
    """Pegasus-X by TorchScript: nothing proves the mask to be as long; but keys beside global ones are never one."""
    b = Builder(FLOAT16)
    first = b.input("global", ("batch", HEADS, 8, HEAD))
    keys, values = (
        b("Concat", first, b.input(name, ("batch", HEADS, "keys", HEAD)), axis=2) for name in ("key", "value")
    )
    mask = b("Pad", b.input("mask", ("batch", 1, 1, "more")), b.integers(0, 0, 0, 8, 0, 0, 0, 0))
    s = b("Add", b("Einsum", first, keys, equation="bhgd,bhnd->bhgn"), mask)
    model = b.model(b("Einsum", b("Softmax", s, axis=-1), values, equation="bhgn,bhnd->bhgd"))
    analysis = analysed(model)
    assert [site.fusion.pattern for site in analysis.sites] == ["attention"]
    fused, feed = rewritten(analysis), feeds(model, {"batch": 2, "keys": 24, "more": 24})
    assert [out.tobytes() for out in run(model, feed)] == [out.tobytes() for out in run(fused, feed)]
