"""Tiles of the sm_90a kernel whose M side is the weight: which are legal, what shared memory they need, and its maps.

wgmma multiplies 64 rows of its M side, but any multiple of 8 of its N side. With lhs as the N side a tile has as many
rows as there are, which matters from 65 rows to some hundred ("swap AB"). The kernel sees the output as [n, m], as that
of quantized weights does (`hopper_quantized_tile.swapped`). Shared memory lies as `hopper_tile` says, but for stages:

    stage     lhs[block_m][128 bytes], of each part rhs[block_n][128 bytes], swizzled as wgmma wants it

`kernels/cuda/hopper/swapped_stage.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from onnxfuse.limits import MAX_MAPS, STAGE_ROW_BYTES
from onnxfuse.schedule import hopper_tile
from onnxfuse.schedule.hopper_quantized_tile import of_shape, swapped
from onnxfuse.schedule.hopper_tile import FRAGMENT_ROWS, HopperFootprint, HopperTile, Rules, block_k
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import QUANTIZED, TMA_BYTES, KernelSpec

LAST_WAVE_SPLITS = (1, 2)
MOST_BLOCKS = 8  # of a cluster that every chip can launch
MAX_ACCUMULATORS = {1: 160, 2: 160, 4: 80}  # of a thread, by the blocks that split k; tests forbid that ptxas spills


@dataclass(frozen=True)
class SwappedTile:
    """The shape of one thread block's work.

    Attributes:
        block_m: rows of the output tile: the columns of one wgmma.
        block_n: columns of the output tile, of each part.
        splits: blocks of a cluster that share each tile along k; 1, 2 or 4.
        group_rows: tiles along n that run together, for reuse in L2.
        pingpong: each of the two groups owns every other tile; otherwise both share each tile.
        cluster_m: blocks with neighbouring rows that share what they load of rhs.
        cluster_n: blocks with neighbouring columns that share what they load of lhs.
        last_wave_splits: blocks of a cluster that share along k each tile of the last wave alone, where those have room
            for it; 1 or 2.
    """

    block_m: int
    block_n: int
    splits: int = 1
    group_rows: int = 4
    pingpong: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    last_wave_splits: int = 1

    k_groups: ClassVar[int] = 1  # all groups multiply every stage of their tile

    @property
    def cluster(self) -> int:
        """Blocks that work together on every tile."""
        return self.cluster_m * self.cluster_n * self.splits

    @property
    def launched_cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.last_wave_splits

    @cached_property
    def swapped(self) -> HopperTile:
        """The tile as the kernel sees it."""
        return HopperTile(
            self.block_n, self.block_m, self.pingpong, cluster_m=self.cluster_n, cluster_n=self.cluster_m,
            splits=self.splits * self.last_wave_splits, group_rows=self.group_rows,
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.swapped.threads

    def __str__(self) -> str:
        splits = f" k split by {self.splits}" if self.splits > 1 else ""
        splits += f" last wave's k split by {self.last_wave_splits}" if self.last_wave_splits > 1 else ""
        cluster = f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        pingpong = " ping-pong" if self.pingpong else ""
        return f"{self.block_m}x{self.block_n} swapped{pingpong}{cluster}{splits}"


def seen(spec: KernelSpec) -> KernelSpec:
    """A spec as the kernel sees it: its lhs is the weight, its rhs is lhs, and rows of the output are columns."""
    return replace(swapped(spec), lhs_order="mk" if spec.rhs_order == "nk" else "km", rhs_order="nk")


def footprint(spec: KernelSpec, tile: SwappedTile, shared_limit: int) -> HopperFootprint:
    """Lay out the shared memory of one block."""
    stage = STAGE_ROW_BYTES * (tile.block_m + spec.parts * tile.block_n)
    return hopper_tile.footprint(swapped(spec), tile.swapped, shared_limit, stage)


def map_rules(spec: KernelSpec, tile: SwappedTile) -> tuple[MapRule | None, ...]:
    """The tensor maps of a launch: lhs, rhs of each part; threads store the outputs, which need none."""
    depth = block_k(spec)
    nk = spec.rhs_order == "nk"
    box = (depth, (tile.block_n if nk else depth) // tile.cluster_m)  # as many columns as k fill a row of 128 bytes
    lhs = MapRule("lhs", 0, False, STAGE_ROW_BYTES, depth, tile.block_m // tile.cluster_n)
    rhs = (MapRule("rhs", part, nk, STAGE_ROW_BYTES, *box) for part in range(spec.parts))
    return (lhs, *rhs, *(None for _ in spec.outs))


def in_registers(spec: KernelSpec) -> bool:
    """Whether wgmma reads the weight from registers: from shared memory 32-bit elements have k contiguous only."""
    return spec.math == "tf32" and spec.rhs_order == "kn"


def why_not(spec: KernelSpec, tile: SwappedTile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile, or None if it can."""
    return (
        hopper_tile.first(_of_operands(spec))
        or hopper_tile.first(_of_tile(spec, tile))
        or hopper_tile.first(_of_memory(spec, tile, shared_limit))
    )


def _of_operands(spec: KernelSpec) -> Rules:
    """What no tile changes."""
    narrow = min(factor.width for factor in spec.factors) * spec.dtype.bytes < TMA_BYTES
    yield spec.quantization is not None, QUANTIZED
    yield spec.math not in hopper_tile.WGMMA_STEPS, f"wgmma does not multiply {spec.math}"
    yield narrow, "TMA needs rows of lhs and rhs on 16-byte boundaries"
    plain = spec.lhs_order == "mk" and not (spec.lhs_run or spec.lhs_batch_runs or spec.rhs_batch_runs)
    yield not plain, "swapped: one stride walks the rows of lhs, one its batches, and k is contiguous"
    yield any(out.transposed for out in spec.outs), "swapped: outputs have n contiguous"
    walked = [load for load in spec.loads if load.kind != "tile" and {*load.two_levels} - {"batch"}]
    yield walked, "one stride walks each loop of a row or column"


def _of_tile(spec: KernelSpec, tile: SwappedTile) -> Rules:
    yield from of_shape(spec, tile.block_m, tile.block_n, tile.swapped.group_m)
    yield tile.splits not in hopper_tile.SPLITS, "k is split by 2 or 4"
    other = tile.pingpong or tile.cluster_m * tile.cluster_n > 1
    yield tile.splits > 1 and other, "k is split among blocks with cooperative tiles that share no loads"
    yield from _of_last_wave(tile)
    yield tile.cluster > MOST_BLOCKS, f"a cluster has {MOST_BLOCKS} blocks at most"
    parts = tile.block_m % tile.cluster_n == 0 and block_k(spec) % tile.cluster_m == 0
    yield not parts, "blocks load equal parts of what they share"
    accumulators = spec.parts * tile.swapped.group_m // FRAGMENT_ROWS * tile.block_m // 2
    most = MAX_ACCUMULATORS[tile.swapped.splits] - hopper_tile.COPIED_OUT_REGISTERS * (len(spec.outs) - 1)
    most = min(hopper_tile.max_accumulators(swapped(spec), tile.swapped.groups), most)
    yield accumulators > most, f"{accumulators} accumulators in a thread, of {most} at most"
    yield 1 + spec.parts + len(spec.outs) > MAX_MAPS, f"a launch has {MAX_MAPS} tensor maps at most"


def _of_last_wave(tile: SwappedTile) -> Rules:
    yield tile.last_wave_splits not in LAST_WAVE_SPLITS, "the last wave's k is split by 2"
    other = tile.cluster > 1 or not tile.pingpong
    yield tile.last_wave_splits > 1 and other, "the last wave's k is split in ping-pong where blocks share nothing"


def _of_memory(spec: KernelSpec, tile: SwappedTile, shared_limit: int) -> Rules:
    layout = footprint(spec, tile, shared_limit)
    yield layout.stages < hopper_tile.LEAST_STAGES, f"{layout.stages} stages fit into shared memory"
