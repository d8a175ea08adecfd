"""The kernel that normalises groups of channels: what its text depends on, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.limits import MAX_BLOCK
from onnxfuse.schedule.norm_tile import NormSpec

WARP = 32
PAIR_BYTES = 8  # a sum, and one of squares
BARRIER_BYTES = 8
TURNS = 2  # of what blocks send: those of one group are read while those of the next one come


@dataclass(frozen=True)
class GroupNormTile:
    """The shape of one thread block's work.

    Attributes:
        threads: of a block.
        held: accesses of a thread that stay in registers; the others are read twice.
        splits: blocks of a cluster that share a group.
    """

    threads: int
    held: int
    splits: int

    @property
    def block_m(self) -> int:
        """Groups of one cluster."""
        return 1

    @property
    def block_n(self) -> int:
        """All elements of a group, or as many as a launch rule can say: the kernel goes on behind them."""
        return MAX_BLOCK

    def __str__(self) -> str:
        cluster = f" cluster {self.splits}" if self.splits > 1 else ""
        return f"groups of channels, {self.threads} threads{cluster}"


@dataclass(frozen=True)
class GroupNormSpec(NormSpec):
    """Everything but its tile that the text of the kernel depends on; all sizes are run-time arguments.

    The kernel looks at addresses and at the number of pixels by itself.
    """

    checked: bool = True

    @property
    def checks_outs(self) -> bool:
        """Outputs as well."""
        return True


def shared_bytes(tile: GroupNormTile) -> int:
    """Of one block: a pair of sums of each warp, and of a cluster what all blocks send, and barriers."""
    sent = TURNS * (tile.splits * PAIR_BYTES + BARRIER_BYTES) if tile.splits > 1 else 0
    return tile.threads // WARP * PAIR_BYTES + sent
