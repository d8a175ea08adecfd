"""The sm_90a kernel for a quantized weight among the families: its tiles, their cost, and its way to each tensor."""

from __future__ import annotations

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import BF16, F32
from onnxfuse.limits import MAX_BOX, STAGE_ROW_BYTES
from onnxfuse.schedule import cost_model, hopper_quantized_tile
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import products_of
from onnxfuse.schedule.hopper import LONGEST, early_depth, epilogue_time, exchange_time, waves_of_clusters
from onnxfuse.schedule.hopper import PATHS as HOPPER_PATHS
from onnxfuse.schedule.hopper_quantized_tile import MAX_GROUPS, QuantizedTile, swapped
from onnxfuse.schedule.hopper_tile import ARCH
from onnxfuse.schedule.kernel_family import Amount, Candidate, Flow, Launch, Problem, ProductFamily, of_each
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

_ROWS = (16, 32, 48, 64, 80, 96, 104, 112, 128, 136, 144, 152, 160)
_SPLIT_ROWS = (16, 32, 64, 80, 96, 104, 128, 136, 144, 152, 160)
_DEEP_ROWS = (16, 32, 48, 64, 80, 96, 128)  # of tiles with 256 of k in a stage, which TMA brings in as many rows as 128
_SHARED_ROWS = _ROWS[1:-1]  # of tiles that fit beside the sums of a second group
TILES = (
    QuantizedTile(256, 64, 64, apart=True),
    *(QuantizedTile(rows, 128, 128) for rows in _ROWS),
    *(QuantizedTile(rows, 128, 256) for rows in _DEEP_ROWS),
    *(QuantizedTile(rows, 128, 64) for rows in (16, 32, 64, 96, 128, 160, 192, 256)),
    *(QuantizedTile(rows, 128, 128, splits=splits) for splits in (2, 4) for rows in _SPLIT_ROWS),
    *(QuantizedTile(rows, 128, depth, k_groups=2) for depth in (128, 256) for rows in (8, 16)),
    *(
        QuantizedTile(rows, 64, depth, groups=1, k_groups=k_groups, splits=splits)
        for k_groups, depth, shared_rows in (
            (4, 128, (8, 16, 32)), (4, 256, (8, 16)), (2, 128, _SHARED_ROWS), (2, 256, (32, 48, 64)),
        )
        for splits in (1, 2)
        for rows in shared_rows
    ),
)  # fmt: skip
WHOLE_STEP = 128  # of k, from which on a step costs no more beside what it converts
IN_FP32 = 8  # bits of which bf16 cannot hold all integers: they become fp32 on the way
PATHS = HOPPER_PATHS
WEIGHT_PATHS = {
    "rhs": "TMA, numbers in registers",
    "scales": "cp.async along k, beside the main loop",
    "zeros": "cp.async along k, beside the main loop",
}


class HopperQuantized(ProductFamily):
    """TMA and wgmma of sm_90a, the weight through registers."""

    name = "hopper_quantized"
    label = "sm_90a quantized"
    tile_type = QuantizedTile

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """All tiles."""
        if device.arch != ARCH or spec.quantization is None:
            return ()
        known = calibration(device)
        pace, widest = known.pace["hopper"]["128 cooperative"], known.hopper_quantized["widest"]
        return tuple(Candidate(self, tile, pace * (widest if tile.block_m == MAX_BOX else 1)) for tile in TILES)

    def why_not(self, spec: KernelSpec, tile: QuantizedTile, device: DeviceSpec) -> str | None:
        """As `hopper_quantized_tile` says."""
        return hopper_quantized_tile.why_not(spec, tile, device.shared_bytes)

    def shared_bytes(self, spec: KernelSpec, tile: QuantizedTile, device: DeviceSpec) -> int:
        """Ring, staging, vectors and barriers."""
        return hopper_quantized_tile.footprint(spec, tile, device.shared_bytes).total

    def launch(self, spec: KernelSpec, tile: QuantizedTile, device: DeviceSpec) -> Launch:
        """A persistent grid of clusters, with tensor maps."""
        layout = hopper_quantized_tile.footprint(spec, tile, device.shared_bytes)
        of_full = early_depth(layout, tile.block_k, device, calibration(device).hopper_quantized_early_bytes)
        return Launch(
            tile.block_m, tile.block_n, tile.threads, layout.total, tile.splits,
            hopper_quantized_tile.map_rules(spec, tile), early_depth(layout, tile.block_k, device), of_full,
        )  # fmt: skip

    def access_path(self, role: str, access: Access) -> str:
        """As the tables say."""
        return WEIGHT_PATHS.get(role) or path(PATHS, role, access)

    def flow(self, spec: KernelSpec, tile: QuantizedTile, device: DeviceSpec) -> Flow:
        """A block each multiprocessor, with the whole ring in flight."""
        layout = hopper_quantized_tile.footprint(spec, tile, device.shared_bytes)
        early = early_depth(layout, tile.block_k, device)
        return Flow(device.multiprocessors, layout.stages * tile.block_k, early)

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Multiplying and converting side by side; infinite where more blocks split k than run at once."""
        tile: QuantizedTile = entry.tile
        known = calibration(device)
        waves, too_many = waves_of_clusters(tile, problem, known)
        epilogue = of_each(tile, lambda each: epilogue_time(each.swapped, swapped(spec), device))
        epilogue = epilogue + known.hopper_quantized["sums"] * (tile.k_groups > 1)
        busy = waves * (_main_loop(entry, spec, problem, device) + epilogue)
        together = np.hypot(busy + waves * known.fill["hopper"], cost_model.moving(spec, problem, device))
        together = together * (1 + known.hopper_long * np.minimum(together, LONGEST))
        together = together + known.launches["hopper"] + exchange_time(tile, spec, problem, device)
        return np.where(too_many, np.inf, together)

    def is_on_par(self, tile: QuantizedTile, m: int) -> bool:
        """Written for the chip's own units."""
        return True


def _main_loop(entry: Candidate, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds of a tile's steps of the ring, of which groups that share k have as many each."""
    tile: QuantizedTile = entry.tile
    steps = np.ceil(problem.k / (tile.block_k * tile.splits * tile.k_groups)) * tile.k_groups
    multiplying = products_of(tile, spec) * tile.block_k / entry.pace / calibration(device).products[spec.math]
    beside = np.hypot(multiplying, of_each(tile, lambda each: _converting(spec, each, device)))
    return steps * np.hypot(beside, _loading(spec, tile, problem, device))


def _loading(spec: KernelSpec, tile: QuantizedTile, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds in which TMA loads a stage's rows, those of the weight as long as any, however short."""
    activations = np.minimum(problem.m, tile.block_m) * tile.block_k * spec.dtype.bytes / STAGE_ROW_BYTES
    return calibration(device).hopper_quantized["row"] * (spec.parts * tile.block_n + activations)


def _converting(spec: KernelSpec, tile: QuantizedTile, device: DeviceSpec) -> float:
    """Microseconds in which a stage's integers become numbers, and zero points what is subtracted of them."""
    form, each = spec.quantization, calibration(device).hopper_quantized
    if form is None:
        return 0.0
    columns = spec.parts * tile.block_n
    in_fp32 = spec.dtype == F32 or (form.bits == IN_FP32 and spec.dtype == BF16)
    pace = each["in fp32"] if in_fp32 else each[f"{form.bits} bits"]
    pace *= each["four groups"] if tile.all_groups == MAX_GROUPS else 1
    blocks = columns * tile.block_k / form.block if form.zero_points else 0
    step = each["step"] * min(tile.block_k / WHOLE_STEP, 1)
    return columns * tile.block_k / pace + blocks * each["zero point"] + step / tile.k_groups


HOPPER_QUANTIZED = HopperQuantized()
