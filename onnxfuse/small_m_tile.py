"""Tiles of the kernel for few rows: which are legal, and what they need of shared memory.

Shared memory of one block holds the sums of its warps, each of another share of k: [warps_k, 16, all parts] in fp32.

`kernels/cuda/small_m_gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from onnxfuse.kernel_spec import KernelSpec

ROWS = 16  # of one mma
FRAGMENT_COLUMNS = 8
CHUNK_BYTES = 16  # of one load
LANES_OF_ROW = 4  # that load a chunk each, side by side
LANES_OF_GROUP = 8  # the same along the columns of rhs[k, n]; half a chunk each where the tile is narrow
MAX_THREADS = 1024
MAX_GATED_THREADS = 384  # lanes of several parts of rhs[k, n] differ in where they read, which takes registers
MAX_REGISTERS = 208  # of one thread for accumulators and stages, of 255
OTHER_REGISTERS = 32  # counters, addresses of lhs, what is being multiplied
ROUNDING_REGISTERS = {"tf32": 8, "3xtf32": 48}  # of fp32 on its way to TF32, or to two numbers of it
MAX_ROUNDED_PARTS = 3  # of rhs[k, n] in fp32: with four, ptxas has too few registers for addresses on sm_120
ADDRESS_REGISTERS = 3  # of each fragment: a pointer, and a part of what advances it
REGISTERS = 65536  # of one multiprocessor
FP32_BYTES = 4


def chunk(spec: KernelSpec) -> int:
    """Elements of one load."""
    return CHUNK_BYTES // spec.dtype.bytes


def step_k(spec: KernelSpec) -> int:
    """Depth that the lanes of a row load at once."""
    return LANES_OF_ROW * chunk(spec)


def columns(spec: KernelSpec) -> int:
    """Columns that a warp multiplies: of all parts, in whole groups where n is contiguous."""
    width = spec.parts * spec.tile.block_n
    narrow = LANES_OF_GROUP * chunk(spec) // 2
    group = 2 * narrow if width > narrow else narrow
    return width if spec.rhs_order == "nk" else -(-width // group) * group


def sums_pitch(spec: KernelSpec) -> int:
    """Elements from row to row of a warp's sums: padded such that the rows of a fragment begin in different banks."""
    return columns(spec) + (8 if spec.rhs_order == "nk" else 2)


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of one block, in bytes."""
    return spec.tile.warps_k * ROWS * sums_pitch(spec) * FP32_BYTES


def registers(spec: KernelSpec) -> int:
    """Registers of one thread that hold accumulators and stages."""
    fragments = columns(spec) // FRAGMENT_COLUMNS
    return 4 * fragments + spec.tile.stages * spec.tile.block_k // step_k(spec) * 4 * (fragments + 2)


def resident_blocks(spec: KernelSpec) -> int:
    """Blocks that the compiler leaves registers for on one multiprocessor."""
    needed = registers(spec) + OTHER_REGISTERS + ADDRESS_REGISTERS * columns(spec) // FRAGMENT_COLUMNS
    needed += ROUNDING_REGISTERS.get(spec.math, 0)
    return max(REGISTERS // (spec.tile.threads * needed), 1)


def why_not(spec: KernelSpec, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec in `shared_limit` bytes of shared memory, or None if it can."""
    tile = spec.tile
    if spec.math == "fp32":
        return f"few rows: no kernel for {spec.math}"
    if min(spec.lhs_width, spec.rhs_width) < chunk(spec):
        return "few rows: rows of lhs and rhs begin on 16-byte boundaries"
    if spec.lhs_run or spec.lhs_order != "mk":
        return "few rows: one stride walks the k of lhs, which is its contiguous axis"
    if tile.block_m != ROWS or tile.warps_m * tile.warps_n != 1:
        return f"few rows: a tile has {ROWS} rows, and warps share k only"
    if tile.block_n % FRAGMENT_COLUMNS or tile.block_k % step_k(spec):
        return f"few rows: block_n is a multiple of {FRAGMENT_COLUMNS}, block_k of {step_k(spec)}"
    limit = MAX_GATED_THREADS if spec.rhs_order == "kn" and spec.parts > 1 else MAX_THREADS
    if tile.threads > limit:
        return f"{tile.threads} threads, of {limit} at most"
    if spec.math in ROUNDING_REGISTERS and spec.rhs_order == "kn" and spec.parts > MAX_ROUNDED_PARTS:
        return f"few rows: {spec.parts} parts of rhs[k, n] in fp32, of {MAX_ROUNDED_PARTS} at most"
    if registers(spec) > MAX_REGISTERS:
        return f"{registers(spec)} registers for accumulators and stages, of {MAX_REGISTERS} at most"
    if shared_bytes(spec) > shared_limit:
        return f"{shared_bytes(spec)} bytes of shared memory, of {shared_limit} at most"
    return None
