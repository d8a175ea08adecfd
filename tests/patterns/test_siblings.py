"""Matches of one input that become one: q, k and v. What they mean, when they pay, and when they may not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import Fusion
from onnxfuse.limits import MAX_PARTS
from onnxfuse.lowering.site import Site
from onnxfuse.patterns import Match, match_sites
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.strategy import Strategy, is_nowhere_slower, saves
from tests.helpers.matching import FEED, K, check_meaning, draw, gate, linear, silu, split_num_outputs
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.tools.sweep import rewritten

HEADS, WIDTH = 2, 4
DEVICE = ARCHITECTURES["sm_90a"]

Found = tuple[Match, Fusion]


def joined(model: onnx.ModelProto, pays: bool = True) -> list[Found]:
    """The matches where joining always pays, or never."""
    found = match_sites(Graph(load_model(model)), lambda match, fusion: (match, fusion), lambda joint, alone: pays)
    return list(found.fused)


def projection(b: Builder, number: int, columns: int = HEADS * WIDTH) -> str:
    product = b("MatMul", "x", b.array(draw(K, columns, seed=number), f"w{number}"))
    return b("Add", product, b.array(draw(columns, seed=number), f"b{number}"))


def head(b: Builder, number: int, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
    split = b("Reshape", projection(b, number), b.integers(0, 0, HEADS, WIDTH))
    return b("Transpose", split, perm=perm)


def inputs(b: Builder) -> None:
    b.input("x", ("batch", "rows", K))


def attention(b: Builder) -> list[str]:
    inputs(b)
    q, k, v = head(b, 0), head(b, 1, (0, 2, 3, 1)), head(b, 2)
    return [b("MatMul", b("Softmax", b("MatMul", q, k)), v)]


def attention_of_gemms(b: Builder) -> list[str]:
    """As onnxsim writes it: each projection a Gemm of two dimensions that the heads are split from at once."""
    inputs(b)
    heads = []
    for number, perm in enumerate(((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))):
        weight, bias = b.array(draw(K, HEADS * WIDTH, seed=number)), b.array(draw(HEADS * WIDTH, seed=number))
        t = b("Gemm", b("Reshape", "x", b.integers(-1, K)), weight, bias)
        rows = b("Slice", b("Shape", "x"), b.integers(0), b.integers(2))
        shape = b("Concat", rows, b.integers(HEADS, WIDTH), axis=0)
        heads.append(b("Transpose", b("Reshape", t, shape), perm=perm))
    q, k, v = heads
    return [b("MatMul", b("Softmax", b("MatMul", q, k)), v)]


def gemms(b: Builder) -> list[str]:
    """With nothing behind them but views across their axes, as windows are put together again."""
    x = b.input("x", (2, 5, K))
    outs = []
    for number in range(3):
        bias = b.array(draw(HEADS * WIDTH, seed=number))
        t = b("Gemm", b("Reshape", x, b.integers(10, K)), b.array(draw(K, HEADS * WIDTH, seed=number)), bias)
        outs.append(t)
    return [b("Softmax", b("Reshape", t, b.integers(4, -1))) for t in outs]


def activations(b: Builder) -> list[str]:
    inputs(b)
    return [silu(b, projection(b, 0)), b("Tanh", projection(b, 1))]


def residuals(b: Builder) -> list[str]:
    inputs(b)
    residual = b.input("residual", ("batch", "rows", HEADS * WIDTH))
    return [b("Add", projection(b, number), residual) for number in range(2)]


def products_of(found: list[Found]) -> list[int]:
    return [len(match.products) for match, _ in found]


@pytest.mark.parametrize(
    ("build", "products"), [(attention, 3), (attention_of_gemms, 3), (gemms, 3), (activations, 2), (residuals, 2)]
)
def test_one_fusion_makes_what_several_made(build, products: int) -> None:
    b = Builder()
    model = b.model(*build(b))
    (site, *others) = joined(model)
    assert products_of([site]) == [products]
    assert len(site[1].outputs) == products
    assert products_of(others) == [1] * len(others)
    feed = FEED | {"residual": draw(2, 5, HEADS * WIDTH, seed=9).astype(np.float32)}
    check_meaning(model, site[1], feed)
    alone = joined(model, pays=False)
    stored = {tensor for _, fusion in alone for tensor in fusion.outputs}
    assert {tensor.name for tensor in site[1].outputs} <= {tensor.name for tensor in stored}
    assert sum(products_of(alone)) == sum(products_of([site, *others]))


def test_the_pattern_has_a_name_of_its_own() -> None:
    b = Builder()
    ((_, fusion), *_) = joined(b.model(*attention(b)))
    assert (fusion.pattern, len(fusion.parts), len(fusion.rhs)) == ("sibling_gemms", 3, 3)


def test_a_gate_stays_by_itself() -> None:
    b = Builder()
    inputs(b)
    packed = gate(b, *split_num_outputs(b, projection(b, 0, 2 * HEADS * WIDTH)))
    model = b.model(packed, *(b("Tanh", projection(b, number)) for number in (1, 2)))
    assert [(fusion.pattern, len(fusion.parts)) for _, fusion in joined(model)] == [
        ("split_gemm", 2), ("sibling_gemms", 2),
    ]  # fmt: skip


def test_what_pays_is_asked_of_the_whole() -> None:
    """The caller sees the one fusion and every one that it stands for."""
    asked: list[tuple[int, list[int]]] = []

    def pays(joint: Found, alone: Sequence[Found]) -> bool:
        asked.append((len(joint[0].products), [len(match.products) for match, _ in alone]))
        return True

    b = Builder()
    model = b.model(*attention(b))
    match_sites(Graph(load_model(model)), lambda match, fusion: (match, fusion), pays)
    assert asked == [(2, [1, 1]), (3, [1, 1, 1])]


def test_a_kernel_takes_so_many() -> None:
    b = Builder()
    inputs(b)
    found = joined(b.model(*(b("Tanh", projection(b, number)) for number in range(MAX_PARTS + 2))))
    assert sorted(products_of(found)) == [2, MAX_PARTS]


def test_other_columns_are_left_out() -> None:
    b = Builder()
    inputs(b)
    model = b.model(
        b("Tanh", projection(b, 0)), b("Tanh", projection(b, 1, 2 * HEADS * WIDTH)), b("Tanh", projection(b, 2))
    )
    assert [[product.label for product in match.products] for match, _ in joined(model)] == [
        ["MatMul_0", "MatMul_6"], ["MatMul_3"],
    ]  # fmt: skip


def test_what_one_makes_the_other_does_not_read() -> None:
    """The second product's scale is computed from the first one's result: no place is right for both."""
    b = Builder()
    inputs(b)
    first = b("Tanh", projection(b, 0))
    model = b.model(first, b("Mul", projection(b, 1), b("Softmax", first)))
    assert products_of(joined(model)) == [1, 1]


def test_a_refused_whole_leaves_its_parts() -> None:
    def make_site(match: Match, fusion: Fusion) -> Found:
        if len(match.products) > 2:
            raise NotFusable("no_tile_fits", match.label, "three are too many")
        return match, fusion

    b = Builder()
    model = b.model(*attention(b))
    found = match_sites(Graph(load_model(model)), make_site, lambda joint, alone: True).fused
    assert sorted(len(match.products) for match, _ in found) == [1, 2]


@pytest.mark.parametrize("build", [attention, activations, residuals])
@pytest.mark.parametrize("epilogue_only", [False, True])
def test_bits_on_the_cpu_are_the_same(build, epilogue_only: bool) -> None:
    b = Builder()
    model = b.model(*build(b))
    feed = FEED | {"residual": draw(2, 5, HEADS * WIDTH, seed=9).astype(np.float32)}
    feed = {value.name: feed[value.name] for value in model.graph.input}
    expected = run(model, feed)
    analysis = analyse_model(model, [DEVICE])
    assert sum(len(site.match.products) > 1 for site in analysis.sites) == 1
    for wanted, actual in zip(expected, run(rewritten(analysis, epilogue_only), feed), strict=True):
        assert wanted.tobytes() == actual.tobytes()


def site_of(m: int, k: int, n: int, projections: int = 3) -> list[Site]:
    """What becomes of some projections of an input [m, k] to n columns each."""
    b = Builder(FLOAT16)
    b.input("x", (m, k))
    weights = [b.array(np.zeros((k, n), np.float16), f"w{number}") for number in range(projections)]
    model = b.model(*(b("Tanh", b("MatMul", "x", weight)) for weight in weights))
    return list(analyse_model(model, [DEVICE]).sites)


@pytest.mark.parametrize("sizes", [(512, 1280, 1280), (154, 768, 320), (1, 768, 768), (4096, 768, 768)])
def test_small_products_share_a_kernel(sizes: tuple[int, int, int]) -> None:
    """Each alone fills a part of the chip, or a part of a last wave."""
    assert [len(site.match.products) for site in site_of(*sizes)] == [3]


def test_saving_is_a_mean_over_rows_on_every_architecture() -> None:
    other = ARCHITECTURES["sm_80"]
    cheap, dear = [1.0, 10.0], [4.0, 40.0]
    assert saves({DEVICE: [3.0, 12.0]}, {DEVICE: [cheap, cheap]})
    assert not saves({DEVICE: [3.0 + calibration(DEVICE).launch, 30.0]}, {DEVICE: [cheap, cheap]})
    assert saves({DEVICE: [9.0, 90.0], other: [3.0, 12.0]}, {DEVICE: [dear, dear, dear], other: [cheap, cheap, cheap]})
    assert not saves({DEVICE: [9.0, 90.0], other: [13.0, 90.0]}, {DEVICE: [dear, dear], other: [cheap, cheap]})


@pytest.mark.parametrize("columns", [8192, 7184])
def test_large_products_share_a_kernel_only_where_that_is_faster(columns: int) -> None:
    """A launch is nothing beside them: the cost model's choice is no slower than the three by themselves."""
    sites = site_of(16384, 1024, columns)
    (alone,) = site_of(16384, 1024, columns, projections=1)
    assert sum(len(site.match.products) for site in sites) == 3
    assert sum(map(microseconds, sites)) <= 3 * microseconds(alone) + 2 * calibration(DEVICE).launch


def microseconds(site: Site) -> float:
    (times,) = site.estimates[DEVICE]
    return times[site.strategy]


@pytest.mark.parametrize("projections", [1, 3])
def test_products_that_the_library_makes_faster_one_by_one_share_a_kernel(projections: int) -> None:
    """224 rows of 5504 -> 240 with bias, fp32; of 12 of 2102 -> 2304 three took 53 us, one kernel of them all 42."""
    b = Builder()
    x = b.input("x", (224, 5504))
    weights = [b.array(np.zeros((5504, 240)), f"w{number}") for number in range(projections)]
    biases = [b.array(np.zeros(240), f"b{number}") for number in range(projections)]
    outs = [b("Add", b("MatMul", x, weight), bias) for weight, bias in zip(weights, biases, strict=True)]
    analysis = analyse_model(b.model(*outs), [DEVICE], keep_weights=True)
    (site,) = analysis.sites
    assert len(site.fusion.parts) == projections
    assert site.strategy is (Strategy.ONE_KERNEL if projections == 3 else Strategy.EPILOGUE_ONLY)


def test_a_product_with_nothing_behind_it_joins_where_that_pays() -> None:
    b = Builder()
    t = linear(b)
    model = b.model(b("Tanh", t), b("MatMul", "x", b.array(draw(K, HEADS * WIDTH), "plain")))
    assert products_of(joined(model)) == [2]
    assert products_of(joined(model, pays=False)) == [1]


@pytest.mark.parametrize("experts", [4, 8, 12])
@pytest.mark.parametrize("order", ["in pairs", "gates first", "mirrored"])
def test_every_gate_is_found_however_many_products_read_the_input(experts: int, order: str) -> None:
    """A dense mixture of experts: the products of one expert meet, wherever they stand among those of all."""
    b = Builder()
    x = b.input("x", ("rows", 256))
    router = b("MatMul", x, b.array(draw(256, experts), "router"))
    names = [(kind, expert) for expert in range(experts) for kind in ("gate", "up")]
    if order != "in pairs":
        names.sort(key=lambda name: (name[0], name[1] if order == "gates first" or name[0] == "up" else -name[1]))
    made = {name: b("MatMul", x, b.array(draw(256, 512, seed=index), f"w{index}")) for index, name in enumerate(names)}
    outs = [gate(b, made["up", expert], made["gate", expert]) for expert in range(experts)]
    found = match_sites(Graph(load_model(b.model(router, *outs))), lambda match, fusion: fusion)
    assert [len(fusion.parts) for fusion in found.fused] == [2] * experts


def bare_projections(b: Builder, rows: int | str = "rows", width: int = 64) -> list[str]:
    """Of q a scale that is computed behind k's heads, k and v with nothing: an attention takes their heads."""
    x = b.input("x", ("batch", rows, width))
    q, k, v = (b("MatMul", x, b.array(draw(width, width, seed=seed), f"bare{seed}")) for seed in range(3))
    split = b.integers(0, 0, 2, width // 2)
    keys = b("Transpose", b("Reshape", k, split), perm=(0, 2, 3, 1))
    scale = b("Sqrt", b.input("scale", (1,)))
    query = b("Mul", b("Transpose", b("Reshape", q, split), perm=(0, 2, 1, 3)), scale)
    values = b("Transpose", b("Reshape", v, split), perm=(0, 2, 1, 3))
    out = b("Transpose", b("MatMul", b("Softmax", b("MatMul", query, keys), axis=-1), values), perm=(0, 2, 1, 3))
    return [b("Reshape", out, b.integers(0, 0, width))]


def test_projections_whose_heads_an_attention_takes_are_siblings() -> None:
    """Nothing is left behind k and v, so that by themselves they would be the library's."""
    b = Builder(FLOAT16)
    model = b.model(*bare_projections(b))
    analysis = analyse_model(model, [DEVICE])
    assert [(site.fusion.pattern, len(site.match.products)) for site in analysis.sites] == [
        ("sibling_gemms", 3), ("attention", 2),
    ]  # fmt: skip
    assert not analysis.skipped
    feed = {"x": draw(2, 5, 64, seed=9).astype(np.float16), "scale": np.array([0.1], np.float16)}
    for before, after in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert before.tobytes() == after.tobytes()


def test_projections_whose_heads_are_normalised_are_siblings() -> None:
    """No kernel of a product normalises rows of heads, so nothing follows any of the three."""
    b, width, head = Builder(FLOAT16), 1024, 64
    x = b.input("x", ("batch", "rows", width))
    products = [b("MatMul", x, b.array(draw(width, width, seed=seed), f"bare{seed}")) for seed in range(3)]
    q, k, v = (b("Reshape", product, b.integers(0, 0, width // head, head)) for product in products)
    q, k = (b("LayerNormalization", heads, *(b.array(draw(head, seed=9)) for _ in "sb")) for heads in (q, k))
    analysis = analyse_model(b.model(q, k, v), [DEVICE])
    found = sorted((site.fusion.pattern, len(site.match.products)) for site in analysis.sites)
    assert found == [("normalisation", 0), ("normalisation", 0), ("sibling_gemms", 3)]


@pytest.mark.parametrize(("one", "pays"), [([3.0, 4.0], True), ([3.0, 5.1], False)])
def test_beside_bare_products_one_kernel_is_slower_at_no_size(one: list[float], pays: bool) -> None:
    assert is_nowhere_slower({DEVICE: one}, {DEVICE: [[2.0, 2.0], [2.0, 3.0]]}) is pays


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_of_each_batch_shares_no_kernel_with_one_of_all(turned: bool) -> None:
    """What is a batch for one is rows for the other, and a kernel walks one of the two."""
    b = Builder()
    x = b.input("x", (2, "rows", K))
    weights = [b.array(draw(2, K, 8)), b.array(draw(K, 8))]
    model = b.model(*(b("Relu", b("MatMul", x, weight)) for weight in weights[:: -1 if turned else 1]))
    matches = joined(model)
    assert [len(fusion.rhs) for _, fusion in matches] == [1, 1]
    for _, fusion in matches:
        check_meaning(model, fusion, FEED)


def test_weights_of_each_batch_share_a_kernel() -> None:
    b = Builder()
    x = b.input("x", (2, "rows", K))
    model = b.model(*(b("Relu", b("MatMul", x, b.array(draw(2, K, 8, seed=seed)))) for seed in range(2)))
    ((_, fusion),) = joined(model)
    assert [rhs.einops for rhs in fusion.rhs] == ["b k n", "b k n"]
    check_meaning(model, fusion, FEED)
