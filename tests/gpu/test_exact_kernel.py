"""Exact fp32 by three TF32 products on the GPU: as accurate as FFMA, and the same at the ends of fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.schedule.kernel_spec import EXACT, Tile
from onnxfuse.schedule.portable import tiles_for
from onnxfuse.schedule.small_m import small_m_tiles
from tests.gpu.kernels import Kernels
from tests.gpu.test_portable_kernel import device_spec, launch
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

pytestmark = pytest.mark.gpu

LARGE = Tile(128, 64, 32, 4, 2, 3)  # of both arithmetics
ORDERS = [("mk", "kn"), ("mk", "nk"), ("km", "kn"), ("km", "nk")]
SMALL_M = "small M"
KERNELS = [("3xtf32", *order) for order in ORDERS] + [(SMALL_M, *order) for order in ORDERS[:2]]
M, N = 200, 136
FLUSHED = 2.0**-126  # what a multiplication may take for nothing

Multiply = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def multiply(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """Lhs * rhs in an arithmetic, both tensors in an order."""
    specs = {(kind, *order): spec_of(kind, LARGE, *order) for kind in EXACT for order in ORDERS}
    small = {order: small_m_tiles("3xtf32", 1, order, ARCHITECTURES["sm_90a"])[0] for order in ("kn", "nk")}
    specs |= {(SMALL_M, "mk", order): small_m_spec(tile, order) for order, tile in small.items()}
    sources = {"-".join(key): (spec.source(), spec.shared_bytes(device_spec())) for key, spec in specs.items()}
    folder: Path = tmp_path_factory.mktemp("exact")
    kernels = Kernels(sources, device_spec(), folder)

    def run(kind: str, lhs: np.ndarray, rhs: np.ndarray, order: tuple[str, str] = ("mk", "kn")) -> np.ndarray:
        key, shape = (kind, *order), (len(lhs), rhs.shape[1])
        if kind == SMALL_M:
            lhs, rhs = whole_chunks(lhs, rhs)
        (out,) = launch(kernels["-".join(key)], problem_of(specs[key], lhs, rhs), None)
        return out.reshape(shape)

    return run


def test_both_have_the_tile() -> None:
    assert all(LARGE in tiles_for(kind, 1) for kind in EXACT)


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_products_are_as_accurate_as_ffma(
    kind: str, depth: int, kernel: tuple[str, str, str], multiply: Multiply
) -> None:
    lhs, rhs, order = draw(kind, M, depth), draw(kind, depth, N), kernel[1:]
    ffma, split = (relative_error(multiply(math, lhs, rhs, order), lhs, rhs) for math in ("fp32", kernel[0]))
    print(f"{kind} {depth}: {split * 2**23:.2f} units, FFMA {ffma * 2**23:.2f}")
    assert split <= bound(depth, ffma)


@pytest.mark.parametrize("kernel", ["3xtf32", SMALL_M])
def test_what_is_not_finite_comes_out_as_of_ffma(kernel: str, multiply: Multiply) -> None:
    lhs, rhs = hard_problem(HARD_ROWS, LARGE.block_m)
    check_hard(multiply(kernel, lhs, rhs), multiply("fp32", lhs, rhs))


@pytest.mark.parametrize("kernel", ["3xtf32", SMALL_M])
def test_numbers_below_the_smallest_normal_one_are_flushed_at_most(kernel: str, multiply: Multiply) -> None:
    lhs, rhs = hard_problem(SMALL_ROWS, LARGE.block_m)
    check_small(multiply(kernel, lhs, rhs), lhs, rhs, FLUSHED)
