"""Tiles of the kernel for few rows and a quantized rhs: which are legal, and what they need of shared memory.

Shared memory of one block:

    warps       each its stages [all parts' columns, a step of k]: integers, scales, zero points; then its slots of lhs,
                or what the sums of lhs that it keeps in registers begin with
    sums        [1 or 2 tiles, warps, rows, all parts' columns] in fp32
    barriers    two, where lhs is kept in registers

`kernels/cuda/quantized_small_m/gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.kernel_spec import KernelSpec

WARP_SIZE = 32
MMA_ROWS = 8
FRAGMENT_COLUMNS = 16
PIECE_BYTES = 16  # of one row of ldmatrix, and of the widest copy
MAX_LHS_WIDTH = 8  # elements
WORD_BYTES = 4  # the narrowest copy of cp.async
SUMS_PADDING = 4
FP32_BYTES = 4
BARRIERS_BYTES = 16
BITS_WITH_EXCESS = 4  # in every type; of 8 bits, bf16 has none
ELEMENTS_OF_REGISTER = 2
MAX_KEPT = (128, 96, 48)  # registers of one thread, by what else takes many
MAX_THREADS = 1024
REGISTERS = 65536  # of one multiprocessor
MAX_SUMS = 64  # of one thread, in fp32
MAX_HALVED_ROWS = 16  # of a block of k that is half of a row of ldmatrix, which takes sums of its own
MANY_BLOCKS = 128  # shorter ones
MANY_PARTS = 2  # more than that
TERMS = {"f16": 1, "bf16": 1, "tf32": 2, "3xtf32": 3, "fp32": 3}  # by arithmetic, of which they are as exact at least


@dataclass(frozen=True)
class QuantizedSmallMTile:
    """The shape of one thread block's work: few rows, whose warps each multiply a share of k.

    Attributes:
        block_m: rows of the output tile.
        block_n: columns of the output tile, of each part.
        block_k: depth of one step of a warp, in elements.
        stages: depth of a warp's pipeline in shared memory.
        lhs_slots: steps of lhs that a warp has room for; where they are all, it reads lhs once.
        warps_k: warps that share k, each with sums of its own.
        resident: blocks that the compiler leaves registers for on one multiprocessor.
        kept_steps: steps of lhs that a warp keeps in registers, and no slots; 0 where lhs is read from shared memory.
        spread: columns of the mma that a kept row lies in, each with its own blocks of k.
        streamed: whether the one step that is kept changes, and the next one is on its way to registers.
        terms: numbers of bf16 that a number of fp32 is multiplied as; 1 of other types.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    lhs_slots: int
    warps_k: int
    resident: int = 1
    kept_steps: int = 0
    spread: int = 1
    streamed: bool = False
    terms: int = 1

    @property
    def term_rows(self) -> int:
        """Rows of the mma: each row's terms lie side by side."""
        return self.block_m * self.terms

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps_k

    @property
    def row_groups(self) -> int:
        """Of the rows of one mma."""
        return -(-self.term_rows // MMA_ROWS)

    def __str__(self) -> str:
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        kept = f"{self.kept_steps} of lhs {'streamed' if self.streamed else 'kept'}" + (
            f" and spread by {self.spread}" if self.spread > 1 else ""
        )
        terms = f" in {self.terms} terms" if self.terms > 1 else ""
        stages = f"stages {self.stages}, {kept if self.kept_steps else f'{self.lhs_slots} of lhs'}"
        return (
            f"{shape} few rows of quantized{terms}, {stages}, k shared by {self.warps_k} warps, {self.resident} blocks"
        )


def columns(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Columns of all parts."""
    return spec.parts * tile.block_n


def step_bytes(form: Quantization, tile: QuantizedSmallMTile) -> int:
    """Bytes of one column's integers in a step."""
    return tile.block_k * form.bits // 8


def stage_bytes(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Shared memory of one stage of one warp."""
    form = _form(spec)
    blocks = max(tile.block_k // form.block, 1)
    size = columns(spec, tile) * (step_bytes(form, tile) + PIECE_BYTES)
    besides = [_beside(blocks * form.scale.bytes, spec.scales_width * form.scale.bytes)]
    if form.zero_points:
        besides.append(_beside(max(blocks * form.bits // 8, 1), spec.zero_points_width))
    return size + sum(_in_pieces(columns(spec, tile) * each) for each in besides)


def _beside(size: int, alignment: int) -> int:
    """Bytes of shared memory for a column's scales or zero points, which may begin anywhere in a word."""
    aligned = min(PIECE_BYTES, size, alignment)
    if aligned >= WORD_BYTES:
        return size
    return (WORD_BYTES - aligned + size + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES


def _in_pieces(size: int) -> int:
    return -(-size // PIECE_BYTES) * PIECE_BYTES


def slot_bytes(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Shared memory of one step's rows of lhs."""
    return tile.block_m * tile.block_k * spec.dtype.bytes


def sums_bytes(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Shared memory of all warps' sums."""
    buffers = 2 if tile.term_rows <= MMA_ROWS * (2 if tile.kept_steps else 1) else 1
    return buffers * tile.warps_k * tile.term_rows * (columns(spec, tile) + SUMS_PADDING) * FP32_BYTES


@cache
def shared_bytes(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Dynamic shared memory of one block, in bytes."""
    warp = tile.stages * stage_bytes(spec, tile) + tile.lhs_slots * slot_bytes(spec, tile) + kept_bytes(spec, tile)
    return tile.warps_k * warp + sums_bytes(spec, tile) + BARRIERS_BYTES * (tile.kept_steps > 0)


def kept_bytes(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Shared memory of what the sums of one warp's kept rows begin with, and of its sums of rows alone."""
    if tile.streamed:
        return 0
    form = _form(spec)
    blocks = max(tile.block_k // form.block, 1) // tile.spread
    has_excess = form.bits == BITS_WITH_EXCESS or spec.math == "f16"
    each = 4 * (4 * has_excess + 2 * form.zero_points) * FP32_BYTES
    return tile.kept_steps * blocks * tile.row_groups * each


def kept_registers(form: Quantization, tile: QuantizedSmallMTile) -> int:
    """Registers of a thread that lhs takes."""
    rows, steps = tile.row_groups * MMA_ROWS, tile.kept_steps + tile.streamed
    return steps * tile.block_k * rows // tile.spread // WARP_SIZE // ELEMENTS_OF_REGISTER


def _form(spec: KernelSpec) -> Quantization:
    assert spec.quantization is not None, "a quantized spec"
    return spec.quantization


def why_not(spec: KernelSpec, tile: QuantizedSmallMTile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile in `shared_limit` bytes of shared memory, or None if it can."""
    if spec.quantization is None:
        return "rhs is not quantized"
    if tile.terms != TERMS[spec.math]:
        return f"few rows of quantized: {TERMS[spec.math]} terms of {spec.math}"
    if tile.streamed and tile.terms > 1:
        return "few rows of quantized: terms are kept, not streamed"
    if spec.lhs_run or spec.lhs_order != "mk":
        return "few rows of quantized: one stride walks the k of lhs, which is its contiguous axis"
    if columns(spec, tile) % FRAGMENT_COLUMNS or tile.block_n % MMA_ROWS:
        return f"all parts' columns together are a multiple of {FRAGMENT_COLUMNS}, each part's of {MMA_ROWS}"
    if step_bytes(spec.quantization, tile) % (2 * PIECE_BYTES):
        return f"a step is a multiple of {2 * PIECE_BYTES} bytes of each column"
    if tile.block_n % (WARP_SIZE * spec.rhs_width // step_bytes(spec.quantization, tile)):
        return "a warp copies whole columns of one part"
    if tile.threads * tile.resident > MAX_THREADS:
        return f"{tile.threads * tile.resident} threads on a multiprocessor, of {MAX_THREADS} at most"
    if sums(spec, tile) > MAX_SUMS:
        return f"{sums(spec, tile)} sums in a thread, of {MAX_SUMS} at most"
    if spec.quantization.block * spec.quantization.bits // 8 < PIECE_BYTES and tile.term_rows > MAX_HALVED_ROWS:
        return f"two blocks in a row of ldmatrix: {tile.term_rows} rows, of {MAX_HALVED_ROWS} at most"
    if tile.kept_steps and (reason := _why_not_kept(spec, tile)):
        return reason
    if shared_bytes(spec, tile) > shared_limit:
        return f"{shared_bytes(spec, tile)} bytes of shared memory, of {shared_limit} at most"
    return None


def max_kept(spec: KernelSpec) -> int:
    """Registers of a thread that lhs may take without spills of others."""
    form = _form(spec)
    zero_points = form.zero_points and form.block < MANY_BLOCKS
    zero_bytes = form.zero_points and form.bits > BITS_WITH_EXCESS
    return MAX_KEPT[zero_points + (spec.parts > MANY_PARTS or zero_bytes or TERMS[spec.math] > 1)]


def _why_not_kept(spec: KernelSpec, tile: QuantizedSmallMTile) -> str | None:
    form = _form(spec)
    if form.block_bytes < PIECE_BYTES:
        return "lhs is kept in whole pieces of a block"
    if tile.spread > 1 and (tile.term_rows * tile.spread > MMA_ROWS or tile.block_k % (form.block * tile.spread)):
        return f"{tile.term_rows} rows of {tile.block_k} are not spread by {tile.spread}"
    if kept_registers(form, tile) > max_kept(spec):
        return f"{kept_registers(form, tile)} registers of lhs, of {max_kept(spec)} at most"
    return None


def sums(spec: KernelSpec, tile: QuantizedSmallMTile) -> int:
    """Sums of one thread."""
    return columns(spec, tile) // FRAGMENT_COLUMNS * tile.row_groups * 4
