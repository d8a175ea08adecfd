"""What a tile costs: microseconds of a problem, by what is known of the chip. The terms of every family.

What keeps a multiprocessor busy at once (multiplying, loading, waiting) hides behind each other in part: it takes the
root of the sum of their squares, between the longest of them and their sum.

A problem with an array of rows has an array of costs, one for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from onnxfuse.device import CACHE_LINE, DeviceSpec
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, AnyTile, Count, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec

CLUSTERS_SINCE = 90  # compute capability


def tiles_of(tile: AnyTile, problem: Problem) -> Amount:
    """Tiles of the whole output."""
    return problem.batch * np.ceil(problem.m / tile.block_m) * np.ceil(problem.n / tile.block_n)


def waves_of(tile: AnyTile, problem: Problem, device: DeviceSpec, splits: Count = 1) -> Amount:
    """Blocks that a multiprocessor computes one after the other; `splits` of them share a tile along k."""
    return np.ceil(tiles_of(tile, problem) * splits / device.multiprocessors)


def saved_of_last_wave(tile: Any, problem: Problem, device: DeviceSpec) -> Amount:
    """The part of a wave that a kernel saves where clusters split the last one's k, 0 where it does not.

    As the kernel decides: each remaining tile has a cluster, and all tiles of the same columns are split or none.
    """
    splits, tiles, at_once = tile.last_wave_splits, tiles_of(tile, problem), device.multiprocessors
    rest = tiles % at_once
    together = (tiles - rest) % np.maximum(np.ceil(problem.m / tile.block_m), 1) == 0
    happens = (problem.batch == 1) & together & (rest > 0) & (rest * splits <= at_once)
    return happens * (1 - 1 / splits)


def filled(sizes: Amount, blocks: Amount) -> Amount:
    """The part of all tiles along an axis, the last one too, that lies inside the tensor."""
    inside: Amount = sizes / (np.ceil(sizes / blocks) * blocks)
    return inside


def clusters_at_once(blocks: int, residents: int, device: DeviceSpec) -> int:
    """Clusters that a chip has room for; one is launched with no more blocks than it has multiprocessors."""
    at_once = device.multiprocessors if residents > 1 else calibration(device).hopper_clustered[str(blocks)]
    return at_once // blocks


def products_of(tile: AnyTile, spec: KernelSpec) -> Count:
    """Products of one k of a block."""
    return tile.block_m * tile.block_n * spec.parts


def multiplying(
    tile: AnyTile, pace: Amount, spec: KernelSpec, problem: Problem, device: DeviceSpec, splits: Count = 1
) -> Amount:
    """Microseconds in which a multiprocessor multiplies; `splits` blocks share a tile along k."""
    depth = waves_of(tile, problem, device, splits) * problem.k / splits
    return products_of(tile, spec) * depth / pace / calibration(device).products[spec.math]


def from_memory(size: Amount, device: DeviceSpec) -> Amount:
    """Microseconds in which memory moves so many bytes."""
    return size / device.multiprocessors / calibration(device).bytes


def with_rows_copied(spec: KernelSpec, problem: Problem) -> Problem:
    """The problem as a kernel sees it whose factors were copied to rows of whole cache lines: k as long as those."""
    along_k = "lhs" in spec.copied or ("rhs" in spec.copied and spec.rhs_order == "nk")
    line = CACHE_LINE // spec.dtype.bytes
    return replace(problem, k=-(-problem.k // line) * line) if along_k else problem


def copying_rows(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which the factors of a kernel are copied: launches, and what they read and write."""
    of_lhs = problem.m if problem.shared_lhs else problem.m * problem.batch
    rows = {"lhs": of_lhs, "rhs": problem.n * spec.parts * problem.batch}
    moved = 2 * problem.k * spec.dtype.bytes * sum(rows[factor] for factor in spec.copied)
    launches = sum(1 if factor == "lhs" else spec.parts for factor in spec.copied)
    return launches * calibration(device).launch + from_memory(moved, device)


def column_bytes(spec: KernelSpec, k: Count) -> Amount:
    """What is stored of one column of rhs, in bytes."""
    return k * spec.dtype.bytes if spec.quantization is None else spec.quantization.column_bytes(k)


def moving(spec: KernelSpec, problem: Problem, device: DeviceSpec, passes: Amount = 1) -> Amount:
    """Microseconds in which memory delivers lhs, rhs so many times, and what the epilogue reads and writes."""
    return moving_factors(spec, problem, device, passes) + moving_rows(spec, problem, device)


def beside_memory(busy: Amount, moving: Amount, power: Amount) -> Amount:
    """Microseconds of work and of what memory delivers, which hide each other in part: the norm of that power."""
    both: Amount = (busy**power + moving**power) ** (1 / power)
    return both


def moving_factors(spec: KernelSpec, problem: Problem, device: DeviceSpec, passes: Amount = 1) -> Amount:
    """Microseconds in which memory delivers lhs, and rhs so many times."""
    rhs = problem.batch * passes * problem.n * spec.parts * column_bytes(spec, problem.k)
    return from_memory(lhs_bytes(spec, problem) + rhs, device)


def lhs_bytes(spec: KernelSpec, problem: Problem) -> Amount:
    """All of lhs; what batches share is read once."""
    return (1 if problem.shared_lhs else problem.batch) * problem.m * problem.k * spec.dtype.bytes


def moving_rows(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which memory moves what the epilogue reads and writes."""
    each = sum(access.dtype.bytes for access in (*spec.loads, *spec.outs) if access.kind == "tile")
    return from_memory(problem.batch * problem.m * problem.n * each, device)


def waiting(tile: AnyTile, reads: Flow, problem: Problem, device: DeviceSpec, family: str) -> Amount:
    """Microseconds in which blocks wait for what they have in flight."""
    trips = np.ceil(problem.k / reads.depth)
    return np.ceil(tiles_of(tile, problem) / reads.blocks) * trips * calibration(device).round_trip[family]


def filling(tile: AnyTile, reads: Flow, problem: Problem, device: DeviceSpec, family: str) -> Amount:
    """Microseconds of the prologues and epilogues of blocks that do not run at once."""
    return np.ceil(tiles_of(tile, problem) / reads.blocks) * calibration(device).fill[family]
