"""Regions against Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.patterns.region import Region

POSITIONS = st.frozensets(st.integers(0, 200))


@given(POSITIONS, POSITIONS)
def test_a_region_is_a_set(first: frozenset[int], second: frozenset[int]) -> None:
    one, other = Region.of(first), Region.of([*second, *second])
    assert set(one | other) == set(Region.union((one, other))) == first | second
    assert set(one & other) == first & second
    assert set(one - other) == first - second
    assert (one <= other) == (first <= second)
    assert (one == other) == (first == second)


@given(POSITIONS)
def test_a_region_has_its_positions_in_order(positions: frozenset[int]) -> None:
    region = Region.of(positions)
    assert list(region) == sorted(positions)
    assert (len(region), bool(region)) == (len(positions), bool(positions))
    assert [position for position in range(202) if position in region] == sorted(positions)
    assert not positions or region.first == min(positions)
