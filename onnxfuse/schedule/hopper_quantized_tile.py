"""Tiles of the sm_90a kernel for a quantized weight: which are legal, what they need of shared memory, and its maps.

The weight is the M side of wgmma, so the kernel sees the output as [n, m]: `swapped` is a spec in its eyes. Shared
memory lies as `hopper_tile` says, with other stages:

    stage     activations[block_k / 64][block_m][128 bytes], swizzled; of each part [block_n][block_k * bits / 8 bytes];
              scales[parts][block_n], 4 to 16 bytes each; zero points, if any, [parts][block_n][4 bytes]

`kernels/cuda/hopper/quantized_factors.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

from onnxfuse.limits import MAX_BOX, MAX_MAPS, STAGE_ROW_BYTES
from onnxfuse.schedule import hopper_tile
from onnxfuse.schedule.hopper_tile import HopperFootprint, HopperTile, Rules
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

ROWS = 64  # of one wgmma: columns n of one consumer group
STEP_ROWS = 8  # of which the N side of wgmma has any multiple
WORD_BYTES = 4  # of which scales are copied whole ones
MAX_SCALE_BYTES = 16  # of a column in a stage: one load
ZERO_PITCH = 4  # bytes of a column's zero points in a stage
STAGE_ALIGNMENT = 1024
KEPT_SPECS = 256  # a plan asks for one again with every tile and number of rows
SPANS = (32, 64, 128)  # bytes of TMA's swizzles
# Fragments of two chunks, what is being converted and scales take the rest of 232 or 160 registers of a thread.
MAX_ACCUMULATORS = {2: 160, 3: 80, 4: 64}
MAX_GROUPS = max(MAX_ACCUMULATORS)
GROUPS, K_GROUPS = (1, 2, 3), (1, 2, 4)
PART_REGISTERS = 40  # of four groups, whose threads have 96: fragments and scales of each further part
TILE_LOAD_REGISTERS = 24
EXCHANGE_REGISTERS = 24  # of blocks that split k; tests forbid that ptxas spills
SWAPPED_KINDS = {"scalar": "scalar", "row": "column", "column": "row", "tile": "tile"}
SWAPPED_LOOPS = {"m": "n", "n": "m", "batch": "batch"}


@dataclass(frozen=True)
class QuantizedTile:
    """The shape of one thread block's work.

    Attributes:
        block_m: rows of the output tile: the columns of one wgmma.
        block_n: columns of the output tile, of each part.
        block_k: of one stage of the ring.
        groups: consumer groups of four warps, which share the columns of each tile.
        splits: blocks of a cluster that share each tile along k; 1, 2 or 4.
        group_rows: tiles along n that run together, for reuse in L2.
        apart: each of two groups multiplies one of two parts.
        k_groups: so many times as many groups; those with the same columns take turns at a tile's stages. 1, 2 or 4.
    """

    block_m: int
    block_n: int
    block_k: int
    groups: int = 2
    splits: int = 1
    group_rows: int = 8
    apart: bool = False
    k_groups: int = 1

    cluster_m: ClassVar[int] = 1  # blocks share no loads
    cluster_n: ClassVar[int] = 1

    @cached_property
    def swapped(self) -> HopperTile:
        """The tile as the kernel sees it; with parts apart, as its epilogues do: side by side."""
        rows, columns = (2 * self.block_n, self.block_m // 2) if self.apart else (self.block_n, self.block_m)
        return HopperTile(rows, columns, False, groups=self.groups, splits=self.splits, group_rows=self.group_rows)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.splits

    @property
    def all_groups(self) -> int:
        """Consumer groups of one block."""
        return self.groups * self.k_groups

    @property
    def threads(self) -> int:
        """Threads of one block: those of the consumer groups and four producer warps."""
        return hopper_tile.GROUP_THREADS * (self.all_groups + 1)

    def __str__(self) -> str:
        groups = f" {self.groups} groups" if self.groups > 2 else ""
        splits = f" k split by {self.splits}" if self.splits > 1 else ""
        apart = " parts apart" if self.apart else ""
        shared = f" k shared by {self.k_groups}" if self.k_groups > 1 else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k} quantized{groups}{shared}{splits}{apart}"


@lru_cache(KEPT_SPECS)
def swapped(spec: KernelSpec) -> KernelSpec:
    """A spec as the kernel sees it: rows of the output are columns."""
    return replace(spec, loads=tuple(map(_swapped, spec.loads)), outs=tuple(map(_swapped, spec.outs)))


def _swapped(access: Access) -> Access:
    return replace(
        access,
        kind=SWAPPED_KINDS[access.kind],
        transposed=access.kind == "tile" and not access.transposed,
        two_levels=tuple(SWAPPED_LOOPS[loop] for loop in access.two_levels),
        run=0,
    )


def packed_bytes(spec: KernelSpec, tile: QuantizedTile) -> int:
    """Bytes of one column of the weight in a stage."""
    return tile.block_k * _bits(spec) // 8


def stage_bytes(spec: KernelSpec, tile: QuantizedTile) -> int:
    """Bytes of a stage, which ends where the next one's swizzle may begin."""
    rows = spec.parts * tile.block_n
    scales = max(tile.block_k // _block(spec) * spec.dtype.bytes, WORD_BYTES)
    zeros = ZERO_PITCH if spec.quantization is not None and spec.quantization.zero_points else 0
    held = tile.block_m * tile.block_k * spec.dtype.bytes + rows * (packed_bytes(spec, tile) + scales + zeros)
    return -(-held // STAGE_ALIGNMENT) * STAGE_ALIGNMENT


def footprint(spec: KernelSpec, tile: QuantizedTile, shared_limit: int) -> HopperFootprint:
    """Lay out the shared memory of one block; of groups that share k each has stages of its own."""
    sums = tile.block_m * tile.block_n * spec.parts * hopper_tile.FP32_BYTES * (tile.k_groups - 1)
    layout = hopper_tile.footprint(swapped(spec), tile.swapped, shared_limit - sums, stage_bytes(spec, tile))
    if tile.k_groups == 1:
        return layout
    return replace(layout, sums=layout.sums + sums, stages=layout.stages // tile.k_groups * tile.k_groups)


def map_rules(spec: KernelSpec, tile: QuantizedTile) -> tuple[MapRule | None, ...]:
    """The tensor maps of a launch: lhs, rhs of each part in bytes; threads store the outputs, which need none."""
    lhs = MapRule("lhs", 0, False, STAGE_ROW_BYTES, STAGE_ROW_BYTES // spec.dtype.bytes, tile.block_m)
    span = packed_bytes(spec, tile)
    rhs = (MapRule("rhs", part, True, span, span, tile.block_n) for part in range(spec.parts))
    return (lhs, *rhs, *(None for _ in spec.outs))


def why_not(spec: KernelSpec, tile: QuantizedTile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile, or None if it can."""
    return (
        hopper_tile.first(_of_operands(spec))
        or hopper_tile.first(_of_tile(spec, tile))
        or hopper_tile.first(_of_apart(spec, tile))
        or hopper_tile.first(_of_memory(spec, tile, shared_limit))
    )


def _of_operands(spec: KernelSpec) -> Rules:
    """What no tile changes."""
    yield spec.quantization is None, "rhs is not quantized"
    yield spec.math not in hopper_tile.WGMMA_STEPS, f"wgmma does not multiply {spec.math}"
    yield spec.lhs_width * spec.dtype.bytes < hopper_tile.LDS_BYTES, "TMA needs rows of lhs on 16-byte boundaries"
    yield spec.rhs_width < hopper_tile.LDS_BYTES, "TMA needs columns of a quantized rhs on 16-byte boundaries"
    plain = spec.lhs_order == "mk" and not (spec.lhs_run or spec.lhs_batch_runs or spec.rhs_batch_runs)
    yield not plain, "quantized: one stride walks the rows of lhs, one its batches, and k is contiguous"
    yield any(out.transposed for out in spec.outs), "quantized: outputs have n contiguous"
    walked = [load for load in spec.loads if load.kind != "tile" and {*load.two_levels} - {"batch"}]
    yield walked, "one stride walks each loop of a row or column"


def _of_tile(spec: KernelSpec, tile: QuantizedTile) -> Rules:
    yield packed_bytes(spec, tile) not in SPANS, f"a stage has {SPANS} bytes of a column of the weight"
    yield tile.block_k % (STAGE_ROW_BYTES // spec.dtype.bytes), "a stage holds whole rows of activations"
    known = tile.groups in GROUPS and tile.k_groups in K_GROUPS and tile.all_groups in MAX_ACCUMULATORS
    yield not known, "two groups, three or four: one, two or three for the columns, times 1, 2 or 4 that share k"
    yield from of_shape(spec, tile.block_m, tile.block_n, tile.swapped.group_m)
    units = spec.parts * tile.swapped.group_m // ROWS
    accumulators = units * tile.swapped.block_n // 2
    most = max_accumulators(spec, tile)
    yield accumulators > most, f"{accumulators} accumulators in a thread, of {most} at most"
    yield tile.splits not in hopper_tile.SPLITS, "k is split by 2 or 4"
    yield 1 + spec.parts + len(spec.outs) > MAX_MAPS, f"a launch has {MAX_MAPS} tensor maps at most"
    # Zero points of a stage are in one register.
    blocks = tile.block_k // _block(spec)
    yield blocks * _bits(spec) > 32, f"{blocks} blocks in a stage"
    yield blocks * spec.dtype.bytes > MAX_SCALE_BYTES, f"{blocks} scales in a stage"


def _of_apart(spec: KernelSpec, tile: QuantizedTile) -> Rules:
    alone = spec.parts != 2 or tile.groups != 2 or tile.splits > 1 or tile.k_groups > 1
    yield tile.apart and alone, "two groups have a part each, of all of k"
    halves = tile.block_n == ROWS and tile.block_m % 32 == 0
    yield tile.apart and not halves, "a group has 64 columns, and half of the rows"
    varies = any(load.kind == "column" for load in spec.loads)
    yield tile.apart and varies, "with parts apart no operand varies along m alone"


def of_shape(spec: KernelSpec, block_m: int, block_n: int, group_columns: int) -> Rules:
    """What holds wherever the weight is the M side: columns by wgmma, and rows where accesses of the epilogue begin."""
    whole = group_columns % ROWS == 0 and max(block_n, block_m) <= MAX_BOX
    yield not whole or block_m % STEP_ROWS, "a group owns multiples of 64 columns, by multiples of 8 rows"
    wide = max((access.width for access in (*spec.loads, *spec.outs)), default=0) > STEP_ROWS
    parts_a_unit = wide and block_m % hopper_tile.UNIT_COLUMNS > 0
    yield parts_a_unit, "accesses are wider than the 8 rows that tiles begin at"


def max_accumulators(spec: KernelSpec, tile: QuantizedTile) -> int:
    """How many of a thread's registers can hold sums, where there is more to do than to store one output."""
    tiles = sum(load.kind == "tile" for load in spec.loads)
    more = TILE_LOAD_REGISTERS * tiles + hopper_tile.COPIED_OUT_REGISTERS * (len(spec.outs) - 1)
    more += PART_REGISTERS * (spec.parts - 1) if tile.all_groups == MAX_GROUPS else 0
    return MAX_ACCUMULATORS[tile.all_groups] - more - (EXCHANGE_REGISTERS if tile.splits > 1 else 0)


def _of_memory(spec: KernelSpec, tile: QuantizedTile, shared_limit: int) -> Rules:
    layout = footprint(spec, tile, shared_limit)
    least = 2 * tile.k_groups
    yield layout.stages < least, f"{layout.stages} stages fit into shared memory, of {least} at least"


def _bits(spec: KernelSpec) -> int:
    return 0 if spec.quantization is None else spec.quantization.bits


def _block(spec: KernelSpec) -> int:
    return 0 if spec.quantization is None else spec.quantization.block
