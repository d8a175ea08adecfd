"""The tiles that a plan considers, with how fast each multiplies, and which of them a kernel can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from onnxfuse.device import DeviceSpec
from onnxfuse.hopper_tile import FRAGMENT_ROWS, HopperTile, rhs_pieces
from onnxfuse.hopper_tile import why_not as hopper_why_not
from onnxfuse.kernel_spec import KernelSpec, Tile
from onnxfuse.tile_footprint import why_not

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
# The sm_90a kernel. Few rows come in a box that is little taller than they are many.
_HOPPER = (
    Candidate(HopperTile(128, 192, pingpong=True), 1.75),
    Candidate(HopperTile(128, 160, pingpong=True), 1.9),
    Candidate(HopperTile(128, 160, pingpong=False), 1.75),
    Candidate(HopperTile(128, 128, pingpong=True, groups=4), 1.88),
    Candidate(HopperTile(128, 128, pingpong=True), 1.8),
    Candidate(HopperTile(128, 128, pingpong=False), 1.6),
    Candidate(HopperTile(128, 224, pingpong=False), 1.6),
    Candidate(HopperTile(128, 256, pingpong=False), 1.5),
    Candidate(HopperTile(128, 96, pingpong=False), 1.4),
    Candidate(HopperTile(128, 80, pingpong=False), 1.2),
    Candidate(HopperTile(128, 64, pingpong=True), 1.2),
    Candidate(HopperTile(128, 64, pingpong=False), 1.25),
    *(
        Candidate(HopperTile(64, width, pingpong=True, lhs_rows=lhs_rows), pace)
        for lhs_rows in (0, 32, 16)
        for width, pace in ((160, 1.23), (128, 1.36), (96, 1.25), (80, 1.13), (64, 0.95), (32, 0.49))
    ),
    *(
        Candidate(HopperTile(128, width, pingpong=False, splits=splits, lhs_rows=lhs_rows), pace)
        for lhs_rows in (0, 64, 32)
        for splits in (2, 4)
        for width, pace in ((160, 1.75), (128, 1.6), (80, 1.2), (64, 1.25))
        if not lhs_rows or width <= 80
    ),
)
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
NARROWEST_BOX = 16  # columns of rhs[k, n]
AHEAD_DEPTH = 1024  # up to this depth of all parts together, fetching operands a tile ahead pays
# The chip deals blocks to eight or so groups of multiprocessors in turn, each with a path to L2 of its own. Where four
# rows of tiles run together, those of one wave have most of their operands in common with others of their group; in
# products of many waves, eight rows are as good.
ONE_WAVE_GROUP_ROWS = 4


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
    group_rows = tile.group_rows if tile.pingpong and tile.block_m == 128 else ONE_WAVE_GROUP_ROWS
    columns = max(tile.block_n // spec.parts // 16, 1) * 16
    pace = entry.pace * columns * spec.parts / tile.block_n
    return Candidate(replace(tile, block_n=columns, operands_ahead=ahead, group_rows=group_rows), pace)


def obstacle(base: KernelSpec, tile: Tile | HopperTile, device: DeviceSpec) -> str | None:
    """Why a kernel cannot run with a tile, or would be slow with it for certain; None if it can."""
    if isinstance(tile, HopperTile):
        pieces = rhs_pieces(base, tile)
        few = len(pieces) > 1 and pieces[-1].columns == NARROWEST_BOX and tile.block_m > FRAGMENT_ROWS
        if pieces[-1].atom == NARROWEST_BOX and not few:
            return "rhs with n contiguous would be read in the narrowest boxes, which is slow"
        return hopper_why_not(base, tile, device.shared_bytes)
    return why_not(replace(base, tile=tile), device.shared_bytes)
