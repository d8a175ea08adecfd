"""The kernel for small M among the families: its tiles, what they cost, and its way to each tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule import cost_model, small_m_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, Candidate, Flow, Problem, ProductFamily
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.small_m_tile import SmallMTile

# Wide tiles read long pieces of rhs; narrow ones fill the chip when n is small, and the more of k a block has on its
# way, the fewer times it waits. A tile's block_n is the width of all parts together.
_SIXTEEN_BIT = (SmallMTile(64, 32, 1, 4), SmallMTile(32, 32, 1, 8), SmallMTile(32, 32, 2, 16), SmallMTile(32, 64, 1, 8))
# The same bytes a stage as above; two were not measured.
_THIRTY_TWO_BIT = tuple(replace(tile, block_k=tile.block_k // 2, stages=1) for tile in _SIXTEEN_BIT)
TILES: dict[str, tuple[SmallMTile, ...]] = {
    "f16": _SIXTEEN_BIT, "bf16": _SIXTEEN_BIT, "tf32": _THIRTY_TWO_BIT, "3xtf32": _THIRTY_TWO_BIT, "fp32": (),
}  # fmt: skip
SECTOR = 32  # bytes that memory delivers at once at least
_SINGLE = "element by element"
PATHS = {
    "product": "along {axis} into registers",
    **dict.fromkeys(("scalar", "row", "column", "tile", "narrow tile"), _SINGLE),
    **dict.fromkeys(("transposed tile", "narrow transposed tile", "out", "transposed out"), _SINGLE),
}


def small_m_tiles(math_mode: str, parts: int) -> tuple[SmallMTile, ...]:
    """The candidate tiles, with block_n the columns of one part."""
    return tuple(_for_parts(tile, parts) for tile in TILES[math_mode])


def _for_parts(tile: SmallMTile, parts: int) -> SmallMTile:
    return replace(tile, block_n=max(tile.block_n // parts // 8, 1) * 8)


class SmallM(ProductFamily):
    """For up to 16 rows, where reading rhs is what takes time."""

    name = "small_m"
    label = "few rows"  # a key of reports
    tile_type = SmallMTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """The same tiles on every device."""
        paces = calibration(device).pace["small_m_3xtf32" if spec.math == "3xtf32" else "small_m"]
        own = zip(TILES[spec.math], small_m_tiles(spec.math, spec.parts), strict=True)
        return tuple(Candidate(self, tile, paces[str(whole)]) for whole, tile in own)

    def why_not(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> str | None:
        """As `small_m_tile` says; rows of 16 bytes took three times as long as rows of 32 bytes."""
        if spec.rhs_order == "kn" and tile.block_n * spec.dtype.bytes < SECTOR:
            return "rhs with n contiguous would be read in halves of a sector"
        return small_m_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> int:
        """The sums of the warps."""
        return small_m_tile.shared_bytes(spec, tile)

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: SmallMTile, device: DeviceSpec) -> Flow:
        """As many blocks as registers hold."""
        resident = small_m_tile.resident_blocks(spec, tile)
        return Flow(resident * device.multiprocessors, tile.warps_k * tile.block_k * tile.stages)

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Multiplying, and the warps' sums; or reading rhs once for every 16 rows, if that is longer."""
        tile: SmallMTile = entry.tile
        busy = cost_model.multiplying(tile, entry.pace, spec, problem, device)
        busy += cost_model.filling(tile, reads, problem, device, self.name)
        known = calibration(device)
        share = np.minimum(cost_model.tiles_of(tile, problem) / device.multiprocessors, 1.0)
        waiting = cost_model.waiting(tile, reads, problem, device, self.name)
        waiting *= known.small_m_alone + (1 - known.small_m_alone) * share
        moving = cost_model.moving(spec, problem, device, np.ceil(problem.m / tile.block_m))
        return known.launches[self.name] + np.maximum(np.hypot(busy, waiting), moving)

    def is_on_par(self, tile: SmallMTile, m: int) -> bool:
        """One tile of rows waits for memory, whoever multiplies."""
        return m <= tile.block_m


SMALL_M = SmallM()
