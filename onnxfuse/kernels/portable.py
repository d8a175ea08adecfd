"""A spec and a tile -> the full text of the CUDA source of the portable kernel."""

from __future__ import annotations

from onnxfuse.kernels.gemm import generated, tile_numbers
from onnxfuse.kernels.source import assembled
from onnxfuse.schedule.kernel_spec import KernelSpec, Tile
from onnxfuse.schedule.portable_tile import Footprint, footprint
from onnxfuse.schedule.shared_memory import copy_width


def emit(spec: KernelSpec, tile: Tile) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `portable_tile.why_not(spec, tile, ...)` is None.
    """
    layout = footprint(spec, tile)
    text = generated(spec, _numbers(spec, tile, layout), layout.load_offsets, layout.out_offsets)
    return assembled(text, "portable/gemm.cuh")


def _numbers(spec: KernelSpec, tile: Tile, layout: Footprint) -> dict[str, int]:
    return {
        **tile_numbers(tile, layout.total),
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "LHS_WIDTH": copy_width(spec.lhs_width, spec.dtype.bytes),
        "RHS_WIDTH": copy_width(spec.rhs_width, spec.dtype.bytes),
        "SLABS": layout.slabs,
        "STAGING_BYTES": layout.staging,
        "VECTORS_OFFSET": layout.vectors_offset,
        "VECTORS_BYTES": layout.vectors,
    }
