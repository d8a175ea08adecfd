"""The sm_90a kernel among the families: its tiles, what they cost, and its way to each tensor."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule import cost_model, hopper_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import products_of, tiles_of, waves_of
from onnxfuse.schedule.hopper_tile import ARCH, FP32_BYTES, FRAGMENT_ROWS, HopperTile, block_k, rhs_pieces, tma_stored
from onnxfuse.schedule.kernel_family import Candidate, Flow, Launch, Problem, ProductFamily
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
)
NARROWEST_BOX = 16  # columns of rhs[k, n]
_VECTOR = "once per tile through shared memory, ahead of the main loop"
PATHS = {
    "product": "TMA",
    "scalar": _VECTOR,
    "row": _VECTOR,
    "column": _VECTOR,
    "tile": "cp.async along n, beside the main loop",
    "narrow tile": "element by element along n, beside the main loop",
    "transposed tile": "cp.async along m, beside the main loop, transposed in shared memory",
    "narrow transposed tile": "element by element along m, beside the main loop, transposed in shared memory",
    "out": "direct store along n",
    "transposed out": "transposed in shared memory, direct store along m",
}
TMA_STORED_OUT = {**PATHS, "out": "TMA store"}


class Hopper(ProductFamily):
    """TMA and wgmma of sm_90a."""

    name = "hopper"
    label = "sm_90a"

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """Of widths that parts round to the same, the first."""
        every = [self._candidate(tile, spec, device, k) for tile in TILES if device.arch == ARCH]
        distinct = {entry.tile: entry for entry in reversed(every)}
        return tuple(reversed(distinct.values()))

    def _candidate(self, tile: HopperTile, spec: KernelSpec, device: DeviceSpec, k: int) -> Candidate:
        """The tile's width shared among the parts, in whole steps of wgmma's transposed operand; narrower is slower."""
        known = calibration(device)
        shallow = spec.parts * k <= known.hopper_ahead_depth
        ahead = tile.groups == 2 and shallow and all(load.kind != "tile" for load in spec.loads)
        group_rows = tile.group_rows if tile.pingpong and tile.block_m == 128 else known.hopper_one_wave_group_rows
        columns = max(tile.block_n // spec.parts // 16, 1) * 16
        own = replace(tile, block_n=columns, operands_ahead=ahead, group_rows=group_rows)
        pace = known.pace["hopper"][str(replace(tile, splits=1, lhs_rows=0))]
        return Candidate(self, own, pace * columns * spec.parts / tile.block_n)

    def why_not(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> str | None:
        """As `hopper_tile` says, and the narrowest boxes are slow."""
        pieces = rhs_pieces(spec, tile)
        few = len(pieces) > 1 and pieces[-1].columns == NARROWEST_BOX and tile.block_m > FRAGMENT_ROWS
        if pieces[-1].atom == NARROWEST_BOX and not few:
            return "rhs with n contiguous would be read in the narrowest boxes, which is slow"
        return hopper_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> int:
        """Ring, staging, vectors and barriers."""
        return hopper_tile.footprint(spec, tile, device.shared_bytes).total

    def launch(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> Launch:
        """A persistent grid of clusters, with tensor maps."""
        return Launch(
            tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n, tile.threads,
            self.shared_bytes(spec, tile, device), tile.cluster, hopper_tile.map_rules(spec, tile, device.shared_bytes),
        )  # fmt: skip

    def access_path(self, role: str, access: Access) -> str:
        """As the tables say; TMA stores what lies in boxes."""
        return path(TMA_STORED_OUT if role == "out" and tma_stored(access) else PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: HopperTile, device: DeviceSpec) -> Flow:
        """A block each multiprocessor, with the whole ring in flight."""
        stages = hopper_tile.footprint(spec, tile, device.shared_bytes).stages
        return Flow(device.multiprocessors, stages * block_k(spec))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
        """Infinite for a tile that splits k where its blocks are more than run at once, or may be."""
        tile: HopperTile = entry.tile
        blocks = tiles_of(tile, problem) * tile.splits
        if tile.splits > 1 and (problem.guessed or blocks > _at_once(device)):
            return math.inf  # a tile for every multiprocessor is faster than a share of one
        computing = _computing(tile, entry.pace, spec, problem, device)
        loading = _loading(tile, reads, spec, problem, device)
        reading = max(loading, cost_model.waiting(tile, reads, problem, device, tile.splits))
        longer = max(computing, reading)
        sums = _exchanging(tile, spec, problem, device)
        return cost_model.overlapped(computing, reading, device) + sums + _filling(tile, spec, problem, device, longer)

    def is_on_par(self, tile: HopperTile, m: int) -> bool:
        """Written for the chip's own units."""
        return True

    def alike(self, tile: HopperTile) -> HopperTile:
        """Tiles that differ in the boxes of lhs alone."""
        return replace(tile, lhs_rows=0)


def _at_once(device: DeviceSpec) -> int:
    """Multiprocessors that clusters can fill."""
    group = calibration(device).hopper_group
    return device.multiprocessors // group * group


def _computing(tile: HopperTile, pace: float, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which a multiprocessor multiplies, its tiles' prologues and epilogues among them."""
    known = calibration(device)
    waves, k = waves_of(tile, problem, device, tile.splits), math.ceil(problem.k / tile.splits)
    exposed = 1 if tile.pingpong else waves  # epilogues beside which nothing is multiplied
    depth = waves * (k + known.pipeline_fill) + exposed * known.hopper_exposed_epilogue
    pieces = rhs_pieces(spec, tile)
    narrow = known.hopper_narrow_boxes[f"{tile.block_m}x{pieces[-1].atom}"] if len(pieces) > 1 else 1.0
    pace *= known.hopper_lone_group if tile.pingpong and waves == 1 else 1.0
    steps = waves * math.ceil(k / block_k(spec))
    return max(products_of(tile, spec) * depth / pace / known.products[spec.math], known.hopper_step * steps) / narrow


def _loading(tile: HopperTile, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which rhs comes from memory: where a last wave is not full, its blocks read a little faster."""
    columns = float(problem.batch * problem.n * spec.parts)
    if tiles_of(tile, problem) > reads.blocks:
        columns = (columns + cost_model.columns_in_waves(tile, reads, spec, problem)) / 2
    else:
        columns /= calibration(device).hopper_boxed
    return cost_model.loading(columns, spec, problem, device)


def _exchanging(tile: HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    """Microseconds in which blocks that split k add up what each has of a tile."""
    if tile.splits == 1:
        return 0.0
    sums = tiles_of(tile, problem) * products_of(tile, spec) * FP32_BYTES * (tile.splits - 1)
    return calibration(device).hopper_meeting + sums / calibration(device).hopper_exchanged


def _filling(tile: HopperTile, spec: KernelSpec, problem: Problem, device: DeviceSpec, longer: float) -> float:
    """Microseconds more that TMA takes for rows of zeros and many boxes: most hide behind the longer of the others."""
    known, waves = calibration(device), waves_of(tile, problem, device, tile.splits)
    steps = math.ceil(problem.k / tile.splits / block_k(spec))
    ragged = math.ceil(waves / math.ceil(problem.m / tile.block_m))  # only the last tiles along m have rows of zeros
    rows, box = min(problem.m, tile.block_m), tile.lhs_rows or tile.block_m
    zeros = ragged * steps * known.hopper_zero_row[str(box)] * (-problem.m % box)
    more = zeros + waves * steps * known.hopper_box * (math.ceil(rows / box) - 1)
    uncovered = known.hopper_loaded_row * waves * steps * (rows + tile.block_n * spec.parts) - longer
    return max(uncovered + more, 0.0) - max(uncovered, 0.0) + more / known.hopper_shown


HOPPER = Hopper()
