"""A spec of a normalisation of groups of channels -> the full text of the CUDA source of its kernel."""

from __future__ import annotations

from onnxfuse.kernels.epilogue import constant, norm_functor
from onnxfuse.kernels.hopper import cluster_attribute
from onnxfuse.kernels.source import assembled, without_product
from onnxfuse.schedule.group_norm_tile import GroupNormSpec, GroupNormTile, shared_bytes

ENTRY = "onnxfuse_group_norm"


def emit(spec: GroupNormSpec, tile: GroupNormTile) -> str:
    """The CUDA source of a kernel."""
    numbers = {
        "THREADS": tile.threads,
        "HELD": tile.held,
        "SPLITS": tile.splits,
        "SHARED_BYTES": shared_bytes(tile),
    }
    own = f"""\
constexpr float EPSILON = {constant(spec.epsilon)};
#define ONNXFUSE_CLUSTER {cluster_attribute(tile.splits)}
"""
    return assembled(without_product(spec, numbers, own, norm_functor(spec)), "group_norm/kernel.cuh")
