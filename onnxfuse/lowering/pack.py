"""The implementations of all sites and their compiled kernels -> the archive, and which kernel each launches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from onnxfuse.graph.archive import Record, pack
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.launch_record import launch_record
from onnxfuse.lowering.site import Implementation


def pack_implementations(implementations: Sequence[Implementation], kernels: Kernels) -> tuple[bytes, list[str]]:
    """The archive, and the kernel id of each implementation: those with equal launch rules share one."""
    names = [_kernel_name(implementation) for implementation in implementations]
    records: dict[str, list[Record]] = {}
    for implementation, name in zip(implementations, names, strict=True):
        if name not in records:
            records[name] = [
                launch_record(name, device, variant, kernels) for device, variant in implementation.variants
            ]
    return pack([record for group in records.values() for record in group]), names


def _kernel_name(implementation: Implementation) -> str:
    parts = [
        (device.arch, kernel_source(variant, device), str(variant.min_m), str(variant.max_m))
        for device, variant in implementation.variants
    ]
    return hashlib.sha256("\0".join(text for part in parts for text in part).encode()).hexdigest()[:16]
