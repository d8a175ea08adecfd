"""Tiles of the kernel for few rows: which are legal, and what they need of shared memory.

Shared memory of one block holds the sums of its warps, each of another share of k: [warps_k, 16, all parts] in fp32.

`kernels/cuda/small_m_gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from onnxfuse.kernel_spec import KernelSpec

ROWS = 16  # of one mma
CHUNK = 8  # elements of one 16-byte load
STEP_K = 32  # a row's four lanes, one chunk each
NARROW_GROUP = 32  # columns of rhs[k, n] that eight lanes load, 8 bytes each
WIDE_GROUP = 64  # 16 bytes each
MAX_THREADS = 1024
MAX_GATED_THREADS = 384  # lanes of several parts of rhs[k, n] differ in where they read, which takes registers
MAX_REGISTERS = 208  # of one thread for accumulators and stages, of 255
OTHER_REGISTERS = 32  # counters, addresses of lhs, what is being multiplied
ADDRESS_REGISTERS = 3  # of each fragment: a pointer, and a part of what advances it
REGISTERS = 65536  # of one multiprocessor
FP32_BYTES = 4


def columns(spec: KernelSpec) -> int:
    """Columns that a warp multiplies: of all parts, in whole groups where n is contiguous."""
    width = spec.parts * spec.tile.block_n
    group = WIDE_GROUP if width > NARROW_GROUP else NARROW_GROUP
    return width if spec.rhs_order == "nk" else -(-width // group) * group


def sums_pitch(spec: KernelSpec) -> int:
    """Elements from row to row of a warp's sums: padded such that the rows of a fragment begin in different banks."""
    return columns(spec) + (8 if spec.rhs_order == "nk" else 2)


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of one block, in bytes."""
    return spec.tile.warps_k * ROWS * sums_pitch(spec) * FP32_BYTES


def registers(spec: KernelSpec) -> int:
    """Registers of one thread that hold accumulators and stages."""
    fragments = columns(spec) // CHUNK
    return 4 * fragments + spec.tile.stages * spec.tile.block_k // STEP_K * 4 * (fragments + 2)


def resident_blocks(spec: KernelSpec) -> int:
    """Blocks that the compiler leaves registers for on one multiprocessor."""
    needed = registers(spec) + OTHER_REGISTERS + ADDRESS_REGISTERS * columns(spec) // CHUNK
    return max(REGISTERS // (spec.tile.threads * needed), 1)


def why_not(spec: KernelSpec, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec in `shared_limit` bytes of shared memory, or None if it can."""
    tile = spec.tile
    if spec.math not in ("f16", "bf16"):
        return f"few rows: no kernel for {spec.math}"
    if spec.lhs_width < CHUNK or spec.rhs_width < CHUNK:
        return "few rows: rows of lhs and rhs begin on 16-byte boundaries"
    if spec.lhs_run or spec.lhs_order != "mk":
        return "few rows: one stride walks the k of lhs, which is its contiguous axis"
    if tile.block_m != ROWS or tile.warps_m * tile.warps_n != 1:
        return f"few rows: a tile has {ROWS} rows, and warps share k only"
    if tile.block_n % CHUNK or tile.block_k % STEP_K:
        return f"few rows: block_n is a multiple of {CHUNK}, block_k of {STEP_K}"
    limit = MAX_GATED_THREADS if spec.rhs_order == "kn" and spec.parts > 1 else MAX_THREADS
    if tile.threads > limit:
        return f"{tile.threads} threads, of {limit} at most"
    if registers(spec) > MAX_REGISTERS:
        return f"{registers(spec)} registers for accumulators and stages, of {MAX_REGISTERS} at most"
    if shared_bytes(spec) > shared_limit:
        return f"{shared_bytes(spec)} bytes of shared memory, of {shared_limit} at most"
    return None
