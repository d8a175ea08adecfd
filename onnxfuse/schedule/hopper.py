"""The sm_90a kernel among the families: its tiles, what they cost, and its way to each tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from onnxfuse.device import CACHE_LINE, SECTOR, DeviceSpec
from onnxfuse.ir.fusion import NONLINEAR
from onnxfuse.schedule import cost_model, hopper_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import Calibration, calibration
from onnxfuse.schedule.cost_model import products_of, tiles_of
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile
from onnxfuse.schedule.hopper_tile import (
    ARCH,
    FP32_BYTES,
    FRAGMENT_ROWS,
    HopperFootprint,
    HopperTile,
    begins_at_any_row,
    block_k,
    in_place_load,
    is_served,
    rhs_pieces,
    tma_stored,
)
from onnxfuse.schedule.kernel_family import Amount, Candidate, Count, Flow, Launch, Problem, ProductFamily, of_each
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

# Small M comes in a box that is little taller than M. A tile's block_n is the width of all parts together.
TILES = (
    HopperTile(128, 192, pingpong=True),
    HopperTile(128, 160, pingpong=True),
    HopperTile(128, 160, pingpong=False),
    HopperTile(128, 128, pingpong=True, groups=4),
    HopperTile(128, 128, pingpong=True),
    HopperTile(128, 128, pingpong=False),
    HopperTile(128, 224, pingpong=False),
    HopperTile(128, 256, pingpong=False),
    HopperTile(192, 224, pingpong=False, groups=3),
    HopperTile(192, 192, pingpong=False, groups=3),
    HopperTile(192, 160, pingpong=False, groups=3),
    HopperTile(192, 128, pingpong=False, groups=3),
    HopperTile(192, 96, pingpong=False, groups=3),
    HopperTile(192, 64, pingpong=False, groups=3),
    HopperTile(128, 96, pingpong=False),
    HopperTile(128, 80, pingpong=False),
    HopperTile(128, 64, pingpong=True),
    HopperTile(128, 64, pingpong=False),
    *(
        HopperTile(64, width, pingpong=True, lhs_rows=lhs_rows)
        for lhs_rows in (0, 32, 16)
        for width in (160, 128, 96, 80, 64, 32)
    ),
    *(
        HopperTile(128, width, pingpong=False, splits=splits, lhs_rows=lhs_rows)
        for lhs_rows in (0, 64, 32)
        for splits in (2, 4)
        for width in (160, 128, 80, 64)
        if not lhs_rows or width <= 80
    ),
    HopperTile(192, 80, pingpong=False, groups=3, splits=4),
    HopperTile(192, 64, pingpong=False, groups=3, splits=4),
)
# Two blocks beside each other load half of lhs each, where its rows begin at no sector: elsewhere clusters do not pay.
SHARED_LHS = (
    HopperTile(128, 160, pingpong=False, cluster_n=2),
    HopperTile(192, 128, pingpong=False, groups=3, cluster_n=2),
    HopperTile(192, 160, pingpong=False, groups=3, cluster_n=2),
    HopperTile(192, 192, pingpong=False, groups=3, cluster_n=2),
)
LONGEST_KEPT_ROW = 1024  # bytes of k of what blocks keep of rhs: of 61 problems with longer rows one gained
KEEPING = (
    *(HopperTile(128, width, pingpong=True) for width in (192, 160, 128, 96)),
    HopperTile(128, 128, pingpong=True, groups=4),
    HopperTile(64, 160, pingpong=True),
    *(HopperTile(192, width, pingpong=False, groups=3) for width in (128, 96)),
)
NARROWEST_BOX = 16  # columns of rhs[k, n]
WIDEST_BESIDE_REST = 128  # columns of one part in a tile of 64 rows whose rest comes in its own box; 160 never paid
LONGEST = 300.0  # microseconds from which on a kernel is as slow as any
READ_BESIDE = 36  # columns that a wgmma multiplies while it reads lhs: 32 by bandwidth, fitted
FEW_ROWS_POWER = 2.5  # of the norm that joins work and memory where lhs comes in boxes: less of it is zeros, more hides
_VECTOR = "once per tile through shared memory, ahead of the main loop"
PATHS = {
    "product": "TMA",
    "scalar": _VECTOR,
    "row": _VECTOR,
    "column": _VECTOR,
    "tile": "TMA or cp.async along n, beside the main loop",
    "narrow tile": "in chunks of memory along n, single bytes by themselves, beside the main loop",
    "transposed tile": "cp.async along m, beside the main loop, transposed in shared memory",
    "narrow transposed tile": "element by element along m, beside the main loop, transposed in shared memory",
    "out": "direct store along n",
    "transposed out": "transposed in shared memory, direct store along m",
}
TMA_STORED_OUT = {**PATHS, "out": "TMA store"}


RingTile = HopperTile | QuantizedTile | SwappedTile
"""A tile of a kernel that has the ring of `kernels/cuda/hopper/ring.cuh`."""


class Hopper(ProductFamily):
    """TMA and wgmma of sm_90a."""

    name = "hopper"
    label = "sm_90a"
    tile_type = HopperTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """Of widths that parts round to the same, the first."""
        shared = SHARED_LHS if k * spec.dtype.bytes % SECTOR else ()
        step = block_k(spec)
        deep = k * spec.dtype.bytes > LONGEST_KEPT_ROW
        keeping = [replace(tile, group_rows=1, kept_k=-(-k // step) * step) for tile in KEEPING if not deep]
        every = [self._candidate(tile, spec, device, k) for tile in (*TILES, *shared, *keeping) if device.arch == ARCH]
        distinct = {entry.tile: entry for entry in reversed(every)}
        return tuple(reversed(distinct.values()))

    def _candidate(self, tile: HopperTile, spec: KernelSpec, device: DeviceSpec, k: int) -> Candidate:
        """The tile's width shared among the parts, in whole steps of wgmma's transposed operand; narrower is slower."""
        known = calibration(device)
        shallow = spec.parts == 1 and k <= known.hopper_ahead_depth
        group_rows = tile.group_rows if tile.pingpong or tile.kept_k else known.hopper_one_wave_group_rows
        columns = max(tile.block_n // spec.parts // 16, 1) * 16
        own = replace(tile, block_n=columns, group_rows=group_rows)
        in_place = in_place_load(spec, own) is not None
        ahead = in_place or (shallow and all(load.kind != "tile" for load in spec.loads))
        whole = replace(own, whole_slabs=True)
        own = whole if is_served(spec, whole) and k <= _whole_slabs_depth(spec, in_place, known) else own
        own = replace(own, operands_ahead=tile.groups == 2 and ahead)
        return Candidate(self, own, known.pace["hopper"][_schedule(tile)])

    def copied(self, spec: KernelSpec) -> tuple[str, ...]:
        """As `hopper_tile` says."""
        return hopper_tile.copied(spec)

    def why_not(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> str | None:
        """As `hopper_tile` says, and the narrowest boxes are slow."""
        pieces = rhs_pieces(spec, tile)
        few = len(pieces) > 1 and pieces[-1].columns == NARROWEST_BOX and tile.block_m > FRAGMENT_ROWS
        if pieces[-1].atom == NARROWEST_BOX and not few:
            return "rhs with n contiguous would be read in the narrowest boxes, which is slow"
        if len(pieces) > 1 and tile.block_m == FRAGMENT_ROWS and tile.block_n > WIDEST_BESIDE_REST:
            return "rhs with n contiguous would be read in three boxes for 64 rows, which is slow"
        return hopper_tile.why_not(spec, tile, device.shared_bytes)

    def early_share(self, spec: KernelSpec, device: DeviceSpec) -> float:
        """Rhs that no kernel of the run writes is loaded before the kernel before has ended."""
        return rhs_ahead_share(spec, device)

    def shared_bytes(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> int:
        """Ring, staging, vectors and barriers."""
        return hopper_tile.footprint(spec, tile, device.shared_bytes).total

    def launch(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> Launch:
        """A persistent grid of clusters, with tensor maps."""
        layout = hopper_tile.footprint(spec, tile, device.shared_bytes)
        return Launch(
            tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n, tile.threads, layout.total, tile.cluster,
            hopper_tile.map_rules(spec, tile, device.shared_bytes), early_depth(layout, block_k(spec), device),
            full_early_depth(tile, layout, spec, device),
        )  # fmt: skip

    def access_path(self, role: str, access: Access) -> str:
        """As the tables say; TMA stores what lies in boxes."""
        return path(TMA_STORED_OUT if role == "out" and tma_stored(access) else PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> Flow:
        """A block each multiprocessor, with the whole ring in flight."""
        layout, depth = hopper_tile.footprint(spec, tile, device.shared_bytes), block_k(spec)
        return Flow(device.multiprocessors, layout.stages * depth, early_depth(layout, depth, device))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Infinite for a tile that splits k where its blocks are more than run at once, or may be."""
        tile: HopperTile = entry.tile
        known = calibration(device)
        waves, too_many = waves_of_clusters(tile, problem, known)
        waves = np.where(tile.kept_k, waves_of_rows(tile, problem, device), waves)
        main_loop = _main_loop(entry, reads, spec, problem, device, waves) + known.fill[self.name]
        epilogue = of_each(tile, lambda each: epilogue_time(each, spec, device))
        busy = in_turns(tile, waves, main_loop, epilogue)
        together = joined(tile, busy, cost_model.moving(spec, problem, device), problem, known)
        exchanging = exchange_time(tile, spec, problem, device)
        sharing = known.hopper_cluster * (tile.cluster > tile.splits)
        too_many = too_many | is_kept_in_vain(tile, problem, device)
        return np.where(too_many, np.inf, known.launches[self.name] + together + exchanging + sharing)

    def is_on_par(self, tile: HopperTile, m: int) -> bool:
        """Written for the chip's own units."""
        return True

    def is_of_one_depth(self, tile: HopperTile) -> bool:
        """Those that keep rhs."""
        return tile.kept_k > 0

    def alike(self, tile: HopperTile) -> HopperTile:
        """Tiles that differ in the boxes of lhs alone."""
        return replace(tile, lhs_rows=0)


def _whole_slabs_depth(spec: KernelSpec, in_place: bool, known: Calibration) -> int:
    kind = "nonlinear" if any(step.op in NONLINEAR for step in spec.steps) else "linear"
    return known.hopper_whole_slabs_depth["in place" if in_place else kind]


def early_depth(layout: HopperFootprint, depth: int, device: DeviceSpec, most: float = 0.0) -> int:
    """How much k the tiles of a block may have, one after the other, for an early start to pay.

    The blocks of a kernel that starts early lie in any order, those with the same rows or columns no longer beside each
    other, and loads take longer: where few are loaded, less than a launch does.

    Args:
        layout: with the bytes of a stage, and of what is loaded once.
        depth: k of a stage.
        device: to plan for.
        most: bytes that a multiprocessor may load, where those are more than of any kernel.
    """
    streamed = max(max(most, calibration(device).hopper_early_bytes) - layout.kept, 0)
    return int(streamed / layout.stage * depth * layout.splits)


def full_early_depth(tile: RingTile, layout: HopperFootprint, spec: KernelSpec, device: DeviceSpec) -> int:
    """The same of a grid that leaves few multiprocessors idle: what is used often is waited for less."""
    rows, columns = tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n * spec.parts
    multiplied = rows * columns / (rows + columns)
    by_least = calibration(device).hopper_full_early_bytes
    most = max((value for least, value in by_least.items() if multiplied >= float(least)), default=0.0)
    return early_depth(layout, block_k(spec), device, most)


def rhs_ahead_share(spec: KernelSpec, device: DeviceSpec) -> float:
    """Of its time, what a kernel takes that has loaded rhs of its first steps when the kernel before ends.

    Copies of rhs are made by that one. Networks learnt from kernels that load nothing ahead.
    """
    return 1.0 if "rhs" in spec.copied else calibration(device).hopper_ahead


def waves_of_clusters(tile: RingTile, problem: Problem, known: Calibration) -> tuple[Amount, Amount]:
    """Tiles that a block computes one after the other, and whether they are too many to split k.

    A tile for every multiprocessor is faster than a share of one. Of clusters of more than two, which leave
    multiprocessors empty, a grid has more than run at once.
    """
    blocks = blocks_of(tile, problem)
    at_once = of_each(tile, lambda each: known.hopper_clustered[str(each.cluster)])
    too_many = ((tile.splits > 1) | (tile.cluster > 2)) & (problem.guessed | (blocks > at_once))
    return np.maximum(np.ceil(blocks / at_once), 1), too_many


def is_kept_in_vain(tile: HopperTile, problem: Problem, device: DeviceSpec) -> Amount:
    """Whether a block's next tile is of other columns, or of a batch with an rhs of its own, or may be."""
    columns = np.ceil(problem.n / tile.block_n)
    return (tile.kept_k > 0) & ((columns > device.multiprocessors) | (problem.batch > 1) | problem.guessed)


def waves_of_rows(tile: HopperTile, problem: Problem, device: DeviceSpec) -> Amount:
    """Tiles one after the other where each block has those of the same columns: as many blocks for all columns."""
    columns = np.maximum(np.ceil(problem.n / tile.block_n), 1)
    blocks = np.maximum(device.multiprocessors // columns, 1)
    return np.maximum(np.ceil(problem.batch * np.ceil(problem.m / tile.block_m) / blocks), 1)


def blocks_of(tile: RingTile, problem: Problem) -> Amount:
    """Blocks of all tiles: of whole clusters."""
    rows = np.ceil(problem.m / (tile.block_m * tile.cluster_m))
    columns = np.ceil(problem.n / (tile.block_n * tile.cluster_n))
    return problem.batch * rows * columns * tile.cluster


def in_turns(tile: HopperTile, waves: Amount, main_loop: Amount, epilogue: Amount) -> Amount:
    """Microseconds of a multiprocessor's tiles: in ping-pong an epilogue runs beside the other team's main loop."""
    both = main_loop + epilogue
    return np.where(tile.pingpong, (waves - 1) * np.maximum(main_loop, both / 2) + both, waves * both)


def joined(tile: HopperTile, busy: Amount, moving: Amount, problem: Problem, known: Calibration) -> Amount:
    """Microseconds of a multiprocessor's work and of memory's; what multiplies, and no more, meets the chip's power."""
    few = (tile.lhs_rows > 0) & (problem.m <= tile.block_m - tile.lhs_rows)
    both = cost_model.beside_memory(busy, moving, np.where(few, FEW_ROWS_POWER, 2.0))
    return both * (1 + known.hopper_long * (busy / both) ** 2 * np.minimum(both, LONGEST))


def _main_loop(
    entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec, waves: Amount
) -> Amount:
    """Microseconds of a tile's steps of the ring; only the last tiles along m load rows of zeros."""
    tile, known = entry.tile, calibration(device)
    steps = np.ceil(np.ceil(problem.k / block_k(spec)) / tile.splits)
    share = np.minimum(tiles_of(tile, problem) * tile.splits / device.multiprocessors, 1.0)
    ragged = np.ceil(waves / np.maximum(np.ceil(problem.m / tile.block_m), 1)) / waves
    loading = _loading(tile, spec, problem, device, waves) * (known.hopper_alone + (1 - known.hopper_alone) * share)
    box = _box(tile)
    loading = loading + known.hopper_box * (np.ceil(np.minimum(problem.m, tile.block_m) / box) - 1)
    behind = np.where(begins_at_any_row(spec) & (problem.m >= tile.block_m), 0, -problem.m % box)
    zeros = known.hopper_zero_row * behind * share
    columns = of_each(tile, lambda each: _multiplied_columns(each, spec))
    multiplying = tile.block_m * columns * block_k(spec) / entry.pace / known.products[spec.math]
    arriving = known.round_trip["hopper"] * block_k(spec) / reads.depth
    beside = np.hypot(np.hypot(multiplying, arriving), known.hopper_step)
    return steps * ((1 - ragged) * np.hypot(beside, loading) + ragged * np.hypot(beside, loading + zeros))


def _multiplied_columns(tile: HopperTile, spec: KernelSpec) -> float:
    """Columns of all parts, those of a narrow wgmma counted as what it takes: it reads as much of lhs as any other.

    Of k that fits 32 bytes shared memory hands out 64 rows of lhs in 16 cycles and as many of rhs too; the tensor cores
    multiply 64 by 32 of them in that time.
    """
    widths = [spec.parts * piece.columns for piece in rhs_pieces(spec, tile)]
    return sum(max(width, width / 2 + READ_BESIDE) for width in widths)


def _loading(tile: HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec, waves: Amount) -> Amount:
    """Microseconds in which TMA loads a step's rows, of 128 bytes or less, where every multiprocessor loads.

    Rhs that is kept is loaded once for all of a block's tiles.
    """
    known = calibration(device)
    width, order, box = spec.dtype.bytes, spec.rhs_order, _box(tile)
    rows = tile.block_n if order == "nk" else of_each(tile, lambda each: _boxes(each, spec)) * block_k(spec)
    lhs = np.ceil(np.minimum(problem.m, tile.block_m) / box) * box * in_pieces("lhs", problem.k * width, known)
    rhs = spec.parts * rows * in_pieces(f"rhs {order}", problem.rhs_row(order) * width, known)
    rhs = rhs / np.where(tile.kept_k, waves, 1)
    return known.hopper_loaded_row * (lhs * of_shared(tile.cluster_n, known) + rhs * of_shared(tile.cluster_m, known))


def _boxes(tile: HopperTile, spec: KernelSpec) -> int:
    """Boxes of rhs[k, n] that one part of a tile has in a step."""
    return sum(math.ceil(piece.columns / piece.atom) for piece in rhs_pieces(spec, tile))


def of_shared(blocks: Count, known: Calibration) -> Amount:
    """What a row that blocks of a cluster share costs each of them, of one that a block loads alone."""
    return known.hopper_received_row + (1 - known.hopper_received_row) / blocks


def in_pieces(operand: str, pitch: Count, known: Calibration) -> Amount:
    """How much longer the rows of a box take whose pitch is no multiple of a cache line, by what it is a multiple of.

    As if L2 delivered half a line in a cycle: a row that begins in the middle of one takes as many cycles as any, one
    that begins elsewhere another; where it begins at no sector, it is read in pieces.
    """
    granule = np.gcd(pitch, CACHE_LINE)
    return 1.0 + sum((granule == int(each)) * more for each, more in known.hopper_pitch[operand].items())


def epilogue_time(tile: HopperTile, spec: KernelSpec, device: DeviceSpec) -> float:
    """Microseconds of a tile's epilogue, by what each output costs two groups."""
    each = calibration(device).hopper_epilogue
    nonlinear = sum(step.op in NONLINEAR for step in spec.steps)
    tiles = sum(load.kind == "tile" for load in spec.loads)
    layout = hopper_tile.footprint(spec, tile, device.shared_bytes) if tiles else None
    brought, refilling = each["tile"] * tiles, 0.0
    if layout is not None and layout.in_place:
        brought, refilling = each["in place"] + each["conflict"] * layout.conflicts, each["refill"] * layout.refills
    copied = sum(not tma_stored(out) for out in spec.outs)
    one = each["sum"] * spec.parts + each["nonlinear"] * nonlinear + brought + each["copied"] * copied
    team = tile.groups // 2 if tile.pingpong else tile.groups
    return tile.block_m * tile.block_n * one * 2 / team + refilling


def _box(tile: HopperTile) -> Count:
    """Rows of one box of lhs."""
    return np.where(tile.lhs_rows, tile.lhs_rows, tile.block_m)


def exchange_time(tile: RingTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which blocks that split k add up what each has of a tile."""
    return (tile.splits > 1) * exchanging(tiles_of(tile, problem) * (tile.splits - 1) * products_of(tile, spec), device)


def exchanging(sums: Amount, device: DeviceSpec) -> Amount:
    """Microseconds in which the blocks of clusters meet and send each other so many sums."""
    known = calibration(device)
    return known.hopper_meeting + sums * FP32_BYTES / known.hopper_exchanged


def _schedule(tile: HopperTile) -> str:
    """Tiles whose groups work alike: `128 ping-pong 4 groups`."""
    groups = f" {tile.groups} groups" if tile.groups > 2 else ""
    return f"{tile.block_m} {'ping-pong' if tile.pingpong else 'cooperative'}{groups}"


HOPPER = Hopper()
