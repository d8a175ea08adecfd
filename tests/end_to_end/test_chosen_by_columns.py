"""Kernels are chosen by m, or by n where that alone is not known: the plan and the bridge agree which, and use it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from random import Random

import numpy as np
import onnx
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.archive import FIRST_LOAD, FIRST_OUT, pack
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.row_ranges import MOST_KERNELS
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
    size = arguments.n if plan.sizes.by == "n" else arguments.m * (arguments.batch if shared else 1)
    counted = {"lhs_alignment": 1, "rhs_alignment": 1, "load_alignments": (1,) * len(fusion.loads)}
    every_loop = flags(dict.fromkeys([0, 1, *range(FIRST_LOAD, FIRST_LOAD + len(fusion.loads)), FIRST_OUT], 7))
    anywhere = dataclasses.replace(RECORD, out_alignments=(1,), flags=every_loop, **counted)
    records = [dataclasses.replace(anywhere, min_m=each, max_m=each) for each in range(size + 100)]
    assert bridge().choose(pack(records), node, arguments) == size


@pytest.mark.parametrize("batch", [(), ("batch",)])
def test_an_image_of_any_size_has_a_good_kernel(batch: tuple[str, ...]) -> None:
    (plan,) = only_site(convolution(*batch)).plans
    spec, sizes = plan.variants[0].spec, plan.sizes
    ranged = [variant for variant in plan.variants if variant.spec == spec]
    assert sizes.by == "n"
    assert {variant.by for variant in plan.variants} == {"n"}
    assert 2 <= len({variant.tile for variant in ranged}) <= MOST_KERNELS
    costs = {entry.tile: (entry, entry.family.flow(spec, entry.tile, DEVICE)) for _, entry in plan.ranked[0].tiles}

    def cost(tile: object, n: int) -> float:
        entry, reads = costs[tile]
        return float(entry.family.cost(entry, reads, spec, sizes.at(n), DEVICE))

    def regret(n: int) -> float:
        taken = next(variant.tile for variant in ranged if variant.min_m <= n <= variant.max_m)
        return cost(taken, n) / min(cost(tile, n) for tile in costs) - 1

    draws = Random(0)
    regrets = sorted(regret(round(math.exp(draws.uniform(0, math.log(16384))))) for _ in range(60))
    assert regrets[len(regrets) // 2] <= calibration(DEVICE).regret
    assert regrets[-1] <= 0.25 + calibration(DEVICE).regret


def test_an_image_is_timed_at_sizes_of_its_own() -> None:
    site = only_site(convolution("batch"))
    inputs, outputs = ports(Trial(site, 300, {}, "n"))
    assert inputs[0].shape[:2] == (2, K) or inputs[1].shape[:2] == (2, K)
    assert outputs[0].shape == (2, N, 1, 300)
