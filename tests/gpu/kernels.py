"""Kernels of tests, compiled when they are asked for and loaded without ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.runtime.compile import compile_source

Sources = Mapping[str, tuple[str, int]]
"""Name -> CUDA source, and bytes of dynamic shared memory."""


@dataclass
class Kernels:
    """Functions of the GPU by the names of their sources: a worker of many compiles those of its own tests alone.

    Attributes:
        folder: keeps the images, which CuPy reads from files.
    """

    sources: Sources
    device: DeviceSpec
    folder: Path
    _loaded: dict[str, object] = field(default_factory=dict)

    def __getitem__(self, name: str) -> object:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> object:
        import cupy

        source, shared = self.sources[name]
        path = self.folder / f"{name}.{'ptx' if self.device.arch == PTX else 'cubin'}"
        path.write_bytes(compile_source(source, self.device).data)
        function = cupy.RawModule(path=str(path)).get_function(ENTRY)
        function.max_dynamic_shared_size_bytes = shared
        return function
