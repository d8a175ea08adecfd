"""Exact fp32 by three TF32 products, on the emulator: as accurate as FFMA, and the same at the ends of fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import F16
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.small_m_tile import SmallMTile
from tests.helpers.exact_products import (
    DEPTHS,
    HARD_ROWS,
    KINDS,
    SMALL_ROWS,
    bound,
    check_hard,
    check_small,
    draw,
    hard_problem,
    problem_of,
    relative_error,
    small_m_spec,
    spec_of,
    whole_chunks,
)  # fmt: skip
from tests.helpers.kernel_problem import Size, TiledSpec, make_problem
from tests.kernels.test_portable_on_cpu import build, launch

TILE = Tile(32, 32, 32, 2, 1, 3)
SMALL_M = SmallMTile(32, 16, 2, 2)
M, N = 33, 24
SUBNORMAL_TF32 = 2.0**-136

SPECS = {name: spec_of(name, TILE) for name in ("tf32", "fp32", "3xtf32")}
SPECS |= {f"small M {order}": small_m_spec(SMALL_M, order) for order in ("kn", "nk")}
SPLIT = [name for name, spec in SPECS.items() if spec.math == "3xtf32"]
Multiply = Callable[[str, np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def multiply(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """Lhs * rhs by a kernel, whenever asynchronous copies land."""
    libraries: dict[str, ctypes.CDLL] = {}

    def run(name: str, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        spec, shape = SPECS[name], (len(lhs), rhs.shape[1])
        if name not in libraries:
            libraries[name] = build(spec, tmp_path_factory.mktemp("kernel"))
        if name.startswith("small M"):
            lhs, rhs = whole_chunks(lhs, rhs)
        problem = problem_of(spec, lhs, rhs)
        (eager,), (late,) = (launch(libraries[name], problem, lazy) for lazy in (False, True))
        np.testing.assert_array_equal(eager, late)
        return eager.reshape(shape)

    return run


@pytest.mark.one_in(20)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_products_are_as_accurate_as_ffma(kind: str, depth: int, multiply: Multiply) -> None:
    lhs, rhs = draw(kind, M, depth), draw(kind, depth, N)
    ffma, *split = (relative_error(multiply(name, lhs, rhs), lhs, rhs) for name in ("fp32", *SPLIT))
    assert max(split) <= bound(depth, ffma)


def test_one_product_in_tf32_is_not(multiply: Multiply) -> None:
    lhs, rhs = draw("normal", M, 64), draw("normal", 64, N)
    ffma, single = (relative_error(multiply(math, lhs, rhs), lhs, rhs) for math in ("fp32", "tf32"))
    assert single > 100 * bound(64, ffma)


@pytest.mark.parametrize("kernel", SPLIT)
def test_what_is_not_finite_comes_out_as_of_ffma(kernel: str, multiply: Multiply) -> None:
    lhs, rhs = hard_problem(HARD_ROWS, TILE.block_m)
    ffma = multiply("fp32", lhs, rhs)
    assert np.isnan(ffma).any()
    assert np.isinf(ffma).any()
    check_hard(multiply(kernel, lhs, rhs), ffma)


@pytest.mark.parametrize("kernel", SPLIT)
def test_numbers_below_the_smallest_of_tf32_count(kernel: str, multiply: Multiply) -> None:
    lhs, rhs = hard_problem(SMALL_ROWS, TILE.block_m)
    check_small(multiply(kernel, lhs, rhs), lhs, rhs, SUBNORMAL_TF32)


def test_the_emulator_cuts_what_it_adds(tmp_path: Path) -> None:
    """15 ones beside 2^24, whose neighbours are two apart: rounded once they would be 14 or 16; cut, nothing."""
    out = (Access("tile", F16, 1),)
    spec = TiledSpec(F16, "f16", 1, "kn", 1, 1, (), out, (), ("acc0",), tile=Tile(16, 16, 32, 1, 1, 2))
    lhs = np.float16([[2.0**12] + [1.0] * 15 + [-(2.0**12)]])
    problem = make_problem(spec, Size(1, 1, lhs.shape[1]))
    problem.lhs.view[0], problem.rhs[0].view[0] = lhs, np.abs(lhs.T)
    assert launch(build(spec, tmp_path), problem, lazy=False)[0][0] == 0.0
