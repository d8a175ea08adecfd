"""The forms of all sites and their compiled kernels -> the archive, and which kernel each form launches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from onnxfuse.graph.archive import Record, pack
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.launch_record import launch_record
from onnxfuse.lowering.site import Form


def pack_forms(forms: Sequence[Form], kernels: Kernels) -> tuple[bytes, list[str]]:
    """The archive, and the kernel id of each form: those with equal launch rules share one."""
    names = [_kernel_name(form) for form in forms]
    records: dict[str, list[Record]] = {}
    for form, name in zip(forms, names, strict=True):
        if name not in records:
            records[name] = [launch_record(name, device, variant, kernels) for device, variant in form.variants]
    return pack([record for group in records.values() for record in group]), names


def _kernel_name(form: Form) -> str:
    parts = [
        (device.arch, kernel_source(variant, device), str(variant.min_m), str(variant.max_m))
        for device, variant in form.variants
    ]
    return hashlib.sha256("\0".join(text for part in parts for text in part).encode()).hexdigest()[:16]
