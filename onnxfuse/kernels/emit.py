"""The text of every family's kernels, by the family's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from onnxfuse.device import DeviceSpec
from onnxfuse.kernels import (
    attention,
    cached_attention,
    gemm,
    group_norm,
    hopper,
    hopper_quantized,
    hopper_swapped,
    norm,
    pointwise,
    portable,
    quantized_small_m,
    small_m,
)
from onnxfuse.schedule.variant import AnyVariant


@dataclass(frozen=True)
class Text:
    """How a family's kernels are written.

    Attributes:
        entry: name of the function.
        emit: the CUDA source of a spec with a legal tile on a device.
    """

    entry: str
    emit: Callable[[Any, Any, DeviceSpec], str]


KEPT_TEXTS = 512  # some 80 kB each; of equal sites, and of each step from a plan to a file, they are the same
TEXTS = {
    "hopper": Text(gemm.ENTRY, lambda spec, tile, device: hopper.emit(spec, tile, device.shared_bytes)),
    "hopper_quantized": Text(
        gemm.ENTRY, lambda spec, tile, device: hopper_quantized.emit(spec, tile, device.shared_bytes)
    ),
    "hopper_swapped": Text(gemm.ENTRY, lambda spec, tile, device: hopper_swapped.emit(spec, tile, device.shared_bytes)),
    "portable": Text(gemm.ENTRY, lambda spec, tile, device: portable.emit(spec, tile)),
    "small_m": Text(gemm.ENTRY, lambda spec, tile, device: small_m.emit(spec, tile)),
    "quantized_small_m": Text(gemm.ENTRY, lambda spec, tile, device: quantized_small_m.emit(spec, tile)),
    "pointwise": Text(pointwise.ENTRY, lambda spec, tile, device: pointwise.emit(spec, tile)),
    "norm": Text(norm.ENTRY, lambda spec, tile, device: norm.emit(spec, tile)),
    "group_norm": Text(group_norm.ENTRY, lambda spec, tile, device: group_norm.emit(spec, tile)),
    "attention": Text(attention.ENTRY, lambda spec, tile, device: attention.emit(spec, tile)),
    "portable_attention": Text(attention.ENTRY, lambda spec, tile, device: attention.emit_portable(spec, tile)),
    "cached_attention": Text(cached_attention.ENTRY, lambda spec, tile, device: cached_attention.emit(spec, tile)),
    "library": Text(pointwise.ENTRY, lambda spec, tile, device: pointwise.emit(spec.epilogue, tile.pointwise)),
}


def kernel_source(variant: AnyVariant, device: DeviceSpec) -> str:
    """The CUDA source of a variant."""
    return _text(variant.family.name, variant.spec, variant.tile, device)


@lru_cache(KEPT_TEXTS)
def _text(family: str, spec: Any, tile: Any, device: DeviceSpec) -> str:
    return TEXTS[family].emit(spec, tile, device)


def kernel_entry(variant: AnyVariant) -> str:
    """The name of its function."""
    return TEXTS[variant.family.name].entry
