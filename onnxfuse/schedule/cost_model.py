"""What a tile costs: microseconds of a problem, by what is known of the chip. The terms of every family.

What keeps a multiprocessor busy at once (multiplying, loading, waiting) hides behind each other in part: it takes the
root of the sum of their squares, between the longest of them and their sum.
"""

from __future__ import annotations

import math

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import AnyTile, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec


def tiles_of(tile: AnyTile, problem: Problem) -> int:
    """Tiles of the whole output."""
    return problem.batch * math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)


def waves_of(tile: AnyTile, problem: Problem, device: DeviceSpec) -> int:
    """Blocks that a multiprocessor computes one after the other."""
    return math.ceil(tiles_of(tile, problem) / device.multiprocessors)


def products_of(tile: AnyTile, spec: KernelSpec) -> int:
    """Products of one k of a block."""
    return tile.block_m * tile.block_n * spec.parts


def multiplying(tile: AnyTile, pace: float, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which a multiprocessor multiplies."""
    depth = waves_of(tile, problem, device) * problem.k
    return products_of(tile, spec) * depth / pace / calibration(device).products[spec.math]


def moving(spec: KernelSpec, problem: Problem, device: DeviceSpec, passes: int = 1) -> float:
    """Microseconds in which memory delivers lhs, rhs so many times, and what the epilogue reads and writes."""
    factors = problem.m * problem.k + passes * problem.n * spec.parts * problem.k
    rows = sum(each.dtype.bytes for each in (*spec.loads, *spec.outs) if each.kind == "tile")
    size = problem.batch * (factors * spec.dtype.bytes + problem.m * problem.n * rows)
    return size / device.multiprocessors / calibration(device).bytes


def waiting(tile: AnyTile, reads: Flow, problem: Problem, device: DeviceSpec, family: str) -> float:
    """Microseconds in which blocks wait for what they have in flight."""
    trips = math.ceil(problem.k / reads.depth)
    return math.ceil(tiles_of(tile, problem) / reads.blocks) * trips * calibration(device).round_trip[family]


def filling(tile: AnyTile, reads: Flow, problem: Problem, device: DeviceSpec, family: str) -> float:
    """Microseconds of the prologues and epilogues of blocks that do not run at once."""
    return math.ceil(tiles_of(tile, problem) / reads.blocks) * calibration(device).fill[family]


def library(dtype_bytes: int, arithmetic: str, m: int, n: int, k: int, device: DeviceSpec) -> float | None:
    """Microseconds of the library's product [m, k] x [k, n]; None where nothing is known of it."""
    known = calibration(device)
    if arithmetic not in known.library_products:
        return None
    whole = math.ceil(m / known.library_granule) * math.ceil(n / known.library_granule) * known.library_granule**2
    computing = whole * k / device.multiprocessors / known.library_products[arithmetic]
    memory = (m * k + k * n + m * n) * dtype_bytes / device.multiprocessors / known.bytes
    serial = k * dtype_bytes * known.library_depth
    aligned = min(math.gcd(k * dtype_bytes, 16), math.gcd(n * dtype_bytes, 16))
    return known.library_launch + math.hypot(computing, memory, serial) * known.library_misaligned[str(aligned)]
