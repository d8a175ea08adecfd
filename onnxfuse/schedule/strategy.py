"""The strategies of a site, and which of them a model gets where nothing was measured.

    one kernel       the product and all that follows it; nothing but the result is written
    epilogue only    the product stays with ONNX Runtime's library; one kernel does all that follows
    left alone       what the library does is faster than both

One kernel saves writing and reading the product. It wins unless the library multiplies much faster than this project's
kernels. How fast it is was measured on some chips (`library_cost.library`); on others `library_advantage` of the chip's
calibration says how many times as fast as the portable kernel it is assumed to be. A measurement (`--tune`) needs none
of these numbers.

A site is one node of the model, whatever the architectures and the number of rows at run time. On one architecture the
strategy is the one that loses the least: at every number of rows its time is divided by the best one's, and the
smallest geometric mean of these ratios wins. Several architectures must agree, else it is one kernel: what the model is
worth on one chip must not rest on an estimate for another. PTX, which runs on chips that nobody named, has no say
beside others. So is it with the order of weights: the file has one for all. A product with a weight of few bits, for
which ONNX Runtime's own kernel reads as few bytes, is no such bet where they do not agree: it gets a kernel for the one
architecture that wins, under a name that only that one's GPUs know, and its nodes elsewhere; or it is left alone.

Where the sums are those of an op that normalises them (SkipLayerNormalization), that op is part of the bargain: left
alone it reads the product and the skip, makes the sum and its own result; taken apart, a normalisation reads the sum
that the kernel has stored. Both move the same bytes where nobody else wanted the sum, and one tensor less where
somebody did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.schedule import cost_model, library_cost
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import AnyTile, Candidate
from onnxfuse.schedule.variant import ProductPlan, Ranked

CONVOLUTION = "Conv"
LEAST_GAIN = 1.005  # of weights in another order; an estimate that is nearly equal moves nothing


class Strategy(Enum):
    """How a site is written into the model."""

    ONE_KERNEL = "one kernel"
    EPILOGUE_ONLY = "behind the product"  # as reports and measured results have it since the first version
    LEFT_ALONE = "left alone"


Times = Mapping[Strategy, float]


@dataclass(frozen=True)
class Normalising:
    """One row of an op of ONNX Runtime that normalises.

    Attributes:
        op: its type, `SkipLayerNormalization`.
        whole: bytes that it moves as the model has it.
        rest: bytes that it moves where a kernel makes the sum.
    """

    op: str
    whole: int
    rest: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a site moves; of a row, or of a column where kernels are chosen by n.

    Attributes:
        weights: of the factor that all rows share, read once.
        lhs: of one row of the other factor.
        product: of one row of the product.
        rest: of one row of everything else that the epilogue reads or writes.
        passes: nodes of the epilogue, each of which reads and writes what one kernel keeps in registers; the
            activation of a FusedGemm is one too, and the bias of a Gemm, which the runtime writes ahead of the product.
        products: that the library makes one after the other, each of as many columns.
        own_passes: those of the passes that a product's node makes itself, and goes on to make where it stays.
        biased: the nodes of a product that a bias is added to and nothing else follows; where nothing was measured of
            the library, that is a pass like any other. CONVOLUTION adds it by itself.
        normalised: by ops that were taken apart.
        added: by those that the runtime's optimiser makes; where nothing was measured of its kernels, a pass each.
    """

    weights: int
    lhs: int
    product: int
    rest: int
    passes: int
    products: int = 1
    own_passes: int = 0
    biased: str = ""
    normalised: tuple[Normalising, ...] = ()
    added: tuple[Normalising, ...] = ()


def estimated_times(plan: ProductPlan, traffic: Traffic) -> Iterator[Times]:
    """Microseconds of each strategy at each number of rows that a plan has ranked its tiles for."""
    libraries = _libraries(plan, traffic.products)
    for index, ranked in enumerate(plan.ranked):
        library = assumed_library(plan, traffic, ranked) if libraries is None else float(libraries[index])
        yield estimate_from(plan.device, library, traffic, _count(ranked), ranked.one_kernel)


def _libraries(plan: ProductPlan, products: int) -> NDArray[np.float64] | None:
    """Microseconds in which the library makes the product of each, asked for at once; None where that is unknown."""
    problems = [ranked.problem for ranked in plan.ranked]
    if not problems:
        return np.empty(0)
    m, n, k, batch = np.array([(each.m, each.n, each.k, each.batch) for each in problems]).T
    together = replace(problems[0], m=m, n=n.astype(np.int64), k=k.astype(np.int64), batch=batch)
    found = library_cost.library(plan.variants[0].spec, together, products, plan.device)
    return None if found is None else np.broadcast_to(np.asarray(found, np.float64), m.shape)


def _count(ranked: Ranked) -> int:
    """Rows, or columns, of all batches."""
    problem = ranked.problem
    return int((problem.n if problem.by == "n" else problem.m) * problem.batch)


def beside_stock(plan: ProductPlan, products: int, passes: int) -> Iterator[Times]:
    """Microseconds of one kernel, and of quantised products with nodes behind them, at each number of rows.

    Args:
        plan: of the kernel.
        products: that ONNX Runtime makes one after the other.
        passes: nodes behind them, which take a launch at least.
    """
    libraries = _libraries(plan, products)
    assert libraries is not None, "the cost model knows MatMulNBits"
    for ranked, library in zip(plan.ranked, libraries, strict=True):
        stock = float(library) + passes * calibration(plan.device).launch
        yield {Strategy.ONE_KERNEL: ranked.one_kernel, Strategy.LEFT_ALONE: stock}


def assumed_library(plan: ProductPlan, traffic: Traffic, ranked: Ranked) -> float:
    """The same by how long the one kernel takes: to begin as long, less for products, nothing for narrow copies."""
    one_kernel, best = ranked.tiles[0]
    problem, math_mode = ranked.problem, plan.variants[0].spec.math
    faster = advantage(plan.device, math_mode, best, int(problem.m)) * padding(best.tile, problem.n)
    memory = cost_model.from_memory(traffic.weights + _count(ranked) * (traffic.lhs + traffic.product), plan.device)
    known = calibration(plan.device)
    fixed = known.launches[best.family.name] + known.fill[best.family.name]
    return float(max(fixed + (one_kernel - fixed - ranked.copying) / faster, memory))


def advantage(device: DeviceSpec, arithmetic: str, entry: Candidate, m: int) -> float:
    """How many times as fast the library multiplies m rows as a tile does."""
    if entry.family.is_on_par(entry.tile, m):
        return 1.0
    return calibration(device).library_advantage.get(arithmetic, 1.0)


def padding(tile: AnyTile, n: int) -> float:
    """Columns that a tile computes for one that is stored: the library has tiles for narrow products as well."""
    return math.ceil(n / tile.block_n) * tile.block_n / n


def estimate_from(device: DeviceSpec, library: float, traffic: Traffic, m: int, one_kernel: float) -> Times:
    """The same, given how long the library and the one kernel take.

    Args:
        device: the chip.
        library: microseconds of the library's products.
        traffic: bytes that the site moves.
        m: number of rows.
        one_kernel: microseconds of the one kernel.
    """
    known, memory = calibration(device), cost_model.from_memory(m * (traffic.product + traffic.rest), device)
    a_pass, is_known = known.launch + memory, bool(known.library_products)
    passes = traffic.passes + (0 if is_known else len(traffic.added))
    biasing = (known.biasing.get(traffic.biased, 1.0) - 1.0) * memory if is_known else 0.0
    alone = library * (known.convolution if traffic.biased == CONVOLUTION else 1.0)
    normalised = (*traffic.normalised, *(traffic.added if is_known else ()))
    whole = _normalising(device, m, ((each.op, each.whole) for each in normalised))
    rest = _normalising(device, m, ((each.op, each.rest) for each in normalised))
    return {
        Strategy.ONE_KERNEL: one_kernel + rest,
        Strategy.LEFT_ALONE: alone + passes * (a_pass + biasing) + whole,
        Strategy.EPILOGUE_ONLY: library + (traffic.own_passes + 1) * a_pass + rest,
    }


def _normalising(device: DeviceSpec, m: int, ops: Iterable[tuple[str, int]]) -> float:
    """Microseconds of ONNX Runtime's ops that normalise m rows of so many bytes each."""
    known = calibration(device)
    each = (known.launch + known.normalising[op] * cost_model.from_memory(m * size, device) for op, size in ops)
    return float(sum(each))


def choose(architectures: Mapping[DeviceSpec, Sequence[Times]], otherwise: Strategy = Strategy.ONE_KERNEL) -> Strategy:
    """The strategy that is best on every architecture, by its times at every number of rows.

    Args:
        architectures: times of each.
        otherwise: what is taken where they do not agree.
    """
    best = {least_loss(architectures[device]) for device in named(architectures)}
    return best.pop() if len(best) == 1 else otherwise


def named(architectures: Iterable[DeviceSpec]) -> list[DeviceSpec]:
    """Those that have a say."""
    devices = list(architectures)
    return [device for device in devices if device.arch != PTX] or devices


def saves(joint: Mapping[DeviceSpec, Sequence[float]], alone: Mapping[DeviceSpec, Sequence[Sequence[float]]]) -> bool:
    """Whether one node saves time over several, on every architecture, as a mean over the numbers of rows.

    Args:
        joint: microseconds of the one, at every number of rows.
        alone: of each of the several.
    """
    return all(_saving(device, joint[device], alone[device]) > 0 for device in named(joint))


def is_nowhere_slower(
    joint: Mapping[DeviceSpec, Sequence[float]], alone: Mapping[DeviceSpec, Sequence[Sequence[float]]]
) -> bool:
    """Whether one node takes no longer than several, on every architecture, at every number of rows.

    Args:
        joint: microseconds of the one, at every number of rows.
        alone: of each of the several.
    """
    pairs = ((one, each) for device in named(joint) for one, *each in zip(joint[device], *alone[device], strict=True))
    return all(one <= sum(each) for one, each in pairs)


def is_faster(other: Mapping[DeviceSpec, Sequence[float]], kept: Mapping[DeviceSpec, Sequence[float]]) -> bool:
    """Whether to store weights in another order than the model does: slower on no architecture, faster on some one.

    Args:
        other: microseconds with the other order, at every number of rows.
        kept: with the model's own.
    """
    gains = [
        fmean(math.log(before / after) for before, after in zip(kept[device], other[device], strict=True))
        for device in named(kept)
    ]
    return bool(gains) and min(gains) >= 0 and max(gains) >= math.log(LEAST_GAIN)


def _saving(device: DeviceSpec, joint: Sequence[float], alone: Sequence[Sequence[float]]) -> float:
    launches = calibration(device).launch * (len(alone) - 1)
    return fmean(math.log((sum(each) + launches) / one) for one, *each in zip(joint, *alone, strict=True))


def least_loss(times: Sequence[Times]) -> Strategy:
    """The strategy whose times, each relative to the best one's, have the smallest mean; the first of equals.

    Args:
        times: at every number of rows; a strategy that is missing somewhere is not taken.
    """
    strategies = [strategy for strategy in times[0] if all(strategy in each for each in times)]
    best = [min(each.values()) for each in times]
    loss = {
        strategy: fmean([math.log(each[strategy] / us) for each, us in zip(times, best, strict=True)])
        for strategy in strategies
    }
    return min(loss, key=lambda strategy: loss[strategy])
