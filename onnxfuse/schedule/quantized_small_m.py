"""The kernel for few rows and a quantized rhs among the families: its tiles, what they cost, its way to each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import BF16
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule import cost_model, quantized_small_m_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import (
    Amount,
    Candidate,
    Count,
    Flow,
    Launch,
    Problem,
    ProductFamily,
    any_depth,
    of_each,
)
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.quantized_small_m_tile import QuantizedSmallMTile
from onnxfuse.schedule.small_m import PATHS as ELEMENT_PATHS

PATHS = {
    **ELEMENT_PATHS,
    "product": "cp.async along {axis}",
    "narrow product": "element by element along {axis}",
}


@dataclass(frozen=True)
class Shape:
    """A tile whatever the form of rhs.

    Attributes:
        rows: of the tile; of several terms, of all of them.
        width: columns of all parts together.
        warps: that share k.
        step: bytes of a column that a warp multiplies at once.
        stages: of a warp.
        kept: whether lhs is kept in registers, spread as far as it may be.
        streamed: whether it is streamed to them where it cannot be kept.
    """

    rows: int
    width: int
    warps: int
    step: int
    stages: int
    kept: bool = False
    streamed: bool = False


# More rows take more of shared memory, and so leave less of it for what is on its way: 32 rows are two tiles of 16.
# With lhs there, a tile of four rows is no faster than one of eight. The three before lhs in registers are for chips
# with less of it, and fit everywhere.
SHAPES = (
    Shape(1, 32, 8, 128, 3), Shape(1, 16, 8, 128, 3), Shape(8, 32, 8, 128, 2),
    Shape(16, 32, 8, 64, 2), Shape(16, 32, 8, 64, 3),
    Shape(1, 32, 8, 128, 2), Shape(8, 32, 4, 64, 2), Shape(16, 32, 4, 64, 2),
    Shape(1, 32, 8, 128, 3, kept=True), Shape(4, 32, 8, 128, 3, kept=True),
    Shape(8, 32, 8, 128, 3, kept=True, streamed=True),
    Shape(16, 32, 8, 128, 3, kept=True), Shape(16, 32, 8, 64, 4, kept=True, streamed=True),
)  # fmt: skip
STREAMED_BITS = 4  # lhs of 8 bits has twice the steps, whose loads the warps would wait for: 26 us became 39


def tile_of(shape: Shape, spec: KernelSpec, form: Quantization, slots: int) -> QuantizedSmallMTile:
    """The tile of a shape for a spec with room for so many steps of lhs."""
    block_n = max(shape.width // spec.parts // 8, 1) * 8
    if spec.parts * block_n % quantized_small_m_tile.FRAGMENT_COLUMNS:
        block_n = quantized_small_m_tile.FRAGMENT_COLUMNS
    depth, terms = shape.step * 8 // form.bits, quantized_small_m_tile.TERMS[spec.math]
    rows = max(shape.rows // terms, 1)
    return QuantizedSmallMTile(rows, block_n, depth, shape.stages, slots, shape.warps, terms=terms)


def spread_of(tile: QuantizedSmallMTile, form: Quantization) -> int:
    """How far the rows and blocks of a tile allow kept rows to be spread, in powers of two."""
    most = max(min(quantized_small_m_tile.MMA_ROWS // tile.term_rows, tile.block_k // form.block), 1)
    return 1 << most.bit_length() - 1


class QuantizedSmallM(ProductFamily):
    """For few rows, where reading a quantized rhs is what takes time; it runs any number of rows on every chip."""

    name = "quantized_small_m"
    label = "few rows of quantized"  # a key of reports
    tile_type = QuantizedSmallMTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """With lhs in shared memory as a whole where it fits."""
        form = spec.quantization
        if form is None:
            return ()
        tiles = _tiles(spec, form, device.shared_bytes, k)
        return tuple(Candidate(self, tile, _pace(tile, spec, device)) for tile in tiles)

    def why_not(self, spec: KernelSpec, tile: QuantizedSmallMTile, device: DeviceSpec) -> str | None:
        """As `quantized_small_m_tile` says."""
        return quantized_small_m_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: QuantizedSmallMTile, device: DeviceSpec) -> int:
        """The warps' stages, their rows of lhs, and sums."""
        return quantized_small_m_tile.shared_bytes(spec, tile)

    def launch(self, spec: KernelSpec, tile: QuantizedSmallMTile, device: DeviceSpec) -> Launch:
        """A persistent grid that starts early where the chip can; elsewhere one block a tile."""
        shared = self.shared_bytes(spec, tile, device)
        depth = any_depth(device)
        return Launch(tile.block_m, tile.block_n, tile.threads, shared, cluster=int(depth > 0), early_depth=depth)

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: QuantizedSmallMTile, device: DeviceSpec) -> Flow:
        """One block on a multiprocessor, with all stages but one on their way."""
        depth = tile.warps_k * tile.block_k * (tile.stages - 1)
        return Flow(device.multiprocessors, depth, any_depth(device))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Unpacking, multiplying and reading lhs again hide behind reading rhs, once a tile of rows, or that does."""
        tile: QuantizedSmallMTile = entry.tile
        known = calibration(device)
        busy = cost_model.multiplying(tile, entry.pace, spec, problem, device) * _whole_steps(tile, problem.k)
        busy = busy + _reading_again(tile, spec, problem, device)
        moving = cost_model.moving(spec, problem, device, np.ceil(problem.m / tile.block_m))
        waiting = cost_model.waiting(tile, reads, problem, device, self.name)
        beside = _beside(tile, spec, problem, device)
        return known.launches[self.name] + beside + np.hypot(np.cbrt(busy**3 + moving**3), waiting)

    def is_on_par(self, tile: QuantizedSmallMTile, m: int) -> bool:
        """One tile of rows waits for memory, whoever multiplies."""
        return m <= tile.block_m


def _pace(tile: QuantizedSmallMTile, spec: KernelSpec, device: DeviceSpec) -> float:
    """That of the shape whose rows its terms fill; of fp32 relative to TF32, though bf16 is what is multiplied."""
    known, is_kept = calibration(device), tile.kept_steps > 0
    rows = min(shape.rows for shape in SHAPES if shape.kept == is_kept and shape.rows >= tile.term_rows)
    pace = known.pace[QuantizedSmallM.name][f"{rows}{' streamed' if tile.streamed else ' kept' if is_kept else ''}"]
    if tile.terms == 1:
        return pace
    return pace * tile.block_m / rows * known.products[BF16.name] / known.products[spec.math]


def _whole_steps(tile: QuantizedSmallMTile, k: Count) -> Amount:
    """What all warps' steps cover of k, which need not fill the last ones."""
    return _steps(tile, k) * tile.block_k * tile.warps_k / k


def _reading_again(tile: QuantizedSmallMTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which blocks read rows of lhs that do not stay in shared memory, once for each tile."""
    held = np.maximum(tile.lhs_slots, tile.kept_steps)
    read = np.where(_steps(tile, problem.k) > held, tile.block_m * problem.k * spec.dtype.bytes, 0)
    return cost_model.waves_of(tile, problem, device) * read / calibration(device).read_again


def _beside(tile: QuantizedSmallMTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which nothing else is done: rows of lhs come to registers, or a tile's sums are added at once."""
    known, form = calibration(device), spec.quantization

    def registers(each: QuantizedSmallMTile) -> int:
        return quantized_small_m_tile.kept_registers(form, each) if form and each.kept_steps else 0

    adding = cost_model.waves_of(tile, problem, device) * known.sums_added
    return np.where(tile.kept_steps, of_each(tile, registers) * known.kept_register, adding)


def _steps(tile: QuantizedSmallMTile, k: Count) -> Count:
    """Of one warp."""
    return -(-k // (tile.block_k * tile.warps_k))


def _tiles(spec: KernelSpec, form: Quantization, limit: int, k: int) -> Iterator[QuantizedSmallMTile]:
    for shape in SHAPES:
        yield from tiles_of_shape(shape, spec, form, limit, k)


def tiles_of_shape(
    shape: Shape, spec: KernelSpec, form: Quantization, limit: int, k: int
) -> Iterator[QuantizedSmallMTile]:
    """The tile of a shape: lhs in shared memory, as a whole if it fits, or kept in registers, or streamed to them."""
    ring = tile_of(shape, spec, form, shape.stages)
    if shape.kept:
        yield from _in_registers(shape, ring, spec, form, limit, k)
        return
    whole = replace(ring, lhs_slots=max(_steps(ring, k), ring.stages))
    yield whole if quantized_small_m_tile.shared_bytes(spec, whole) <= limit else ring


def _in_registers(
    shape: Shape, ring: QuantizedSmallMTile, spec: KernelSpec, form: Quantization, limit: int, k: int
) -> Iterator[QuantizedSmallMTile]:
    kept = replace(ring, lhs_slots=0, kept_steps=_steps(ring, k), spread=spread_of(ring, form))
    if quantized_small_m_tile.kept_registers(form, kept) > quantized_small_m_tile.max_kept(spec):
        if not shape.streamed or form.bits != STREAMED_BITS or ring.terms > 1:
            return
        kept = replace(kept, kept_steps=1, streamed=True)
    if quantized_small_m_tile.why_not(spec, kept, limit) is None:
        yield kept


QUANTIZED_SMALL_M = QuantizedSmallM()
