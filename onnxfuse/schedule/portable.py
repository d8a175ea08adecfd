"""The portable kernel among the families: its tiles, what they cost, and its way to each tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule import cost_model, portable_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, Candidate, Flow, Problem, ProductFamily, any_depth
from onnxfuse.schedule.kernel_spec import Access, KernelSpec, Tile

# Larger tiles load less for each product; smaller ones fill the chip when m or n is small. A tile's block_n is the
# width of all parts together.
_SIXTEEN_BIT = (
    Tile(128, 256, 64, 2, 4, 3),
    Tile(128, 128, 64, 2, 2, 3),
    Tile(64, 128, 64, 2, 2, 4),
    Tile(32, 128, 64, 1, 4, 4),
)
# The same bytes a stage as above.
_THIRTY_TWO_BIT = (Tile(128, 128, 32, 2, 2, 3), Tile(64, 128, 32, 2, 2, 3), Tile(32, 128, 32, 1, 4, 3))
# Exact fp32 sums in two levels, so a thread holds half as many outputs.
_SPLIT = (
    Tile(128, 128, 32, 2, 4, 3),
    Tile(128, 64, 32, 4, 2, 3),
    Tile(64, 64, 32, 2, 2, 3),
    Tile(32, 64, 32, 2, 2, 3),
)
_SCALAR = (Tile(128, 64, 32, 4, 2, 3), Tile(64, 64, 32, 2, 2, 3), Tile(32, 64, 32, 1, 4, 3))
TILES = {"f16": _SIXTEEN_BIT, "bf16": _SIXTEEN_BIT, "tf32": _THIRTY_TWO_BIT, "3xtf32": _SPLIT, "fp32": _SCALAR}
PACES = {"f16": "portable_half", "bf16": "portable_half", "tf32": "portable_tf32"}
PACES |= {"3xtf32": "portable_3xtf32", "fp32": "portable_fp32"}
WIDEST_COPY = 16  # bytes
# Of the norm that joins its work and what memory takes: by the longer of them 11 x 5712 x 11008, where both take 28
# us, was 21 % too fast (677 timed kernels: off by 18.4 -> 18.1 % rms, of few rows and large weights 23.4 -> 22.5).
MEMORY_POWER = 2.5
MANY_SUMS = 128  # of a thread: half of its registers
_VECTOR = "once per tile through shared memory"
PATHS = {
    "product": "cp.async along {axis}",
    "narrow product": "words shifted in registers along {axis}",
    "scalar": _VECTOR,
    "row": _VECTOR,
    "column": _VECTOR,
    "tile": "cp.async along n",
    "narrow tile": "element by element along n",
    "transposed tile": "cp.async along m, transposed in shared memory",
    "narrow transposed tile": "element by element along m, transposed in shared memory",
    "out": "direct store along n",
    "transposed out": "transposed in shared memory, direct store along m",
}


def tiles_for(math_mode: str, parts: int) -> tuple[Tile, ...]:
    """The candidate tiles, with block_n the columns of one part."""
    return tuple(_for_parts(tile, parts) for tile in TILES[math_mode])


def _for_parts(tile: Tile, parts: int) -> Tile:
    """The tile's width shared among the parts, in whole fragments of every warp."""
    step = 16 * tile.warps_n
    return replace(tile, block_n=max(tile.block_n // parts // step, 1) * step)


class Portable(ProductFamily):
    """Runs everything, on every chip."""

    name = "portable"
    label = "portable"
    tile_type = Tile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """The same tiles on every device."""
        paces = calibration(device).pace[PACES[spec.math]]
        own = zip(TILES[spec.math], tiles_for(spec.math, spec.parts), strict=True)
        return tuple(Candidate(self, tile, paces[str(whole)]) for whole, tile in own)

    def why_not(self, spec: KernelSpec, tile: Tile, device: DeviceSpec) -> str | None:
        """As `portable_tile` says."""
        return portable_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: Tile, device: DeviceSpec) -> int:
        """The ring, or staging areas, and vectors."""
        return portable_tile.footprint(spec, tile).total

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: Tile, device: DeviceSpec) -> Flow:
        """As many blocks as shared memory holds."""
        resident = max(device.shared_bytes // self.shared_bytes(spec, tile, device), 1)
        return Flow(resident * device.multiprocessors, (tile.stages - 1) * tile.block_k, any_depth(device))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Multiplying, and copying lhs and rhs, which the same threads do, beside what memory takes.

        What the epilogue reads and writes comes on top: blocks of large tiles are alone on their multiprocessor, and no
        other block's main loop hides it.
        """
        tile: Tile = entry.tile
        busy = cost_model.multiplying(tile, entry.pace, spec, problem, device)
        copying = _copying(tile, spec, problem, device, narrow=False)
        busy = busy + (copying + _narrow_copies(tile, reads, spec, problem, device))
        busy = busy + cost_model.filling(tile, reads, problem, device, self.name)
        waiting = cost_model.waiting(tile, reads, problem, device, self.name)
        moving = cost_model.moving_factors(spec, problem, device)
        main_loop = cost_model.beside_memory(np.hypot(busy, waiting), moving, MEMORY_POWER)
        return calibration(device).launches[self.name] + main_loop + cost_model.moving_rows(spec, problem, device)

    def copying(self, tile: Tile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Copies of less than 16 bytes."""
        return _narrow_copies(tile, self.flow(spec, tile, device), spec, problem, device)


def _narrow_copies(tile: Tile, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Copies of less than 16 bytes, which blocks beside each other hide in part."""
    known, tiles = calibration(device).copied_beside, cost_model.tiles_of(tile, problem)
    is_alone = np.minimum(reads.blocks, tiles) <= device.multiprocessors
    factor = np.where(is_alone, known["alone"], known["beside"])
    return _copying(tile, spec, problem, device, narrow=True) * factor


def _copying(tile: Tile, spec: KernelSpec, problem: Problem, device: DeviceSpec, narrow: bool) -> Amount:
    """Microseconds of a multiprocessor's copies to shared memory, those of 16 bytes or all narrower ones.

    A thread that holds many sums has few registers for what it copies, and so fewer copies under way.
    """
    rows = zip(spec.factors, (tile.block_m, tile.block_n * spec.parts), strict=True)
    known = calibration(device)
    crowded = spec.parts * tile.block_m * tile.block_n // tile.threads >= MANY_SUMS
    each = {width: us * np.where(crowded, known.copied_crowded[width], 1.0) for width, us in known.copied.items()}
    widths = [(count / factor.width, factor.width * factor.dtype.bytes) for factor, count in rows]
    one_k = sum(count * each[str(width)] for count, width in widths if (width < WIDEST_COPY) == narrow)
    depth = np.ceil(problem.k / tile.block_k) * tile.block_k
    return cost_model.waves_of(tile, problem, device) * depth * one_k / tile.threads


PORTABLE = Portable()
