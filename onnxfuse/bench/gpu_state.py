"""Whether a GPU can be timed now: who else uses it, and whether its clock is held down; from NVML, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnxfuse.runtime import driver

SLOW_CLOCK = 0.95  # of the highest; a GPU moves a step or two below it without being held down
BUSY = 10  # percent; a display or a monitor may take so much
SM_CLOCK = 1  # nvmlClockType_t
MAX_PROCESSES = 64

# nvmlClocksEventReasons: why a clock is lower than it could be. Idleness and a display are no reasons to warn.
REASONS = {
    0x002: "application clocks are set",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "clocks are synchronised with another GPU",
    0x020: "too hot (driver)",
    0x040: "too hot (hardware)",
    0x080: "power brake",
}


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last moments."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of version 3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuState:
    """What NVML says of one GPU; None where it does not.

    Attributes:
        busy: percent of the last moments in which a kernel ran.
        processes: processes with memory on it, this one among them.
        clock: of the multiprocessors, in MHz.
        highest_clock: that this GPU can have.
        reasons: why the clock is lower than it could be.
    """

    busy: int | None
    processes: int | None
    clock: int | None
    highest_clock: int | None
    reasons: tuple[str, ...]


def warnings_of(before: GpuState | None, during: GpuState | None) -> tuple[str, ...]:
    """What is against trusting times, a sentence each.

    Args:
        before: the state before the first run, when nothing of this process should keep the GPU busy.
        during: the state right behind a run, when the clock is that of the runs.
    """
    return tuple(_warnings(before, during))


def _warnings(before: GpuState | None, during: GpuState | None) -> Iterator[str]:
    if before is not None and before.busy is not None and before.busy > BUSY:
        yield f"the GPU is shared: it was {before.busy} % busy before the first run"
    if during is None:
        return
    if during.processes is not None and during.processes > 1:
        yield f"the GPU is shared: {during.processes} processes have memory on it"
    if during.clock is not None and during.highest_clock and during.clock < SLOW_CLOCK * during.highest_clock:
        why = f" ({', '.join(during.reasons)})" if during.reasons else ""
        yield f"the GPU is throttled: its clock is {during.clock} MHz of {during.highest_clock} MHz{why}"


def gpu_state(index: int = 0) -> GpuState | None:
    """The state of a CUDA device right now; None without NVML. Ask while the GPU is busy: an idle one clocks down."""
    nvml, bus = _library(), driver.bus_id(index)
    if nvml is None or bus is None or nvml.nvmlInit_v2():
        return None
    try:
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device)):
            return None
        return GpuState(
            busy=_busy(nvml, device),
            processes=_processes(nvml, device),
            clock=_number(nvml.nvmlDeviceGetClockInfo, device, SM_CLOCK),
            highest_clock=_number(nvml.nvmlDeviceGetMaxClockInfo, device, SM_CLOCK),
            reasons=_reasons(nvml, device),
        )
    finally:
        nvml.nvmlShutdown()


def _library() -> Any:
    """NVML, which comes with the driver; None without it."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def _number(function: Any, device: ctypes.c_void_p, *arguments: int) -> int | None:
    value = ctypes.c_uint()
    return None if function(device, *arguments, ctypes.byref(value)) else value.value


def _busy(nvml: Any, device: ctypes.c_void_p) -> int | None:
    found = _Utilization()
    return None if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(found)) else found.gpu


def _processes(nvml: Any, device: ctypes.c_void_p) -> int | None:
    """Processes on the GPU. In a container NVML may hide this one, or know it by another number: it counts as one."""
    count, found = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
        return None
    return max(count.value, 1)


def _reasons(nvml: Any, device: ctypes.c_void_p) -> tuple[str, ...]:
    bits = ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(bits)):
        return ()
    return tuple(text for bit, text in REASONS.items() if bits.value & bit)
