"""The library's product by range of rows: who may take it, which rows do, and that their own kernels stay behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.limits import MAX_M
from onnxfuse.schedule import library as library_module
from onnxfuse.schedule.library import GAIN, LABEL, LIBRARY, library_rows, library_time, rows_text
from onnxfuse.schedule.plan import by_library, estimated, make_plan, replan
from onnxfuse.schedule.row_ranges import SAME, range_ends, range_lows
from onnxfuse.schedule.strategy import Strategy, Traffic, estimated_times
from tests.helpers.fusions import fusion
from tests.schedule.test_plan import planned

DEVICE = ARCHITECTURES["sm_90a"]
FEW_COLUMNS = {"n": 136, "k": 4096}


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_for_which_it_is_faster_go_to_the_library(dtype, parts: int) -> None:
    """In every range of rows one way or the other, whichever the cost model says is the faster at its ends."""
    plan = planned(DEVICE, **(FEW_COLUMNS if parts == 1 else {"n": 1283, "k": 771}), parts=parts, dtype=dtype)
    assert plan.library_rows
    base, sizes = plan.variants[0].spec, plan.sizes
    candidates = [entry for _, entry in plan.ranked[0].tiles]
    taken = {each.tile for each in plan.variants}
    own = [index for index, entry in enumerate(candidates) if entry.tile in taken]

    def gains(rows: np.ndarray) -> np.ndarray:
        problem = sizes.at(rows)
        return estimated(base, candidates, problem, DEVICE)[own].min(axis=0) / library_time(base, problem, 1, DEVICE)

    means = np.sqrt(gains(range_lows()) * gains(range_ends()))
    for high, mean in zip(map(int, range_ends()), means, strict=True):
        first = next(each for each in plan.tried if each.min_m <= high <= each.max_m)
        assert mean >= 1 - SAME if first.family is LIBRARY else mean < GAIN


def test_what_a_launch_tries_first_is_the_librarys_where_it_is_and_own_kernels_are_behind_it() -> None:
    plan = planned(DEVICE, **FEW_COLUMNS)
    assert plan.tried[-len(plan.variants) :] == plan.variants
    behind = plan.tried[: -len(plan.variants)]
    assert {each.family for each in behind} == {LIBRARY}
    for m in (0, 1, 16, 77, 300, 1024, 16384, MAX_M):
        covered = any(low <= m <= high for low, high in plan.library_rows)
        assert any(each.min_m <= m <= each.max_m for each in behind) == covered
        assert any(each.min_m <= m <= each.max_m for each in plan.variants)
    assert LABEL in str(plan)
    assert not plan.library_rows or f"m {plan.library_rows[0][0]}.." in str(plan)


@pytest.mark.parametrize("arch", sorted({*ARCHITECTURES} - {"sm_90a"}))
def test_where_nothing_is_known_of_the_library_only_a_measurement_takes_it(arch: str) -> None:
    plan = planned(ARCHITECTURES[arch], n=1283, k=771)
    assert plan.library
    assert not plan.library_rows


def test_who_may_not() -> None:
    """Exact products are this project's; operands in two levels, no depth, and more loads than a kernel takes."""
    assert not planned(DEVICE, dtype=F32, exact=True).library
    assert not planned(DEVICE, k=0).library
    heads = fusion({"b": 2, "m": 64, "h": 4, "d": 16, "n": 64}, lhs="b h m d", rhs="(h d) n", out="b m n")
    mapping = map_axes(heads)
    assert not make_plan(heads, mapping, analyse(heads, mapping), DEVICE, False).library
    many = fusion({"m": 64, "n": 64, "k": 64}, operands=[("m n", F16)] * 12)
    mapping = map_axes(many)
    assert not make_plan(many, mapping, analyse(many, mapping), DEVICE, False).library


def test_parts_are_the_first_loads_of_the_kernel_behind() -> None:
    plan = planned(DEVICE, n=40, k=64, parts=2)
    for each in plan.library:
        assert len(each.spec.loads) == 2 + len(plan.variants[0].spec.loads)
        assert [load.kind for load in each.spec.loads[:2]] == ["tile", "tile"]
        assert {load.dtype for load in each.spec.loads[:2]} == {F16}
        assert each.spec.math == "f16"
    assert {each.spec.loads[0].width for each in plan.library} == {8, 1}


def test_ranges_do_not_flutter() -> None:
    """The library wins every second range by a little: it stays; it wins by less than GAIN: it is not taken."""
    ends = range_ends()

    def fluttering(m: np.ndarray) -> np.ndarray:
        return 10 * np.where(np.searchsorted(ends, m) % 2, 1.005, 0.99 / GAIN)

    assert library_rows(lambda m: 10.0, fluttering) == ((0, MAX_M),)
    assert library_rows(lambda m: 10.0, lambda m: 9.9) == ()
    assert library_rows(lambda m: 10.0, lambda m: np.where((m >= 65) & (m <= 128), 5.0, 11.0)) == ((65, 128),)
    assert library_rows(lambda m: 10.0, lambda m: math.inf) == ()


def test_measured_times_decide_for_the_rows_nearest_to_them() -> None:
    plan = planned(DEVICE, n=1280, k=1280)
    tile = str(plan.ranked[0].tiles[0][1].tile)
    tuned = by_library(plan, {16: {tile: 5.0, LABEL: 9.0}, 300: {tile: 9.0, LABEL: 5.0}, 4096: {tile: 8.0, LABEL: 9.0}})
    ((low, high),) = tuned.library_rows
    assert 48 < low < 97  # sqrt(16 * 300) is 69, in a range of 16 rows
    assert 1000 < high < 1200  # sqrt(300 * 4096) is 1109
    assert by_library(plan, {}) == plan
    assert by_library(plan).library_rows == ((0, MAX_M),)
    assert replan(by_library(plan), plan.ranked[0].tiles[0][1]).library_rows == (), "one tile means that tile"


def test_the_fused_node_is_as_fast_as_its_fastest_way() -> None:
    traffic = Traffic(weights=1283 * 771 * 2, lhs=771 * 2, product=1283 * 2, rest=1283 * 2, passes=2)
    plan = planned(DEVICE, n=1283, k=771)
    for ranked, times in zip(plan.ranked, estimated_times(plan, traffic), strict=True):
        taken = any(low <= ranked.size <= high for low, high in plan.library_rows)
        assert (ranked.library < math.inf) == taken
        own = ranked.tiles[0][0] + ranked.risk
        assert times[Strategy.ONE_KERNEL] <= own
        assert taken or times[Strategy.ONE_KERNEL] == own


def test_a_report_names_the_rows() -> None:
    assert rows_text(((0, 16), (129, 192), (513, MAX_M)), "m") == "m 0..16, 129..192, 513.."


def test_two_products_take_as_long_as_two() -> None:
    base = planned(DEVICE, n=640, k=640, parts=2).variants[0].spec
    problem = planned(DEVICE, n=640, k=640, parts=2).sizes.at(512)
    single = replace(base, parts=1)
    assert library_time(base, problem, 2, DEVICE) > library_time(base, problem, 1, DEVICE)
    assert library_time(base, problem, 2, DEVICE) < 2 * library_time(single, problem, 1, DEVICE)
    assert library_module.LIBRARY.label == LABEL
