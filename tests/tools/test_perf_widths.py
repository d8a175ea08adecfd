"""The problems of `tests.perf.widths`, without a GPU: which kernels are timed, and how both sides of a ratio differ."""

from __future__ import annotations

import pytest

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import is_transposed
from onnxfuse.device import ARCHITECTURES
from tests.perf.widths import FLOOR, ODD, TRANSPOSED_OVER_PLAIN, WORTH, Problem, strides

HOPPER = ARCHITECTURES["sm_90a"]


@pytest.mark.parametrize("problem", [*FLOOR, *WORTH], ids=str)
def test_wide_and_narrow_differ_in_the_epilogue_alone(problem: Problem) -> None:
    wide, narrow = problem.variant(HOPPER), problem.narrow.variant(HOPPER)
    assert wide.family.name == "hopper"
    assert narrow.family.name == "hopper"
    assert {each.width * each.dtype.bytes for each in (*wide.spec.loads, *wide.spec.outs)} == {16}
    assert {each.width for each in (*narrow.spec.loads, *narrow.spec.outs)} == {1}
    assert (wide.spec.lhs_width, wide.spec.rhs_width) == (narrow.spec.lhs_width, narrow.spec.rhs_width) == (8, 8)
    assert wide.spec.steps == narrow.spec.steps


def test_the_transposed_residual_is_transposed_and_its_peer_is_not() -> None:
    for transposed, plain in TRANSPOSED_OVER_PLAIN:
        for problem, expected in ((transposed, True), (plain, False)):
            built = problem.fusion
            assert is_transposed(built, built.operands[1], map_axes(built)) == expected
            assert strides(built.operands[1], built, "m", "n") == ((1, 8192) if expected else (1280, 1))


def test_an_odd_n_narrows_what_has_it() -> None:
    for problem in ODD:
        spec = problem.variant(HOPPER).spec
        assert {each.width for each in (*spec.loads, *spec.outs)} == {1}
        assert (spec.lhs_width, spec.rhs_width) == (8, 1 if problem.order == "kn" else 8)


def test_every_row_of_a_table_has_a_name_of_its_own() -> None:
    for table in (FLOOR, [transposed for transposed, _ in TRANSPOSED_OVER_PLAIN], ODD, WORTH):
        assert len({(each.name, each.order) for each in table}) == len(table)
    assert len(WORTH) == 6
