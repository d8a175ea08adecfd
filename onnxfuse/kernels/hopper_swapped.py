"""A spec and a tile -> the full text of the CUDA source of the sm_90a kernel whose M side is the weight.

The kernel takes two arguments, as `kernels/hopper.py` says; the maps are those of `hopper_swapped_tile.map_rules`.
"""

from __future__ import annotations

from onnxfuse.kernels.hopper import block_numbers, generated_swapped, multiplications, uses
from onnxfuse.kernels.source import assembled
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile, footprint, in_registers, seen
from onnxfuse.schedule.hopper_tile import HopperFootprint, begins_at_any_column, block_k
from onnxfuse.schedule.kernel_spec import KernelSpec


def emit(spec: KernelSpec, tile: SwappedTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `hopper_swapped_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    products = multiplications(seen(spec), [tile.block_m] * spec.parts, in_registers(spec))
    text = _generated(seen(spec), tile, footprint(spec, tile, shared_limit), products)
    return assembled(text, f"hopper/swapped{'_registers' * in_registers(spec)}.cuh", uses(spec))


def _generated(spec: KernelSpec, tile: SwappedTile, layout: HopperFootprint, products: str) -> str:
    """Of a spec as the kernel sees it."""
    flags = {
        "LHS_K_CONTIGUOUS": spec.lhs_order == "mk",
        "RHS_K_CONTIGUOUS": True,
        "LAST_COLUMNS_FULL": begins_at_any_column(spec),
        "PINGPONG": tile.pingpong,
        "LAST_WAVE_SPLIT": tile.last_wave_splits > 1,
    }
    return generated_swapped(spec, tile.launched_cluster, layout, flags, _numbers(spec, tile, layout), products)


def _numbers(spec: KernelSpec, tile: SwappedTile, layout: HopperFootprint) -> dict[str, int]:
    return {
        "TMA_STORED_OUTS": 0,
        "BLOCK_M": tile.block_n,
        "BLOCK_N": tile.block_m,
        "BLOCK_K": block_k(spec),
        "GROUP_M": tile.swapped.group_m,
        "CLUSTER_M": tile.cluster_n,
        "CLUSTER_N": tile.cluster_m,
        "RHS_COLUMNS": tile.block_m,
        "RHS_PIECES": 1,
        **block_numbers(spec, tile, layout),
    }
