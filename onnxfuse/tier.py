"""The tiers of a site, and which of them a model gets where nothing was measured.

    one kernel            the product and all that follows it; nothing but the result is written
    behind the product    the product stays with ONNX Runtime's library; one kernel does all that follows
    left alone            what the library does is faster than both

One kernel saves writing and reading the product. It wins unless the library multiplies much faster than this project's
kernels, and does so on architectures with matrix units that they do not reach yet: `LIBRARY_ADVANTAGE` says how much is
assumed for those; it is 1 where a kernel was written for the architecture's own units. A measurement (`--tune`) needs
none of these numbers.

A site is one node of the model, whatever the architectures and the number of rows at run time. So the tier is the one
that loses the least: for every architecture and number of rows its time is divided by the best tier's, and the tier
with the smallest geometric mean of these ratios is taken. An architecture that gains twice outweighs two that each lose
a third.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from onnxfuse.device import DeviceSpec
from onnxfuse.plan import BYTES


class Tier(Enum):
    """How a site is written into the model."""

    ONE_KERNEL = "one kernel"
    BEHIND = "behind the product"
    LEFT_ALONE = "left alone"


LIBRARY_ADVANTAGE = {"sm_100": 2.5, "sm_120": 1.5}  # of multiplying; assumed, not measured
LAUNCH = 2.0  # microseconds from one kernel's end to the next one's first result

Times = Mapping[Tier, float]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a site moves.

    Attributes:
        weights: of rhs, read once.
        lhs: of one row.
        product: of one row of the product.
        rest: of one row of everything else that is read or written behind the product.
        passes: nodes behind the product, each of which reads and writes what one kernel keeps in registers.
    """

    weights: int
    lhs: int
    product: int
    rest: int
    passes: int


def estimate(device: DeviceSpec, traffic: Traffic, m: int, one_kernel: float) -> Times:
    """Microseconds of each tier at m rows, given those of the best plan of one kernel."""

    def moving(size: float) -> float:
        return size / device.multiprocessors / BYTES

    advantage = LIBRARY_ADVANTAGE.get(device.arch, 1.0)
    memory = moving(traffic.weights + m * (traffic.lhs + traffic.product))
    library = max(one_kernel / advantage, memory)
    return {
        Tier.ONE_KERNEL: one_kernel,
        Tier.LEFT_ALONE: library + traffic.passes * (LAUNCH + moving(m * (traffic.product + traffic.rest))),
        Tier.BEHIND: library + LAUNCH + moving(m * (traffic.product + traffic.rest)),
    }


def least_loss(architectures: Sequence[Sequence[Times]]) -> Tier:
    """The tier whose times, each relative to the best tier's, have the smallest product; the first of equals.

    Args:
        architectures: of each, the times at every number of rows; their mean counts, however many rows there are. A
            tier that is missing somewhere is not taken.
    """
    rows = [each for times in architectures for each in times]
    tiers = [tier for tier in rows[0] if all(tier in each for each in rows)]
    loss = {tier: sum(fmean(_loss(each, tier) for each in times) for times in architectures) for tier in tiers}
    return min(loss, key=lambda tier: loss[tier])


def _loss(times: Times, tier: Tier) -> float:
    return math.log(times[tier] / min(times.values()))
