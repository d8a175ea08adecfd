"""A spec and a tile -> the full text of the CUDA source of the kernel for small M."""

from __future__ import annotations

from onnxfuse.kernels.gemm import generated, tile_numbers
from onnxfuse.kernels.hopper import cluster_attribute
from onnxfuse.kernels.source import assembled
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.small_m_tile import SmallMTile, lhs_copy, resident_blocks, shared_bytes, sums_pitch


def emit(spec: KernelSpec, tile: SmallMTile) -> str:
    """The CUDA source of a kernel, which stages neither operands nor outputs in shared memory.

    Args:
        spec: what to compute.
        tile: a legal tile: `small_m_tile.why_not(spec, tile, ...)` is None.
    """
    text = generated(spec, _numbers(spec, tile), (0,) * len(spec.loads), (0,) * len(spec.outs))
    return assembled(f"{text}#define ONNXFUSE_CLUSTER {cluster_attribute(tile.splits)}\n", "small_m/gemm.cuh")


def _numbers(spec: KernelSpec, tile: SmallMTile) -> dict[str, int]:
    return {
        **tile_numbers(tile, shared_bytes(spec, tile)),
        "LHS_WIDTH": lhs_copy(spec),
        "WARPS_K": tile.warps_k,
        "SPLITS": tile.splits,
        "SUMS_PITCH": sums_pitch(spec, tile),
        "RESIDENT_BLOCKS": resident_blocks(spec, tile),
    }
