"""What was learnt of kernels' times: a factor for the estimate, for kernels like those that were timed alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.schedule import learned_cost, networks
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.kernel_family import Candidate, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.learned_cost import Kernels
from onnxfuse.schedule.small_m import SMALL_M
from tests.perf import learn
from tests.perf.calibrate import planned_spec
from tests.perf.early_launch import starts_early
from tests.perf.learn import DEVICE

ROOT = Path(__file__).parents[2]
NETWORKS = networks.networks(DEVICE.arch)
SEED = 5
FEW = 50  # problems of a file


def site(dtype: str = "f16", parts: int = 1, order: str = "nk") -> tuple[KernelSpec, list[Candidate], list[Flow]]:
    """A kernel of 768 columns of each part, and all of its tiles."""
    spec = planned_spec(1024, 768, parts, order, "residual", dtype, DEVICE)
    entries = [
        entry
        for family in PRODUCTS
        for entry in family.candidates(spec, DEVICE, 1024)
        if family.why_not(spec, entry.tile, DEVICE) is None
    ]
    return spec, entries, [entry.family.flow(spec, entry.tile, DEVICE) for entry in entries]


def terms(spec: KernelSpec, entries: list[Candidate], flows: list[Flow], problem: Problem) -> np.ndarray:
    costs = [
        entry.family.cost(entry, reads, spec, problem, DEVICE) for entry, reads in zip(entries, flows, strict=True)
    ]
    return np.stack([np.broadcast_to(cost, np.shape(problem.m)) for cost in costs])


def by_loops(row: np.ndarray) -> float:
    """What the networks say of one kernel, one number at a time."""
    inputs = [
        min(max((value - mean) / scale, -NETWORKS.widest), NETWORKS.widest)
        for value, mean, scale in zip(row, NETWORKS.means, NETWORKS.scales, strict=True)
    ]
    said = []
    for network in range(len(NETWORKS.weights[0])):
        values = inputs
        for layer, (weight, bias) in enumerate(zip(NETWORKS.weights, NETWORKS.biases, strict=True)):
            sums = [
                sum(value * each for value, each in zip(values, column, strict=True)) + start
                for column, start in zip(weight[network].T, bias[network, 0], strict=True)
            ]
            values = sums if layer == len(NETWORKS.weights) - 1 else [max(each, 0.0) for each in sums]
        said.append(values[0])
    return sum(said) / len(said)


@pytest.mark.parametrize(("dtype", "parts", "order"), [("f16", 1, "nk"), ("bf16", 2, "kn"), ("f32", 2, "nk")])
def test_a_factor_is_that_of_each_kernel_by_itself(dtype: str, parts: int, order: str) -> None:
    spec, entries, flows = site(dtype, parts, order)
    rows = np.array([1, 16, 300, 5000])
    estimates = terms(spec, entries, flows, Problem(rows, 768, 1024))
    found = learned_cost.factors(entries, flows, estimates, spec, Problem(rows, 768, 1024), DEVICE)
    assert found.shape == estimates.shape
    near = estimates <= learned_cost.NEAR * estimates.min(axis=0)
    assert (found[~near] == 1).all()
    places = np.argwhere(near)
    for tile, size in places[np.random.default_rng(SEED).permutation(len(places))[:8]]:
        kernel = Kernels(
            [entries[tile]], [flows[tile]], np.zeros(1, np.int64), estimates[tile, size : size + 1],
            Problem(int(rows[size]), 768, 1024),
        )  # fmt: skip
        seen = learned_cost.features(kernel, spec, DEVICE)
        assert (*seen,) == NETWORKS.names
        said = by_loops(np.array([float(value[0]) for value in seen.values()]))
        limited = min(max(said, -learned_cost.MOST), learned_cost.MOST)
        assert np.log(found[tile, size]) == pytest.approx(limited, abs=1e-4)


@pytest.mark.parametrize("arch", sorted({*ARCHITECTURES} - {DEVICE.arch}))
def test_nothing_is_known_of_an_architecture_that_was_not_timed(arch: str) -> None:
    assert networks.networks(arch) is None


@pytest.mark.parametrize("change", [{"math": "3xtf32"}, {"lhs_order": "km"}, {"across": True}, {"batch": 4}])
def test_kernels_unlike_those_that_were_timed_keep_their_estimate(change: dict) -> None:
    spec, entries, flows = site()
    problem = Problem(np.array([300]), 768, 1024, batch=change.pop("batch", 1))
    estimates = terms(spec, entries, flows, problem)
    if change.pop("across", False):
        change["outs"] = tuple(replace(out, transposed=True) for out in spec.outs)
    other = replace(spec, **change)
    assert (learned_cost.factors(entries, flows, estimates, other, problem, DEVICE) == 1).all()


@pytest.mark.parametrize("sizes", [(0, 768, 1024), (300, 0, 1024), (300, 768, 0)])
def test_an_empty_product_has_a_finite_estimate(sizes: tuple[int, int, int]) -> None:
    """Whose logarithm nobody takes: models declare axes of no elements, and a row beside it is what it was."""
    spec, entries, flows = site()
    estimates = terms(spec, entries, flows, Problem(np.array([300]), 768, 1024)).repeat(2, axis=1)
    m, n, k = (np.array([size, usual]) for size, usual in zip(sizes, (300, 768, 1024), strict=True))
    empty, usual = learned_cost.factors(entries, flows, estimates, spec, Problem(m, n, k), DEVICE).T
    assert (empty == 1).all()
    assert (usual != 1).any()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_kernel_is_seen_to_start_early_where_the_bridge_started_it_so_when_networks_learnt(dtype: str) -> None:
    """Of those for few rows all had, also of weights that do not now; of full grids only those that load little."""
    spec, entries, flows = site(dtype)
    kept = [index for index, entry in enumerate(entries) if entry.family is not SMALL_M]
    entries, flows = [entries[index] for index in kept], [flows[index] for index in kept]
    rules = [replace(entry.family.launch(spec, entry.tile, DEVICE), full_early_depth=0) for entry in entries]
    found = set()
    for rows in (1, 300, 5000, 16384):
        kernels = Kernels(entries, flows, np.arange(len(entries)), np.ones(len(entries)), Problem(rows, 768, 1024))
        seen = learned_cost.features(kernels, spec, DEVICE)["early"]
        for rule, early in zip(rules, seen, strict=True):
            if rule.cluster <= 1:
                tiles = math.ceil(rows / rule.block_m) * math.ceil(768 / rule.block_n)
                assert early == starts_early(rule, tiles, 1024, DEVICE)
                found.add(bool(early))
    assert found == {False, True}


@pytest.mark.parametrize("file", ["h200-drawn-tiles", "h200-layer-tiles", "h200-early-tiles", "h200-few-tiles"])
def test_what_was_timed_is_estimated_better(file: str) -> None:
    """Also which kernel is the fastest; what it gains on kernels that were not learnt from is docs/kernel-notes.md."""
    rows = learn.rows_of_file(ROOT / f"results/{file}.json.xz")
    alone = [row for row in rows if row["drawn"][0] != "qkv"]
    known = learn.timings(alone[:: max(len(alone) // FEW, 1)], DEVICE)
    said = NETWORKS(known.features)
    assert np.square(known.left - said).mean() < np.square(known.left).mean() / 2
    before, since = (learn.regrets(known, known.estimates * np.exp(each)) for each in (0 * said, said))
    assert since.mean() < before.mean()


def test_slopes_are_differences() -> None:
    """Of what is learnt, as weights and biases move a little."""
    rng = np.random.default_rng(SEED)
    layers = [layer + rng.standard_normal(layer.shape) / 4 for layer in learn._initial((5, 4, 3, 1), rng)]
    drawn = (rng.standard_normal(7), rng.standard_normal(7) / 20, rng.random(7))
    lesson = learn.Lesson(rng.standard_normal((7, 5)), *drawn, np.array([0, 3, 4]))

    def loss() -> float:
        values = lesson.inputs
        for index in range(0, len(layers), 2):
            values = values @ layers[index] + layers[index + 1]
            values = np.maximum(values, 0) if index < len(layers) - 2 else values
        said = values[:, 0]
        odds = np.exp(-(lesson.estimates + said / learn.SHARPER) / learn.ALIKE)
        problems = (slice(0, 3), slice(3, 4), slice(4, 7))
        chosen = [odds[each] @ lesson.excess[each] / odds[each].sum() for each in problems]
        return float(np.square(said - lesson.wanted).mean() / 2 + learn.CHOSEN * np.mean(chosen))

    for layer, slope in zip(layers, learn._slopes(layers, lesson), strict=True):
        for place in np.ndindex(layer.shape):
            layer[place] += 1e-6
            above = loss()
            layer[place] -= 2e-6
            below = loss()
            layer[place] += 1e-6
            assert (above - below) / 2e-6 == pytest.approx(slope[place], abs=1e-5)


def test_networks_learn_what_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of two features, and they are the same when they are read again, but for weights of 16 bits."""
    monkeypatch.setattr(learn, "EPOCHS", 40)
    monkeypatch.setattr(learn, "PROBLEMS", 125)  # of one kernel each, which is no choice
    rng = np.random.default_rng(SEED)
    features = rng.standard_normal((2000, 3)).astype(np.float32)
    left = 0.1 * features[:, 0] * features[:, 1]
    ones, places = np.ones(2000), np.arange(2000)
    known = learn.Timings(("a", "b", "c"), features, ones, np.exp(left).astype(np.float64), places, places)
    found = learn.fit(known)
    assert np.square(found(features) - left).mean() < np.square(left).mean() / 20
    learn.write(tmp_path / "some.npz", found)
    monkeypatch.setattr(networks, "FOLDER", tmp_path)
    again = networks.networks.__wrapped__("some")
    assert again.names == known.names
    np.testing.assert_allclose(again(features), found(features), atol=2e-3)
