"""The shape that a Reshape in a fallback function has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FallbackShape:
    """The second input of a Reshape in a fallback function, where the model computes it elsewhere.

    Attributes:
        entries: as Reshape reads them: 0 keeps a dimension, -1 is the one that is left.
        of_base: for each entry, the dimension of an input that is taken instead; None for the entry itself.
        base: which of the fusion's inputs.
    """

    entries: tuple[int, ...]
    of_base: tuple[int | None, ...]
    base: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether no dimension of an input is needed."""
        return not any(index is not None for index in self.of_base)
