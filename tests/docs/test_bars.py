"""The bars of docs/performance.md look at the results: none is met by kernels that are ten times slower."""

from __future__ import annotations

from typing import Any

import pytest

from tests.perf.bars import bars, regret
from tests.perf.document import result

TIMES = ("ours_us", "fused_us", "fused")


def scaled(found: Any, factor: float) -> Any:
    """A result whose fused times are so many times longer, and whose gains are less."""
    if isinstance(found, list):
        return [scaled(each, factor) for each in found]
    if not isinstance(found, dict):
        return found
    own = {"ratio": 1 / factor, **dict.fromkeys(TIMES, factor)}
    return {
        key: value * own[key] if key in own and isinstance(value, float) else scaled(value, factor)
        for key, value in found.items()
    }


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_bars_are_met_by_what_is_faster_and_by_nothing_that_is_slower(factor: float) -> None:
    """All but regret, which is of tiles, and the ratios of two fused times."""
    found = {what: met for what, _, _, met in bars(lambda name: scaled(result(name), factor))}
    relative = [what for what in found if "regret" in what or ", over " in what or ", 2048 rows" in what]
    assert {met for what, met in found.items() if what not in relative} == {factor < 1}


def test_regret_is_the_chosen_tiles_time_over_the_fastest() -> None:
    tiles = {"a": (6.0, 5.0), "b": (5.0, 5.5)}
    assert regret({"chosen": "a", "tiles": tiles}) == pytest.approx(0.2)
    assert regret({"chosen": "b", "tiles": tiles}) == 0.0
    assert regret({"chosen": "cuBLASLt + epilogue", "tiles": tiles}) is None
    assert regret({"chosen": "a"}) is None
