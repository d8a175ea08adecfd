"""What a tile needs of shared memory, and which tiles the portable kernel can run: arithmetic over a kernel's spec.

Shared memory of one block, in this order:

    ring      stages x (lhs[block_m, block_k] + parts x rhs[block_k, block_n]); after the main loop, the staging areas
    vectors   the scalar, row and column operands in fp32

`kernels/cuda/portable/gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.schedule.kernel_spec import EXACT, QUANTIZED, Access, KernelSpec, Tile
from onnxfuse.schedule.shared_memory import CHUNK_BYTES, staged_pitch

MAX_THREADS = 1024
MAX_ACCUMULATORS = 128  # fp32 registers of one thread; with 255 in all, the rest holds two sets of fragments
MAX_SPLIT_ACCUMULATORS = 96  # where each factor becomes two, and the addresses of lhs or of many parts take the rest
SUMS = dict.fromkeys(EXACT, 2)  # registers of an accumulator: exact fp32 sums in two levels
FRAGMENT_ROWS = 16
FRAGMENT_COLUMNS = 16  # two mma fragments: one ldmatrix brings the rhs of both
SCALAR_STEP_K = 2  # k of one multiplication without tensor cores
PADDING = 8  # elements at the end of a row of the ring, against bank conflicts
FP32_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """Shared memory of one block; all sizes and offsets in bytes.

    Attributes:
        ring: the pipeline's stages.
        slabs: fragments of 16 rows that one pass of the epilogue stages.
        staging: staging area of one warp.
        vectors_offset: where the vectors begin: the larger of the ring and all staging areas.
        vectors: all scalar, row and column operands.
        load_offsets: of each load, in the vectors or, for a tile operand, in the warp's staging area.
        out_offsets: of each output in the warp's staging area.
    """

    ring: int
    slabs: int
    staging: int
    vectors_offset: int
    vectors: int
    load_offsets: tuple[int, ...]
    out_offsets: tuple[int, ...]

    @property
    def total(self) -> int:
        """Dynamic shared memory of the launch."""
        return self.vectors_offset + self.vectors


def footprint(spec: KernelSpec, tile: Tile) -> Footprint:
    """Lay out the shared memory of one block of a legal tile."""
    ring = tile.stages * _stage_bytes(spec, tile)
    slabs = _slabs(spec, tile, ring)
    loads, outs, staging, vectors = [], [], 0, 0
    for load in spec.loads:
        loads.append(staging if load.kind == "tile" else vectors)
        staging += _staged_bytes(load, tile, slabs) if load.kind == "tile" else 0
        vectors += _vector_bytes(load, tile)
    for out in spec.outs:
        outs.append(staging)
        staging += _staged_bytes(out, tile, slabs)
    vectors_offset = max(ring, staging * tile.warps_m * tile.warps_n)
    return Footprint(ring, slabs, staging, vectors_offset, vectors, tuple(loads), tuple(outs))


def why_not(spec: KernelSpec, tile: Tile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile in `shared_limit` bytes of shared memory, or None if it can."""
    if spec.quantization is not None:
        return QUANTIZED
    step_k = SCALAR_STEP_K if spec.math == "fp32" else 2 * CHUNK_BYTES // spec.dtype.bytes
    if tile.block_m % (tile.warps_m * FRAGMENT_ROWS) or tile.block_n % (tile.warps_n * FRAGMENT_COLUMNS):
        return f"a warp owns multiples of {FRAGMENT_ROWS} rows and {FRAGMENT_COLUMNS} columns"
    if tile.block_k % (2 * step_k):
        return f"block_k is a multiple of {2 * step_k} for {spec.math}"
    if tile.stages < 2:
        return "a pipeline has two stages at least"
    if tile.threads > MAX_THREADS:
        return f"{tile.threads} threads, of {MAX_THREADS} at most"
    accumulators = SUMS.get(spec.math, 1) * spec.parts * tile.block_m * tile.block_n // tile.threads
    crowded = spec.math == "3xtf32" and (spec.lhs_order == "km" or spec.parts > 2)
    most = MAX_SPLIT_ACCUMULATORS if crowded else MAX_ACCUMULATORS
    if accumulators > most:
        return f"{accumulators} accumulators in a thread, of {most} at most"
    shared = footprint(spec, tile).total
    if shared > shared_limit:
        return f"{shared} bytes of shared memory, of {shared_limit} at most"
    return None


def _stage_bytes(spec: KernelSpec, tile: Tile) -> int:
    lhs = tile.block_k * (tile.block_m + _padding(spec, spec.lhs_order == "km"))
    rhs = tile.block_k * (tile.block_n + _padding(spec, spec.rhs_order == "kn"))
    return (lhs + spec.parts * rhs) * spec.dtype.bytes


def _padding(spec: KernelSpec, k_is_outer: bool) -> int:
    """Of a row, against bank conflicts: 32-bit elements with k outside are read without ldmatrix."""
    return PADDING if k_is_outer and spec.dtype.bytes == FP32_BYTES else 0


def _slabs(spec: KernelSpec, tile: Tile, ring: int) -> int:
    """The largest number of slabs whose staging fits into the ring's memory; one if none does."""
    staged = [load for load in spec.loads if load.kind == "tile"] + list(spec.outs)
    one = tile.warps_m * tile.warps_n * sum(_staged_bytes(access, tile, 1) for access in staged)
    fragments = tile.block_m // tile.warps_m // FRAGMENT_ROWS
    fitting = [slabs for slabs in range(1, fragments + 1) if fragments % slabs == 0 and slabs * one <= ring]
    return max(fitting, default=1)


def _staged_bytes(access: Access, tile: Tile, slabs: int) -> int:
    rows, columns = slabs * FRAGMENT_ROWS, tile.block_n // tile.warps_n
    if access.transposed:
        return columns * (rows * access.dtype.bytes + CHUNK_BYTES)
    return rows * staged_pitch(access, columns) * access.dtype.bytes


def _vector_bytes(load: Access, tile: Tile) -> int:
    lengths = {"scalar": CHUNK_BYTES // FP32_BYTES, "row": tile.block_n, "column": tile.block_m, "tile": 0}
    return lengths[load.kind] * FP32_BYTES
