"""Kernels are chosen by m, or by n where that or the batch alone is not known: plan and bridge agree which, and use it.

Those of an attention whose queries are known are chosen by its batches.

Of a batch that only the run knows, the columns count together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from random import Random
from statistics import fmean

import numpy as np
import onnx
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.archive import FIRST_LOAD, FIRST_OUT, Record, pack
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule import attention_plan, cost_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Problem
from onnxfuse.schedule.plan import most_kernels
from onnxfuse.schedule.variant import ProductPlan, ProductVariant
from onnxfuse.tune import search
from onnxfuse.tune.search import Trial
from onnxfuse.tune.session_timer import ports
from tests.graph.test_archive import RECORD
from tests.helpers.bridge_hooks import Node, bridge
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.tools.fuzz_archive import flags

DEVICE = ARCHITECTURES["sm_90a"]
SIZES = {"batch": 2, "rows": 40, "height": 6, "width": 20}
K, N = 320, 640


def convolution(*known: str) -> onnx.ModelProto:
    """Its m is the number of channels that it makes, its n the image's size."""
    b = Builder(FLOAT16)
    shape = ["batch", K, "height", "width"]
    x = b.input("x", [SIZES[axis] if axis in known else axis for axis in shape])
    made = b("Conv", x, b.array(np.zeros((N, K, 1, 1)), "weight"), b.array(np.zeros(N), "bias"))
    return b.model(b("Relu", made))


def linear(*known: str) -> onnx.ModelProto:
    b = Builder(FLOAT16)
    x = b.input("x", [SIZES[axis] if axis in known else axis for axis in ("batch", "rows", K)])
    return b.model(b("Relu", b("Add", b("MatMul", x, b.array(np.zeros((K, N)), "weight")), b.array(np.zeros(N)))))


def of_inputs(*known: str) -> onnx.ModelProto:
    """Both factors are inputs: a weight of which only the run knows how wide it is."""
    b = Builder(FLOAT16)
    x = b.input("x", [SIZES[axis] if axis in known else axis for axis in ("batch", "rows", K)])
    weight = b.input("w", [K, SIZES["width"] if "width" in known else "width"])
    product = b("MatMul", x, weight)
    return b.model(b("Relu", b("Mul", b("Sigmoid", product), b("Tanh", product))))


def heads(*known: str) -> onnx.ModelProto:
    """Scores: neither the batch nor queries nor keys are known."""
    b = Builder(FLOAT16)
    product = b("MatMul", b.input("q", ["batch", 12, "rows", 64]), b.input("k", ["batch", 12, 64, "width"]))
    return b.model(b("Relu", b("Mul", product, b.array(0.125))))


def attention(*known: str) -> onnx.ModelProto:
    """Heads of a batch; the queries and keys are `rows`."""
    b = Builder(FLOAT16)
    batch, rows = (SIZES[axis] if axis in known else axis for axis in ("batch", "rows"))
    q, k, v = (b.input(name, [batch, 12, rows, 64]) for name in "qkv")
    scores = b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2]))
    return b.model(b("MatMul", b("Softmax", b("Mul", scores, b.array(0.125)), axis=-1), v))


def of_first_spec(plan: ProductPlan) -> list[ProductVariant]:
    """The kernels by range of sizes, without what takes over from them."""
    return [variant for variant in plan.variants if variant.spec == plan.variants[0].spec]


def subsets(*axes: str) -> list[tuple[str, ...]]:
    return [each for count in range(len(axes) + 1) for each in itertools.combinations(axes, count)]


CASES = [
    *((convolution, known) for known in subsets("batch", "height", "width")),
    *((linear, known) for known in subsets("batch", "rows")),
    *((of_inputs, known) for known in subsets("batch", "rows", "width")),
]


def only_site(model: onnx.ModelProto) -> Site:
    (site,) = analyse_model(model, [DEVICE]).sites
    return site


def fused_node(site: Site) -> Node:
    text: Mapping[str, str] = node_attributes(site.one_kernel, RECORD.kernel)
    names = {field.name for field in dataclasses.fields(Node)}
    return Node(**{name: value for name, value in text.items() if name in names})


@pytest.mark.parametrize(("make", "known"), CASES)
def test_the_bridge_takes_the_size_that_the_plan_goes_by(make, known: tuple[str, ...]) -> None:
    site = only_site(make(*known))
    (plan,) = site.plans
    node = fused_node(site)
    fusion, sizes = site.fusion, {axis.name: axis.size for axis in site.fusion.axes}
    unknown = [axis for axis in sizes if sizes[axis] is None]
    counts = dict(zip(unknown, (3, 5, 7, 11), strict=False))
    shapes = [
        tuple(math.prod(sizes[axis] or counts[axis] for axis in dim) for dim in tensor.dims) for tensor in fusion.inputs
    ]
    arguments, _ = bridge().arguments(node, shapes, element_bytes=2)
    shared = not any(axis in fusion.rhs[0].axes for axis in site.mapping.batch)
    columns = arguments.n * arguments.batch // plan.sizes.batch
    size = columns if plan.sizes.by == "n" else arguments.m * (arguments.batch if shared else 1)
    records = [dataclasses.replace(anywhere(site), min_m=each, max_m=each) for each in range(size + 100)]
    assert bridge().choose(pack(records), node, arguments) == size


def anywhere(site: Site) -> Record:
    """A record that takes any tensors of a site."""
    loads = len(site.fusion.loads)
    counted = {"lhs_alignment": 1, "rhs_alignment": 1, "load_alignments": (1,) * loads}
    every_loop = flags(dict.fromkeys([0, 1, *range(FIRST_LOAD, FIRST_LOAD + loads), FIRST_OUT], 7))
    return dataclasses.replace(RECORD, out_alignments=(1,), flags=every_loop, **counted)


@pytest.mark.parametrize("make", [convolution, heads, of_inputs])
def test_the_bridge_takes_the_kernel_that_the_plan_has_for_a_size(make) -> None:
    site = only_site(make())
    ranged = of_first_spec(site.plans[0])
    node, record = fused_node(site), anywhere(site)
    archive = pack([dataclasses.replace(record, min_m=each.min_m, max_m=each.max_m) for each in ranged])
    draws = Random(1)
    for _ in range(40):
        counts = {axis.name: round(math.exp(draws.uniform(0, 6))) for axis in site.fusion.axes if axis.size is None}
        shapes = [
            tuple(math.prod(site.fusion.size(axis) or counts[axis] for axis in dim) for dim in tensor.dims)
            for tensor in site.fusion.inputs
        ]
        arguments, _ = bridge().arguments(node, shapes, element_bytes=2)
        by_columns = site.plans[0].sizes.by == "n"
        rows = arguments.m * (arguments.batch if make is of_inputs else 1)
        size = arguments.n * arguments.batch if by_columns else rows
        taken = [index for index, each in enumerate(ranged) if each.min_m <= size <= each.max_m]
        assert [bridge().choose(archive, node, arguments)] == taken


def regrets(site: Site, problems: Iterable[tuple[int, Problem]]) -> list[float]:
    """How much longer than the best tile the kernel of each size takes, sorted."""
    (plan,) = site.plans
    ranged = of_first_spec(plan)
    spec, candidates = ranged[0].spec, [entry for _, entry in plan.ranked[0].tiles]
    assert 2 <= len({variant.tile for variant in ranged}) <= most_kernels(spec, plan.sizes)

    def regret(size: int, problem: Problem) -> float:
        flows = {entry: entry.family.flow(spec, entry.tile, DEVICE) for entry in candidates}
        costs = {entry.tile: float(entry.family.cost(entry, flows[entry], spec, problem, DEVICE)) for entry in flows}
        taken = next(variant.tile for variant in ranged if variant.min_m <= size <= variant.max_m)
        return costs[taken] / min(costs.values()) - 1

    return sorted(itertools.starmap(regret, problems))


@pytest.mark.parametrize("batch", [(), ("batch",)])
def test_an_image_of_any_size_has_a_good_kernel(batch: tuple[str, ...]) -> None:
    site = only_site(convolution(*batch))
    (plan,) = site.plans
    label = "n" if batch else "batch*n"
    assert plan.sizes.by == "n"
    assert {variant.by for variant in plan.variants} == {label}
    assert f"{label} 0.." in str(plan)
    draws = Random(0)
    columns = [round(math.exp(draws.uniform(0, math.log(16384)))) for _ in range(60)]
    found = regrets(site, [(n, plan.sizes.at(n)) for n in columns])
    assert found[30] <= calibration(DEVICE).regret
    assert found[-1] <= 0.25 + calibration(DEVICE).regret


def test_images_of_any_number_have_a_good_kernel() -> None:
    site = only_site(convolution())
    sizes, draws = site.plans[0].sizes, Random(0)
    batches = [draws.choice((1, 2, 3, 4, 5, 8, 16)) for _ in range(60)]
    columns = [round(math.exp(draws.uniform(math.log(16), math.log(16384)))) for _ in batches]
    problems = [dataclasses.replace(sizes.at(n), batch=batch) for n, batch in zip(columns, batches, strict=True)]
    pairs = [(problem.n * problem.batch, problem) for problem in problems]
    found = regrets(site, pairs)
    assert found[30] <= calibration(DEVICE).regret
    assert found[-1] <= 0.5, "planned and chosen for one image it was 5.9"
    assert fmean(found) <= 0.06, "planned and chosen for one image it was 0.5"


def test_images_of_a_known_size_have_a_good_kernel_at_any_number() -> None:
    """As vision models are exported: the batch alone is open, and decides how many tiles there are."""
    site = only_site(convolution("height", "width"))
    (plan,) = site.plans
    size = SIZES["height"] * SIZES["width"]
    assert (plan.sizes.by, plan.sizes.label, plan.sizes.n) == ("n", "batch*n", size)
    problems = [dataclasses.replace(plan.sizes.at(size), batch=batch) for batch in range(1, 129)]
    found = regrets(site, [(size * problem.batch, problem) for problem in problems])
    assert found[64] <= calibration(DEVICE).regret
    assert found[-1] <= 0.25
    alone = next(entry for entry in plan.ranked if entry.size == size)
    many = [entry.tiles[0][0] for entry in plan.ranked if entry.size == 64 * size]
    assert many[0] > 3 * alone.tiles[0][0], "64 images are not priced as one"


def test_a_weight_is_read_once_for_all_images() -> None:
    spec, sizes = only_site(convolution("height", "width")).plans[0].variants[0].spec, Problem(N, 1, K, batch=64)
    images, weight = 64 * K * spec.dtype.bytes, N * K * spec.dtype.bytes
    for shared_lhs, weights in ((True, 1), (False, 64)):
        moved = cost_model.moving_factors(spec, dataclasses.replace(sizes, shared_lhs=shared_lhs), DEVICE)
        assert moved == pytest.approx(cost_model.from_memory(images + weights * weight, DEVICE))


def test_scores_of_any_batch_have_a_good_kernel() -> None:
    site = only_site(heads())
    sizes, draws = site.plans[0].sizes, Random(0)
    drawn = [(round(math.exp(draws.uniform(0, 8))), draws.choice((1, 1, 2, 4, 8))) for _ in range(60)]
    problems = [(m, dataclasses.replace(sizes.at(m), n=max(m, 64), batch=12 * batch)) for m, batch in drawn]
    found = regrets(site, problems)
    assert fmean(found) <= 0.1
    assert found[-1] <= 0.5


def test_an_image_is_timed_at_sizes_of_its_own() -> None:
    site = only_site(convolution("batch"))
    inputs, outputs = ports(Trial(site, 300, {}))
    assert inputs[0].shape[:2] == (2, K) or inputs[1].shape[:2] == (2, K)
    assert outputs[0].shape == (2, N, 1, 300)


@pytest.mark.parametrize("known", subsets("batch", "rows"))
def test_an_attention_goes_by_its_batches_where_they_alone_are_open(known: tuple[str, ...]) -> None:
    site = only_site(attention(*known))
    assert site.whole is not None
    variants = [each for each in site.whole.plans[0].variants if each.spec == site.whole.plans[0].variants[0].spec]
    by_batches = known == ("rows",)
    assert {each.by for each in variants} == {"batch" if by_batches else "m"}
    node = fused_node(site)
    records = [dataclasses.replace(anywhere(site), min_m=each, max_m=each) for each in range(200)]
    for batch, rows in ((1, 7), (3, 40), (11, 150)):
        batch, rows = SIZES["batch"] if "batch" in known else batch, SIZES["rows"] if "rows" in known else rows
        arguments, _ = bridge().arguments(node, [(batch, 12, rows, 64)] * 3, element_bytes=2)
        assert bridge().choose(pack(records), node, arguments) == (batch if by_batches else rows)


def test_few_and_many_images_have_attentions_of_their_own() -> None:
    """197 rows: with one image tiles of 64 rows are more blocks, with many tiles of 128 read the keys less often."""
    site = only_site(attention("rows"))
    assert site.whole is not None
    (plan,) = site.whole.plans
    own = [each for each in plan.variants if each.spec == plan.variants[0].spec]
    assert [each.min_m for each in own] == [0, *(each.max_m + 1 for each in own[:-1])]
    for count in (1, 2, 4, 8, 16, 32, 64):
        sizes = attention_plan._sizes(site.fusion, site.mapping, SIZES["rows"], count, DEVICE)
        tiles = attention_plan.tiles(own[0].spec, SIZES["rows"], DEVICE)
        times = {tile: attention_plan._time(own[0].spec, tile, sizes, DEVICE) for tile in tiles}
        taken = next(each.tile for each in own if each.min_m <= count <= each.max_m)
        assert times[taken] <= min(times.values()) * (1 + 2 * attention_plan.SAME)


def test_images_of_a_known_size_are_timed_at_several_numbers() -> None:
    site = only_site(convolution("height", "width"))
    size = SIZES["height"] * SIZES["width"]
    trials = search._trials(site, DEVICE)
    assert {trial.size // size for trial in trials} == {1, 2, 4, 8, 16, 32, 64}
    assert trials[0].size == 8 * size, "the middle first"
    assert {ports(trial)[1][0].shape for trial in trials} == {(trial.size // size, N, 6, 20) for trial in trials}


def test_scores_are_timed_with_as_many_keys_as_they_are_planned_for() -> None:
    """One key would say nothing of any tile."""
    site = only_site(heads())
    for rows, keys in ((77, 1024), (4096, 4096)):
        inputs, (scores,) = ports(Trial(site, rows, {}))
        assert [port.shape for port in inputs][:2] == [(1, 12, rows, 64), (1, 12, 64, keys)]
        assert scores.shape == (1, 12, rows, keys)
