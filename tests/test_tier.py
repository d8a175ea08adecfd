"""The tier that a site gets: by what it loses on every architecture and number of rows, not by a majority."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.tier import LIBRARY_ADVANTAGE, Tier, Traffic, estimate, least_loss

ONE, BEHIND, ALONE = Tier.ONE_KERNEL, Tier.BEHIND, Tier.LEFT_ALONE
TRAFFIC = Traffic(weights=2 * 4096 * 8192, lhs=2 * 4096, product=2 * 8192, rest=2 * 4096, passes=5)


def times(one: float, behind: float, alone: float = 1000.0) -> dict[Tier, float]:
    return {ONE: one, BEHIND: behind, ALONE: alone}


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([times(1, 2)], ONE),
        ([times(2, 1)], BEHIND),
        ([times(2, 2, 2)], ONE),
        ([times(3, 3, 2)], ALONE),
        ([times(1, 1.3), times(1, 1.3), times(2, 1)], BEHIND),  # twice as fast there outweighs two small losses
        ([times(1, 1.5), times(1, 1.5), times(2, 1)], ONE),
        ([times(100, 130), times(1, 0.5)], BEHIND),  # a ratio counts the same for short and long kernels
    ],
)
def test_the_tier_that_loses_least(each: list[dict[Tier, float]], expected: Tier) -> None:
    assert least_loss([[times] for times in each]) is expected
    assert least_loss([[times] for times in each[::-1]]) is expected


def test_an_architecture_counts_once_however_many_rows_it_was_timed_at() -> None:
    assert least_loss([[times(1, 1.5)] * 10, [times(2, 1)]]) is BEHIND


def test_a_tier_that_was_not_timed_everywhere_is_not_taken() -> None:
    assert least_loss([[{ONE: 3.0, ALONE: 2.0}, times(3, 1, 2)]]) is ALONE


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES.keys() - LIBRARY_ADVANTAGE.keys()))
@pytest.mark.parametrize("m", [1, 128, 8192])
@pytest.mark.parametrize("microseconds", [1.0, 50.0, 2000.0])
def test_an_own_kernel_is_always_taken(arch: str, m: int, microseconds: float) -> None:
    estimated = estimate(ARCHITECTURES[arch], replace(TRAFFIC, passes=1), m, microseconds)
    assert estimated[ONE] < min(estimated[BEHIND], estimated[ALONE])


@pytest.mark.parametrize("arch", LIBRARY_ADVANTAGE)
def test_a_faster_library_is_taken_where_multiplying_takes_longest(arch: str) -> None:
    device = ARCHITECTURES[arch]
    assert least_loss([[estimate(device, TRAFFIC, 8192, 2000.0)]]) is BEHIND
    assert least_loss([[estimate(device, TRAFFIC, 16, 14.0)]]) is ONE  # bound by reading the weights
    assert least_loss([[estimate(device, replace(TRAFFIC, passes=1), 8192, 2000.0)]]) is ALONE
