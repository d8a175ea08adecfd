"""Which kernels a site gets where only the run knows m, and which of them each number of rows takes.

Costs jump where a tile more begins, so m is looked at in ranges that end where some tile does, each at both of its
ends. A set of kernels has a regret in each range: how much longer its best takes than the best of all candidates. The
set grows by the kernel that lowers the regret most, as a mean over the logarithm of m, until no range has more than
`regret`, and loses again what is not needed for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onnxfuse.limits import MAX_M
from onnxfuse.schedule.kernel_family import Candidate

MOST_KERNELS = 8  # of one site and architecture
SAME = 0.01  # a kernel is not changed for less
LARGEST = 16384  # the last range has no end: what is best there is best behind it
SMALLEST_END = 16
STEPS = 16  # ranges from one power of two to the next

Price = Callable[[Candidate, int], float]
"""Microseconds of a candidate at a number of rows."""


@dataclass(frozen=True)
class RowRange:
    """Numbers of rows `low <= m <= high` and the kernel that they take."""

    low: int
    high: int
    entry: Candidate


def range_ends() -> tuple[int, ...]:
    """Every 16 rows to 128, then four ranges to each power of two; fewer rows than 16 are 1, 2, 4, 8 and 16."""
    few = (1, 2, 4, 8)
    by_tile = range(SMALLEST_END, 128, 16)
    octaves = (128 << power for power in range(int(math.log2(LARGEST // 128))))
    return (*few, *by_tile, *(base + base * step // STEPS for base in octaves for step in range(STEPS)), LARGEST)


def choose_ranges(candidates: Sequence[Candidate], price: Price, regret: float) -> tuple[RowRange, ...]:
    """The kernels and their ranges of m, which cover every m once.

    Args:
        candidates: legal for every m.
        price: infinite where a candidate is not to be taken; finite for one of them at any m.
        regret: that is worth no other kernel, as a part of the best one's time.
    """
    ends = range_ends()
    lows = (1, *(end + 1 for end in ends[:-1]))
    losses = [_losses(candidates, price, low, high) for low, high in zip(lows, ends, strict=True)]
    weights = [math.log((high + 1) / low) for low, high in zip(lows, ends, strict=True)]
    chosen = _without_needless(_grown(losses, weights, regret), losses, regret)
    picked: list[int] = []
    for row in losses:
        best = min(chosen, key=row.__getitem__)
        stays = picked and row[picked[-1]] <= row[best] + SAME
        picked.append(picked[-1] if stays else best)
    return tuple(_joined(picked, ends, candidates))


def _losses(candidates: Sequence[Candidate], price: Price, low: int, high: int) -> list[float]:
    """How much longer each candidate takes than the best one, as a logarithm, at the worse end of a range."""
    found = [0.0] * len(candidates)
    for m in {low, high}:
        prices = [price(entry, m) for entry in candidates]
        best = min(prices)
        found = [max(loss, math.log(each / best)) for loss, each in zip(found, prices, strict=True)]
    return found


def _grown(losses: Sequence[Sequence[float]], weights: Sequence[float], regret: float) -> list[int]:
    """Candidates, the one that helps most first."""
    chosen: list[int] = []
    least = [math.inf] * len(losses)

    def mean(candidate: int) -> float:
        return sum(
            weight * min(row[candidate], loss, 1e3) for weight, row, loss in zip(weights, losses, least, strict=True)
        )

    floors = [min(row) for row in losses]
    while len(chosen) < MOST_KERNELS:
        if all(loss - floor <= math.log1p(regret) for loss, floor in zip(least, floors, strict=True)):
            break
        helps = min(range(len(losses[0])), key=mean)
        if helps in chosen:
            break
        chosen.append(helps)
        least = [min(loss, row[chosen[-1]]) for loss, row in zip(least, losses, strict=True)]
    return chosen


def _without_needless(chosen: list[int], losses: Sequence[Sequence[float]], regret: float) -> list[int]:
    """The same without candidates whose ranges others take as well, within `regret`."""

    def least(candidates: Sequence[int]) -> list[float]:
        return [min((row[each] for each in candidates), default=math.inf) for row in losses]

    allowed = [max(loss, min(row) + math.log1p(regret)) for loss, row in zip(least(chosen), losses, strict=True)]
    for each in list(chosen):
        others = [other for other in chosen if other != each]
        if all(loss <= most for loss, most in zip(least(others), allowed, strict=True)):
            chosen = others
    return chosen


def _joined(picked: Sequence[int], ends: Sequence[int], candidates: Sequence[Candidate]) -> Iterator[RowRange]:
    """Neighbouring ranges of one kernel as one; the first begins at 0, the last has no end."""
    low = 0
    for index, end in enumerate(ends):
        last = index == len(ends) - 1
        if last or picked[index + 1] != picked[index]:
            yield RowRange(low, MAX_M if last else end, candidates[picked[index]])
            low = end + 1
