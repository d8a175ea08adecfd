"""Problem -> candidates -> cost -> best: which kernel, tile and access widths compute a fusion on one architecture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from onnxfuse import small_m_tile
from onnxfuse.access_path import CP_ASYNC_BYTES
from onnxfuse.axes import Axes, AxisMapping, flatten, levels
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import F32, DType
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Pointwise, Tensor
from onnxfuse.hopper_tile import FP32_BYTES, HopperTile, block_k
from onnxfuse.hopper_tile import footprint as hopper_footprint
from onnxfuse.hopper_tile import why_not as hopper_why_not
from onnxfuse.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.tile_footprint import shared_bytes, why_not
from onnxfuse.vector_width import Width, Widths, is_turned, lhs_order, rhs_order


@dataclass(frozen=True)
class Variant:
    """A kernel and the rows that it is for, `min_m <= m <= max_m`.

    Attributes:
        hopper: the tile of the sm_90a kernel; None for the portable kernel, whose tile is the spec's own.
    """

    spec: KernelSpec
    min_m: int
    max_m: int
    hopper: HopperTile | None = None

    @property
    def tile(self) -> Tile | HopperTile:
        """The tile that the kernel computes with."""
        return self.hopper or self.spec.tile


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not taken, and why."""

    tile: Tile | HopperTile
    reason: str


@dataclass(frozen=True)
class Ranked:
    """Every legal tile at one number of rows, and n columns, with its estimated microseconds, the fastest first.

    Attributes:
        copying: of the fastest tile's microseconds, those for copies through registers.
        risk: microseconds to expect beside them, where only the run knows whether wider copies are legal.
    """

    m: int
    n: int
    tiles: tuple[tuple[float, Tile | HopperTile], ...]
    copying: float = 0.0
    risk: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The kernels of one fusion on one architecture, in the order in which a launch tries them.

    The first variants use the widest accesses; the last looks at every tensor by itself and fits any pointer.
    """

    device: DeviceSpec
    variants: tuple[Variant, ...]
    rejected: tuple[Rejected, ...]
    ranked: tuple[Ranked, ...]

    def __str__(self) -> str:
        rows = [
            f"{self.device.arch:<7} m {variant.min_m}..{variant.max_m if variant.max_m < MAX_M else ''}  "
            f"{tile_text(variant.tile)}  lhs x{variant.spec.lhs_width} rhs x{variant.spec.rhs_width}"
            f"{', where a tensor lies so' if variant.spec.checked else ''}"
            for variant in self.variants
        ]
        rows += [f"{'':<7} not {tile_text(entry.tile)}: {entry.reason}" for entry in self.rejected]
        return "\n".join(rows)


MAX_M = 2**31 - 1
SAMPLED_M = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # where a dynamic m is planned for
FALLBACK_M = (64, 16384)  # the same for what takes over where wide accesses are not legal: every tile is compiled
UNKNOWN = 1024  # an n or k that only the run knows: a sequence like m, but not a short one


AnyTile = TypeVar("AnyTile", bound=Tile | HopperTile, covariant=True)


@dataclass(frozen=True)
class Candidate(Generic[AnyTile]):
    """A tile that a plan may take.

    Attributes:
        tile: its block_n is the width of all parts together.
        pace: products that a multiprocessor makes in a unit of time with it, relative to the portable kernel's fastest
            tile; measured on an H200.
    """

    tile: AnyTile
    pace: float


# Larger tiles load less for each product; smaller ones fill the chip when m or n is small.
_SIXTEEN_BIT = (
    Candidate(Tile(128, 256, 64, 2, 4, 3), 1.0),
    Candidate(Tile(128, 128, 64, 2, 2, 3), 0.95),
    Candidate(Tile(64, 128, 64, 2, 2, 4), 0.85),
    Candidate(Tile(32, 128, 64, 1, 4, 4), 0.6),
)
# The same bytes a stage as above.
_THIRTY_TWO_BIT = (
    Candidate(Tile(128, 128, 32, 2, 2, 3), 0.95),
    Candidate(Tile(64, 128, 32, 2, 2, 3), 0.85),
    Candidate(Tile(32, 128, 32, 1, 4, 3), 0.6),
)
# Exact fp32 sums in two levels, so a thread holds half as many outputs.
_SPLIT = (
    Candidate(Tile(128, 128, 32, 2, 4, 3), 1.0),
    Candidate(Tile(128, 64, 32, 4, 2, 3), 0.85),
    Candidate(Tile(64, 64, 32, 2, 2, 3), 0.92),
    Candidate(Tile(32, 64, 32, 2, 2, 3), 0.8),
)
_SCALAR = (
    Candidate(Tile(128, 64, 32, 4, 2, 3), 1.0),
    Candidate(Tile(64, 64, 32, 2, 2, 3), 0.9),
    Candidate(Tile(32, 64, 32, 1, 4, 3), 0.7),
)
# The sm_90a kernel.
_HOPPER = (
    Candidate(HopperTile(128, 192, pingpong=True), 1.75),
    Candidate(HopperTile(128, 160, pingpong=True), 1.9),
    Candidate(HopperTile(128, 160, pingpong=False), 1.75),
    Candidate(HopperTile(128, 128, pingpong=True, groups=4), 1.88),
    Candidate(HopperTile(128, 128, pingpong=True), 1.8),
    Candidate(HopperTile(128, 128, pingpong=False), 1.6),
    Candidate(HopperTile(128, 224, pingpong=False), 1.6),
    Candidate(HopperTile(128, 256, pingpong=False), 1.5),
    Candidate(HopperTile(128, 80, pingpong=False), 1.4),
    Candidate(HopperTile(64, 160, pingpong=True), 1.4),
    Candidate(HopperTile(64, 128, pingpong=True), 1.35),
    Candidate(HopperTile(64, 80, pingpong=True), 0.9),
    Candidate(HopperTile(128, 64, pingpong=True), 1.2),
    Candidate(HopperTile(128, 64, pingpong=False), 1.2),
    *(
        Candidate(HopperTile(64, width, pingpong=True, lhs_rows=16), pace)
        for width, pace in ((160, 1.4), (128, 1.35), (96, 0.9), (64, 0.7), (32, 0.38))
    ),
    *(
        Candidate(HopperTile(128, width, pingpong=False, splits=splits), pace)
        for splits in (2, 4)
        for width, pace in ((160, 1.75), (128, 1.6), (64, 1.2), (80, 1.4))
    ),
)
# Columns of a part of rhs[k, n] are read in swizzles of 64, 32 or 16: the narrower, the more bank conflicts.
WIDEST_SWIZZLE = 64
WIDE_SWIZZLE = 32
NARROW_SWIZZLE = 0.83  # of the pace with 32 columns; with 16, it is 0.4 to 0.8
LONE_GROUP = 0.85  # of a ping-pong tile's pace where a multiprocessor computes only one of them
# Blocks that split k exchange their sums: microseconds, and bytes of the whole chip in one; measured on an H200
# (results/h200-splits.json). A cluster lies within one of the chip's groups of multiprocessors, and a group may have
# two more than its clusters fill.
MEETING = 1.0
EXCHANGED = 0.42e6
MULTIPROCESSOR_GROUP = 16
AHEAD_DEPTH = 1024  # up to this depth of all parts together, fetching operands a tile ahead pays
# The kernel for few rows. Wide tiles read long pieces of rhs; narrow ones fill the chip when n is small, and the more
# of k a block has on its way, the fewer times it waits.
_SMALL_M = (
    Candidate(Tile(16, 64, 32, 1, 1, 1, 4, "small_m"), 0.5),
    Candidate(Tile(16, 32, 32, 1, 1, 1, 8, "small_m"), 0.4),
    Candidate(Tile(16, 32, 32, 1, 1, 1, 16, "small_m"), 0.4),
    Candidate(Tile(16, 32, 64, 1, 1, 1, 8, "small_m"), 0.4),
)
# The same bytes a stage as above.
_SMALL_M_FP32 = tuple(replace(each, tile=replace(each.tile, block_k=each.tile.block_k // 2)) for each in _SMALL_M)
FEW_ROWS = {"f16": _SMALL_M, "bf16": _SMALL_M, "tf32": _SMALL_M_FP32, "3xtf32": _SMALL_M_FP32, "fp32": ()}
CANDIDATES = {"f16": _SIXTEEN_BIT, "bf16": _SIXTEEN_BIT, "tf32": _THIRTY_TWO_BIT, "3xtf32": _SPLIT, "fp32": _SCALAR}
# Exact fp32 where the tensor cores multiply TF32 more than three times as fast as the fp32 units multiply: by the
# vendor's peaks 8 times on sm_80, 7.4 on sm_90a. On sm_86, sm_89 and sm_120 it is 1 to 2 times; sm_100 is not known.
EXACT_ON = {"sm_80": "3xtf32", "sm_90a": "3xtf32"}
SHALLOW = 8  # a product of a smaller depth fills no step of the tensor cores
PIPELINE_FILL = 64  # a tile's prologue and epilogue take about as long as products of this depth
EXPOSED_EPILOGUE = 128  # and that much longer where no main loop of the sm_90a kernel runs beside it

# One multiprocessor of an H200 in a microsecond: products at a pace of 1, its share of what memory delivers; and how
# long a block waits, in microseconds, for the loads that it has on their way. Other chips have other units, but similar
# relations between them. Of 3xtf32 the tensor cores' three products allow 0.37e6, and issuing the 245 instructions of a
# warp's step, 48 of them on the tensor cores, 0.47e6; neither hides all of the other.
PRODUCTS = {"f16": 2.3e6, "bf16": 2.3e6, "tf32": 1.1e6, "3xtf32": 0.21e6, "fp32": 0.15e6}
BYTES = 32.6e3
ROUND_TRIP = 1.0
# TMA loads a row of 128 bytes in 1.2 ns, as fast as L2 delivers it, and writes one of zeros, behind the end of lhs, in
# 5. That hides behind 72 % of what else a kernel waits for. Measured with 17 to 128 rows of two products on an H200.
LOADED_ROW = 0.0012
ZERO_ROW = 0.005
HIDDEN = 0.72
COPIED = 30.0  # elements that a thread copies through registers, as 8192 x 1280 x 1281 with weights [k, n] needs
# Of a length that only the run knows being one that wide copies do not fit: texts have any, images even ones.
ODDS = 0.5
OVERLAP = 16  # of computing and reading the shorter hides behind the longer, but for one part in 16


def tile_text(tile: Tile | HopperTile) -> str:
    """`128x64x32 warps 2x4 stages 4`, `16x32x32 few rows, k shared by 4 warps`, or `128x96 ping-pong`."""
    if isinstance(tile, HopperTile):
        return str(tile)
    shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    if tile.kernel == "small_m":
        return f"{shape} few rows, k shared by {tile.warps_k} warps"
    return f"{shape} warps {tile.warps_m}x{tile.warps_n} stages {tile.stages}"


def tiles_for(math: str, parts: int) -> tuple[Tile, ...]:
    """The portable kernel's candidate tiles, with block_n the columns of one part."""
    return tuple(replace(entry.tile, block_n=_columns(entry.tile, parts)) for entry in CANDIDATES[math])


def small_m_tiles(math: str, parts: int) -> tuple[Tile, ...]:
    """The candidate tiles of the kernel for few rows, with block_n the columns of one part."""
    tiles = (entry.tile for entry in FEW_ROWS[math])
    return tuple(replace(tile, block_n=max(tile.block_n // parts // 8, 1) * 8) for tile in tiles)


def _columns(tile: Tile, parts: int) -> int:
    """Columns of one part: the tile's width shared among the parts, in whole fragments of every warp."""
    step = 16 * tile.warps_n
    return max(tile.block_n // parts // step, 1) * step


def candidates_for(spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate[Tile | HopperTile], ...]:
    """Every tile that a plan considers, with block_n the columns of one part; those of the faster kernel first."""
    portable = zip(CANDIDATES[spec.math], tiles_for(spec.math, spec.parts), strict=True)
    few_rows = zip(FEW_ROWS[spec.math], small_m_tiles(spec.math, spec.parts), strict=True)
    hopper = [_hopper_candidate(entry, spec, k) for entry in (_HOPPER if device.arch == "sm_90a" else ())]
    distinct = {entry.tile: entry for entry in reversed(hopper)}  # of widths that parts round to the same, the first
    return (
        *(replace(entry, tile=tile) for entry, tile in few_rows),
        *reversed(distinct.values()),
        *(replace(entry, tile=tile) for entry, tile in portable),
    )


def _hopper_candidate(entry: Candidate[HopperTile], spec: KernelSpec, k: int) -> Candidate[HopperTile]:
    """The tile's width shared among the parts, in whole steps of wgmma's transposed operand; narrower is slower."""
    tile = entry.tile
    ahead = tile.groups == 2 and spec.parts * k <= AHEAD_DEPTH and all(load.kind != "tile" for load in spec.loads)
    columns = max(tile.block_n // spec.parts // 16, 1) * 16
    pace = entry.pace * columns * spec.parts / tile.block_n
    if spec.rhs_order == "kn" and columns % WIDEST_SWIZZLE:
        pace *= NARROW_SWIZZLE
    return Candidate(replace(tile, block_n=columns, operands_ahead=ahead), pace)


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
    tile, n = candidate.tile, problem.n
    splits = tile.splits if isinstance(tile, HopperTile) else 1
    k = math.ceil(problem.k / splits)
    rows = math.ceil(problem.m / tile.block_m)
    blocks = _tiles(problem, tile) * splits
    most = device.multiprocessors // MULTIPROCESSOR_GROUP * MULTIPROCESSOR_GROUP
    if splits > 1 and (blocks > most or problem.guessed):
        return math.inf  # a tile for every multiprocessor is faster than a share of one
    waves = math.ceil(blocks / device.multiprocessors)
    depth, pace = k + PIPELINE_FILL, candidate.pace
    fetched = float(problem.batch * rows * n * spec.parts)  # columns of rhs
    if reads.shared:  # blocks that have no tile in the last wave do not read either
        fetched = math.ceil(blocks / reads.blocks) * reads.blocks * tile.block_n * spec.parts / rows
    if isinstance(tile, HopperTile):
        depth += EXPOSED_EPILOGUE if not tile.pingpong or waves == 1 else 0
        pace *= LONE_GROUP if tile.pingpong and waves == 1 else 1.0
    computing = waves * tile.block_m * tile.block_n * spec.parts * depth / pace / PRODUCTS[spec.math]
    memory = fetched * k * spec.dtype.bytes / device.multiprocessors / BYTES
    waiting = math.ceil(blocks / reads.blocks) * math.ceil(k / reads.depth) * ROUND_TRIP
    reading = max(memory, waiting)
    sums = blocks * tile.block_m * tile.block_n * spec.parts * FP32_BYTES * (splits - 1) / splits
    meeting = MEETING + sums / EXCHANGED if splits > 1 else 0.0
    longer = max(computing, reading)
    added = meeting + _filling(tile, spec, problem, device, longer) + copying(tile, spec, problem, device)
    return longer + min(computing, reading) / OVERLAP + added


def _tiles(problem: Problem, tile: Tile | HopperTile) -> int:
    """Tiles of the whole output."""
    return problem.batch * math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)


def _filling(tile: Tile | HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec, longer: float) -> float:
    """Microseconds more that TMA takes for rows of zeros, of which most hide behind the longer of the other two."""
    if not isinstance(tile, HopperTile):
        return 0.0
    waves = math.ceil(_tiles(problem, tile) * tile.splits / device.multiprocessors)
    steps = waves * math.ceil(problem.k / tile.splits / block_k(spec))
    rows = min(problem.m, tile.block_m) + tile.block_n * spec.parts
    zeros = ZERO_ROW * steps * (-problem.m % (tile.lhs_rows or tile.block_m))
    uncovered = LOADED_ROW * steps * rows - HIDDEN * longer
    return max(uncovered + zeros, 0.0) - max(uncovered, 0.0)


def copying(tile: Tile | HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which the portable kernel copies operands through registers, where cp.async cannot."""
    if isinstance(tile, HopperTile) or tile.kernel == "small_m":
        return 0.0
    operands = ((spec.lhs_width, tile.block_m), (spec.rhs_width, tile.block_n * spec.parts))
    rows = sum(rows for width, rows in operands if width * spec.dtype.bytes < CP_ASYNC_BYTES)
    waves = math.ceil(_tiles(problem, tile) / device.multiprocessors)
    depth = math.ceil(problem.k / tile.block_k) * tile.block_k
    return waves * rows * depth / tile.threads / COPIED


def make_plan(fusion: Fusion, mapping: AxisMapping, widths: Widths, device: DeviceSpec, exact_fp32: bool) -> Plan:
    """Choose the kernels of a fusion for one architecture.

    Raises:
        NotFusable: no tile fits the architecture's shared memory.
    """
    columns, depth = _static_product(fusion, mapping.n), _static_product(fusion, mapping.k)
    base = _spec(fusion, mapping, widths, arithmetic(fusion.lhs.dtype, device, depth, exact_fp32))
    # Batches that share rhs count as rows: the launch rule adds them up as well.
    shared = not any(axis in fusion.rhs[0].axes for axis in mapping.batch)
    m = _static_product(fusion, (*mapping.batch, *mapping.m) if shared else mapping.m)
    batch = 1 if shared else math.prod(fusion.size(axis) or 1 for axis in mapping.batch)
    guessed = columns is None or (not shared and _static_product(fusion, mapping.batch) is None)
    problems = [
        Problem(size, columns or max(size, UNKNOWN), depth or max(size, UNKNOWN), batch, guessed)
        for size in ([m] if m else SAMPLED_M)
    ]
    deepest = problems[-1].k
    fitting, rejected = _fitting(base, device, deepest)
    if not fitting:
        raise NotFusable("no_tile_fits", fusion.anchor, f"every tile needs more shared memory than {device.arch} has")
    ranked = _rank(base, fitting, problems, device)
    if widths.lhs.guarded:
        slowest, exposed = fitting[-1].tile, replace(base, lhs_width=1)
        risks = [ODDS * copying(slowest, exposed, problem, device) for problem in problems]
        ranked = tuple(replace(entry, risk=risk) for entry, risk in zip(ranked, risks, strict=True))
    variants = _fastest(base, ranked)
    taken = {variant.tile for variant in variants}
    rejected += [Rejected(entry.tile, "slower by the cost model") for entry in fitting if entry.tile not in taken]
    unguarded = _unguarded(base, widths, fusion)
    if unguarded != base:
        few = [problem for problem in problems if problem.m in FALLBACK_M] or problems
        variants += _fastest(unguarded, _rank(unguarded, _fitting(unguarded, device, deepest)[0], few, device))
    last = _variant(_checked(base), fitting[-1].tile, 0, MAX_M)
    if all(variant.spec != last.spec for variant in variants):
        variants.append(last)
    return Plan(device, tuple(variants), tuple(rejected), ranked)


def replan(plan: Plan, best: Sequence[tuple[int, Tile | HopperTile]]) -> Plan:
    """The plan with other tiles, at some numbers of rows in ascending order; what takes over from them stays."""
    base = plan.variants[0].spec
    rest = [variant for variant in plan.variants if replace(variant.spec, tile=base.tile) != base]
    return replace(plan, variants=(*_variants(base, best), *rest))


def _rank(
    base: KernelSpec,
    fitting: list[Candidate[Tile | HopperTile]],
    problems: Sequence[Problem],
    device: DeviceSpec,
) -> tuple[Ranked, ...]:
    """The tiles by their estimated time, at each of some sizes."""
    priced = [(entry, flow(base, entry.tile, device)) for entry in fitting]

    def rank(problem: Problem) -> Ranked:
        costs = [(cost(entry, reads, base, problem, device), entry.tile) for entry, reads in priced]
        costs.sort(key=lambda pair: pair[0])
        return Ranked(problem.m, problem.n, tuple(costs), copying(costs[0][1], base, problem, device))

    return tuple(map(rank, problems))


def _fastest(base: KernelSpec, ranked: Sequence[Ranked]) -> list[Variant]:
    """The fastest tile for each range of m."""
    return _variants(base, [(entry.m, entry.tiles[0][1]) for entry in ranked])


def _variants(base: KernelSpec, best: Sequence[tuple[int, Tile | HopperTile]]) -> list[Variant]:
    return [_variant(base, tile, low, high) for tile, low, high in _ranges(best)]


def _variant(base: KernelSpec, tile: Tile | HopperTile, min_m: int, max_m: int) -> Variant:
    if isinstance(tile, HopperTile):
        return Variant(base, min_m, max_m, tile)
    return Variant(replace(base, tile=tile), min_m, max_m)


def arithmetic(dtype: DType, device: DeviceSpec, depth: int | None, exact_fp32: bool) -> str:
    """How products are computed, as `KernelSpec.math` names it.

    Args:
        dtype: of the factors.
        device: to compute on.
        depth: of the product; None where only the run knows.
        exact_fp32: whether fp32 products are computed in full precision.
    """
    if dtype != F32:
        return dtype.name
    if not exact_fp32:
        return "tf32"
    return "fp32" if depth is not None and depth < SHALLOW else EXACT_ON.get(device.arch, "fp32")


def _spec(fusion: Fusion, mapping: AxisMapping, widths: Widths, math_mode: str) -> KernelSpec:
    """The kernel of a fusion but for its tile."""
    operands = [
        access(fusion, operand, mapping, width) for operand, width in zip(fusion.operands, widths.operands, strict=True)
    ]
    outs = [access(fusion, out.tensor, mapping, width) for out, width in zip(fusion.outs, widths.outs, strict=True)]
    return KernelSpec(
        dtype=fusion.lhs.dtype,
        math=math_mode,
        parts=len(fusion.parts),
        rhs_order=rhs_order(fusion, mapping),
        lhs_width=widths.lhs.elements,
        rhs_width=widths.rhs.elements,
        loads=tuple(operands[load.operand] for load in fusion.loads),
        outs=tuple(replace(out, kind="tile") for out in outs),
        steps=fusion.steps,
        out_values=tuple(out.value for out in fusion.outs),
        tile=_SIXTEEN_BIT[0].tile,  # stands in until a candidate is chosen
        lhs_run=_run(fusion, fusion.lhs, mapping.k) or 0,
        lhs_order=lhs_order(fusion, mapping),
    )


def access(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping, width: Width) -> Access:
    """How a kernel reaches a tensor of the epilogue."""
    kind = mapping.kind(tensor)
    loops = (("m", mapping.m), ("n", mapping.n), ("batch", mapping.batch))
    two_levels = tuple(name for name, loop in loops if levels(fusion, tensor, loop) > 1)
    elements = width.elements if kind in ("row", "tile") else 1
    turned = kind == "tile" and is_turned(fusion, tensor, mapping)
    run = _run(fusion, tensor, mapping.n) if "n" in two_levels else None
    return Access(kind, tensor.dtype, elements, turned, two_levels, run or 0)


def _run(fusion: Pointwise, tensor: Tensor, loop: Axes) -> int | None:
    """Steps of one run of a loop that two strides walk; None where one does, or only the run knows."""
    groups = flatten(fusion, (tensor,), loop)
    return _static_product(fusion, groups[-1]) if len(groups) > 1 else None


def _unguarded(spec: KernelSpec, widths: Widths, fusion: Fusion) -> KernelSpec:
    """The same kernel with single elements where only the run knows whether a wider access is legal."""
    loads = (
        replace(load, width=1) if widths.operands[index.operand].guarded else load
        for load, index in zip(spec.loads, fusion.loads, strict=True)
    )
    outs = (replace(out, width=1) if width.guarded else out for out, width in zip(spec.outs, widths.outs, strict=True))
    return replace(
        spec,
        lhs_width=1 if widths.lhs.guarded else spec.lhs_width,
        rhs_width=1 if widths.rhs.guarded else spec.rhs_width,
        loads=tuple(loads),
        outs=tuple(outs),
    )


def _checked(spec: KernelSpec) -> KernelSpec:
    """The same kernel, legal for every pointer, pitch and size: it takes single elements of what they do not fit."""
    widths = (spec.lhs_width, spec.rhs_width, *(each.width for each in (*spec.loads, *spec.outs)))
    return replace(spec, checked=max(widths) > 1)


def _fitting(base: KernelSpec, device: DeviceSpec, k: int) -> tuple[list[Candidate[Tile | HopperTile]], list[Rejected]]:
    fitting: list[Candidate[Tile | HopperTile]] = []
    rejected: list[Rejected] = []
    for candidate in candidates_for(base, device, k):
        obstacle = _obstacle(base, candidate.tile, device)
        if obstacle is None:
            fitting.append(candidate)
        else:
            rejected.append(Rejected(candidate.tile, obstacle))
    return fitting, rejected


def _obstacle(base: KernelSpec, tile: Tile | HopperTile, device: DeviceSpec) -> str | None:
    if isinstance(tile, HopperTile):
        if base.rhs_order == "kn" and tile.block_n % WIDE_SWIZZLE:
            return "rhs with n contiguous would be read in the narrowest swizzle, which is slow"
        return hopper_why_not(base, tile, device.shared_bytes)
    return why_not(replace(base, tile=tile), device.shared_bytes)


def _static_product(fusion: Pointwise, axes: Iterable[str]) -> int | None:
    sizes = [fusion.size(axis) for axis in axes]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _ranges(best: Sequence[tuple[int, Tile | HopperTile]]) -> list[tuple[Tile | HopperTile, int, int]]:
    """Neighbouring sizes with the same choice become one range; the last one has no end."""
    ranges: list[tuple[Tile | HopperTile, int, int]] = []
    for index, (size, tile) in enumerate(best):
        low = 0 if index == 0 else best[index - 1][0] + 1
        high = MAX_M if index == len(best) - 1 else size
        if ranges and ranges[-1][0] == tile:
            ranges[-1] = (tile, ranges[-1][1], high)
        else:
            ranges.append((tile, low, high))
    return ranges
