"""Tiles of the sm_90a kernel: which are legal, what they need of shared memory, and how TMA reaches the operands.

Shared memory of one block, in this order:

    ring      stages x (lhs[block_m, block_k] + parts x rhs[block_k, block_n]), swizzled as wgmma wants it; of rhs with
              n contiguous first the columns of all parts that fill whole swizzles, then the rest of all parts;
              or stages x lhs, and behind them the rhs of every step of k, which stays
    sums      where blocks split k: those that the others send, [block][warp][register / 4][lane] of four registers each
    staging   for each consumer warp: one or two slabs of every output, two or all of every tile operand; or for each
              group two or all slabs of a tile operand, whose place the output takes
    vectors   for each of four tiles: the tile's place, the scalar, row and column operands in fp32
    barriers  two for each stage of the ring, for each of the vectors and for each slab of each group's tile operands;
              one for the start of the latter; two for the sums that blocks exchange where they split k

`kernels/cuda/hopper/gemm.cuh` asserts the same numbers, so the two cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from onnxfuse.limits import MAX_BOX, MAX_MAPS, STAGE_ROW_BYTES
from onnxfuse.schedule.calibration import calibration_of
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import FACTORS, QUANTIZED, TMA_BYTES, Access, KernelSpec
from onnxfuse.schedule.shared_memory import staged_pitch

ARCH = "sm_90a"
VECTOR_BUFFERS = 4  # as gemm.cuh has them, which says why
FRAGMENT_ROWS = 64  # of one wgmma
UNIT_COLUMNS = 16  # that the epilogue computes at once
WGMMA_STEPS = {"f16": 16, "bf16": 16, "tf32": 8}  # elements of k in one wgmma: 32 bytes
MAX_WIDTH = 256  # columns of one wgmma
WIDEST_AT_ONCE = {2: 256, 3: 192, 4: 256}  # columns of one wgmma, by groups: of 128 registers it may name 96 sums
MAX_ACCUMULATORS = {2: 192, 3: 112, 4: 64}  # fp32 registers of one thread, of 232, 160 or 96, by the number of groups
TILE_LOAD_REGISTERS = 32  # of a tile operand's pairs and addresses; tests forbid that ptxas spills
LEAST_STAGES = 3  # of two, one waits while the other is multiplied: up to twice the time
FEW_STAGES = 4  # below which stages are worth more than slabs of long rows to several outputs, which lie side by side
WHOLE_SLABS_STAGES = 3  # that are enough where all slabs are wanted
SERVED_BUFFERS = 4  # of an output that no operand's place is for
COPIED_OUT_REGISTERS = 16  # of an output that TMA does not store
SWIZZLE_ROWS = 8  # a period of the swizzle: a box begins on one
ATOM = 64  # elements of the widest swizzle's span, of 16-bit elements with m or n contiguous
BANK_WORDS = 32
SLAB_ROWS = 16  # of one wgmma in a warp
SWIZZLED_COLUMNS = (16, 32, 64)  # of 16-bit elements: spans of 32, 64 and 128 bytes
BOX_ALIGNMENT = 128  # bytes, of a box without a swizzle
SPLITS = (1, 2, 4)  # each of a group's four warps belongs to one of the blocks that split k
BARRIER_BYTES = 8
FP32_BYTES = 4
GROUP_WARPS = 4
GROUP_THREADS = 128
TILE_BYTES = 16  # place of a tile, before its vectors
LDS_BYTES = 16  # the widest shared-memory access
KEPT_FOOTPRINTS = 1 << 14  # a site's plan asks for each a few times, and equal sites again


@dataclass(frozen=True)
class HopperTile:
    """The shape of one thread block's work.

    Attributes:
        block_m: rows of the output tile.
        block_n: columns of the output tile, of each part.
        pingpong: each half of the consumer groups owns every other tile; otherwise all share each tile.
        cluster_m: 2 where two blocks with neighbouring rows share what they load of rhs, else 1.
        cluster_n: 2 where two blocks with neighbouring columns share what they load of lhs, else 1.
        whole_slabs: room for all slabs of a tile operand, or four of an output, which producers store, matters more
            than stages: faster where k is short.
        operands_ahead: the epilogue reads operands before it needs them: faster where it outlasts the main loop.
        group_rows: row tiles that run together, for reuse in L2.
        stages: depth of the ring; 0 for as many as fit.
        groups: consumer groups of four warps; half of them share a tile with `pingpong`, else all.
        splits: blocks of a cluster that share each tile along k; 1, 2 or 4.
        lhs_rows: rows of one box of lhs, of which those behind the last row are not loaded; 0 for one box of all that
            the block loads. A box takes TMA time by itself, and so do rows of zeros in a tall one.
        kept_k: of rhs that stays in shared memory while a block computes tiles of the same columns, a multiple of a
            stage's and no less than the product's; 0 where each tile loads its own.
    """

    block_m: int
    block_n: int
    pingpong: bool
    cluster_m: int = 1
    cluster_n: int = 1
    whole_slabs: bool = False
    operands_ahead: bool = False
    group_rows: int = 8
    stages: int = 0
    groups: int = 2
    splits: int = 1
    lhs_rows: int = 0
    kept_k: int = 0

    k_groups: ClassVar[int] = 1  # all groups multiply every stage of their tile

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.splits

    @property
    def threads(self) -> int:
        """Threads of one block: those of the consumer groups and four producer warps, of which two may serve slabs."""
        return GROUP_THREADS * self.groups + (64 if self.groups == 4 and not self.whole_slabs else GROUP_THREADS)

    @property
    def group_m(self) -> int:
        """Rows of one consumer group."""
        return self.block_m // (self.groups // 2 if self.pingpong else self.groups)

    def __str__(self) -> str:
        groups = f" {self.groups} groups" if self.groups > 2 else ""
        cluster = f" cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        splits = f" k split by {self.splits}" if self.splits > 1 else ""
        schedule = "ping-pong" if self.pingpong else "cooperative"
        boxes = f" lhs by {self.lhs_rows} rows" if self.lhs_rows else ""
        kept = " rhs kept" if self.kept_k else ""
        return f"{self.block_m}x{self.block_n} {schedule}{groups}{cluster}{splits}{boxes}{kept}"


@dataclass(frozen=True)
class HopperFootprint:
    """Shared memory of one block; all sizes and offsets in bytes.

    Attributes:
        stages: depth of the ring.
        stage: one stage of the ring.
        kept: all of rhs that stays, behind the ring.
        slab_columns: columns that one pass of the epilogue stages.
        staging: staging area of one warp, or a quarter of its group's.
        vectors: vectors of one tile.
        load_offsets: of each load, in the vectors or, for a tile operand, in the warp's staging area.
        out_offsets: of each output in the warp's staging area.
        out_buffers: slabs of one output stored by TMA that can be in flight at once, that being computed
            included.
        load_buffers: slabs of one tile operand that are there at once: all of the tile's, or two; or those of an output
            that producers store; else 0.
        groups: consumer groups.
        splits: blocks that share a tile along k.
        sums: what the other ones send of this block's share of them.
        served: whether producers store the slabs of the output.
        in_place_load: the load in whose staging areas the output lies, if any.
        refills: slabs of that operand which are loaded when others of their tile are stored.
        conflicts: whether rows of a slab begin in the same banks, as those that are not swizzled do.
    """

    stages: int
    stage: int
    kept: int
    slab_columns: int
    staging: int
    vectors: int
    load_offsets: tuple[int, ...]
    out_offsets: tuple[int, ...]
    out_buffers: int
    load_buffers: int
    groups: int
    splits: int
    sums: int
    served: bool
    in_place_load: int | None
    refills: int
    conflicts: bool

    @property
    def in_place(self) -> bool:
        """Whether the output lies where a tile operand was."""
        return self.in_place_load is not None

    @property
    def vectors_offset(self) -> int:
        """Where the vectors begin."""
        return self.stages * self.stage + self.kept + self.sums + GROUP_WARPS * self.groups * self.staging

    @property
    def barriers_offset(self) -> int:
        """Where the barriers begin."""
        return self.vectors_offset + VECTOR_BUFFERS * self.vectors

    @property
    def total(self) -> int:
        """Dynamic shared memory of the launch."""
        barriers = _barriers(self.stages, self.groups * self.load_buffers, self.splits)
        return self.barriers_offset + barriers * BARRIER_BYTES


def block_k(spec: KernelSpec) -> int:
    """Elements of k in one stage of the ring."""
    return STAGE_ROW_BYTES // spec.dtype.bytes


@dataclass(frozen=True)
class RhsPiece:
    """Columns of every part of rhs that come in boxes of one width, and that one wgmma multiplies.

    Attributes:
        columns: of one part.
        atom: elements of the swizzle's span along the contiguous axis, k or n.
    """

    columns: int
    atom: int


def rhs_pieces(spec: KernelSpec, tile: HopperTile) -> tuple[RhsPiece, ...]:
    """A tile's columns: where n is contiguous, those of a part that fill the widest swizzles, then the rest.

    TMA takes as long for a row of a narrow box as for one of 128 bytes. Where k is contiguous there are two pieces if
    one wgmma does not multiply all columns.
    """
    if spec.rhs_order == "nk":
        fits = spec.parts * tile.block_n <= WIDEST_AT_ONCE[tile.groups]
        first = tile.block_n if fits else -(-tile.block_n // 32) * 16
        widths = (first, tile.block_n - first)
        return tuple(RhsPiece(columns, block_k(spec)) for columns in widths if columns)
    rest = tile.block_n % ATOM
    pieces = RhsPiece(tile.block_n - rest, ATOM), RhsPiece(rest, 32 if rest % 32 == 0 else 16)
    return tuple(piece for piece in pieces if piece.columns)


def lhs_box(spec: KernelSpec, tile: HopperTile) -> tuple[int, int]:
    """Elements of one box of lhs along its contiguous and its other axis."""
    if spec.lhs_order == "km":
        return ATOM, block_k(spec)
    return block_k(spec), tile.lhs_rows or tile.block_m // tile.cluster_n


def rhs_box(spec: KernelSpec, tile: HopperTile, piece: RhsPiece) -> tuple[int, int]:
    """Elements of one box of rhs along its contiguous and its other axis.

    In a cluster that shares rhs each block loads half of every box and sends it to both.
    """
    rows = block_k(spec) if spec.rhs_order == "kn" else piece.columns
    return piece.atom, rows // tile.cluster_m


def begins_at_any_row(spec: KernelSpec) -> bool:
    """Whether a tile may begin at any row: only accesses along m ask where, and boxes of rows do not."""
    return spec.lhs_order == "mk" and not any(access.transposed for access in (*spec.loads, *spec.outs))


def begins_at_any_column(spec: KernelSpec) -> bool:
    """Whether a tile may begin a whole tile before the last column, of which every width is a divisor: not in runs.

    Nor where n, along which TMA reads rhs, is no multiple of 16 bytes: boxes begin on one, others are illegal.
    """
    inside_rows = spec.rhs_order == "kn" and "rhs" in spec.copied
    return not inside_rows and not any("n" in access.two_levels for access in (*spec.loads, *spec.outs))


def tma_stored(out: Access) -> bool:
    """Whether TMA stores an output: 16-bit elements, rows on 16-byte boundaries, runs of columns that hold slabs."""
    in_runs = "n" not in out.two_levels or (out.run > 0 and out.run % calibration_of(ARCH).hopper_shortest_run == 0)
    in_runs = in_runs and "batch" not in out.two_levels
    return out.dtype.bytes == 2 and out.width * out.dtype.bytes >= LDS_BYTES and not out.transposed and in_runs


def in_place_load(spec: KernelSpec, tile: HopperTile) -> int | None:
    """The tile operand in whose staging areas the output lies, by its place among the loads: of one each, in boxes."""
    tiles = [index for index, load in enumerate(spec.loads) if load.kind == "tile"]
    alone = len(tiles) == len(spec.outs) == tile.splits == 1
    in_boxes = alone and all(_in_boxes(access) for access in (spec.loads[tiles[0]], *spec.outs))
    return tiles[0] if in_boxes else None


def is_served(spec: KernelSpec, tile: HopperTile) -> bool:
    """Whether producer warps store the slabs of the only output, and hand its buffers to the consumers."""
    if in_place_load(spec, tile) is not None:
        return True
    alone = len(spec.outs) == tile.splits == 1 and not _tile_loads(spec)
    return tile.whole_slabs and alone and _in_boxes(spec.outs[0])


def _in_boxes(access: Access) -> bool:
    return tma_stored(access) and not access.two_levels


def map_rules(spec: KernelSpec, tile: HopperTile, shared_limit: int) -> tuple[MapRule | None, ...]:
    """The tensor maps of a launch, in the order of the kernel's second argument: lhs, rhs, each output.

    Those of rhs are each part's, of one piece after the other.

    None is an output that needs no map: its 128 bytes are there and zero. Behind them is that of the tile operand in
    whose staging areas the output lies.
    """
    layout = footprint(spec, tile, shared_limit)
    rows = FRAGMENT_ROWS if layout.served else SLAB_ROWS
    columns = layout.slab_columns
    out_swizzle = 2 * columns if columns in SWIZZLED_COLUMNS else 0
    lhs = MapRule("lhs", 0, spec.lhs_order == "km", STAGE_ROW_BYTES, *lhs_box(spec, tile))
    rhs = (
        MapRule("rhs", part, spec.rhs_order == "nk", spec.dtype.bytes * piece.atom, *rhs_box(spec, tile, piece))
        for piece in rhs_pieces(spec, tile)
        for part in range(spec.parts)
    )
    outs = (
        MapRule("out", index, False, out_swizzle, columns, rows) if tma_stored(out) else None
        for index, out in enumerate(spec.outs)
    )
    if layout.in_place_load is None:
        return (lhs, *rhs, *outs)
    return (lhs, *rhs, *outs, MapRule("load", layout.in_place_load, False, out_swizzle, columns, rows))


def footprint(spec: KernelSpec, tile: HopperTile, shared_limit: int, stage: int = 0) -> HopperFootprint:
    """Lay out the shared memory of one block: enough stages, then as much room for outputs and operands as is left.

    Args:
        spec: what to compute.
        tile: how.
        shared_limit: shared memory of one block, in bytes.
        stage: bytes of a stage; 0 for those of factors as they are.
    """
    loaded = tile.block_m + (0 if tile.kept_k else spec.parts * tile.block_n)
    stage = stage or STAGE_ROW_BYTES * loaded
    products = tile.block_m * tile.block_n * spec.parts
    known = calibration_of(ARCH)
    enough = max(-(-known.hopper_enough_products[str(tile.groups)] // products), known.hopper_enough_stages)
    constants = (known.hopper_most_stages, known.hopper_widest_slab, known.hopper_shortest_run)
    return _footprint(spec, tile, shared_limit, stage, WHOLE_SLABS_STAGES if tile.whole_slabs else enough, constants)


@lru_cache(KEPT_FOOTPRINTS)
def _footprint(
    spec: KernelSpec, tile: HopperTile, shared_limit: int, stage: int, enough: int, constants: tuple[int, ...]
) -> HopperFootprint:
    """The same for a stage of so many bytes and `enough` stages; it looks up `constants`, which tell results apart."""
    lengths = _slab_lengths(spec, tile.block_n)
    in_place = in_place_load(spec, tile)
    widest = _slab_columns(lengths, in_place is not None and tile.group_m == FRAGMENT_ROWS)
    narrow = next((columns for columns in (48, 32) if columns < widest and columns in lengths), widest)
    lone = tile.group_m == FRAGMENT_ROWS and tile.block_n == widest  # the tile's only slab, which waits for no other
    slabs = ((widest, 1), (narrow, 1)) if lone else ((widest, 2), (narrow, 2), (widest, 1), (narrow, 1))
    wholes = (True, False) if _tile_loads(spec) else (True,)  # without operands to hold there is no difference

    def most_stages(slabs: Sequence[tuple[int, int]]) -> HopperFootprint:
        candidates = [
            _layout(spec, tile, shared_limit, stage, columns, buffers, whole, in_place)
            for whole in wholes
            for columns, buffers in dict.fromkeys(slabs)
        ]
        return max(candidates, key=lambda layout: min(layout.stages, enough))

    usual = most_stages(slabs)
    wanted = FEW_STAGES if len(spec.outs) > 1 else LEAST_STAGES
    return usual if usual.stages >= wanted else most_stages((*slabs, (UNIT_COLUMNS, 1)))


def _slab_lengths(spec: KernelSpec, block_n: int) -> list[int]:
    """Columns that slabs may have: they divide a tile in whole units, and the runs of outputs that TMA stores."""
    whole = math.gcd(_in_units(block_n), *(out.run for out in spec.outs if tma_stored(out)))
    most = calibration_of(ARCH).hopper_widest_slab
    return [columns for columns in range(UNIT_COLUMNS, most + 1, UNIT_COLUMNS) if whole % columns == 0]


def _in_units(columns: int) -> int:
    """A tile's columns and, of the kernel whose columns are rows of lhs, what its last unit has beside them."""
    return -(-columns // UNIT_COLUMNS) * UNIT_COLUMNS


def _slab_columns(lengths: list[int], swizzled: bool) -> int:
    """Columns of a slab: swizzled rows, or rows whose length spreads 8 of them over the banks with few conflicts.

    A slab that is read and written has twice as many conflicts: narrower rows without any are faster, but for groups of
    128 rows, whose threads would have registers of too many slabs.
    """
    for columns in (64, 32) if swizzled else (64,):
        if columns in lengths:
            return columns
    return max(columns for columns in lengths if columns in SWIZZLED_COLUMNS or _conflicts(columns) <= 2)


def _conflicts(columns: int) -> int:
    """How many of 8 consecutive rows of 16-bit elements begin in one bank."""
    banks = [row * columns // 2 % BANK_WORDS for row in range(8)]
    return max(map(banks.count, banks))


def _barriers(stages: int, slabs: int, splits: int) -> int:
    return 2 * (stages + VECTOR_BUFFERS) + (1 + 2 * slabs if slabs else 0) + (2 if splits > 1 else 0)


def _layout(
    spec: KernelSpec, tile: HopperTile, shared_limit: int, stage: int, columns: int, buffers: int, whole: bool,
    in_place: int | None,
) -> HopperFootprint:  # fmt: skip
    slabs = tile.group_m // FRAGMENT_ROWS * (_in_units(tile.block_n) // columns)
    served = is_served(spec, tile)
    load_buffers = (slabs if whole else min(slabs, 2)) if _tile_loads(spec) else min(slabs, SERVED_BUFFERS) * served
    buffers = load_buffers if served else buffers
    loads, outs, staging, vectors = [], [0] * len(spec.outs), 0, TILE_BYTES
    # Boxes first: they need the alignment of the swizzle.
    for index, out in sorted(enumerate(spec.outs), key=lambda entry: not tma_stored(entry[1])):
        outs[index] = staging
        staging += buffers * SLAB_ROWS * columns * 2 if tma_stored(out) else _staged_bytes(out, columns)
    for load in spec.loads:
        is_apart = load.kind == "tile" and in_place is None
        loads.append(staging if is_apart else 0 if load.kind == "tile" else vectors)
        staging += load_buffers * _staged_bytes(load, columns) if is_apart else 0
        vectors += _vector_bytes(load, tile)
    period = SLAB_ROWS * columns if columns in SWIZZLED_COLUMNS else BOX_ALIGNMENT  # 8 rows are a period of the swizzle
    staging = -(-staging // period) * period
    sums = tile.block_m * tile.block_n * spec.parts * FP32_BYTES // tile.splits * (tile.splits - 1)
    barriers = _barriers(0, tile.groups * load_buffers, tile.splits) * BARRIER_BYTES
    kept = tile.kept_k * spec.dtype.bytes * tile.block_n * spec.parts
    fixed = kept + sums + GROUP_WARPS * tile.groups * staging + VECTOR_BUFFERS * vectors + barriers
    fitting = (shared_limit - fixed) // (stage + 2 * BARRIER_BYTES)
    stages = tile.stages or min(max(fitting, 0), calibration_of(ARCH).hopper_most_stages)
    return HopperFootprint(
        stages, stage, kept, columns, staging, vectors, tuple(loads), tuple(outs), buffers, load_buffers, tile.groups,
        tile.splits, sums, served, in_place, 0 if in_place is None else slabs - load_buffers,
        columns not in SWIZZLED_COLUMNS,
    )  # fmt: skip


Rules = Iterator[tuple[object, str]]
"""What may be in a kernel's way: whether it is, and in words; one is asked only where none before it is."""


def why_not(spec: KernelSpec, tile: HopperTile, shared_limit: int) -> str | None:
    """Why the kernel cannot run a spec with a tile, or None if it can."""
    return (
        first(_of_operands(spec))
        or first(_of_rows(spec, tile))
        or first(_of_columns(spec, tile))
        or first(_of_clusters(spec, tile))
        or first(_of_kept(spec, tile))
        or first(_of_memory(spec, tile, shared_limit))
    )


def copied(spec: KernelSpec) -> tuple[str, ...]:
    """The factors that TMA reaches where they were copied alone; none where that does not help."""
    in_one_level = {
        "lhs": spec.lhs_order == "mk" and not (spec.lhs_run or spec.lhs_batch_runs),
        "rhs": not spec.rhs_batch_runs,
    }
    widths = zip(FACTORS, (spec.lhs_width, spec.rhs_width), strict=True)
    narrow = tuple(name for name, width in widths if width * spec.dtype.bytes < TMA_BYTES)
    return narrow if spec.quantization is None and all(in_one_level[name] for name in narrow) else ()


def first(rules: Rules) -> str | None:
    """The reason that holds, if any."""
    return next((reason for holds, reason in rules if holds), None)


def _of_operands(spec: KernelSpec) -> Rules:
    """What no tile changes."""
    transposed = spec.rhs_order == "kn" or spec.lhs_order == "km"
    narrow = min(factor.width for factor in spec.factors) * spec.dtype.bytes < TMA_BYTES
    walked = [load for load in spec.loads if load.kind != "tile" and {*load.two_levels} - {"batch"}]
    yield spec.quantization is not None, QUANTIZED
    yield spec.math not in WGMMA_STEPS, f"wgmma does not multiply {spec.math}"
    yield spec.math == "tf32" and transposed, "wgmma reads 32-bit elements with k contiguous only"
    yield narrow, "TMA needs rows of lhs and rhs on 16-byte boundaries"
    step = block_k(spec)
    yield spec.lhs_run % step, f"a run of {spec.lhs_run} columns of lhs is no multiple of {step}"
    yield spec.lhs_batch_runs and spec.lhs_run, "of lhs either batches lie in runs or k does"
    yield walked, "one stride walks each loop of a row or column"


def _of_rows(spec: KernelSpec, tile: HopperTile) -> Rules:
    known = tile.groups in MAX_ACCUMULATORS and tile.groups % (2 if tile.pingpong else 1) == 0
    yield not known, "two groups or four, or three that share each tile"
    yield tile.groups == 4 and _tile_loads(spec), "four groups leave no warps that bring tile operands"
    whole = tile.group_m % FRAGMENT_ROWS == 0 and tile.block_m <= MAX_BOX
    yield not whole, f"a consumer group owns multiples of {FRAGMENT_ROWS} rows"
    transposed = spec.lhs_order == "km"
    loaded = tile.block_m // tile.cluster_n
    yield transposed and loaded % ATOM, f"of lhs with m contiguous a block loads multiples of {ATOM} rows"
    if tile.lhs_rows:
        alone = not (transposed or _shares(tile))
        yield not alone, "lhs comes in boxes of a few rows where k is contiguous and blocks share no loads"
        part = tile.block_m % tile.lhs_rows == 0 and tile.lhs_rows % SWIZZLE_ROWS == 0
        yield not part, f"a box of lhs is a part of the tile's rows, and a multiple of {SWIZZLE_ROWS}"


def _of_columns(spec: KernelSpec, tile: HopperTile) -> Rules:
    width = spec.parts * tile.block_n
    whole = tile.block_n % UNIT_COLUMNS == 0 and width <= MAX_WIDTH
    yield not whole, f"parts have multiples of {UNIT_COLUMNS} columns, {MAX_WIDTH} in all at most"
    in_place = in_place_load(spec, tile) is not None
    accumulators, most = tile.group_m * width // 128, max_accumulators(spec, tile.groups)
    yield accumulators > most, f"{accumulators} accumulators in a thread, of {most} at most"
    yield (
        tile.operands_ahead and _tile_loads(spec) and not in_place,
        "no registers are left to read tile operands ahead",
    )
    maps = 1 + spec.parts * len(rhs_pieces(spec, tile)) + len(spec.outs) + in_place
    yield maps > MAX_MAPS, f"a launch has {MAX_MAPS} tensor maps at most"


def _of_clusters(spec: KernelSpec, tile: HopperTile) -> Rules:
    in_runs = spec.lhs_batch_runs or spec.rhs_batch_runs
    yield in_runs and _shares(tile), "blocks share no operand whose batches lie in runs"
    yield tile.cluster_m * tile.cluster_n > 2, "clusters that share loads have two blocks at most"
    yield tile.splits not in SPLITS, "k is split by 2 or 4"
    other = tile.pingpong or tile.groups > 3 or _shares(tile)
    yield tile.splits > 1 and other, "k is split among blocks with cooperative tiles that share no loads"


def _of_kept(spec: KernelSpec, tile: HopperTile) -> Rules:
    yield tile.kept_k % block_k(spec), f"a stage has {block_k(spec)} of k"
    yield tile.kept_k and tile.cluster > 1, "a block that keeps rhs loads it alone"
    yield tile.kept_k and tile.group_rows > 1, "tiles are dealt along the columns where rhs is kept"


def _of_memory(spec: KernelSpec, tile: HopperTile, shared_limit: int) -> Rules:
    layout = footprint(spec, replace(tile, stages=0), shared_limit)
    yield layout.stages < (tile.stages or LEAST_STAGES), f"{layout.stages} stages fit into shared memory"


def _shares(tile: HopperTile) -> bool:
    """Whether blocks of a cluster share loads."""
    return tile.cluster_m * tile.cluster_n > 1


def _tile_loads(spec: KernelSpec) -> int:
    return sum(load.kind == "tile" for load in spec.loads)


def max_accumulators(spec: KernelSpec, groups: int) -> int:
    """How many of a thread's registers can hold sums: addresses and pairs of tile operands need some more."""
    copied = sum(not tma_stored(out) for out in spec.outs)
    return MAX_ACCUMULATORS[groups] - TILE_LOAD_REGISTERS * _tile_loads(spec) - COPIED_OUT_REGISTERS * copied


def _staged_bytes(access: Access, columns: int) -> int:
    if access.transposed:
        return columns * (SLAB_ROWS * access.dtype.bytes + LDS_BYTES)
    return SLAB_ROWS * staged_pitch(access, columns) * access.dtype.bytes


def _vector_bytes(load: Access, tile: HopperTile) -> int:
    lengths = {"scalar": 4, "row": tile.block_n, "column": tile.block_m, "tile": 0}
    return lengths[load.kind] * FP32_BYTES
