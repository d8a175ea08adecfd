"""What the CUDA driver says of this machine, asked through ctypes: running a model needs neither CuPy nor a toolkit."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

from onnxfuse.device import nearest

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_KERNEL_NODE, _COPY_NODE = 0, 1  # CUgraphNodeType
_HOST, _UNIFIED = 1, 4  # CUmemorytype
_MEMORY_TYPE = 2  # CUpointer_attribute
_COPY_WORDS, _COPY_TO, _COPY_ADDRESS = 25, 15, 17  # CUDA_MEMCPY3D in words of 8 bytes: dstMemoryType, dstDevice
_NAME_BYTES = 256
_BUS_BYTES = 16
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def device_count() -> int:
    """CUDA devices that this process may use; 0 without a driver."""
    cuda = _library()
    count = ctypes.c_int()
    return count.value if cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def device_name(index: int = 0) -> str | None:
    """The device's marketing name, `NVIDIA H200`; None without such a device."""
    cuda = _library()
    if cuda is None or index >= device_count():
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetName(name, _NAME_BYTES, device):
        return None
    return name.value.decode(errors="replace")


def bus_id(index: int = 0) -> str | None:
    """Where the device is on the PCI bus, `0000:1B:00.0`; None without such a device."""
    cuda = _library()
    if cuda is None or index >= device_count():
        return None
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_BUS_BYTES)
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetPCIBusId(text, _BUS_BYTES, device):
        return None
    return text.value.decode()


def kernel_nodes(graph: int) -> int | None:
    """How many nodes of a CUDA graph (a `CUgraph`) launch a kernel; None where the driver does not say."""
    cuda = _library()
    if cuda is None:
        return None
    nodes = _nodes(cuda, graph)
    return None if nodes is None else sum(_node_type(cuda, node) == _KERNEL_NODE for node in nodes)


def copies_to_host(graph: int) -> bool:
    """Whether a CUDA graph (a `CUgraph`) copies to the host's memory: whoever waits for that has read it already."""
    cuda = _library()
    if cuda is None:
        return False
    nodes = _nodes(cuda, graph) or []
    return any(_node_type(cuda, node) == _COPY_NODE and _is_to_host(cuda, node) for node in nodes)


def _is_to_host(cuda: ctypes.CDLL, node: int | None) -> bool:
    """By the memory that a node's copy goes to; of an address alone the driver is asked whose it is."""
    copy = (ctypes.c_uint64 * _COPY_WORDS)()
    if cuda.cuGraphMemcpyNodeGetParams(ctypes.c_void_p(node), copy):
        return True
    kind, address = ctypes.c_uint(copy[_COPY_TO] & 0xFFFFFFFF), ctypes.c_uint64(copy[_COPY_ADDRESS])
    if kind.value == _UNIFIED and cuda.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, address):
        return True
    return kind.value == _HOST


def _nodes(cuda: ctypes.CDLL, graph: int) -> list[int | None] | None:
    """The nodes of a graph; None where the driver does not say."""
    count = ctypes.c_size_t()
    if cuda.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    return None if cuda.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)) else list(nodes)


def _node_type(cuda: ctypes.CDLL, node: int | None) -> int:
    kind = ctypes.c_int(-1)
    cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value


def local_architectures() -> list[str]:
    """The architecture to compile for on each of this machine's GPUs, each once; none without a driver."""
    cuda = _library()
    if cuda is None:
        return []
    capabilities = (_capability(cuda, index) for index in range(device_count()))
    return list(dict.fromkeys(nearest(capability) for capability in capabilities))


def _capability(cuda: ctypes.CDLL, index: int) -> int:
    device, value, digits = ctypes.c_int(), ctypes.c_int(), []
    cuda.cuDeviceGet(ctypes.byref(device), index)
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        digits.append(value.value)
    return digits[0] * 10 + digits[1]


def cuda_version() -> str | None:
    """The newest CUDA version that the driver supports, `13.0`; None without a driver."""
    cuda = _library()
    version = ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_version(source: Path = _KERNEL_MODULE) -> str | None:
    """The version of the kernel module, `580.65.06`; None where it cannot be read."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", source.read_text())
    except OSError:
        return None
    return found.group() if found else None


@cache
def _library() -> ctypes.CDLL | None:
    """The initialised driver; None when there is none or it finds no device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None
