"""The kernel for small M among the families: its tiles, what they cost, and its way to each tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxfuse.device import CACHE_LINE, SECTOR, DeviceSpec
from onnxfuse.dtypes import F32
from onnxfuse.schedule import cost_model, small_m_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, Candidate, Flow, Launch, Problem, ProductFamily, any_depth, of_each
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.small_m_tile import FRAGMENT_COLUMNS, SmallMTile, chunk, lhs_copy

# Wide tiles read long pieces of rhs; narrow ones fill the chip when n is small, and the more of k a block has on its
# way, the fewer times it waits. A tile's block_n is the width of all parts together.
_SIXTEEN_BIT = (SmallMTile(64, 32, 1, 4), SmallMTile(32, 32, 1, 8), SmallMTile(32, 32, 2, 16), SmallMTile(32, 64, 1, 8))
# The same bytes a stage as above; two were not measured.
_THIRTY_TWO_BIT = tuple(replace(tile, block_k=tile.block_k // 2, stages=1) for tile in _SIXTEEN_BIT)
TILES: dict[str, tuple[SmallMTile, ...]] = {
    "f16": _SIXTEEN_BIT, "bf16": _SIXTEEN_BIT, "tf32": _THIRTY_TWO_BIT, "3xtf32": _THIRTY_TWO_BIT, "fp32": (),
}  # fmt: skip
# Where n is small: narrower ones, and clusters that share k. The narrowest read too few bytes of a row of rhs[k, n].
_NARROW = (
    SmallMTile(16, 64, 1, 8), SmallMTile(16, 128, 1, 8), SmallMTile(16, 64, 1, 16, 2), SmallMTile(16, 64, 1, 8, 8),
)  # fmt: skip
_WIDE = (SmallMTile(32, 32, 1, 8, 8), SmallMTile(64, 32, 1, 8, 4), SmallMTile(64, 32, 1, 8, 8))
_DEEP = (SmallMTile(32, 32, 1, 16, 2), SmallMTile(32, 32, 1, 16, 4))
_SPLIT_TF32 = (
    SmallMTile(16, 32, 1, 16), SmallMTile(16, 32, 1, 8, 2), SmallMTile(16, 32, 1, 8, 8), SmallMTile(32, 16, 1, 16, 2),
    SmallMTile(32, 16, 1, 16, 4), SmallMTile(32, 16, 1, 16, 8), SmallMTile(64, 16, 1, 8, 8),
)  # fmt: skip
FEW_COLUMNS: dict[tuple[str, str], tuple[SmallMTile, ...]] = {
    ("f16", "nk"): (*_NARROW, *_DEEP), ("f16", "kn"): (*_WIDE, *_DEEP),
    ("bf16", "nk"): (*_NARROW, *_DEEP), ("bf16", "kn"): (*_WIDE, *_DEEP),
    ("tf32", "nk"): _SPLIT_TF32, ("tf32", "kn"): _SPLIT_TF32,
}  # fmt: skip
# Where n is large, and so many blocks of few warps with two steps each have more on their way than one of many warps.
_MANY = (
    SmallMTile(16, 32, 2, 4), SmallMTile(16, 64, 2, 4), SmallMTile(16, 64, 2, 8), SmallMTile(32, 32, 2, 4),
    SmallMTile(32, 32, 2, 8),
)  # fmt: skip
MANY_COLUMNS = {("f16", "nk"): _MANY, ("bf16", "nk"): _MANY}
MOST_BEYOND = 1.5  # times k that a tile's first loads reach; the next deeper ones took 5 to 27 % longer than these
_SINGLE = "element by element"
PATHS = {
    "product": "along {axis} into registers",
    "narrow product": "element by element along {axis} into registers",
    **dict.fromkeys(("scalar", "row", "column", "tile", "narrow tile"), _SINGLE),
    **dict.fromkeys(("transposed tile", "narrow transposed tile", "out", "transposed out"), _SINGLE),
}


def whole_tiles(math_mode: str, parts: int, rhs_order: str, device: DeviceSpec) -> tuple[SmallMTile, ...]:
    """The candidate tiles, with block_n the columns of all parts."""
    if device.capability < cost_model.CLUSTERS_SINCE:
        return TILES[math_mode]
    form = math_mode, rhs_order
    more = (*FEW_COLUMNS.get(form, ()), *MANY_COLUMNS.get(form, ()))
    return (*TILES[math_mode], *(tile for tile in more if parts * FRAGMENT_COLUMNS <= tile.block_n))


def small_m_tiles(math_mode: str, parts: int, rhs_order: str, device: DeviceSpec) -> tuple[SmallMTile, ...]:
    """The same with block_n the columns of one part."""
    return tuple(_for_parts(tile, parts) for tile in whole_tiles(math_mode, parts, rhs_order, device))


def _for_parts(tile: SmallMTile, parts: int) -> SmallMTile:
    return replace(tile, block_n=max(tile.block_n // parts // FRAGMENT_COLUMNS, 1) * FRAGMENT_COLUMNS)


class SmallM(ProductFamily):
    """For up to 16 rows, where reading rhs is what takes time."""

    name = "small_m"
    label = "few rows"  # a key of reports
    tile_type = SmallMTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """The same tiles on every device, but for those that were measured beside clusters, and where k is short."""
        paces = calibration(device).pace["small_m_3xtf32" if spec.math == "3xtf32" else "small_m"]
        whole = _not_too_deep(whole_tiles(spec.math, spec.parts, spec.rhs_order, device), k)
        return tuple(Candidate(self, _for_parts(tile, spec.parts), paces[str(tile)]) for tile in whole)

    def why_not(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> str | None:
        """As `small_m_tile` says; rows of 16 bytes took three times as long as rows of 32 bytes."""
        if spec.rhs_order == "kn" and tile.block_n * spec.dtype.bytes < SECTOR:
            return "rhs with n contiguous would be read in halves of a sector"
        return small_m_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> int:
        """The sums of the warps."""
        return small_m_tile.shared_bytes(spec, tile)

    def launch(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> Launch:
        """A block for each tile, or a persistent grid of clusters."""
        alone = replace(super().launch(spec, tile, device), early_depth=_early_depth(spec, tile, device))
        return alone if tile.splits == 1 else replace(alone, cluster=tile.splits)

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> Flow:
        """As many blocks as registers hold, or as many clusters as the chip has room for. A cluster counts as one.

        It starts early, as it did where the networks learnt it.
        """
        blocks = small_m_tile.resident_blocks(spec, tile)
        if tile.splits > 1:
            at_once = cost_model.clusters_at_once(tile.splits, blocks, device)
        else:
            at_once = blocks * device.multiprocessors
        return Flow(at_once, tile.splits * tile.warps_k * tile.block_k * tile.stages, any_depth(device))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Multiplying, and the warps' sums; or reading rhs once for every 16 rows, if that is longer."""
        tile: SmallMTile = entry.tile
        known = calibration(device)
        pace = entry.pace if lhs_copy(spec) == chunk(spec) else entry.pace / known.small_m_narrow
        busy = cost_model.multiplying(tile, pace, spec, problem, device, tile.splits)
        busy = busy + cost_model.filling(tile, reads, problem, device, self.name)
        share = np.minimum(cost_model.tiles_of(tile, problem) * tile.splits / device.multiprocessors, 1.0)
        waiting = cost_model.waiting(tile, reads, problem, device, self.name)
        waiting = waiting * (known.small_m_alone + (1 - known.small_m_alone) * share)
        moving = cost_model.moving(spec, problem, device, np.ceil(problem.m / tile.block_m))
        moving = moving * of_each(tile, lambda each: _in_sectors(spec, each, device))
        together = np.maximum(np.hypot(busy, waiting), moving)
        return known.launches[self.name] + together + _meeting(tile, reads, spec, problem, device)

    def is_on_par(self, tile: SmallMTile, m: int) -> bool:
        """One tile of rows waits for memory, whoever multiplies."""
        return m <= tile.block_m


def _early_depth(spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> int:
    """How much k the tiles of the grid, or of one cluster of a persistent one, may have for an early start to pay.

    Behind a kernel of wgmma, whose blocks end one after the other, multiprocessors that are free first get more of the
    blocks than others. That costs a share of the time; of a short kernel less than a launch.
    """
    anyway = any_depth(device)
    if spec.dtype != F32 or anyway == 0:
        return anyway
    rows = calibration(device).small_m_early_bytes / (tile.block_n * spec.parts * spec.dtype.bytes)
    return int(rows / (device.multiprocessors // tile.splits if tile.splits > 1 else 1))


def _first_loads(tile: SmallMTile) -> int:
    """Depth of what all warps load before they multiply."""
    return tile.splits * tile.warps_k * tile.block_k * tile.stages


def _not_too_deep(tiles: tuple[SmallMTile, ...], k: int) -> tuple[SmallMTile, ...]:
    """The tiles but for those most of whose warps would have nothing to do, and their sums to add all the same."""
    most = max(MOST_BEYOND * k, min(map(_first_loads, tiles), default=0))
    return tuple(tile for tile in tiles if _first_loads(tile) <= most)


def _in_sectors(spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> float:
    """How much longer memory takes where each row of rhs[k, n] that a tile reads is one sector, or less than a line."""
    row, known = tile.block_n * spec.dtype.bytes, calibration(device)
    if spec.rhs_order == "nk" or row >= CACHE_LINE:
        return 1.0
    return known.small_m_sectors[str(tile.block_k)] if row <= SECTOR else known.small_m_short_row


def _meeting(tile: SmallMTile, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which the blocks of a cluster wait for each other and send their sums, of all rows that exist."""
    known = calibration(device).small_m_meeting
    sums = np.minimum(problem.m, tile.block_m) * tile.block_n * spec.parts * (tile.splits - 1)
    tiles = np.ceil(cost_model.tiles_of(tile, problem) / reads.blocks)
    return (tile.splits > 1) * tiles * (known["cluster"] + known["sum"] * sums)


SMALL_M = SmallM()
