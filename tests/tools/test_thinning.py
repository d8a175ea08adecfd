"""A short run takes a fair part of the cases."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.helpers.thinning import Taken, is_taken

SHARES = (2, 3, 4, 5)


@pytest.mark.parametrize("one_in", SHARES)
def test_one_in_so_many_is_taken_and_the_first(one_in: int) -> None:
    for count in range(1, 200):
        taken = sum(is_taken(index, one_in) for index in range(count))
        assert abs(taken - count / one_in) <= 3  # which grows with the logarithm of the count alone
        assert taken


@pytest.mark.parametrize("one_in", SHARES)
@pytest.mark.parametrize("inner", range(1, 9))
def test_no_value_of_an_axis_is_always_left_out(one_in: int, inner: int) -> None:
    """Cases are often products of axes: the inner axis repeats with a period, and no period keeps a value away."""
    cases = list(itertools.product(range(4 * one_in), range(inner)))
    taken = [case for index, case in enumerate(cases) if is_taken(index, one_in)]
    assert {value for _, value in taken} == set(range(inner))


def test_the_fixture_takes_the_same(taken: Taken, request: pytest.FixtureRequest) -> None:
    cases = list(range(50))
    short = [index for index in cases if is_taken(index, 3)]
    assert taken(cases, 3) == (cases if request.config.getoption("thorough") else short)


CASES = 18
MARKED = "tests/kernels/test_pointwise_kernel.py"


@pytest.mark.parametrize("options", [(), ("--thorough",)], ids=str)
def test_a_run_leaves_out_cases_of_marked_tests_alone(options: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, MARKED]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True)
    cases = [line for line in done.stdout.splitlines() if "::test_kernel_computes_the_steps[" in line]
    others = [line for line in done.stdout.splitlines() if "::test_a_tile_is_made_of_whole_threads[" in line]
    assert len(cases) == (CASES if options else sum(is_taken(index, 5) for index in range(CASES)))
    assert len(others) == 108  # what is not marked
