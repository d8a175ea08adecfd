"""A spec and a tile -> the full text of the CUDA source of the kernel for few rows and a quantized rhs."""

from __future__ import annotations

from onnxfuse.kernels.gemm import generated
from onnxfuse.kernels.source import assembled
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.quantized_small_m_tile import MAX_LHS_WIDTH, QuantizedSmallMTile, shared_bytes


def emit(spec: KernelSpec, tile: QuantizedSmallMTile) -> str:
    """The CUDA source of a kernel, which stages neither operands nor outputs in shared memory.

    Args:
        spec: what to compute.
        tile: a legal tile: `quantized_small_m_tile.why_not(spec, tile, ...)` is None.
    """
    text = generated(spec, _numbers(spec, tile), (0,) * len(spec.loads), (0,) * len(spec.outs))
    return assembled(text, "quantized_small_m/gemm.cuh")


def _numbers(spec: KernelSpec, tile: QuantizedSmallMTile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "THREADS": tile.threads,
        "STAGES": tile.stages,
        "SHARED_BYTES": shared_bytes(spec, tile),
        "WEIGHT_DEPTH": spec.depth,
        "WEIGHT_COLUMNS": spec.columns,
        "TERMS": tile.terms,
        "LHS_SLOTS": tile.lhs_slots,
        "KEPT_STEPS": tile.kept_steps,
        "SPREAD": tile.spread,
        "STREAMED": int(tile.streamed),
        "WARPS_K": tile.warps_k,
        "LHS_WIDTH": min(spec.lhs_width, MAX_LHS_WIDTH),
        "RHS_BYTES": spec.rhs_width,
        "RESIDENT_BLOCKS": tile.resident,
    }
