"""The IR of a normalisation of groups of channels: pixels less the mean, over the deviation, and pointwise steps."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.normalisation import Normalisation

IMAGE, GROUP, CHANNEL = "b", "g", "c"  # axes; those of pixels are called `p`, or `p0`, `p1`, ...


@dataclass(frozen=True)
class GroupNormalisation(Normalisation):
    """`normal[b, g, c, p] = (x[b, g, c, p] - mean[b, g]) / sqrt(variance[b, g] + epsilon)`, and the steps over it.

    Of an image `[b, (g c), p]` each of g groups of c channels has a mean and a variance of its own (Wu and He, 2018);
    an instance normalisation has groups of one channel. The first operand is x, all others are of channels, `[(g c)]`.
    """

    @property
    def channels(self) -> int:
        """Of a group."""
        return self.size(CHANNEL) or 1
