"""The GPUs at hand, asked through CuPy."""

from __future__ import annotations

from onnxfuse.device import nearest


def local_architectures() -> list[str]:
    """The architecture of every GPU of this machine, each once; none where there is no driver."""
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return []
    found = (int(cupy.cuda.Device(index).compute_capability) for index in range(count))
    return list(dict.fromkeys(nearest(capability) for capability in found))
