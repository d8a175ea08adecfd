"""Choosing by measurement: which implementations of a site are worth timing, and what the times decide. Sees no GPU.

For each distinct site and number of rows the plan's best few tiles, the epilogue-only one and the nodes as they
were are timed side by side. The strategy is the one that loses the least over all rows, if the estimates of
architectures that are not at hand agree; within one kernel, each number of rows gets its fastest tile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.analysis.axis_mapping import static_size
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.progress import Progress
from onnxfuse.schedule.kernel_family import AnyTile, Candidate
from onnxfuse.schedule.kernel_spec import EXACT
from onnxfuse.schedule.library import LABEL as LIBRARY
from onnxfuse.schedule.plan import by_library, replan, retuned
from onnxfuse.schedule.strategy import Strategy, Times, choose
from onnxfuse.schedule.variant import ProductPlan, Ranked

FEW = 4  # tiles of one kernel that are timed at each number of rows
TUNED = (1, 16, 77, 300, 1024, 4096)  # where a dynamic m or n is timed, some SAMPLED: ragged where ranges are narrow
MIDDLE_FIRST = (1024, 77, 300, 16, 4096, 1)  # in which order, for a budget that does not last

OF_WHOLE = (1024, 256, 4096, 64)  # the same of an attention's queries, and of rows that are normalised
OWN = "its kernels"

LEFT_ALONE, EPILOGUE_ONLY = Strategy.LEFT_ALONE.value, Strategy.EPILOGUE_ONLY.value


@dataclass(frozen=True)
class Trial:
    """One site at one size, to be timed in each implementation; None stands for the nodes as they were.

    Attributes:
        size: number of rows, or of columns where kernels are chosen by them.
    """

    site: Site
    size: int
    implementations: Mapping[str, Implementation | None]


Timer = Callable[[Trial], Mapping[str, float]]
"""Microseconds of each implementation, by its name; one that does not run is missing."""


def measure(
    groups: Sequence[Sequence[Site]],
    device: DeviceSpec,
    timer: Timer,
    budget: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[int, Mapping[str, float]]]:
    """Time each distinct site once, within a budget.

    Args:
        groups: sites that have equal times, together.
        device: the architecture at hand.
        timer: measures one trial.
        budget: seconds; what does not fit is not measured. None means no limit.
        progress: called after each trial.
        clock: tells seconds.

    Returns:
        The times of each group by number of rows, and by implementation.
    """
    trials = [(index, trial) for index, trial in _breadth_first(groups, device)]
    times: list[dict[int, Mapping[str, float]]] = [{} for _ in groups]
    deadline = None if budget is None else clock() + budget
    best = 1.0
    for done, (index, trial) in enumerate(trials):
        if deadline is not None and clock() >= deadline:
            break
        times[index][trial.size] = timer(trial)
        best = max(best, gain(times[index][trial.size]))
        if progress is not None:
            progress(f"timing sites, best {best:.2f}x", done + 1, len(trials))
    return times


def _breadth_first(groups: Sequence[Sequence[Site]], device: DeviceSpec) -> Iterator[tuple[int, Trial]]:
    """Every site at one number of rows before any site at a second, the most frequent site first."""
    order = sorted(range(len(groups)), key=lambda index: -len(groups[index]))
    queues = [(index, _trials(groups[index][0], device)) for index in order]
    while queues:
        queues = [(index, trials) for index, trials in queues if trials]
        for index, trials in queues:
            yield index, trials.pop(0)


def _trials(site: Site, device: DeviceSpec) -> list[Trial]:
    if site.whole is not None:
        return _trials_of_whole(site, site.whole, device)
    # No kernel has the product in it, or none for this device: there is nothing to choose.
    if not site.plans or site.only not in (None, device.arch):
        return []
    ranked = {entry.size: entry for entry in _plan_of(site, device).ranked}
    sizes = [size for size in MIDDLE_FIRST if size in ranked] if len(ranked) > 1 else []
    sizes = sizes or sorted(ranked, key=lambda size: abs(list(ranked).index(size) - len(ranked) // 2))
    return [Trial(site, size, _implementations(site, device, ranked[size])) for size in sizes]


def _trials_of_whole(site: Site, whole: Implementation, device: DeviceSpec) -> list[Trial]:
    """The kernels of its plan beside its nodes; queries and keys that only the run knows are as many."""
    plans = tuple(plan for plan in whole.plans if plan.device == device)
    implementations = {OWN: replace(whole, plans=plans), LEFT_ALONE: None}
    known = static_size(site.fusion, site.mapping.m)
    sizes = OF_WHOLE if known is None else (known,)
    return [Trial(site, size, implementations) for size in sizes] if plans else []


def _plan_of(site: Site, device: DeviceSpec) -> ProductPlan:
    return next(plan for plan in site.plans if plan.device == device)


def _implementations(site: Site, device: DeviceSpec, ranked: Ranked) -> dict[str, Implementation | None]:
    plan = _plan_of(site, device)
    implementations: dict[str, Implementation | None] = {
        str(entry.tile): replace(site.one_kernel, plans=(replan(plan, entry),)) for entry in contenders(ranked)
    }
    if plan.library:
        implementations[LIBRARY] = replace(site.one_kernel, plans=(by_library(plan),))
    # That it pays to take an op apart is the estimate's word: the site's own nodes are not the op. So it is where
    # integers are packed, which the site's own nodes cannot be given.
    if site.opens_ops or site.packs_integers:
        return implementations
    if site.epilogue_only is not None:
        plans = tuple(each for each in site.epilogue_only.plans if each.device == device)
        implementations[EPILOGUE_ONLY] = replace(site.epilogue_only, plans=plans)
    # ONNX Runtime multiplies fp32 in TF32, so it is no choice where exact products were asked for.
    return implementations if plan.variants[0].spec.math in EXACT else {**implementations, LEFT_ALONE: None}


def contenders(ranked: Ranked) -> list[Candidate]:
    """The first few tiles by the estimate; of those that are alike, the first."""
    distinct: dict[AnyTile, Candidate] = {}
    for _, entry in ranked.tiles:
        distinct.setdefault(entry.family.alike(entry.tile), entry)
    return list(distinct.values())[:FEW]


def gain(times: Mapping[str, float]) -> float:
    """How many times as fast the best implementation is as the nodes as they were; 1 where that is not known."""
    return times[LEFT_ALONE] / min(times.values()) if LEFT_ALONE in times else 1.0


def strategy_times(times: Mapping[str, float]) -> Times:
    """The best time of each strategy that ran."""
    strategies = {EPILOGUE_ONLY: Strategy.EPILOGUE_ONLY, LEFT_ALONE: Strategy.LEFT_ALONE}
    best: dict[Strategy, float] = {}
    for strategy in Strategy:  # in their order: the first of equals is taken
        own = [value for name, value in times.items() if strategies.get(name, Strategy.ONE_KERNEL) is strategy]
        if own:
            best[strategy] = min(own)
    return best


def decide(site: Site, device: DeviceSpec, times: Mapping[int, Mapping[str, float]]) -> Site:
    """The site with the strategy and the tiles that its times speak for; without times it stays as it is.

    Raises:
        NotFusable: `slower`, with the figures, where the nodes as they were win.
    """
    measured = [(m, each) for m, each in sorted(times.items()) if each]
    if not measured:
        return site
    strategy = choose({**site.estimates, device: [strategy_times(each) for _, each in measured]})
    by = "m" if site.whole is not None else _plan_of(site, device).ranked[0].problem.by
    figures = "; ".join(f"{by}={size}: {times_text(each)}" for size, each in measured)
    if strategy is Strategy.LEFT_ALONE:
        raise NotFusable("slower", site.fusion.anchor, f"measured on {device.arch}: {figures}")
    if site.whole is not None:
        return replace(site, strategy=strategy, timings=figures)
    return _retuned(site, device, strategy, dict(measured), figures)


def _retuned(
    site: Site, device: DeviceSpec, strategy: Strategy, measured: Mapping[int, Mapping[str, float]], figures: str
) -> Site:
    """The site with the tiles that its times speak for."""
    plan = _plan_of(site, device)
    tuned = retuned(plan, {m: each for m, each in measured.items() if _has_tiles(plan, each)})
    tuned = by_library(tuned, {m: each for m, each in measured.items() if LIBRARY in each})
    plans = tuple(tuned if each is plan else each for each in site.plans)
    return replace(
        site, strategy=strategy, plans=plans if strategy is Strategy.ONE_KERNEL else site.plans, timings=figures
    )


def times_text(times: Mapping[str, float]) -> str:
    """`one kernel 22.8 us, left alone 106.3 us`: each strategy's best."""
    return ", ".join(f"{strategy.value} {value:.1f} us" for strategy, value in strategy_times(times).items())


def _has_tiles(plan: ProductPlan, times: Mapping[str, float]) -> bool:
    """Whether a tile was timed, not only other ways."""
    return any(str(entry.tile) in times for _, entry in plan.ranked[0].tiles)
