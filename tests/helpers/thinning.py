"""Which cases of a long list a short run takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Taken = Callable[[Sequence[Any], int], list[Any]]  # the fixture `taken`
GOLDEN = (math.sqrt(5) - 1) / 2


def each_with_one(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Cases of all pairs, of which a short run has each of the first with one of the second, in turn."""
    left_out = pytest.mark.one_in(math.inf)
    return [
        pytest.param(each, other, marks=() if place == index % len(second) else left_out)
        for index, each in enumerate(first)
        for place, other in enumerate(second)
    ]


def case_id(value: Any) -> str:
    """What a run calls one of their values: a function by its name, ONNX's type of floats by its width."""
    return {1: "f32", 10: "f16"}.get(value) or value.__name__


def is_taken(index: int, one_in: float) -> bool:
    """Whether a case is one of those that are taken, which are the first and one in so many behind it.

    The multiples of the golden ratio modulo 1 are spread evenly, also those of every second or third index (Knuth, The
    Art of Computer Programming, volume 3, 6.4), so that no axis of a product of cases is always taken at one place.
    """
    return index * GOLDEN % 1 < 1 / one_in
