"""What a tile costs: microseconds of a problem, estimated from what was measured on an H200."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxfuse import small_m_tile
from onnxfuse.access_path import CP_ASYNC_BYTES
from onnxfuse.device import DeviceSpec
from onnxfuse.hopper_tile import FP32_BYTES, HopperTile, block_k, rhs_pieces
from onnxfuse.hopper_tile import footprint as hopper_footprint
from onnxfuse.kernel_spec import KernelSpec, Tile
from onnxfuse.tile_candidates import Candidate
from onnxfuse.tile_footprint import shared_bytes

# One multiprocessor of an H200 in a microsecond: products at a pace of 1, its share of what memory delivers; and how
# long a block waits, in microseconds, for the loads that it has on their way. Other chips have other units, but similar
# relations between them. Of 3xtf32 the tensor cores' three products allow 0.37e6, and issuing the 245 instructions of a
# warp's step, 48 of them on the tensor cores, 0.47e6; neither hides all of the other.
PRODUCTS = {"f16": 2.3e6, "bf16": 2.3e6, "tf32": 1.1e6, "3xtf32": 0.21e6, "fp32": 0.15e6}
BYTES = 32.6e3
BOXED = 0.98  # of what memory delivers, where TMA loads rhs: 32 rows of 4096 x 14336 SwiGLU
ROUND_TRIP = 1.0
SUMMING = 0.5  # microseconds in which the warps of a block for few rows add up what each has
# TMA loads a row of 128 bytes in 1.8 ns, takes 1 ns for a row of zeros, behind the end of lhs, 3.5 in a tall box, and
# 20 for another box. Most of that hides behind what else a kernel waits for. Measured with 1 to 512 rows on an H200
# (results/h200-few-rows.json).
LOADED_ROW = 0.0018
ZERO_ROW = {16: 0.001, 32: 0.001, 64: 0.001, 128: 0.0035}  # by rows of the box
BOX = 0.02
SHOWN = 4  # of that one part in 4 never hides
COPIED = 30.0  # elements that a thread copies through registers, as 8192 x 1280 x 1281 with weights [k, n] needs
OVERLAP = 16  # of computing and reading the shorter hides behind the longer, but for one part in 16
PIPELINE_FILL = 64  # a tile's prologue and epilogue take about as long as products of this depth
EXPOSED_EPILOGUE = 128  # and that much longer where no main loop of the sm_90a kernel runs beside it
STEP = 0.14  # microseconds of a step of the sm_90a kernel's ring at least, however narrow the tile
# Of a ping-pong or cooperative tile's pace, where boxes of rhs[k, n] with so many columns follow those of 64, by rows.
NARROW_BOXES = {(128, 32): 0.92, (128, 16): 0.87, (64, 32): 0.85}
LONE_GROUP = 0.85  # of a ping-pong tile's pace where a multiprocessor computes only one of them
# Blocks that split k exchange their sums: microseconds, and bytes of the whole chip in one; measured on an H200
# (results/h200-splits.json). A cluster lies within one of the chip's groups of multiprocessors, and a group may have
# two more than its clusters fill.
MEETING = 1.7
EXCHANGED = 0.7e6
MULTIPROCESSOR_GROUP = 16


@dataclass(frozen=True)
class Flow:
    """How a tile's blocks read rhs.

    Attributes:
        blocks: that run at once on the whole chip.
        depth: of k, that a block has on its way at any time.
        shared: row tiles with the same columns meet in L2, so that memory is read once for all of them.
    """

    blocks: int
    depth: int
    shared: bool


def flow(spec: KernelSpec, tile: Tile | HopperTile, device: DeviceSpec) -> Flow:
    """How a legal tile reads rhs."""
    if isinstance(tile, HopperTile):
        stages = hopper_footprint(spec, tile, device.shared_bytes).stages
        return Flow(device.multiprocessors, stages * block_k(spec), shared=True)
    own = replace(spec, tile=tile)
    if tile.kernel == "small_m":
        resident = small_m_tile.resident_blocks(own)
        return Flow(resident * device.multiprocessors, tile.warps_k * tile.block_k * tile.stages, shared=False)
    resident = max(device.shared_bytes // shared_bytes(own), 1)
    return Flow(resident * device.multiprocessors, (tile.stages - 1) * tile.block_k, shared=True)


@dataclass(frozen=True)
class Problem:
    """Sizes that tiles are priced for.

    Attributes:
        batch: counts those with an rhs of their own.
        guessed: n or the batch may be larger at run time.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    guessed: bool = False


def cost(
    candidate: Candidate[Tile | HopperTile], reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec
) -> float:
    """Estimated microseconds: the longer of computing and reading rhs, a little of the shorter, and what adds to both.

    Infinite for a tile that splits k where its blocks are more than run at once, or may be.
    """
    tile = candidate.tile
    if _splits(tile) > 1 and (problem.guessed or _blocks(tile, problem) > _at_once(device)):
        return math.inf  # a tile for every multiprocessor is faster than a share of one
    computing = _computing(candidate, spec, problem, device)
    reading = max(_loading(tile, reads, spec, problem, device), _waiting(tile, reads, problem))
    longer, shorter = max(computing, reading), min(computing, reading)
    added = _summing(tile, spec, problem) + copying(tile, spec, problem, device)
    return longer + shorter / OVERLAP + added + _filling(tile, spec, problem, device, longer)


def _splits(tile: Tile | HopperTile) -> int:
    """Blocks that share a tile along k."""
    return tile.splits if isinstance(tile, HopperTile) else 1


def _tiles(problem: Problem, tile: Tile | HopperTile) -> int:
    """Tiles of the whole output."""
    return problem.batch * math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)


def _blocks(tile: Tile | HopperTile, problem: Problem) -> int:
    """Blocks that the whole output needs."""
    return _tiles(problem, tile) * _splits(tile)


def _waves(tile: Tile | HopperTile, problem: Problem, device: DeviceSpec) -> int:
    """Blocks that a multiprocessor computes one after the other."""
    return math.ceil(_blocks(tile, problem) / device.multiprocessors)


def _at_once(device: DeviceSpec) -> int:
    """Multiprocessors that clusters can fill."""
    return device.multiprocessors // MULTIPROCESSOR_GROUP * MULTIPROCESSOR_GROUP


def _computing(
    candidate: Candidate[Tile | HopperTile], spec: KernelSpec, problem: Problem, device: DeviceSpec
) -> float:
    """Microseconds in which a multiprocessor multiplies, its tiles' prologues and epilogues among them."""
    tile, waves, pace = candidate.tile, _waves(candidate.tile, problem, device), candidate.pace
    k = math.ceil(problem.k / _splits(tile))
    products = tile.block_m * tile.block_n * spec.parts  # of one k of a block
    depth = waves * (k + PIPELINE_FILL)
    if not isinstance(tile, HopperTile):
        return products * depth / pace / PRODUCTS[spec.math]
    exposed = 1 if tile.pingpong else waves  # epilogues beside which nothing is multiplied
    depth += exposed * EXPOSED_EPILOGUE
    pieces = rhs_pieces(spec, tile)
    narrow = NARROW_BOXES[tile.block_m, pieces[-1].atom] if len(pieces) > 1 else 1.0
    pace *= LONE_GROUP if tile.pingpong and waves == 1 else 1.0
    steps = waves * math.ceil(k / block_k(spec))
    return max(products * depth / pace / PRODUCTS[spec.math], STEP * steps) / narrow


def _loading(tile: Tile | HopperTile, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which rhs comes from memory."""
    rows = math.ceil(problem.m / tile.block_m)
    columns = float(problem.batch * problem.n * spec.parts)
    waves = math.ceil(_tiles(problem, tile) / reads.blocks)
    in_waves = waves * reads.blocks * tile.block_n * spec.parts / rows  # as if no block were missing in the last one
    if isinstance(tile, HopperTile):  # the others then read faster, though not as fast as all
        columns = (columns + in_waves) / 2 if waves > 1 else columns / BOXED
    else:
        columns = in_waves if reads.shared else columns * rows
    return columns * problem.k * spec.dtype.bytes / device.multiprocessors / BYTES


def _waiting(tile: Tile | HopperTile, reads: Flow, problem: Problem) -> float:
    """Microseconds in which blocks wait for what they have on its way."""
    trips = math.ceil(math.ceil(problem.k / _splits(tile)) / reads.depth)
    return math.ceil(_blocks(tile, problem) / reads.blocks) * trips * ROUND_TRIP


def _summing(tile: Tile | HopperTile, spec: KernelSpec, problem: Problem) -> float:
    """Microseconds in which warps or blocks add up what each has of a tile."""
    if isinstance(tile, Tile):
        return SUMMING if tile.kernel == "small_m" else 0.0
    if tile.splits == 1:
        return 0.0
    sums = _tiles(problem, tile) * tile.block_m * tile.block_n * spec.parts * FP32_BYTES * (tile.splits - 1)
    return MEETING + sums / EXCHANGED


def _filling(tile: Tile | HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec, longer: float) -> float:
    """Microseconds more that TMA takes for rows of zeros and many boxes: most hide behind the longer of the others."""
    if not isinstance(tile, HopperTile):
        return 0.0
    waves, steps = _waves(tile, problem, device), math.ceil(problem.k / tile.splits / block_k(spec))
    ragged = math.ceil(waves / math.ceil(problem.m / tile.block_m))  # only the last tiles along m have rows of zeros
    rows, box = min(problem.m, tile.block_m), tile.lhs_rows or tile.block_m
    zeros = ragged * steps * ZERO_ROW[box] * (-problem.m % box)
    more = zeros + waves * steps * BOX * (math.ceil(rows / box) - 1)
    uncovered = LOADED_ROW * waves * steps * (rows + tile.block_n * spec.parts) - longer
    return max(uncovered + more, 0.0) - max(uncovered, 0.0) + more / SHOWN


def copying(tile: Tile | HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which the portable kernel copies operands through registers, where cp.async cannot."""
    if isinstance(tile, HopperTile) or tile.kernel == "small_m":
        return 0.0
    operands = ((spec.lhs_width, tile.block_m), (spec.rhs_width, tile.block_n * spec.parts))
    rows = sum(rows for width, rows in operands if width * spec.dtype.bytes < CP_ASYNC_BYTES)
    depth = math.ceil(problem.k / tile.block_k) * tile.block_k
    return _waves(tile, problem, device) * rows * depth / tile.threads / COPIED
