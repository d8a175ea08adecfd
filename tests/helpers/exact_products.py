"""Products of fp32 matrices that exact arithmetic must get right, on the emulator and on a GPU, and how right it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from onnxfuse.dtypes import F32
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.small_m_tile import SmallMTile
from tests.helpers.kernel_problem import SPLIT, Problem, Size, TiledSpec, in_chunks, make_problem

ULP = 2.0**-23
CHUNK = 4  # elements in 16 bytes
SHALLOW = 7  # below, the error of each product shows; above, that of their sum
DEPTHS = (1, 3, 7, 64, 1000, 4096)
Run = Callable[[Problem], np.ndarray]


def spec_of(math_mode: str, tile: Tile | SmallMTile, lhs_order: str = "mk", rhs_order: str = "kn") -> TiledSpec:
    """A product alone, of any size."""
    out = (Access("tile", F32, 1),)
    return TiledSpec(F32, math_mode, 1, rhs_order, 1, 1, (), out, (), ("acc0",), tile=tile, lhs_order=lhs_order)


def small_m_spec(tile: SmallMTile, rhs_order: str) -> TiledSpec:
    """The same by the kernel for small M, whose rows begin on 16-byte boundaries."""
    return in_chunks(spec_of("3xtf32", tile, rhs_order=rhs_order))


def whole_chunks(lhs: np.ndarray, rhs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same product with zeros up to the next 16 bytes of k."""
    missing = -len(rhs) % CHUNK
    return np.pad(lhs, ((0, 0), (0, missing))), np.pad(rhs, ((0, missing), (0, 0)))


def problem_of(spec: TiledSpec, lhs: np.ndarray, rhs: np.ndarray) -> Problem:
    """The launch that multiplies lhs [m, k] with rhs [k, n]."""
    problem = make_problem(spec, Size(len(lhs), rhs.shape[1], len(rhs)))
    problem.lhs.view[0], problem.rhs[0].view[0] = lhs, rhs
    return problem


def draw(kind: str, *shape: int) -> np.ndarray:
    """Random numbers in fp32: of both signs, of one, so that cut sums add up, or of exponents far apart."""
    rng = np.random.default_rng([len(kind), *shape])
    values = rng.standard_normal(shape)
    scale = 2.0 ** rng.integers(-20, 20, shape) if kind == "scaled" else 1.0
    return ((np.abs(values) if kind == "positive" else values) * scale).astype(np.float32)


KINDS = ("normal", "positive", "scaled")


def relative_error(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray) -> float:
    """The largest error of an output over the sum of its products' magnitudes."""
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    return float((np.abs(out.astype(np.float64) - lhs @ rhs) / (np.abs(lhs) @ np.abs(rhs))).max())


def bound(depth: int, of_ffma: float) -> float:
    """What the relative error may be where FFMA's is `of_ffma`."""
    return max(2 * of_ffma + ULP, SPLIT + ULP if depth < SHALLOW else 0.0)


# Rows that hold, beside ones, numbers at the ends of fp32.
INFINITY, NAN, LARGEST = math.inf, math.nan, float(np.finfo(np.float32).max)
HARD_ROWS: tuple[tuple[float, ...], ...] = (
    (INFINITY,), (-INFINITY,), (INFINITY, -INFINITY), (INFINITY, INFINITY), (NAN,), (-NAN,), (NAN, INFINITY),
    (LARGEST,), (-LARGEST,), (LARGEST, -LARGEST), (LARGEST, LARGEST), (LARGEST, LARGEST, -LARGEST, -LARGEST),
    (2.0**128 - 2.0**116,), (2.0**128 - 2.0**116 - 2.0**104,), (2.0**127,), (1e30, 1e-30), (1e38, 1e38, 1e38, 1e38),
    (0.0, -0.0),
)  # fmt: skip
SMALL_ROWS: tuple[tuple[float, ...], ...] = (
    (2.0**-149,), (1e-40,), (-1e-42, 1e-40), (1.17e-38,), (2.345678e-38,), (1.2345678e-36,),
    (1.2345678e-34, 1e-44), (3e-30,),
)  # fmt: skip
HARD_COLUMNS = (1.0, -1.0, 0.0, 0.5, 3.0, 1 + 2.0**-12, 1e30, -1e-30)


def hard_problem(rows: Sequence[Sequence[float]], block_m: int) -> tuple[np.ndarray, np.ndarray]:
    """Lhs and rhs, each row in a block of its own: what one row needs must not help another."""
    depth = max(map(len, rows)) + 1
    lhs = np.ones((len(rows) * block_m, depth), np.float32)
    for number, row in enumerate(rows):
        lhs[number * block_m, : len(row)] = row
    rhs = np.tile(np.array(HARD_COLUMNS, np.float32), (depth, 1))
    rhs[1::2, 4:6] *= np.float32(0.75)
    return lhs, rhs


def check_hard(out: np.ndarray, ffma: np.ndarray) -> None:
    """The same outputs as FFMA's are infinite, of the same sign, or not a number."""
    np.testing.assert_array_equal(_special(out), _special(ffma))


def _special(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), np.float32(0.0), values)


def check_small(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, lost: float) -> None:
    """Sums within the bound of exact products, where each factor may be off by `lost` as well."""
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    magnitude = np.abs(lhs) @ np.abs(rhs)
    allowed = (SPLIT + 2 * ULP) * magnitude + lost * np.abs(rhs).sum(0) + 2.0**-149
    assert (np.abs(out.astype(np.float64) - lhs @ rhs) <= allowed).all()
