"""A set of nodes of what has grown, each by its position: a set of small numbers, kept as the bits of a large one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A set of positions; it is true where it has any, and iterates from the first one on."""

    bits: int = 0

    @staticmethod
    def of(positions: Iterable[int]) -> Region:
        """The region of some positions, each given once or more often."""
        return Region.union(Region(1 << position) for position in positions)

    @staticmethod
    def union(regions: Iterable[Region]) -> Region:
        """What any of some regions has."""
        bits = 0
        for region in regions:
            bits |= region.bits
        return Region(bits)

    def __or__(self, other: Region) -> Region:
        return Region(self.bits | other.bits)

    def __and__(self, other: Region) -> Region:
        return Region(self.bits & other.bits)

    def __sub__(self, other: Region) -> Region:
        return Region(self.bits & ~other.bits)

    def __le__(self, other: Region) -> bool:
        return not self.bits & ~other.bits

    def __contains__(self, position: int) -> bool:
        return bool(self.bits >> position & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[int]:
        bits = self.bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    @property
    def first(self) -> int:
        """The first position of a region that has any."""
        return (self.bits & -self.bits).bit_length() - 1
