"""One product taken apart into column ranges of any width, each a fusion of its own: q, k and v of grouped queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import Fusion
from onnxfuse.patterns import Match, match_sites
from onnxfuse.pipeline import analyse_model
from onnxfuse.selection import Selection
from tests.helpers.matching import K, check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, cpu_session, run
from tests.helpers.thinning import case_id, each_with_one
from tests.tools.sweep import rewritten

HEADS, GROUPS, WIDTH = 3, 1, 4  # of queries, of keys and of values; columns of each
SIZES = (HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH)


def packed(b: Builder, sizes: Sequence[int] = SIZES, bias: bool = False, transposed: bool = False) -> str:
    n = sum(sizes)
    x = b.input("x", ("batch", "rows", K))
    weight = b.array(draw(n, K), "weight") if transposed else b.array(draw(K, n), "weight")
    t = b("MatMul", x, b("Transpose", weight, perm=(1, 0)) if transposed else weight)
    return b("Add", b.array(draw(n, seed=1), "bias"), t) if bias else t


def head(b: Builder, t: str, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
    return b("Transpose", b("Reshape", t, b.integers(0, 0, -1, WIDTH)), perm=perm)


def split(b: Builder, t: str, sizes: Sequence[int] = SIZES) -> list[str]:
    return b("Split", t, b.integers(*sizes), outputs=len(sizes), axis=-1)


def sliced(b: Builder, t: str, sizes: Sequence[int] = SIZES) -> list[str]:
    ends = np.cumsum([0, *sizes])
    return [b("Slice", t, *map(b.integers, (start, end, 2))) for start, end in pairwise(ends)]


def grouped_queries(b: Builder) -> list[str]:
    q, k, v = split(b, packed(b))
    return [head(b, q), head(b, k, (0, 2, 3, 1)), head(b, v)]


def biased_slices(b: Builder) -> list[str]:
    q, k, v = sliced(b, packed(b, bias=True))
    return [head(b, b("Mul", q, b.array(0.5))), head(b, k), head(b, v)]


def weight_of_rows(b: Builder) -> list[str]:
    return [head(b, each) for each in split(b, packed(b, bias=True, transposed=True))]


def bias_of_a_range(b: Builder) -> list[str]:
    q, k, v = split(b, packed(b))
    q = b("Add", q, b.array(draw(SIZES[0], seed=2), "q_bias"))
    return [head(b, q), b("Tanh", k), b("Relu", v)]


def twice_as_wide(b: Builder) -> list[str]:
    """Two heads of queries for each of keys: parts of the product, of two widths."""
    sizes = (2 * WIDTH, WIDTH, WIDTH)
    return [head(b, each) for each in split(b, packed(b, sizes), sizes)]


def no_common_width(b: Builder) -> list[str]:
    sizes = (5, 7, 2)
    first, second, third = split(b, packed(b, sizes, bias=True), sizes)
    return [b("Tanh", first), b("Relu", second), b("Neg", third)]


def one_range_is_read(b: Builder) -> list[str]:
    return [b("Tanh", sliced(b, packed(b, bias=True))[0])]


def rotated_queries(b: Builder) -> list[str]:
    """A rotary embedding reads q and its halves; what is before it is fused, and the first product of it."""
    q, k, v = split(b, packed(b))
    q = head(b, q)
    first, second = (b("Slice", q, *map(b.integers, (start, start + 2, 3))) for start in (0, 2))
    rotated = b("Concat", b("Neg", second), first, axis=3)
    q = b("Add", b("Mul", q, b.input("cos", ("rows", WIDTH))), b("Mul", rotated, b.input("sin", ("rows", WIDTH))))
    return [q, head(b, k), head(b, v)]


def shapes_of_their_own(b: Builder) -> list[str]:
    """Heads are split to sizes that each range is asked for."""
    heads = []
    for t in sliced(b, packed(b)):
        sizes = [b("Gather", b("Shape", t), b.integers(index)) for index in (0, 1)]
        split = b("Reshape", t, b("Concat", *sizes, b.integers(-1, WIDTH), axis=0))
        heads.append(b("Transpose", split, perm=(0, 2, 1, 3)))
    return heads


def shapes_of_the_product(b: Builder) -> list[str]:
    t = packed(b)
    sizes = [b("Gather", b("Shape", t), b.integers(index)) for index in (0, 1)]
    shape = b("Concat", *sizes, b.integers(-1, WIDTH), axis=0)
    return [b("Transpose", b("Reshape", each, shape), perm=(0, 2, 1, 3)) for each in split(b, t)]


def rotated_alike(b: Builder, sizes: Sequence[int] = SIZES) -> list[str]:
    """Queries and keys are multiplied by one table of a head's columns."""
    q, k, v = split(b, packed(b, sizes, bias=True), sizes)
    cos = b.input("cos", ("rows", WIDTH))
    return [b("Mul", head(b, q), cos), b("Mul", head(b, k), cos), head(b, v)]


def twice_as_wide_rotated_alike(b: Builder) -> list[str]:
    return rotated_alike(b, (4 * WIDTH, 2 * WIDTH, 2 * WIDTH))


PARALLEL = (*SIZES, 2 * 16)  # with a value and a gate of 16 columns, as PaLM's parallel blocks have them


def gate_beside_others(b: Builder) -> list[str]:
    q, k, v, both = split(b, packed(b, PARALLEL), PARALLEL)
    value, gate = b("Split", both, outputs=2, axis=-1, num_outputs=2)
    return [head(b, q), head(b, k), head(b, v), b("Mul", value, b("Mul", gate, b("Sigmoid", gate)))]


def gate_of_two_ranges(b: Builder) -> list[str]:
    sizes = (SIZES[0], 16, 16, *SIZES[1:])
    q, gate, value, k, v = split(b, packed(b, sizes, bias=True), sizes)
    return [head(b, q), b("Neg", k), head(b, v), b("Mul", b("Gelu", gate), value)]


def gate_of_neighbours(b: Builder) -> list[str]:
    sizes = (16, 16, *SIZES)
    value, gate, q, k, v = sliced(b, packed(b, sizes, transposed=True), sizes)
    return [b("Mul", value, b("Relu", gate)), head(b, q), head(b, k), head(b, v)]


GATES = (gate_beside_others, gate_of_two_ranges, gate_of_neighbours)
FORMS = {
    grouped_queries: 3, biased_slices: 3, weight_of_rows: 3, bias_of_a_range: 3, twice_as_wide: 3, no_common_width: 3,
    one_range_is_read: 1, rotated_queries: 3, shapes_of_their_own: 3, shapes_of_the_product: 3,
    rotated_alike: 3, twice_as_wide_rotated_alike: 3, gate_beside_others: 4, gate_of_two_ranges: 4,
    gate_of_neighbours: 4,
}  # fmt: skip


def built(form, dtype: int = FLOAT) -> onnx.ModelProto:
    b = Builder(dtype)
    return b.model(*form(b))


def found(model: onnx.ModelProto) -> list[tuple[Match, Fusion]]:
    return list(match_sites(Graph(load_model(model)), lambda match, fusion: (match, fusion)).fused)


def feed_of(model: onnx.ModelProto, rows: int = 5) -> dict[str, np.ndarray]:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    values = {"x": draw(2, rows, K, seed=2), "cos": draw(rows, WIDTH, seed=3), "sin": draw(rows, WIDTH, seed=4)}
    return {value.name: values[value.name].astype(dtype) for value in model.graph.input}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_range_means_what_it_meant(form) -> None:
    model = built(form)
    sites = found(model)
    assert len(sites) == FORMS[form]
    for _, fusion in sites:
        check_meaning(model, fusion, feed_of(model))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("form", "dtype"), each_with_one(FORMS, [FLOAT, FLOAT16]), ids=case_id)
def test_nothing_is_left_of_the_product_and_bits_are_the_same(form, dtype: int) -> None:
    model = built(form, dtype)
    feeds = [feed_of(model), feed_of(model, rows=1)]
    expected = [run(model, feed) for feed in feeds]
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list), fp32="exact")
    assert not analysis.skipped
    fused = rewritten(analysis)
    whole = form is no_common_width and dtype == FLOAT16  # reading windows that begin anywhere costs more than a Split
    left = {"MatMul", "Split", "Slice"} & {node.op_type for node in fused.graph.node}
    assert not left or whole or form is rotated_queries
    assert all(node.op_type != "MatMul" for node in fused.graph.node)
    for feed, wanted in zip(feeds, expected, strict=True):
        for before, after in zip(wanted, run(fused, feed), strict=True):
            assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("form", [rotated_alike, twice_as_wide_rotated_alike], ids=lambda form: form.__name__)
def test_ranges_of_several_widths_may_read_one_operand(form) -> None:
    fused = rewritten(analyse_model(built(form), resolve("sm_90a", list)))
    assert "Mul" not in [node.op_type for node in fused.graph.node]


def test_a_range_is_a_window_of_the_weight() -> None:
    """Nothing is copied, whatever the width; where all ranges are parts of one width, they are indices along p."""
    (_, q), (_, k), (_, v) = found(built(biased_slices))
    assert [str(fusion.rhs[0]) for fusion in (q, k, v)] == ["f32[k, (n1 n2):20]", "f32[k, (p n)]", "f32[k, (p n)]"]
    for ranges in ([fusion.parts[0] for fusion in (q, k, v)], [fusion.loads[0] for fusion in (q, k, v)]):
        assert [(each.part, each.start) for each in ranges] == [(None, 0), (3, None), (4, None)]
    (_, first), (_, second), (_, third) = found(built(no_common_width))
    assert [fusion.parts[0].start for fusion in (first, second)] == [0, 5]
    assert third.parts[0].part == 6


@pytest.mark.parametrize("form", GATES, ids=lambda form: form.__name__)
def test_a_gate_beside_other_ranges_is_one_kernel_of_two_windows(form) -> None:
    fusions = [fusion for _, fusion in found(built(form))]
    (gate,) = (fusion for fusion in fusions if len(fusion.parts) == 2)
    starts = {gate_beside_others: [20, 36], gate_of_two_ranges: [12, 28], gate_of_neighbours: [0, 16]}[form]
    assert [(part.part, part.start) for part in gate.parts] == [(None, start) for start in starts]
    assert gate.pattern == ("split_gemm" if form is gate_beside_others else "column_ranges")


def test_ranges_of_equal_width_share_a_kernel_where_that_pays() -> None:
    analysis = analyse_model(built(grouped_queries, FLOAT16), resolve("sm_80", list))
    assert [len(site.fusion.parts) for site in analysis.sites] == [1, 2]
    assert [site.fusion.anchor for site in analysis.sites] == ["MatMul_0/0", "MatMul_0/12"]


def test_where_a_range_ends_is_told_of_the_range_alone() -> None:
    """What keeps the ranges out of one fusion is no end of theirs."""
    assert [match.stop for match, _ in found(built(grouped_queries))] == [None] * 3
    b = Builder()
    q, k, v = split(b, packed(b))
    model = b.model(b("Softmax", head(b, q)), head(b, k), head(b, v))
    assert [match.stop and match.stop.reason for match, _ in found(model)] == ["unknown_op", None, None]


def test_each_range_can_be_left_out() -> None:
    """Then its nodes stay, with the product that they read, and the others are fused all the same."""
    model = built(grouped_queries, FLOAT16)
    selection = Selection(plan={"MatMul_0/12": "column_ranges"})
    analysis = analyse_model(model, resolve("sm_80", list), selection=selection)
    assert [site.fusion.anchor for site in analysis.sites] == ["MatMul_0/12"]
    assert [(skipped.anchor, skipped.reason) for skipped in analysis.skipped] == [("MatMul_0/0", "not_selected")]
    feed = feed_of(model)
    expected = run(model, feed)
    for before, after in zip(expected, run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def raw_range(b: Builder) -> list[str]:
    q, k, v = split(b, packed(b))
    return [head(b, q), head(b, k), b("Softmax", v)]


def product_is_an_output(b: Builder) -> list[str]:
    t = packed(b)
    return [t, *(head(b, each) for each in split(b, t))]


def product_is_read_beside(b: Builder) -> list[str]:
    t = packed(b)
    return [b("Softmax", t), *(head(b, each) for each in split(b, t))]


def range_is_an_output(b: Builder) -> list[str]:
    q, k, v = split(b, packed(b))
    return [head(b, q), head(b, k), k, head(b, v)]


@pytest.mark.parametrize("form", [raw_range, product_is_an_output, product_is_read_beside, range_is_an_output])
def test_a_product_that_stays_is_not_computed_twice(form) -> None:
    """Somebody reads what the ranges share, or a range as it is."""
    model = built(form, FLOAT16)
    analysis = analyse_model(model, resolve("sm_80", list))
    assert not any(site.match.shared for site in analysis.sites)
    assert sum(node.op_type == "MatMul" for node in rewritten(analysis).graph.node) == 1


def test_two_ranges_that_read_each_other_stay_together() -> None:
    b = Builder(FLOAT16)
    q, k, v = split(b, packed(b))
    k = b("Tanh", k)
    model = b.model(b("Mul", q, b("ReduceMax", k, b.integers(-1))), b("Relu", v), k)
    feed = feed_of(model)
    expected = run(model, feed)
    analysis = analyse_model(model, resolve("sm_80", list))
    for before, after in zip(expected, run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def test_a_shared_product_is_no_ordinary_node_behind_which_kernels_stand() -> None:
    """It would compute all columns for each of them."""
    analysis = analyse_model(built(grouped_queries), resolve("sm_90a", list))
    assert all(site.epilogue_only is None for site in analysis.sites if site.match.shared)


Parts = Callable[[Builder, str, Sequence[int]], list[str]]
HEAD = 32  # columns that an attention has a kernel for
WIDE = (4 * HEAD, 2 * HEAD, 2 * HEAD)  # of the queries, and of fewer keys and values


def attended(b: Builder, parts: Parts, are_turned: bool = True, depth: int = K, of_values: int = HEAD) -> list[str]:
    """Queries and keys may have an epilogue; between the product and the attention v has views alone."""
    x = b.input("x", ("batch", "rows", depth))
    sizes, widths = (*WIDE[:2], 2 * of_values), (HEAD, HEAD, of_values)
    ranges = parts(b, b("MatMul", x, b.array(draw(depth, sum(sizes)), "weight")), sizes)
    shapes = [b.integers(0, 0, -1, width) for width in widths]
    heads = [b("Reshape", each, shape) for each, shape in zip(ranges, shapes, strict=True)]
    q, k, v = (b("Transpose", each, perm=(0, 2, 1, 3)) for each in heads)
    if are_turned:
        q, k = (b("Mul", each, b.input(name, ("rows", HEAD))) for each, name in ((q, "cos"), (k, "sin")))
    repeated = [b("Tile", b("Unsqueeze", each, b.integers(2)), b.integers(1, 1, 2, 1, 1)) for each in (k, v)]
    shapes = [b.integers(0, 4, -1, width) for width in widths[1:]]
    keys, values = (b("Reshape", each, shape) for each, shape in zip(repeated, shapes, strict=True))
    scores = b("MatMul", q, b("Transpose", keys, perm=(0, 1, 3, 2)))
    return [b("MatMul", b("Softmax", scores, axis=-1), values)]


def attended_feed(dtype: int) -> dict[str, np.ndarray]:
    shapes = {"x": (2, 5, K), "cos": (5, HEAD), "sin": (5, HEAD)}
    return {name: draw(*shape, seed=3).astype(Builder(dtype).numpy) for name, shape in shapes.items()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("parts", [split, sliced])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("left_out", [None, "MatMul_0/0", "MatMul_0/128"])
def test_a_range_that_an_attention_reads_as_it_is_does_not_keep_the_product(
    parts: Parts, dtype: int, left_out: str | None
) -> None:
    """It joins its neighbour; where one of the ranges is left out, the product stays for that alone."""
    b = Builder(dtype)
    model = b.model(*attended(b, parts))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    found = {site.fusion.anchor: (site.fusion.pattern, len(site.match.live_outs)) for site in analysis.sites}
    (scores,) = (site.fusion.anchor for site in analysis.sites if site.fusion.pattern == "attention")
    assert found == {"MatMul_0/0": ("column_ranges", 1), "MatMul_0/128": ("column_ranges", 2), scores: ("attention", 1)}
    assert not analysis.skipped
    plan = {site.fusion.anchor: site.fusion.pattern for site in analysis.sites if site.fusion.anchor != left_out}
    chosen = analyse_model(model, resolve("sm_90a,sm_80", list), selection=Selection(plan=plan))
    fused = rewritten(chosen)
    onnx.checker.check_model(fused)
    left = [node.op_type for node in fused.graph.node if node.op_type in ("MatMul", "Split", "Slice")]
    assert len(left) == {None: 0, "MatMul_0/0": 2, "MatMul_0/128": 2 if parts is split else 3}[left_out]
    feed = attended_feed(dtype)
    for before, after in zip(run(model, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("parts", [split, sliced])
def test_a_range_by_itself_means_what_it_meant(parts: Parts) -> None:
    b = Builder()
    model = b.model(*attended(b, parts))
    sites = [site for site in analyse_model(model, resolve("sm_80", list)).sites if site.match.shared]
    assert [len(site.fusion.outputs) for site in sites] == [1, 2]
    for site in sites:
        check_meaning(model, site.fusion, attended_feed(FLOAT))


@pytest.mark.parametrize("parts", [split, sliced])
def test_ranges_that_an_attention_reads_as_they_are_stay_one_product(parts: Parts) -> None:
    """No range has an epilogue that a kernel of its own would spare."""
    b = Builder(FLOAT16)
    analysis = analyse_model(b.model(*attended(b, parts, are_turned=False)), resolve("sm_80", list))
    assert [site.fusion.pattern for site in analysis.sites] == ["attention"]


@pytest.mark.parametrize("parts", [split, sliced])
def test_a_weight_that_ranges_alone_read_is_stored_in_another_order(parts: Parts) -> None:
    """What stays of the product is read by nobody, though a range of it keeps its name."""
    b = Builder()
    model = b.model(*attended(b, parts, depth=512))
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert analysis.transposed == {"weight"}
    assert [site.match.name for site in analysis.sites if site.match.shared] == ["MatMul_0/0", "MatMul_0/128"]


@pytest.mark.parametrize("parts", [split, sliced])
def test_a_range_by_itself_that_no_neighbour_is_as_wide_as_has_a_kernel_alone(parts: Parts) -> None:
    b = Builder(FLOAT16)
    model = b.model(*attended(b, parts, of_values=2 * HEAD))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    nodes = {site.fusion.anchor: len(site.match.nodes) for site in analysis.sites if site.match.shared}
    assert set(nodes) == {"MatMul_0/0", "MatMul_0/128", "MatMul_0/192"}
    assert nodes["MatMul_0/192"] == 0
    feed = attended_feed(FLOAT16)
    for before, after in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def unbound_by_split(b: Builder, moved: str) -> list[str]:
    return [b("Squeeze", each, b.integers(0)) for each in b("Split", moved, outputs=3, axis=0, num_outputs=3)]


def unbound_by_slice(b: Builder, moved: str) -> list[str]:
    ends = [(b.integers(index), b.integers(index + 1)) for index in range(3)]
    return [b("Squeeze", b("Slice", moved, *each, b.integers(0)), b.integers(0)) for each in ends]


def indexed(b: Builder, moved: str) -> list[str]:
    return [b("Gather", moved, b.scalar(index), axis=0) for index in range(3)]


@pytest.mark.parametrize("apart", [unbound_by_split, unbound_by_slice, indexed])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
def test_ranges_that_are_moved_together_leave_no_copy(
    apart: Callable[[Builder, str], list[str]], bias: bool, dtype: int
) -> None:
    """As in DeiT and DINO: with the scale behind the scores nothing but views stands between ranges and scores."""
    b = Builder(dtype)
    product = b("MatMul", b.input("x", ("batch", "rows", K)), b.array(draw(K, 6 * HEAD), "weight"))
    product = b("Add", product, b.array(draw(6 * HEAD), "bias")) if bias else product
    moved = b("Transpose", b("Reshape", product, b.integers(0, 0, 3, 2, HEAD)), perm=(2, 0, 3, 1, 4))
    q, k, v = apart(b, moved)
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), b.array(0.25))
    model = b.model(b("MatMul", b("Softmax", scores, axis=-1), v))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    first = analysis.sites[0]
    assert (first.fusion.pattern, len(first.match.live_outs)) == ("column_ranges", 3)
    fused = rewritten(analysis)
    assert not {"Transpose", "Split", "Slice", "Gather"} & {node.op_type for node in fused.graph.node}
    feed = {"x": attended_feed(dtype)["x"]}
    for before, after in zip(run(model, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()


def of_each_head_indexed(b: Builder, product: str) -> list[str]:
    """BLOOM, Persimmon."""
    heads = b("Reshape", product, b.integers(0, 0, 2, 3, HEAD))
    return [b("Gather", heads, b.scalar(index), axis=3) for index in range(3)]


def of_each_head_split(b: Builder, product: str) -> list[str]:
    """GPT-NeoX, Megatron."""
    return b("Split", b("Reshape", product, b.integers(0, 0, 2, 3 * HEAD)), outputs=3, axis=3, num_outputs=3)


def of_each_head_sliced(b: Builder, product: str) -> list[str]:
    heads = b("Reshape", product, b.integers(0, 0, 2, 3 * HEAD))
    return [b("Slice", heads, *map(b.integers, (start, start + HEAD, 3))) for start in range(0, 3 * HEAD, HEAD)]


def attended_of_each_head(apart: Callable[[Builder, str], list[str]], bias: bool, dtype: int) -> onnx.ModelProto:
    b = Builder(dtype)
    product = b("MatMul", b.input("x", ("batch", "rows", K)), b.array(draw(K, 6 * HEAD), "weight"))
    product = b("Add", product, b.array(draw(6 * HEAD), "bias")) if bias else product
    q, k, v = (b("Transpose", each, perm=perm) for each, perm in zip(apart(b, product), PERMS, strict=True))
    return b.model(b("MatMul", b("Softmax", b("Mul", b("MatMul", q, k), b.array(0.25)), axis=-1), v))


@pytest.mark.parametrize("apart", [of_each_head_indexed, of_each_head_split, of_each_head_sliced])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
def test_a_query_a_key_and_a_value_of_each_head_leave_no_copy(
    apart: Callable[[Builder, str], list[str]], bias: bool, dtype: int
) -> None:
    model = attended_of_each_head(apart, bias, dtype)
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    first, second = analysis.sites
    assert (first.fusion.pattern, second.fusion.pattern) == ("column_ranges", "attention")
    assert len(first.match.live_outs) == 3
    fused = rewritten(analysis, transposed=True)
    assert not {"MatMul", "Add", "Split", "Slice", "Gather"} & {node.op_type for node in fused.graph.node}
    feed = {"x": attended_feed(dtype)["x"]}
    # The weight is stored part by part, and the body puts it in the model's order.
    expected, actual = (cpu_session(each, folds=True).run(None, feed) for each in (model, fused))
    assert [each.tobytes() for each in actual] == [each.tobytes() for each in expected]
    if dtype == FLOAT:
        (_, fusion), _ = found(model)
        check_meaning(model, fusion, feed)


@pytest.mark.parametrize("apart", [of_each_head_indexed, of_each_head_split, of_each_head_sliced])
def test_parts_of_each_head_of_a_weight_that_stays_are_no_parts(apart: Callable[[Builder, str], list[str]]) -> None:
    model = attended_of_each_head(apart, True, FLOAT16)
    analysis = analyse_model(model, resolve("sm_90a", list), keep_weights=True)
    assert not analysis.transposed
    feed = {"x": attended_feed(FLOAT16)["x"]}
    for before, after in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def heads_of(b: Builder, t: str) -> str:
    return b("Reshape", t, b.integers(0, 0, 2, HEAD))


def heads_of_computed_sizes(b: Builder, t: str) -> str:
    """As TorchScript writes a view or einops' rearrange of open sizes."""
    shape = b("Shape", t)
    sizes = [b("Unsqueeze", b("Gather", shape, b.scalar(axis)), b.integers(0)) for axis in range(3)]
    width = b("Div", sizes.pop(), b.integers(2))
    return b("Reshape", t, b("Concat", *sizes, b.integers(2), width, axis=0))


def attended_heads(
    b: Builder,
    parts: Parts,
    bias: bool,
    beside: Callable[[Builder, str], list[str]],
    heads_of: Callable[[Builder, str], str] = heads_of,
) -> list[str]:
    """As in GPT-2 and vit-pytorch: the attention has all views behind the ranges, and the scale behind the scores."""
    sizes = (2 * HEAD,) * 3
    product = packed(b, sizes, bias)
    ranges = parts(b, product, sizes)
    heads = [heads_of(b, each) for each in ranges]
    q, k, v = (b("Transpose", each, perm=perm) for each, perm in zip(heads, PERMS, strict=True))
    scores = b("Mul", b("MatMul", q, k), b.array(0.25))
    return [b("MatMul", b("Softmax", scores, axis=-1), v), *beside(b, product)]


PERMS = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))


def sliced_by_computed_sizes(b: Builder, t: str, sizes: Sequence[int]) -> list[str]:
    """As TorchScript writes `chunk` of open sizes: thirds of the last dimension, which is known, rounded up."""
    last = b("Gather", b("Shape", t), b.integers(-1))
    third = b("Div", b("Add", last, b.integers(len(sizes) - 1)), b.integers(len(sizes)))
    ends = [b.integers(0), *(b("Mul", third, b.integers(count + 1)) for count in range(len(sizes)))]
    return [b("Slice", t, start, end, b.integers(-1)) for start, end in pairwise(ends)]


@pytest.mark.parametrize("parts", [split, sliced, sliced_by_computed_sizes])
@pytest.mark.parametrize("heads", [heads_of, heads_of_computed_sizes])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
def test_equal_ranges_that_are_only_read_apart_leave_no_copy(
    parts: Parts, heads: Callable[[Builder, str], str], bias: bool, dtype: int
) -> None:
    b = Builder(dtype)
    model = b.model(*attended_heads(b, parts, bias, lambda b, product: [], heads))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    first, second = analysis.sites
    assert (first.fusion.pattern, second.fusion.pattern) == ("column_ranges", "attention")
    assert len(first.match.live_outs) == 3
    fused = rewritten(analysis)
    assert not {"MatMul", "Add", "Split", "Slice"} & {node.op_type for node in fused.graph.node}
    feed = {"x": attended_feed(dtype)["x"]}
    for before, after in zip(run(model, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()
    if dtype == FLOAT:
        check_meaning(model, first.fusion, feed)


@pytest.mark.parametrize("parts", [split, sliced])
@pytest.mark.parametrize("beside", [lambda b, product: [product], lambda b, product: [b("ReduceMax", product)]])
def test_equal_ranges_of_what_is_read_whole_are_not_stored_twice(
    parts: Parts, beside: Callable[[Builder, str], list[str]]
) -> None:
    b = Builder(FLOAT16)
    analysis = analyse_model(b.model(*attended_heads(b, parts, True, beside)), resolve("sm_90a,sm_80", list))
    stored = [len(site.match.live_outs) for site in analysis.sites if site.fusion.pattern != "attention"]
    assert stored == [1]


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
def test_a_range_that_no_kernel_stores_as_it_is_moved_leaves_the_others_theirs(dtype: int) -> None:
    """As in Flux's single blocks: q, k and v are moved together, and what is normalised of them reads a Slice each."""
    b = Builder(dtype, opset=18)
    first, second = split(b, packed(b, (6 * HEAD, 8 * HEAD), bias=True), (6 * HEAD, 8 * HEAD))
    moved = b("Transpose", b("Reshape", first, b.integers(0, 0, 3, 2, HEAD)), perm=(2, 0, 3, 1, 4))
    peaks = [b("ReduceMax", each, b.integers(-1)) for each in unbound_by_slice(b, moved)]
    model = b.model(*peaks, b("Tanh", second))
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert [(site.match.name, site.match.out) for site in analysis.sites] == [
        ("MatMul_0/0", first), (f"MatMul_0/{6 * HEAD}", model.graph.output[3].name),
    ]  # fmt: skip
    fused = rewritten(analysis)
    assert not {"MatMul", "Split", "Tanh"} & {node.op_type for node in fused.graph.node}
    feed = feed_of(model)
    for before, after in zip(run(model, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()
