"""A pointwise spec -> the full text of the CUDA source of the epilogue-only kernel."""

from __future__ import annotations

from onnxfuse.kernels.epilogue import pointwise_functor
from onnxfuse.kernels.source import assembled, without_product
from onnxfuse.schedule.pointwise_tile import PointwiseSpec, PointwiseTile

ENTRY = "onnxfuse_pointwise"


def emit(spec: PointwiseSpec, tile: PointwiseTile) -> str:
    """The CUDA source of a kernel."""
    return assembled(without_product(spec, _numbers(tile), "", pointwise_functor(spec)), "pointwise/kernel.cuh")


def _numbers(tile: PointwiseTile) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SPAN": tile.span, "THREADS": tile.threads}
