"""Which kernels a range of rows gets, against what every other choice of as many would cost."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.kernel_family import Amount, Candidate, Count
from onnxfuse.schedule.row_ranges import choose_ranges, range_ends, range_lows
from onnxfuse.schedule.small_m import SMALL_M
from tests.schedule.test_plan import planned

DEVICE = ARCHITECTURES["sm_90a"]
CANDIDATES = list(SMALL_M.candidates(planned(DEVICE).variants[-1].spec, DEVICE, 1280))[:7]
REGRET = 0.03


def drawn_prices(seed: int) -> dict[Candidate, np.ndarray]:
    """Microseconds of every candidate in every range, with a fastest one here and another there."""
    drawn = np.random.default_rng(seed).lognormal(sigma=0.3, size=(len(CANDIDATES), len(range_ends()) // 8 + 1))
    return {entry: np.repeat(row, 8)[: len(range_ends())] for entry, row in zip(CANDIDATES, drawn, strict=True)}


def prices_at(prices: dict[Candidate, np.ndarray], rows: Count) -> Amount:
    return np.stack([*prices.values()])[:, np.searchsorted(range_ends(), rows)]


def mean_loss(prices: dict[Candidate, np.ndarray], chosen: set[Candidate]) -> float:
    weights = np.log((range_ends() + 1) / range_lows())
    least = np.min(list(prices.values()), axis=0)
    taken = np.min([prices[entry] for entry in chosen], axis=0)
    return float(weights @ np.log(taken / least))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_no_other_kernel_in_the_place_of_one_is_better(seed: int, most: int) -> None:
    prices = drawn_prices(seed)
    ranges = choose_ranges(CANDIDATES, partial(prices_at, prices), REGRET, few=1.0, most=most)
    assert (ranges[0].low, ranges[-1].high) == (0, MAX_M)
    assert all(before.high + 1 == behind.low for before, behind in pairwise(ranges))
    chosen = {each.entry for each in ranges}
    assert len(chosen) <= most
    neighbours = [set(other) for other in combinations(CANDIDATES, len(chosen)) if len(chosen - set(other)) == 1]
    assert mean_loss(prices, chosen) <= 1.02 * min((mean_loss(prices, other) for other in neighbours), default=np.inf)


@pytest.mark.parametrize(("few", "own"), [(1.0, False), (4.0, True)])
def test_one_row_has_a_kernel_before_rarer_ranges(few: float, own: bool) -> None:
    """Two kernels for three ranges: one row, where another takes 8 % longer, and the largest, where it takes 5."""
    of_one, of_few, of_many = CANDIDATES[:3]
    ends = range_ends()
    prices = {
        of_one: np.where(ends == 1, 1.0, 3.0),
        of_few: np.where(ends == 1, 1.08, np.where(ends < 4096, 1.0, 1.05)),
        of_many: np.where(ends < 4096, 3.0, 1.0),
    }
    ranges = choose_ranges([*prices], partial(prices_at, prices), REGRET, few, most=2)
    assert (ranges[0].entry is of_one) == own


@pytest.mark.parametrize(("few", "own"), [(1.0, False), (4.0, True)])
def test_rows_of_several_texts_have_a_kernel_before_rarer_ranges(few: float, own: bool) -> None:
    """The same of 9 to 16 rows."""
    of_sixteen, of_others, of_many = CANDIDATES[:3]
    ends = range_ends()
    prices = {
        of_sixteen: np.where(ends == 16, 1.0, 3.0),
        of_others: np.where(ends == 16, 1.1, np.where(ends < 4096, 1.0, 1.08)),
        of_many: np.where(ends < 4096, 3.0, 1.0),
    }
    ranges = choose_ranges([*prices], partial(prices_at, prices), REGRET, few, most=2)
    assert (of_sixteen in {each.entry for each in ranges}) == own
