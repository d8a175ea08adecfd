"""Which cases of a long list a short run takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Taken = Callable[[Sequence[Any], int], list[Any]]  # the fixture `taken`
GOLDEN = (math.sqrt(5) - 1) / 2


def is_taken(index: int, one_in: int) -> bool:
    """Whether a case is one of those that are taken, which are the first and one in so many behind it.

    The multiples of the golden ratio modulo 1 are spread evenly, also those of every second or third index (Knuth, The
    Art of Computer Programming, volume 3, 6.4), so that no axis of a product of cases is always taken at one place.
    """
    return index * GOLDEN % 1 < 1 / one_in
