"""What a tile costs: microseconds of a problem, by what is known of the chip. The terms of every family.

The time is the longer of computing and reading rhs, a little of the shorter, and what adds to both.
"""

from __future__ import annotations

import math

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import AnyTile, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec


def overlapped(computing: float, reading: float, device: DeviceSpec) -> float:
    """Microseconds of both at once."""
    return max(computing, reading) + min(computing, reading) / calibration(device).overlap


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
    depth = waves_of(tile, problem, device) * (problem.k + calibration(device).pipeline_fill)
    return products_of(tile, spec) * depth / pace / calibration(device).products[spec.math]


def columns_in_waves(tile: AnyTile, reads: Flow, spec: KernelSpec, problem: Problem) -> float:
    """Columns of rhs that memory is read for, where row tiles meet in L2: as if the last wave were full."""
    rows = math.ceil(problem.m / tile.block_m)
    return math.ceil(tiles_of(tile, problem) / reads.blocks) * reads.blocks * tile.block_n * spec.parts / rows


def loading(columns: float, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which columns of rhs come from memory."""
    return columns * problem.k * spec.dtype.bytes / device.multiprocessors / calibration(device).bytes


def waiting(tile: AnyTile, reads: Flow, problem: Problem, device: DeviceSpec, splits: int = 1) -> float:
    """Microseconds in which blocks wait for what they have in flight."""
    trips = math.ceil(math.ceil(problem.k / splits) / reads.depth)
    return math.ceil(tiles_of(tile, problem) * splits / reads.blocks) * trips * calibration(device).round_trip
