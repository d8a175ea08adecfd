"""Epilogue only: the product stays a node, and one kernel computes exactly what followed it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxfuse.analysis.axis_mapping import map_axes, map_pointwise
from onnxfuse.device import resolve
from onnxfuse.dtypes import F16, F32
from onnxfuse.errors import NotFusable
from onnxfuse.graph.op_names import FUSED_GEMM, FUSED_POINTWISE, kind_of
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import Fusion, Pointwise, Tensor
from onnxfuse.limits import MAX_LOADS
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.schedule.pointwise_plan import make_pointwise_plan
from onnxfuse.schedule.strategy import Strategy
from tests.helpers import corpus
from tests.helpers.fusions import dims, fusion
from tests.helpers.matching import check_meaning, with_product
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.helpers.reference_fusion import OPS, evaluate, spread
from tests.patterns.test_products import feed_of
from tests.tools.sweep import rewritten

SIZES = {"b": 2, "m": 3, "n": 4, "k": 5, "p": 2}


def products_of(built: Fusion) -> tuple[Tensor, ...]:
    columns = "(p n)" if "p" in built.rhs[0].axes else "n"
    rows = " ".join(axis for axis in built.lhs.axes if axis != "k")
    return tuple(Tensor(f"product{i}", built.lhs.dtype, dims(f"{rows} {columns}")) for i in range(len(built.rhs)))


def evaluate_pointwise(pointwise: Pointwise, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in float64, straight from the IR."""
    sizes = {axis.name: axis.size for axis in pointwise.axes}
    rows = pointwise.outs[0].tensor.axes
    names: dict[str, np.ndarray] = {}
    for index, load in enumerate(pointwise.loads):
        tensor = pointwise.operands[load.operand]
        array = spread(tensor, values[tensor.name], rows if load.part is None else ("p", *rows), sizes)
        names[f"op{index}"] = array if load.part is None else array[load.part]
    for step in pointwise.steps:
        names[step.result] = OPS[step.op](*(v if isinstance(v, float) else names[v] for v in step.inputs))
    return [np.broadcast_to(names[out.value], [sizes[axis] for axis in rows]) for out in pointwise.outs]


def random_values(built: Pointwise) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        tensor.name: rng.standard_normal([int(np.prod([built.size(axis) or 1 for axis in dim])) for dim in tensor.dims])
        for tensor in built.inputs
    }


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("operands", [(), (("n", F16),), (("b m n", F32), ("m 1", F16)), (("(p n)", F16), ("1", F32))])
def test_it_computes_what_the_fusion_computes(parts: int, operands) -> None:
    if parts == 1 and any("p" in text for text, _ in operands):
        pytest.skip("one part is not packed")
    rhs = "k (p n)" if parts > 1 else "k n"
    built = fusion(
        {axis: size for axis, size in SIZES.items() if parts > 1 or axis != "p"},
        lhs="b m k", out="b m n", rhs=rhs, operands=operands, parts=parts,
    )  # fmt: skip
    values = random_values(built)
    product = values["lhs"] @ values["rhs"]
    epilogue_only = epilogue_of(built, products_of(built))
    (expected,) = evaluate(built, values)
    (actual,) = evaluate_pointwise(epilogue_only, values | {"product0": product})
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert "k" not in {axis.name for axis in epilogue_only.axes}


def test_each_weights_product_is_an_operand_of_its_own() -> None:
    built = fusion({"m": None, "n": 8, "k": 5}, parts=2)
    parts = tuple(replace(part, tensor=index) for index, part in enumerate(built.parts))
    built = replace(built, rhs=(built.rhs[0], replace(built.rhs[0], name="other")), parts=parts)
    epilogue_only = epilogue_of(built, products_of(built))
    assert [tensor.name for tensor in epilogue_only.inputs] == ["product0", "product1"]
    assert [(load.operand, load.part) for load in epilogue_only.loads] == [(0, None), (1, None)]


def test_the_products_parts_count_as_loads() -> None:
    operands = [("n", F16)] * (MAX_LOADS - 1)
    built = fusion({"m": None, "n": 8, "k": 5, "p": 2}, rhs="k (p n)", operands=operands, parts=2)
    with pytest.raises(NotFusable, match="too_many_operands"):
        epilogue_of(built, products_of(built))


def test_rows_flatten_where_only_lhs_stood_in_the_way() -> None:
    built = fusion({"b": None, "m": None, "n": 8, "k": 5}, lhs="b m k", out="b m n", operands=[("b m n", F16)])
    mapping = replace(map_axes(built), batch=("b",), m=("m",))
    epilogue_only = epilogue_of(built, (Tensor("product", F16, dims("b m n")),))
    assert map_pointwise(epilogue_only, mapping).m == ("b", "m")
    transposed = replace(epilogue_only, operands=(Tensor("product", F16, dims("m b n")), *epilogue_only.operands[1:]))
    assert (map_pointwise(transposed, mapping).batch, map_pointwise(transposed, mapping).m) == (("b",), ("m",))


IMAGE = "b c y"
JOINED = [  # sizes, what else is read; the axes of n, and elements of an access
    ({"c": 8, "y": 49}, [(IMAGE, F16)], ("c", "y"), 8),
    ({"c": 8, "y": None}, [(IMAGE, F16)], ("c", "y"), 8),
    ({"c": 12, "y": 49}, [(IMAGE, F16), ("1", F32)], ("c", "y"), 4),
    ({"c": None, "y": 49, "b": 16}, [(IMAGE, F16)], ("b", "c", "y"), 8),
    ({"c": 7, "y": 49}, [(IMAGE, F16)], ("y",), 1),
    ({"c": 8, "y": 196}, [(IMAGE, F16)], ("c", "y"), 8),
    ({"c": 8, "y": 64}, [(IMAGE, F16)], ("y",), 8),
    ({"c": 8, "y": 49}, [("b c 1", F16)], ("y",), 1),  # a number of each row lies between
    ({"c": 8, "y": 49}, [("1 1 y", F16)], ("y",), 1),
]


@pytest.mark.parametrize(("sizes", "operands", "columns", "width"), JOINED)
def test_rows_that_begin_anywhere_are_joined(sizes, operands, columns: tuple[str, ...], width: int) -> None:
    """Of images: whatever is read and written wide is so at every element where an access of it begins."""
    built = fusion({"b": None, "k": 5} | sizes, lhs="c k", rhs="b k y", out=IMAGE, operands=operands)
    epilogue_only = epilogue_of(built, (Tensor("product", F16, dims(IMAGE)),))
    mapping = map_pointwise(epilogue_only, map_axes(built))
    assert mapping.n == columns
    assert (*mapping.batch, *mapping.m, *mapping.n) == ("b", "c", "y")
    (device,) = resolve("sm_90a", list)
    plan = make_pointwise_plan(epilogue_only, mapping, device)
    tile = plan.variants[0].tile
    assert plan.variants[0].spec.outs[0].width == width
    assert tile.block_n % tile.span == 0
    assert tile.block_m * tile.block_n % (tile.threads * tile.span) == 0


def test_windows_of_rows_are_not_joined() -> None:
    """Other columns of the product lie between those of one row and of the next."""
    built = fusion({"c": 8, "y": 49, "b": None, "k": 5}, lhs="c k", rhs="b k y", out=IMAGE)
    dense = Tensor("product", F16, dims(IMAGE))
    for product, columns in ((dense, ("c", "y")), (replace(dense, wide=(2, 98)), ("y",))):
        assert map_pointwise(epilogue_of(built, (product,)), map_axes(built)).n == columns


def test_few_rows_are_spread_over_more_blocks() -> None:
    built = fusion({"m": None, "n": 1280, "k": 5, "p": 2}, rhs="k (p n)", parts=2)
    epilogue_only = epilogue_of(built, products_of(built))
    (device,) = resolve("sm_90a", list)
    plan = make_pointwise_plan(epilogue_only, map_pointwise(epilogue_only, map_axes(built)), device)
    flat, tall, checked, narrow = plan.variants
    assert flat.tile.block_m < tall.tile.block_m
    assert (flat.min_m, flat.max_m + 1, tall.max_m) == (0, tall.min_m, narrow.max_m)
    assert checked.spec.checked
    assert (checked.spec.loads, checked.spec.outs) == (tall.spec.loads, tall.spec.outs)
    assert {access.width for access in (*narrow.spec.loads, *narrow.spec.outs)} == {1}


def test_no_kernel_follows_one_that_fits_everything() -> None:
    """Columns of an output that lies transposed are stored one by one, so what is read decides alone."""
    built = fusion({"m": None, "n": 1280, "k": 5}, out="n m", operands=[("m n", F16)])
    epilogue_only = epilogue_of(built, products_of(built))
    (device,) = resolve("sm_90a", list)
    plan = make_pointwise_plan(epilogue_only, map_pointwise(epilogue_only, map_axes(built)), device)
    assert {out.width for out in plan.variants[0].spec.outs} == {1}
    assert [variant.spec.checked for variant in plan.variants][-2:] == [False, True]


# ---- In a model ------------------------------------------------------------------------------------------------------


def behind_everywhere(model: ModelProto) -> tuple[Analysis, ModelProto]:
    """The model with epilogues only wherever a site allows it: all but those that reshape by the product's input."""
    analysis = analyse_model(model, resolve("sm_80", list), attention=False)  # one kernel or none
    sites = with_product(analysis)
    assert sites
    assert all(site.epilogue_only is not None or site.match.shapes for site in sites)
    return analysis, rewritten(analysis, epilogue_only=True)


KEYS = corpus.families("ff_geglu", "ff_swiglu", "ff_gelu", "phi3", "bert", "sd15_unet_mini", size="tiny")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("key", KEYS)
def test_bits_are_the_same_on_the_cpu(key: str) -> None:
    original = corpus.materialize(key)
    analysis, fused = behind_everywhere(original)
    onnx.checker.check_model(fused)
    made = [kind_of(node.op_type) for node in fused.graph.node]
    sites = with_product(analysis)
    behind = sum(site.epilogue_only is not None for site in sites)
    assert made.count(FUSED_POINTWISE) == behind + len(analysis.sites) - len(sites), "and normalisations"
    assert made.count(FUSED_GEMM) == sum(site.epilogue_only is None for site in sites)
    for index in (0, 1):
        feed = corpus.feed(key, index)
        for expected, actual in zip(run(original, feed), run(fused, feed), strict=True):
            assert expected.tobytes() == actual.tobytes()


def gemm_model() -> ModelProto:
    b = Builder(FLOAT16)
    rng = np.random.default_rng(3)
    x = b.input("x", ("rows", 24))
    weight, bias = b.array(rng.standard_normal((16, 24)), "weight"), b.array(rng.standard_normal(16), "bias")
    t = b("Gemm", x, weight, bias, transB=1, alpha=0.5)
    first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    return b.model(b("Mul", first, b("Sigmoid", second)))


def test_gemms_own_bias_and_factor_stay_with_it() -> None:
    analysis, fused = behind_everywhere(gemm_model())
    assert [node.op_type for node in fused.graph.node] == ["Gemm", "FusedPointwise_0"]
    epilogue_only = analysis.sites[0].epilogue_only
    assert epilogue_only is not None
    assert [step.op for step in epilogue_only.fusion.steps] == ["sigmoid", "mul"]
    assert len(epilogue_only.fusion.operands) == 1
    x = np.random.default_rng(4).standard_normal((5, 24)).astype(np.float16)
    assert run(gemm_model(), {"x": x})[0].tobytes() == run(fused, {"x": x})[0].tobytes()


@pytest.mark.parametrize(
    ("arch", "strategy"),
    [
        ("sm_100", Strategy.EPILOGUE_ONLY),
        ("sm_120", Strategy.EPILOGUE_ONLY),
        ("sm_80", Strategy.ONE_KERNEL),
        ("sm_80,sm_90a,ptx", Strategy.ONE_KERNEL),
    ],
)
def test_an_architecture_without_a_kernel_of_its_own_gets_the_epilogue_only(arch: str, strategy: Strategy) -> None:
    key = "real/phi3.real.torchscript.op17.fp16.dynamic.onnx"
    analysis = analyse_model(corpus.folder() / key, resolve(arch, list))
    # Scores write more than they multiply: one kernel, however fast the library is. So it is where q, k and v share a
    # product: behind it would stand several.
    own = [site for site in with_product(analysis) if not site.match.shared]
    weighted = [site for site in own if all(product.is_weight for product in site.match.products)]
    assert {site.strategy for site in weighted} == {strategy}


@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize(("arch", "is_fused"), [("sm_100", False), ("sm_90a", True)])
def test_ranges_alone_are_no_kernels_where_the_library_multiplies_faster(
    arch: str, is_fused: bool, reshaped: bool
) -> None:
    b = Builder(FLOAT16)
    product = b("MatMul", b.input("x", (4096, 3072)), b.array(np.zeros((3072, 9216)), "weight"))
    ranges = b("Split", product, outputs=3, axis=-1, num_outputs=3)
    model = b.model(*(b("Reshape", each, b.integers(4096, 32, 96)) if reshaped else each for each in ranges))
    analysis = analyse_model(model, resolve(arch, list))
    multiplying = [site for site in analysis.sites if site.strategy is Strategy.ONE_KERNEL]
    assert [len(site.fusion.outs) for site in multiplying] == [3] * is_fused
    assert all(skipped.reason == "slower" for skipped in analysis.skipped)


def test_a_lone_op_behind_a_fast_product_is_left_alone() -> None:
    b = Builder(FLOAT16)
    weight = b.array(np.zeros((4096, 4096)), "weight")
    model = b.model(b("Relu", b("MatMul", b.input("x", (2048, 4096)), weight)))
    (skipped,) = analyse_model(model, resolve("sm_100", list)).skipped
    assert (skipped.reason, skipped.anchor) == ("slower", "MatMul_0")
    assert not analyse_model(model, resolve("sm_90a", list)).skipped


def test_exact_products_are_never_left_to_the_library() -> None:
    b = Builder()
    weight = b.array(np.zeros((4096, 4096)), "weight")
    model = b.model(b("Relu", b("MatMul", b.input("x", (4096, 4096)), weight)))
    (site,) = analyse_model(model, resolve("sm_100", list), "exact").sites
    assert (site.strategy, site.epilogue_only) == (Strategy.ONE_KERNEL, None)


# ---- Operands that repeat the product


def repeated(b: Builder, columns: int, places: tuple[int, ...], **gemm: int) -> str:
    """A product of one row an image, with dimensions of size 1 where pixels are."""
    rng = np.random.default_rng(5)
    t = b("Gemm", b.input("t", ("batch", 6)), b.array(rng.standard_normal((columns, 6))),
          b.array(rng.standard_normal(columns)), transB=1, **gemm)  # fmt: skip
    for place in places:
        t = b("Unsqueeze", t, b.integers(place))
    return t


def time_embedding(b: Builder) -> str:
    """As a ResNet block of a UNet adds it."""
    return b("Add", b.input("x", ("batch", 8, "height", "width")), repeated(b, 8, (2, 3)))


def embedding_first(b: Builder) -> str:
    return b("Add", repeated(b, 8, (2,)), b.input("x", ("batch", 8, "length")))


def channels_last(b: Builder) -> str:
    return b("Add", repeated(b, 8, (1, 1)), b.input("x", ("batch", "height", "width", 8)))


def scale_and_shift(b: Builder) -> str:
    """Two halves of the product, as in adaptive group normalisation."""
    scale, shift = b("Split", repeated(b, 16, (2, 3)), outputs=2, axis=1, num_outputs=2)
    scaled = b("Mul", b.input("x", ("batch", 8, "height", "width")), b("Add", scale, b.array(1.0)))
    return b("Relu", b("Add", scaled, shift))


def one_image(b: Builder) -> str:
    t = b("Unsqueeze", b("MatMul", b.input("t", (1, 6)), b.array(np.ones((6, 8)))), b.integers(2))
    return b("Mul", t, b.input("x", ("batch", 8, "length")))


REPEATED = [time_embedding, embedding_first, channels_last, scale_and_shift, one_image]


@pytest.mark.parametrize("dtype", [1, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("form", REPEATED, ids=lambda form: form.__name__)
def test_what_repeats_a_product_is_one_kernel_behind_it(form, dtype: int) -> None:
    b = Builder(dtype)
    model = b.model(form(b))
    (site,) = analyse_model(model, resolve("sm_90a,sm_80", list)).sites
    assert (site.strategy, site.plans) == (Strategy.EPILOGUE_ONLY, ())
    fused = rewritten(analyse_model(model, resolve("sm_90a,sm_80", list)))
    assert [node.op_type for node in fused.graph.node][1:] == ["FusedPointwise_0"]
    for sizes in (
        {"batch": 2, "height": 3, "width": 5, "length": 7},
        {"batch": 1, "height": 1, "width": 1, "length": 1},
    ):
        feed = feed_of(model, **sizes)
        if dtype != FLOAT16:
            check_meaning(model, site.fusion, feed)
        assert run(fused, feed)[0].tobytes() == run(model, feed)[0].tobytes()


def test_an_activation_is_not_repeated() -> None:
    b = Builder(FLOAT16)
    model = b.model(b("Mul", b.input("x", ("batch", 8, "height", "width")), b("Sigmoid", repeated(b, 8, (2, 3)))))
    (site,) = analyse_model(model, resolve("sm_90a", list)).sites
    assert (site.strategy, site.fusion.outs[0].tensor.einops) == (Strategy.ONE_KERNEL, "m n 1 1")
    assert site.match.stop is not None


def test_exact_products_are_not_repeated_either() -> None:
    b = Builder()
    (site,) = analyse_model(b.model(time_embedding(b)), resolve("sm_90a", list), "exact").sites
    assert (site.fusion.outs[0].tensor.einops, site.strategy) == ("m n 1 1", Strategy.ONE_KERNEL)
    assert site.match.stop.reason == "broadcasts_the_product"


def test_a_product_that_is_also_stored_short_stays_as_it_is() -> None:
    b = Builder(FLOAT16)
    t = repeated(b, 8, (2, 3))
    model = b.model(b("Add", b.input("x", ("batch", 8, "height", "width")), t), t)
    (site,) = analyse_model(model, resolve("sm_90a", list)).sites
    assert [out.tensor.einops for out in site.fusion.outs] == ["m n 1 1"]
    assert site.match.stop.reason in ("broadcasts_the_product", "nothing_follows")
