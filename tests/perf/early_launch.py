"""A launch as the bridge makes it (runtime/bridge/launch.cc): beside the end of the last kernel where that pays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.kernel_family import ANY_DEPTH, Launch

STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
VALUE_WORDS = 8  # a launch attribute's value has 64 bytes


class Attribute(ctypes.Structure):
    """`CUlaunchAttribute` of cuda.h, behind whose number the value begins at 8 bytes."""

    _fields_ = (("number", ctypes.c_uint64), ("value", ctypes.c_uint64 * VALUE_WORDS))


class Config(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def starts_early(rule: Launch, tiles: int, k: int, device: DeviceSpec) -> bool:
    """Whether the bridge launches a kernel of so many tiles of depth k beside the end of the one before it."""
    if rule.early_depth in (0, ANY_DEPTH):
        return rule.early_depth > 0
    together = max(device.multiprocessors // rule.cluster, 1) if rule.cluster else 1
    is_full = rule.cluster > 0 and 4 * tiles >= 3 * together
    depth = max(rule.early_depth, rule.full_early_depth) if is_full else rule.early_depth
    return -(-tiles // together) * k <= depth


def launch(
    function: Any, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[np.ndarray], early: bool
) -> None:
    """Launch a CuPy kernel on the current stream, its arguments being the bytes of arrays.

    Raises:
        RuntimeError: the driver refused an early launch.
    """
    if not early:
        function((blocks, 1, 1), (threads, 1, 1), tuple(arguments), shared_mem=shared_bytes)
        return
    attribute = Attribute(STARTS_EARLY, (ctypes.c_uint64 * VALUE_WORDS)(1))
    config = Config(
        (blocks, 1, 1), (threads, 1, 1), shared_bytes, cupy.cuda.get_current_stream().ptr, ctypes.pointer(attribute), 1
    )
    pointers = (ctypes.c_void_p * len(arguments))(*(each.ctypes.data for each in arguments))
    code = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function.kernel.ptr), pointers, None
    )
    if code:
        raise RuntimeError(f"cuLaunchKernelEx: error {code}")
