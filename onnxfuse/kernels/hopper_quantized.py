"""A spec and a tile -> the full text of the CUDA source of the sm_90a kernel for a quantized weight.

The kernel takes two arguments, as `kernels/hopper.py` says; the maps are those of `hopper_quantized_tile.map_rules`.
"""

from __future__ import annotations

from onnxfuse.kernels.hopper import block_numbers, generated_swapped, multiplications
from onnxfuse.kernels.source import assembled
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile, footprint, swapped
from onnxfuse.schedule.hopper_tile import HopperFootprint
from onnxfuse.schedule.kernel_spec import KernelSpec


def emit(spec: KernelSpec, tile: QuantizedTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `hopper_quantized_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    text = _generated(swapped(spec), tile, footprint(spec, tile, shared_limit))
    return assembled(text, "hopper/quantized.cuh")


def _generated(spec: KernelSpec, tile: QuantizedTile, layout: HopperFootprint) -> str:
    """Of a spec as the kernel sees it."""
    flags = {"LHS_K_CONTIGUOUS": True, "RHS_K_CONTIGUOUS": True, "APART": tile.apart}
    products = multiplications(spec, [tile.block_m] * (1 if tile.apart else spec.parts), lhs_in_registers=True)
    return generated_swapped(spec, tile.splits, layout, flags, _numbers(spec, tile, layout), products)


def _numbers(spec: KernelSpec, tile: QuantizedTile, layout: HopperFootprint) -> dict[str, int]:
    own = tile.swapped
    return {
        "TMA_STORED_OUTS": 0,
        "BLOCK_M": tile.block_n,
        "BLOCK_N": own.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": own.group_m,
        "CLUSTER_M": 1,
        "CLUSTER_N": 1,
        "RHS_COLUMNS": own.block_n,
        "RHS_PIECES": 1,
        **block_numbers(spec, tile, layout),
    }
