"""Tiles of the kernel for small M: which are legal, and what they need of shared memory.

Shared memory of one block holds the sums of its warps, each of another share of k: [warps_k, 16, all parts] in fp32.
In a cluster it has room for those of the other blocks too, [splits - 1, 16, all parts], and for a barrier.

`kernels/cuda/small_m/gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.schedule.kernel_spec import QUANTIZED, KernelSpec

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
SINGLES_REGISTERS = 5  # of each fragment too, where elements of lhs come one by one: rows of rhs end one by one as well
ADDRESS_REGISTERS = 3  # of each fragment: a pointer, and a part of what advances it
REGISTERS = 65536  # of one multiprocessor
FP32_BYTES = 4
REGISTER_BYTES = 4
BARRIER_BYTES = 8


@dataclass(frozen=True)
class SmallMTile:
    """The shape of one thread block's work: small M, whose rows its warps multiply with a share of k each.

    Attributes:
        block_n: columns of the output tile, of each part.
        block_k: depth of one pipeline stage of a warp, in elements.
        stages: depth of the pipeline in registers.
        warps_k: warps of a block that share k, each with sums of its own.
        splits: blocks of a cluster that share k; 1, 2, 4 or 8.
    """

    block_n: int
    block_k: int
    stages: int
    warps_k: int
    splits: int = 1

    @property
    def block_m(self) -> int:
        """Rows of the output tile."""
        return ROWS

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps_k

    def __str__(self) -> str:
        stages = f", stages {self.stages}" if self.stages > 1 else ""
        blocks = f" of {self.splits} blocks" if self.splits > 1 else ""
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{size} few rows{stages}, k shared by {self.warps_k} warps{blocks}"


def chunk(spec: KernelSpec) -> int:
    """Elements of one load."""
    return CHUNK_BYTES // spec.dtype.bytes


def lhs_copy(spec: KernelSpec) -> int:
    """Elements of one load of lhs: a chunk is as many of them as it takes."""
    return min(spec.lhs_width, chunk(spec))


def step_k(spec: KernelSpec) -> int:
    """Depth that the lanes of a row load at once."""
    return LANES_OF_ROW * chunk(spec)


def columns(spec: KernelSpec, tile: SmallMTile) -> int:
    """Columns that a warp multiplies: of all parts, in whole groups where n is contiguous."""
    width = spec.parts * tile.block_n
    narrow = LANES_OF_GROUP * chunk(spec) // 2
    group = 2 * narrow if width > narrow else narrow
    return width if spec.rhs_order == "nk" else -(-width // group) * group


def sums_pitch(spec: KernelSpec, tile: SmallMTile) -> int:
    """Elements from row to row of a warp's sums: padded such that the rows of a fragment begin in different banks."""
    return columns(spec, tile) + (8 if spec.rhs_order == "nk" else 2)


def shared_bytes(spec: KernelSpec, tile: SmallMTile) -> int:
    """Dynamic shared memory of one block, in bytes."""
    shares = (tile.splits - 1) * ROWS * spec.parts * tile.block_n
    barrier = BARRIER_BYTES if tile.splits > 1 else 0
    return (tile.warps_k * ROWS * sums_pitch(spec, tile) + shares) * FP32_BYTES + barrier


def registers(spec: KernelSpec, tile: SmallMTile) -> int:
    """Registers of one thread that hold accumulators and stages."""
    fragments = columns(spec, tile) // FRAGMENT_COLUMNS
    lhs = 2 * max(REGISTER_BYTES // (lhs_copy(spec) * spec.dtype.bytes), 1)
    return 4 * fragments + tile.stages * tile.block_k // step_k(spec) * 4 * (fragments + lhs)


def _needed_registers(spec: KernelSpec, tile: SmallMTile) -> int:
    """Registers of one thread, in all."""
    each = ADDRESS_REGISTERS + SINGLES_REGISTERS * (lhs_copy(spec) == 1)
    addresses = each * columns(spec, tile) // FRAGMENT_COLUMNS
    return registers(spec, tile) + addresses + OTHER_REGISTERS + ROUNDING_REGISTERS.get(spec.math, 0)


def resident_blocks(spec: KernelSpec, tile: SmallMTile) -> int:
    """Blocks that the compiler leaves registers for on one multiprocessor.

    Of clusters as many blocks are launched as there are multiprocessors; where two fit, all clusters run at once.
    """
    resident = max(REGISTERS // (tile.threads * _needed_registers(spec, tile)), 1)
    return resident if tile.splits == 1 else min(resident, 2)


def why_not(spec: KernelSpec, tile: SmallMTile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile in `shared_limit` bytes of shared memory, or None if it can."""
    if spec.quantization is not None:
        return QUANTIZED
    if spec.math == "fp32":
        return f"small M: no kernel for {spec.math}"
    if spec.rhs_width < chunk(spec):
        return "small M: rows of rhs begin on 16-byte boundaries"
    if chunk(spec) % lhs_copy(spec):
        return f"small M: copies of {lhs_copy(spec)} elements of lhs do not make {CHUNK_BYTES} bytes"
    if spec.lhs_run or spec.lhs_order != "mk":
        return "small M: one stride walks the k of lhs, which is its contiguous axis"
    if tile.block_n % FRAGMENT_COLUMNS or tile.block_k % step_k(spec):
        return f"small M: block_n is a multiple of {FRAGMENT_COLUMNS}, block_k of {step_k(spec)}"
    limit = MAX_GATED_THREADS if spec.rhs_order == "kn" and spec.parts > 1 else MAX_THREADS
    if tile.threads > limit:
        return f"{tile.threads} threads, of {limit} at most"
    if spec.math in ROUNDING_REGISTERS and spec.rhs_order == "kn" and spec.parts > MAX_ROUNDED_PARTS:
        return f"small M: {spec.parts} parts of rhs[k, n] in fp32, of {MAX_ROUNDED_PARTS} at most"
    if registers(spec, tile) > MAX_REGISTERS:
        return f"{registers(spec, tile)} registers for accumulators and stages, of {MAX_REGISTERS} at most"
    if lhs_copy(spec) == 1 and tile.threads * _needed_registers(spec, tile) > REGISTERS:
        return f"{tile.threads} threads, to which elements of lhs come one by one"
    if shared_bytes(spec, tile) > shared_limit:
        return f"{shared_bytes(spec, tile)} bytes of shared memory, of {shared_limit} at most"
    return None
