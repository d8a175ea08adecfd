"""Fit the networks of `schedule/learned_cost.py`: `python -m tests.perf.learn FILES`, results of `tests.perf.tiles`.

First on some of the sites at a time, to tell of the others by how much their estimates are off and how much longer the
kernel that is estimated fastest takes than the fastest, with the factor and without it. Then on all of them, and writes
the networks. A file that is named twice counts twice. They learn to be near what estimates leave, and that what is
chosen by them is fast: of each problem, kernels are as if drawn by a softmax of their estimates, and the mean of how
much longer they take than the fastest is to fall. Training is Adam with decoupled weight decay (Loshchilov and Hutter,
2019) and a rate that falls as a cosine. Needs no GPU; matrices are small, so OMP_NUM_THREADS=1 is fastest (ten
minutes).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.analysis.vector_width import padded_row
from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.schedule import learned_cost
from onnxfuse.schedule.calibration import FOLDER
from onnxfuse.schedule.cost_model import copying_rows, with_rows_copied
from onnxfuse.schedule.kernel_family import Candidate, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.learned_cost import Kernels
from onnxfuse.schedule.networks import Networks
from tests.perf.calibrate import rows_of
from tests.perf.drawn import Drawn
from tests.perf.every_tile import plan_as_it_lies, plan_padded
from tests.perf.result_file import read_result

DEVICE = ARCHITECTURES["sm_90a"]
HIDDEN = (96, 48)
NETWORKS = 4
EPOCHS, PROBLEMS, WARM_UP = 100, 24, 100  # of a batch; and steps in which the rate rises
RATE, DECAY = 3e-3, 0.1
MOMENTUM, SQUARES, TINY = 0.9, 0.999, 1e-8  # of Adam
SHARPER = 5.0  # times the logarithms that are learnt, which are small
WIDEST = 4.0  # standard deviations
ALIKE = 0.03  # of the logarithm: of kernels as near as this to each other by their estimates, either may be chosen
CHOSEN = 1.5  # what the mean of how much longer chosen ones take counts beside half the mean square
FOLDS = 4
EARLY = "early"  # a feature; results from before 2026-11-29 are of kernels that started behind the ones before them

Layers = list[NDArray[np.float32]]
"""A weight and a bias for each layer, in turn."""


@dataclass(frozen=True)
class Timings:
    """Kernels that were timed.

    Attributes:
        names: of the features.
        features: f32[kernels, features].
        estimates: microseconds, f64[kernels], without the factor.
        times: microseconds, f64[kernels].
        sites: which site each is of, i64[kernels]; likewise `problems`, a site with its rows.
    """

    names: tuple[str, ...]
    features: NDArray[np.float32]
    estimates: NDArray[np.float64]
    times: NDArray[np.float64]
    sites: NDArray[np.int64]
    problems: NDArray[np.int64]

    @property
    def by_problem(self) -> list[NDArray[np.intp]]:
        """The kernels of each problem."""
        order = np.argsort(self.problems, kind="stable")
        _, starts = np.unique(self.problems[order], return_index=True)
        return np.split(order, starts[1:])

    @property
    def left(self) -> NDArray[np.float32]:
        """What estimates leave: the logarithm of the time over them."""
        return np.log(self.times / self.estimates).astype(np.float32)

    def of(self, chosen: NDArray[np.bool_]) -> Timings:
        """Some of them."""
        return Timings(
            self.names,
            self.features[chosen],
            self.estimates[chosen],
            self.times[chosen],
            self.sites[chosen],
            self.problems[chosen],
        )


def rows_of_file(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, which say whether their kernels started early."""
    result = read_result(path)
    return [{**row, "early": result.get("early", False)} for row in rows_of(result)]


def timings(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Timings:
    """The kernels of a result whose tiles are among today's candidates."""
    by_site = defaultdict(list)
    for index, row in enumerate(rows):
        drawn = Drawn(*row["drawn"])
        site = replace(drawn, m=1), row.get("padded", False), row.get("early", False)
        by_site[site].append((index, drawn.m, row["us"]))
    found = [
        ({**known, EARLY: known[EARLY] * early}, *times, site, index)
        for site, ((drawn, padded, early), measured) in enumerate(by_site.items())
        for index, (known, *times) in _kernels(drawn, padded, measured, device)
    ]
    features, estimates, us, sites, problems = zip(*found, strict=True)
    table = np.array([[*each.values()] for each in features], np.float32)
    return Timings((*features[0],), table, np.array(estimates), np.array(us), np.array(sites), np.array(problems))


def together(known: Sequence[Timings]) -> Timings:
    """The kernels of several results, whose sites count as different ones; copies of a site are in one fold."""
    sites = itertools.accumulate((-(-(int(each.sites.max()) + 1) // FOLDS) * FOLDS for each in known), initial=0)
    problems = itertools.accumulate((int(each.problems.max()) + 1 for each in known), initial=0)
    moved = [
        replace(each, sites=each.sites + first, problems=each.problems + before)
        for each, first, before in zip(known, sites, problems, strict=False)
    ]
    columns = ("features", "estimates", "times", "sites", "problems")
    return Timings(known[0].names, *(np.concatenate([getattr(each, name) for each in moved]) for name in columns))


def _kernels(
    drawn: Drawn, padded: bool, measured: Sequence[tuple[int, int, Mapping[str, float]]], device: DeviceSpec
) -> Iterator[tuple[int, tuple[dict[str, float], float, float]]]:
    """Of each kernel of a site the problem, and its features, estimate and time."""
    planned = (plan_padded if padded else plan_as_it_lies)(replace(drawn, m=measured[0][1]), device)
    if planned is None:
        return
    fusion, plan = planned
    base, entries = plan.variants[0].spec.without_copies, [entry for _, entry in plan.ranked[0].tiles]
    if not learned_cost.is_alike(base, Problem(1, drawn.n, drawn.k)):
        return
    for factors in dict.fromkeys(entry.family.copied(base) for entry in entries):
        spec = replace(base, copied=factors)
        alike = {str(entry.tile): entry for entry in entries if entry.family.copied(base) == factors}
        for index, m, times in measured:
            problem = Problem(m, drawn.n, drawn.k, stored_k=padded_row(fusion, fusion.rhs[0]))
            tiles = [alike[tile] for tile in times if tile in alike]
            for entry, own in zip(tiles, _described(spec, tiles, problem, device), strict=True):
                if math.isfinite(own[1]):
                    yield index, (*own, times[str(entry.tile)])


def _described(
    spec: KernelSpec, tiles: Sequence[Candidate], problem: Problem, device: DeviceSpec
) -> Iterator[tuple[dict[str, float], float]]:
    """Features and estimate of each of some tiles of one problem, as a plan has them."""
    seen, copying = with_rows_copied(spec, problem), float(copying_rows(spec, problem, device))
    flows = [entry.family.flow(spec, entry.tile, device) for entry in tiles]
    pairs = zip(tiles, flows, strict=True)
    terms = np.array([float(entry.family.cost(entry, reads, spec, seen, device)) + copying for entry, reads in pairs])
    kernels = Kernels(tiles, flows, np.arange(len(tiles)), terms, seen)
    known = learned_cost.features(kernels, spec, device) if tiles else {}
    for place, estimate in enumerate(terms):
        yield {name: float(values[place]) for name, values in known.items()}, float(estimate)


def fit(known: Timings) -> Networks:
    """The networks that all of these kernels teach."""
    means, scales = known.features.mean(axis=0), known.features.std(axis=0) + np.float32(TINY)
    inputs = np.clip((known.features - means) / scales, -WIDEST, WIDEST)
    problems = [_lesson(known, inputs, places) for places in known.by_problem]
    trained = [_trained(problems, np.random.default_rng(seed)) for seed in range(NETWORKS)]
    weights, biases = (
        [np.stack(each) for each in zip(*(net[start::2] for net in trained), strict=True)] for start in (0, 1)
    )
    weights[-1], biases[-1] = weights[-1] / SHARPER, biases[-1] / SHARPER
    return Networks(known.names, means, scales, WIDEST, tuple(weights), tuple(bias[:, None, :] for bias in biases))


@dataclass(frozen=True)
class Lesson:
    """Kernels of one problem or of several, one after the other.

    Attributes:
        inputs: features as a network takes them, f32[kernels, features].
        wanted: what it is to say, f32[kernels].
        estimates: logarithms, without what it says, f32[kernels].
        excess: how much longer each takes than the fastest of its problem, f32[kernels].
        starts: where each problem begins, i64[problems].
    """

    inputs: NDArray[np.float32]
    wanted: NDArray[np.float32]
    estimates: NDArray[np.float32]
    excess: NDArray[np.float32]
    starts: NDArray[np.intp]


def _lesson(known: Timings, inputs: NDArray[np.float32], places: NDArray[np.intp]) -> Lesson:
    times, us = known.times[places], known.estimates[places]
    estimates, excess = np.log(us), times / times.min() - 1
    wanted = SHARPER * np.log(times / us).astype(np.float32)
    return Lesson(inputs[places], wanted, estimates.astype(np.float32), excess.astype(np.float32), np.zeros(1, np.intp))


def _together(lessons: Sequence[Lesson]) -> Lesson:
    fields = ("inputs", "wanted", "estimates", "excess")
    inputs, wanted, estimates, excess = (np.concatenate([getattr(each, name) for each in lessons]) for name in fields)
    ends = np.cumsum([len(each.wanted) for each in lessons])
    return Lesson(inputs, wanted, estimates, excess, np.array([0, *ends[:-1]]))


def _trained(problems: Sequence[Lesson], rng: np.random.Generator) -> Layers:
    """One network, from random weights on."""
    layers = _initial((problems[0].inputs.shape[1], *HIDDEN, 1), rng)
    first, second = ([np.zeros_like(layer) for layer in layers] for _ in range(2))
    batches = len(problems) // PROBLEMS
    steps = EPOCHS * batches
    for step in range(steps):
        if step % batches == 0:
            order = rng.permutation(len(problems))
        drawn = order[step % batches * PROBLEMS :][:PROBLEMS]
        slopes = _slopes(layers, _together([problems[index] for index in drawn]))
        rate = RATE * 0.5 * (1 + math.cos(math.pi * step / steps)) * min((step + 1) / WARM_UP, 1.0)
        for index, (layer, slope) in enumerate(zip(layers, slopes, strict=True)):
            first[index] += (1 - MOMENTUM) * (slope - first[index])
            second[index] += (1 - SQUARES) * (slope**2 - second[index])
            size = np.sqrt(second[index] / (1 - SQUARES ** (step + 1))) + TINY
            decay = DECAY if index % 2 == 0 else 0.0
            layer -= np.float32(rate) * (first[index] / (1 - MOMENTUM ** (step + 1)) / size + decay * layer)
    return layers


def _initial(sizes: Sequence[int], rng: np.random.Generator) -> Layers:
    """Weights whose layers keep the variance of what they read (He et al., 2015), and biases of 0."""
    layers: Layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        drawn = rng.standard_normal((inputs, outputs)) * math.sqrt(2 / inputs)
        layers += [drawn.astype(np.float32), np.zeros(outputs, np.float32)]
    layers[-2] *= 0.1  # it begins near 0
    return layers


def _slopes(layers: Layers, lesson: Lesson) -> Layers:
    """Of what a network is to lower, in each weight and bias."""
    values = [lesson.inputs]
    for index in range(0, len(layers) - 2, 2):
        values.append(np.maximum(values[-1] @ layers[index] + layers[index + 1], 0))
    slope = _slope_in_said((values[-1] @ layers[-2] + layers[-1])[:, 0], lesson)[:, None]
    slopes: Layers = []
    for index in range(len(layers) - 2, -1, -2):
        below = values[index // 2]
        slopes = [below.T @ slope, slope.sum(axis=0), *slopes]
        slope = (slope @ layers[index].T) * (below > 0)
    return slopes


def _slope_in_said(said: NDArray[np.float32], lesson: Lesson) -> NDArray[np.float32]:
    """Of half the mean square of what it is off by, and of how much longer the kernels take that it has chosen."""
    starts = lesson.starts
    lengths = np.diff([*starts, len(said)])
    scores = -(lesson.estimates + said / SHARPER) / ALIKE
    odds = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), lengths))
    odds /= np.repeat(np.add.reduceat(odds, starts), lengths)
    means = np.repeat(np.add.reduceat(odds * lesson.excess, starts), lengths)
    in_excess = odds * (means - lesson.excess) / (ALIKE * SHARPER * len(starts))
    slope: NDArray[np.float32] = ((said - lesson.wanted) / len(said) + CHOSEN * in_excess).astype(np.float32)
    return slope


def predicted_apart(known: Timings) -> NDArray[np.float32]:
    """For each kernel what networks say that have not seen its site."""
    said = np.zeros(len(known.times), np.float32)
    for fold in range(FOLDS):
        unseen = known.sites % FOLDS == fold
        said[unseen] = fit(known.of(~unseen))(known.features[unseen])
    return said


def regrets(known: Timings, estimates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each problem, how much longer the kernel that is estimated fastest takes than the fastest."""
    problems = known.by_problem
    return np.array([known.times[each][estimates[each].argmin()] / known.times[each].min() - 1 for each in problems])


def report(known: Timings, said: NDArray[np.float32]) -> None:
    for what, factors in (("estimates", np.zeros_like(said)), ("with the factor, unseen", said)):
        found = regrets(known, known.estimates * np.exp(factors))
        off = math.sqrt(float(np.mean((known.left - factors) ** 2)))
        median, late = np.quantile(found, [0.5, 0.95])
        print(
            f"{what}: off by {off:.3f}; regret {median:.1%}, {late:.1%} at the 95th percentile, mean {found.mean():.2%}"
        )


def write(path: Path, found: Networks) -> None:
    """Weights in 16 bits: their rounding moves an estimate by less than a thousandth."""
    arrays: dict[str, Any] = {
        "names": found.names,
        "means": found.means,
        "scales": found.scales,
        "widest": np.float32(found.widest),
    }
    for name, layers in (("weight", found.weights), ("bias", found.biases)):
        arrays |= {f"{name}{layer}": array.astype(np.float16) for layer, array in enumerate(layers)}
    np.savez_compressed(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files of tests.perf.tiles")
    parser.add_argument("--out", type=Path, default=FOLDER / f"{DEVICE.arch}.npz")
    options = parser.parse_args()
    once = {path: timings(rows_of_file(path), DEVICE) for path in dict.fromkeys(options.results)}
    known = together([once[path] for path in options.results])
    print(f"{len(known.times)} kernels of {len({*known.problems})} problems and {len({*known.sites})} sites")
    report(known, predicted_apart(known))
    write(options.out, fit(known))


if __name__ == "__main__":
    main()
