"""What a tile costs: microseconds of a problem, by what is known of the chip. The terms of every family.

What keeps a multiprocessor busy at once (multiplying, loading, waiting) hides behind each other in part: it takes the
root of the sum of their squares, between the longest of them and their sum.

A problem with an array of rows has an array of costs, one for each.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from onnxfuse.device import SECTOR, DeviceSpec
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, AnyTile, Count, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec

FP32_BYTES = 4
CLUSTERS_SINCE = 90  # compute capability
LIBRARY_ALIGNMENT = 16  # bytes that the pitches of the library's fastest kernels are multiples of


def tiles_of(tile: AnyTile, problem: Problem) -> Amount:
    """Tiles of the whole output."""
    return problem.batch * np.ceil(problem.m / tile.block_m) * np.ceil(problem.n / tile.block_n)


def waves_of(tile: AnyTile, problem: Problem, device: DeviceSpec, splits: Count = 1) -> Amount:
    """Blocks that a multiprocessor computes one after the other; `splits` of them share a tile along k."""
    return np.ceil(tiles_of(tile, problem) * splits / device.multiprocessors)


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
    return from_memory(_lhs_bytes(spec, problem) + rhs, device)


def _lhs_bytes(spec: KernelSpec, problem: Problem) -> Amount:
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


def library(spec: KernelSpec, problem: Problem, products: int, device: DeviceSpec) -> Amount | None:
    """Microseconds in which the library makes a kernel's product; None where nothing is known of it.

    Args:
        spec: the kernel that would multiply by itself.
        problem: its sizes.
        products: that the library makes one after the other, each of as many columns.
        device: to plan for.
    """
    if spec.math not in calibration(device).library_products and spec.quantization is None:
        return None
    each = replace(problem, n=problem.n * spec.parts // products)
    of_floats = _of_floats(spec, each, device)
    return products * (of_floats if spec.quantization is None else _of_integers(spec, each, of_floats, device))


def _of_integers(spec: KernelSpec, problem: Problem, of_floats: Amount, device: DeviceSpec) -> Amount:
    """The same of ONNX Runtime's MatMulNBits, in the faster of its modes: by itself, or behind unpacking all of rhs."""
    known, rows = calibration(device).library_quantized, problem.m * problem.batch
    reading = from_memory(problem.n * column_bytes(spec, problem.k), device)
    crowd = np.sqrt(np.maximum(rows / known["few"], 1.0))
    by_itself = reading * (known["read"] + known["row"] * np.sqrt(rows)) * crowd
    unpacking = known["unpacked"] * from_memory(problem.n * problem.k * spec.dtype.bytes, device)
    return known["launch"] + np.minimum(by_itself, unpacking + of_floats)


def _units(spec: KernelSpec) -> str:
    """By what the library multiplies."""
    return "tf32" if spec.dtype.bytes == FP32_BYTES else spec.dtype.name


def _of_floats(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """One product of the library: of a vector, in its fastest kernels, or in those that any address suits."""
    known, size, units = calibration(device), spec.dtype.bytes, _units(spec)
    m, n, k, granule = problem.m, problem.n, problem.k, known.library_granule
    whole = problem.batch * np.ceil(m / granule) * np.ceil(n / granule) * granule**2
    pace = known.library_products.get(spec.math, known.products[units])
    computing = whole * k / device.multiprocessors / pace
    memory = from_memory(_lhs_bytes(spec, problem) + problem.batch * (k + m) * n * size, device)
    turned = known.library_turned.get(f"{units} {spec.rhs_order}", 1.0)
    is_vector = ((m == 1) | (n == 1)) & (problem.batch == 1)
    in_sectors = np.where(k * size % SECTOR > 0, known.library_in_sectors, 1.0)
    alignment = functools.reduce(np.gcd, (k * size, n * size), LIBRARY_ALIGNMENT)
    slower = sum((alignment == int(each)) * factor for each, factor in known.library_misaligned.items())
    ways = {
        "vector": np.hypot(computing, memory),
        units: np.hypot(computing * turned, memory) * in_sectors,
        "misaligned": computing * slower + memory * known.library_misaligned_memory,
    }
    vector, aligned, misaligned = (
        known.library_launch[way] + known.library_depth[way] * np.sqrt(k) + busy for way, busy in ways.items()
    )
    return np.where(is_vector, vector, np.where(alignment == LIBRARY_ALIGNMENT, aligned, misaligned))
