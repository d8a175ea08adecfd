"""Kernels of tests, compiled in parallel and loaded without ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.kernels.emit import ENTRY
from onnxfuse.runtime.compile import compile_source

Sources = Mapping[str, tuple[str, int]]
"""Name -> CUDA source, and bytes of dynamic shared memory."""


def load_kernels(sources: Sources, device: DeviceSpec, folder: Path) -> dict[str, object]:
    """Functions of the GPU by the names of their sources; `folder` keeps the images, which CuPy reads from files."""
    import cupy

    def compiled(name: str) -> Path:
        path = folder / f"{name}.{'ptx' if device.arch == PTX else 'cubin'}"
        path.write_bytes(compile_source(sources[name][0], device).data)
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(compiled, sources))
    loaded = {}
    for (name, (_, shared)), path in zip(sources.items(), paths, strict=True):
        function = cupy.RawModule(path=str(path)).get_function(ENTRY)
        function.max_dynamic_shared_size_bytes = shared
        loaded[name] = function
    return loaded
