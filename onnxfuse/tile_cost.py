"""What a tile costs: microseconds of a problem, estimated from what was measured on an H200. The terms of every family.

The time is the longer of computing and reading rhs, a little of the shorter, and what adds to both.
"""

from __future__ import annotations

import math

from onnxfuse.device import DeviceSpec
from onnxfuse.kernel_family import AnyTile, Flow, Problem
from onnxfuse.kernel_spec import KernelSpec

# One multiprocessor of an H200 in a microsecond: products at a pace of 1, its share of what memory delivers; and how
# long a block waits, in microseconds, for the loads that it has on their way. Other chips have other units, but similar
# relations between them. Of 3xtf32 the tensor cores' three products allow 0.37e6, and issuing the 245 instructions of a
# warp's step, 48 of them on the tensor cores, 0.47e6; neither hides all of the other.
PRODUCTS = {"f16": 2.3e6, "bf16": 2.3e6, "tf32": 1.1e6, "3xtf32": 0.21e6, "fp32": 0.15e6}
BYTES = 32.6e3
ROUND_TRIP = 1.0
OVERLAP = 16  # of computing and reading the shorter hides behind the longer, but for one part in 16
PIPELINE_FILL = 64  # a tile's prologue and epilogue take about as long as products of this depth


def overlapped(computing: float, reading: float) -> float:
    """Microseconds of both at once."""
    return max(computing, reading) + min(computing, reading) / OVERLAP


def tiles_of(tile: AnyTile, problem: Problem) -> int:
    """Tiles of the whole output."""
    return problem.batch * math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)


def waves_of(tile: AnyTile, problem: Problem, device: DeviceSpec, splits: int = 1) -> int:
    """Blocks that a multiprocessor computes one after the other."""
    return math.ceil(tiles_of(tile, problem) * splits / device.multiprocessors)


def products_of(tile: AnyTile, spec: KernelSpec) -> int:
    """Products of one k of a block."""
    return tile.block_m * tile.block_n * spec.parts


def computing(tile: AnyTile, pace: float, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which a multiprocessor multiplies, its tiles' prologues and epilogues among them."""
    depth = waves_of(tile, problem, device) * (problem.k + PIPELINE_FILL)
    return products_of(tile, spec) * depth / pace / PRODUCTS[spec.math]


def columns_in_waves(tile: AnyTile, reads: Flow, spec: KernelSpec, problem: Problem) -> float:
    """Columns of rhs that memory is read for, where row tiles meet in L2: as if the last wave were full."""
    rows = math.ceil(problem.m / tile.block_m)
    return math.ceil(tiles_of(tile, problem) / reads.blocks) * reads.blocks * tile.block_n * spec.parts / rows


def loading(columns: float, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which columns of rhs come from memory."""
    return columns * problem.k * spec.dtype.bytes / device.multiprocessors / BYTES


def waiting(tile: AnyTile, reads: Flow, problem: Problem, splits: int = 1) -> float:
    """Microseconds in which blocks wait for what they have on its way."""
    trips = math.ceil(math.ceil(problem.k / splits) / reads.depth)
    return math.ceil(tiles_of(tile, problem) * splits / reads.blocks) * trips * ROUND_TRIP
