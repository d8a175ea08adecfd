"""The implementations of all sites -> the machine code of every kernel that they launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.site import Implementation
from onnxfuse.progress import Progress
from onnxfuse.runtime.compile import CompiledImage, compile_cached, kernel_pool, shares_compilation
from onnxfuse.settings import cache_dir


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels by source and architecture."""

    images: dict[tuple[str, str], CompiledImage]


def compile_implementations(implementations: Iterable[Implementation], progress: Progress | None = None) -> Kernels:
    """Compile each distinct kernel once, and PTX beside the architecture whose compilation makes it anyway.

    Raises:
        CompileError: NVRTC refused a kernel.
    """
    variants = [pair for implementation in implementations for pair in implementation.variants]
    wanted = {(kernel_source(variant, device), device.arch): device for device, variant in variants}
    groups = _groups(wanted)
    images: dict[tuple[str, str], CompiledImage] = {}
    folder = cache_dir()
    with kernel_pool() as pool:
        jobs = {pool.submit(compile_cached, source, devices, folder): (source, devices) for source, devices in groups}
        for job in as_completed(jobs):
            source, devices = jobs[job]
            images |= {(source, device.arch): image for device, image in zip(devices, job.result(), strict=True)}
            if progress is not None:
                progress("compiling kernels", len(images), len(wanted))
    return Kernels(images)


def _groups(wanted: Mapping[tuple[str, str], DeviceSpec]) -> list[tuple[str, tuple[DeviceSpec, ...]]]:
    """What to compile at once: each kernel for each architecture, PTX with another one where that makes it."""
    found: list[tuple[str, tuple[DeviceSpec, ...]]] = []
    beside = {source for (source, _), device in wanted.items() if shares_compilation(device)}
    for (source, arch), device in wanted.items():
        ptx = wanted.get((source, PTX)) if shares_compilation(device) else None
        if arch != PTX or source not in beside:
            found.append((source, (device,) if ptx is None else (device, ptx)))
    return found
