"""The sm_90a kernel whose M side is the weight among the families: its tiles, cost, and way to each tensor."""

from __future__ import annotations

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule import cost_model, hopper_swapped_tile, hopper_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import products_of
from onnxfuse.schedule.hopper import (
    PATHS,
    blocks_of,
    early_depth,
    epilogue_time,
    exchange_time,
    exchanging,
    full_early_depth,
    in_pieces,
    in_turns,
    joined,
    of_shared,
    rhs_ahead_share,
    waves_of_clusters,
)
from onnxfuse.schedule.hopper_quantized_tile import swapped
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile, in_registers
from onnxfuse.schedule.hopper_tile import ARCH, block_k
from onnxfuse.schedule.kernel_family import Amount, Candidate, Flow, Launch, Problem, ProductFamily, of_each
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

MANY_WAVES = 5  # of tiles, from which on clusters take longer: measured, not explained
NARROW_POWER = 2.5  # of the norm that joins what limits a step
_ROWS = (72, 80, 88, 96, 104, 112, 120, 136, 144, 152, 160, 168, 176, 184, 208, 240)
_NARROW_ROWS = (48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 136, 152)
# Tiles of 192 columns (three groups) and of 256 were up to 50 % slower: docs/kernel-notes.md.
TILES = (
    *(SwappedTile(rows, 128, splits=splits) for splits in (1, 2, 4) for rows in _ROWS),
    *(SwappedTile(rows, 128, cluster_m=2) for rows in _ROWS),
    *(
        SwappedTile(rows, 64, pingpong=True, cluster_m=cluster_m, cluster_n=cluster_n)
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 4))
        for rows in _NARROW_ROWS
    ),
    # Tiles of the same columns are neighbours, for they are split or none of them is.
    *(SwappedTile(rows, 64, group_rows=1, pingpong=True, last_wave_splits=2) for rows in (*_NARROW_ROWS, 160)),
)
# Rows that the kernel whose M side is lhs has for all but a weight that comes from registers.
FROM_REGISTERS = (
    *(SwappedTile(rows, 128) for rows in (32, 64, 128, 192, 256)),
    *(SwappedTile(rows, 128, cluster_m=2) for rows in (128, 256)),
    *(SwappedTile(rows, 128, cluster_n=2) for rows in (128, 192, 256)),
    SwappedTile(128, 64, pingpong=True, cluster_m=2),
    *(SwappedTile(rows, 128, splits=2) for rows in (64, 128)),
    *(SwappedTile(rows, 64, pingpong=True) for rows in (32, 128, 192)),
)


class HopperSwapped(ProductFamily):
    """TMA and wgmma of sm_90a, the weight as the M side."""

    name = "hopper_swapped"
    label = "sm_90a swapped"
    tile_type = SwappedTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """All tiles."""
        if device.arch != ARCH or spec.quantization is not None:
            return ()
        paces = calibration(device).pace["hopper"]
        tiles = (*TILES, *FROM_REGISTERS) if in_registers(spec) else TILES
        return tuple(Candidate(self, tile, paces[_schedule(tile)]) for tile in tiles)

    def copied(self, spec: KernelSpec) -> tuple[str, ...]:
        """As `hopper_tile` says."""
        return hopper_tile.copied(spec)

    def why_not(self, spec: KernelSpec, tile: SwappedTile, device: DeviceSpec) -> str | None:
        """As `hopper_swapped_tile` says."""
        return hopper_swapped_tile.why_not(spec, tile, device.shared_bytes)

    def early_share(self, spec: KernelSpec, device: DeviceSpec) -> float:
        """As the other kernel of two factors."""
        return rhs_ahead_share(spec, device)

    def shared_bytes(self, spec: KernelSpec, tile: SwappedTile, device: DeviceSpec) -> int:
        """Ring, staging, vectors and barriers."""
        return hopper_swapped_tile.footprint(spec, tile, device.shared_bytes).total

    def launch(self, spec: KernelSpec, tile: SwappedTile, device: DeviceSpec) -> Launch:
        """A persistent grid of clusters, with tensor maps."""
        layout = hopper_swapped_tile.footprint(spec, tile, device.shared_bytes)
        rows, columns = tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n
        return Launch(
            rows, columns, tile.threads, layout.total, tile.launched_cluster,
            hopper_swapped_tile.map_rules(spec, tile), early_depth(layout, block_k(spec), device),
            full_early_depth(tile, layout, spec, device),
        )  # fmt: skip

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: SwappedTile, device: DeviceSpec) -> Flow:
        """A block each multiprocessor, with the whole ring in flight."""
        layout, depth = hopper_swapped_tile.footprint(spec, tile, device.shared_bytes), block_k(spec)
        return Flow(device.multiprocessors, layout.stages * depth, early_depth(layout, depth, device))

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """As that of the kernel whose groups share each tile; infinite where a last wave is to be split and is not."""
        tile, known = entry.tile, calibration(device)
        waves, too_many = waves_of_clusters(tile, problem, known)
        waves = waves - (saved := cost_model.saved_of_last_wave(tile, problem, device))
        too_many = too_many | (tile.last_wave_splits > 1) & (saved == 0)
        epilogue = of_each(tile, lambda each: epilogue_time(each.swapped, swapped(spec), device))
        main_loop = _main_loop(entry, reads, spec, problem, device, waves) + known.fill["hopper"]
        busy = in_turns(tile.swapped, waves, main_loop, epilogue)
        both = joined(tile.swapped, busy, cost_model.moving(spec, problem, device), problem, known)
        exchange = exchange_time(tile, spec, problem, device)
        exchange = exchange + (saved > 0) * exchanging(device.multiprocessors / 2 * products_of(tile, spec), device)
        both = both + known.launches[self.name] + exchange
        sharing = tile.cluster > tile.splits
        both = both * (1 + known.hopper_clusters_in_turn * (sharing & (waves >= MANY_WAVES)))
        return np.where(too_many, np.inf, both + known.hopper_cluster * sharing)

    def is_on_par(self, tile: SwappedTile, m: int) -> bool:
        """Written for the chip's own units."""
        return True


def _schedule(tile: SwappedTile) -> str:
    """How its groups work: tiles of one schedule multiply at one pace."""
    return "swapped ping-pong" if tile.pingpong else "swapped"


def _main_loop(
    entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec, waves: Amount
) -> Amount:
    """Microseconds of a tile's steps of the ring.

    What limits a narrow tile hides more of the rest, where every multiprocessor has but one: measured, not explained.
    """
    tile, known = entry.tile, calibration(device)
    steps = np.ceil(np.ceil(problem.k / block_k(spec)) / tile.splits)
    share = np.minimum(blocks_of(tile, problem) / device.multiprocessors, 1.0)
    loading = _loading(tile, spec, problem, device) * (known.hopper_alone + (1 - known.hopper_alone) * share)
    products = products_of(tile, spec) * block_k(spec) / entry.pace / known.products[spec.math]
    arriving = known.round_trip["hopper"] * block_k(spec) / reads.depth
    power = np.where((waves <= 1) & tile.pingpong, NARROW_POWER, 2.0)
    limits = (products, arriving, known.hopper_step, loading)
    return steps * sum(limit**power for limit in limits) ** (1 / power)


def _loading(tile: SwappedTile, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which TMA loads a step's rows of 128 bytes, where every multiprocessor loads."""
    known, width, order = calibration(device), spec.dtype.bytes, spec.rhs_order
    lhs = tile.block_m * in_pieces("lhs", problem.k * width, known)
    rhs = spec.parts * tile.block_n * in_pieces(f"rhs {order}", problem.rhs_row(order) * width, known)
    row = known.hopper_loaded_row * (known.hopper_turned_rows if in_registers(spec) else 1.0)
    return row * (lhs * of_shared(tile.cluster_n, known) + rhs * of_shared(tile.cluster_m, known))


HOPPER_SWAPPED = HopperSwapped()
