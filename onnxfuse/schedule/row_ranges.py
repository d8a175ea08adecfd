"""Which kernels a site gets where only the run knows m, and which of them each number of rows takes.

Costs jump where a tile more begins, so m is looked at in ranges that end where some tile does, each at both of its
ends. A set of kernels has a regret in each range: how much longer its best takes than the best of all candidates. The
set grows by the kernel that lowers the regret most, as a mean over the logarithm of m, until no range has more than
`regret`, loses again what is not needed for that, exchanges a kernel for another as long as the mean falls, and grows
again where that has left one without rows. Up to 16 rows count for more than their logarithm, and the regret of one is
as many times less: a text is read once, and then written token by token, as are several at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from onnxfuse.limits import MAX_M
from onnxfuse.schedule.kernel_family import Amount, Candidate

# Elements of a weight at least, and kernels of such a site for one architecture at most. Beside a large weight the
# machine code of more kernels is nothing, and the more tiles its columns are, the more one that fits m gains:
# docs/kernel-notes.md.
MOST_KERNELS = ((2**24, 24), (2**20, 12), (0, 10))
MOST_OF_QUANTIZED = 16  # two kernels of few rows, and those that split k, fit few numbers of rows each
SAME = 0.01  # a kernel is not changed for less
LARGEST = 16384  # the last range has no end: what is best there is best behind it
SMALLEST_END = 16
STEPS = 16  # ranges from one power of two to the next
WORST = 1e3  # a loss that is as bad as any
FEW_ROWS = 4.0  # times what up to 16 rows count as any other range of an octave: an assumption

Losses = NDArray[np.float64]
"""[ranges, candidates]: how much longer a candidate takes than the best one, as a logarithm, at the worse end."""


@dataclass(frozen=True)
class RowRange:
    """Numbers of rows `low <= m <= high` and the kernel that they take."""

    low: int
    high: int
    entry: Candidate


@cache
def range_ends() -> NDArray[np.int64]:
    """Every 16 rows to 128, then 16 ranges to each power of two; fewer rows than 16 are 1, 2, 4, 8 and 16."""
    few = (1, 2, 4, 8)
    by_tile = range(SMALLEST_END, 128, 16)
    octaves = (128 << power for power in range(int(math.log2(LARGEST // 128))))
    by_octave = (base + base * step // STEPS for base in octaves for step in range(STEPS))
    return np.array([*few, *by_tile, *by_octave, LARGEST])


@cache
def range_lows() -> NDArray[np.int64]:
    """Where each of these ranges begins; fewer rows than one take what one takes."""
    return np.array([1, *(range_ends()[:-1] + 1)])


def at_both_ends(prices: Callable[[NDArray[np.int64]], Amount]) -> NDArray[np.float64]:
    """[..., 2, ranges]: what has a price at each number of rows, [..., rows], at the first and last of each range."""
    rows = np.concatenate([range_lows(), range_ends()])
    found = np.asarray(prices(rows), np.float64)
    found = np.broadcast_to(found, (*found.shape[:-1], len(rows)))
    return found.reshape(*found.shape[:-1], 2, -1)


def choose_ranges(
    candidates: Sequence[Candidate],
    prices: Callable[[NDArray[np.int64]], Amount],
    regret: float,
    few: float = FEW_ROWS,
    *,
    most: int,
) -> tuple[RowRange, ...]:
    """The kernels and their ranges of m, which cover every m once.

    Args:
        candidates: legal for every m.
        prices: microseconds of the candidates at numbers of rows, [candidates, rows]; infinite where one is not to be
            taken, finite for one of them at any m.
        regret: that is worth no other kernel, as a part of the best one's time.
        few: what up to 16 rows count, times any other range of an octave, and by how much the regret of m = 1 is less;
            1 where m stands for columns.
        most: kernels.
    """
    times = at_both_ends(prices)
    losses = np.log(times / times.min(axis=0)).max(axis=1).T
    weights = np.log((range_ends() + 1) / range_lows()) * np.where(range_ends() <= SMALLEST_END, few, 1.0)
    regrets = math.log1p(regret) / np.where(range_ends() == 1, few, 1.0)
    chosen = _without_needless(_grown([], losses, weights, regrets, most), losses, regrets)
    chosen = _exchanged(chosen, losses, weights)
    used = [each for each in chosen if each in {chosen[best] for best in losses[:, chosen].argmin(axis=1)}]
    chosen = _grown(used, losses, weights, regrets, most)
    picked: list[int] = []
    for row in losses:
        best = chosen[int(np.argmin(row[chosen]))]
        stays = picked and row[picked[-1]] <= row[best] + SAME
        picked.append(picked[-1] if stays else best)
    return tuple(_joined(picked, candidates))


def _grown(
    chosen: Sequence[int], losses: Losses, weights: NDArray[np.float64], regrets: NDArray[np.float64], most: int
) -> list[int]:
    """So many candidates at most: those that are chosen, then the one that helps most first."""
    chosen = list(chosen)
    least = losses[:, chosen].min(axis=1, initial=WORST)
    floors = losses.min(axis=1)
    while len(chosen) < most and (least - floors > regrets).any():
        helps = int(np.argmin(weights @ np.minimum(losses, least[:, None])))
        if helps in chosen:
            break
        chosen.append(helps)
        least = np.minimum(least, losses[:, helps])
    return chosen


def _without_needless(chosen: list[int], losses: Losses, regrets: NDArray[np.float64]) -> list[int]:
    """The same without candidates whose ranges others take as well, within `regrets`."""
    allowed = np.maximum(losses[:, chosen].min(axis=1), losses.min(axis=1) + regrets)
    for each in list(chosen):
        others = [other for other in chosen if other != each]
        if others and (losses[:, others].min(axis=1) <= allowed).all():
            chosen = others
    return chosen


def _exchanged(chosen: Sequence[int], losses: Losses, weights: NDArray[np.float64]) -> list[int]:
    """As many candidates, of which no single other one would lower the mean."""
    chosen = list(chosen)
    least = weights @ losses[:, chosen].min(axis=1)
    improves = True
    while improves:
        improves = False
        for place in range(len(chosen)):
            others = losses[:, chosen[:place] + chosen[place + 1 :]].min(axis=1, initial=WORST)
            means = weights @ np.minimum(losses, others[:, None])
            if means.min() < least * (1 - SAME):
                chosen[place], least, improves = int(np.argmin(means)), means.min(), True
    return chosen


def _joined(picked: Sequence[int], candidates: Sequence[Candidate]) -> Iterator[RowRange]:
    """Neighbouring ranges of one kernel as one; the first begins at 0, the last has no end."""
    low = 0
    for index, end in enumerate(map(int, range_ends())):
        last = index == len(picked) - 1
        if last or picked[index + 1] != picked[index]:
            yield RowRange(low, MAX_M if last else end, candidates[picked[index]])
            low = end + 1
