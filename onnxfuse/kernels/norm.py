"""A normalisation's spec -> the full text of the CUDA source of its kernel."""

from __future__ import annotations

from onnxfuse.kernels.epilogue import constant, norm_functor
from onnxfuse.kernels.source import assembled, flag, without_product
from onnxfuse.schedule.norm_tile import NormSpec, NormTile

ENTRY = "onnxfuse_norm"


def emit(spec: NormSpec, tile: NormTile) -> str:
    """The CUDA source of a kernel."""
    own = f"""\
constexpr int PARTS = {spec.parts};
constexpr bool CENTRED = {flag(spec.centred)};
constexpr bool BATCHED = {flag(spec.batched)}, ACROSS = {flag(tile.across)};
constexpr float EPSILON = {constant(spec.epsilon)}, LEAST = {constant(spec.least)}, ADDED = {constant(spec.added)};
"""
    return assembled(without_product(spec, _numbers(tile), own, norm_functor(spec)), "norm/kernel.cuh")


def _numbers(tile: NormTile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "RESIDENTS": tile.residents,
        "ROW_THREADS": tile.row_threads,
        "SPAN": tile.span,
        "SPANS": tile.spans,
        "THREADS": tile.threads,
    }
