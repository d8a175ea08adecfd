"""Warnings about a GPU that is shared or held down, from states and from a stand-in for NVML."""

from __future__ import annotations

import ctypes

import pytest

from onnxfuse.bench import gpu_state
from onnxfuse.bench.gpu_state import GpuState, warnings_of
from onnxfuse.runtime import driver

FREE = GpuState(busy=0, processes=1, clock=1980, highest_clock=1980, reasons=())


class Nvml:
    """Answers like NVML; what is None is not supported."""

    def __init__(self, busy=0, processes=1, clock=1980, highest=1980, reasons=0, fails_to_start=0) -> None:
        self.values = {"busy": busy, "processes": processes, "clock": clock, "highest": highest, "reasons": reasons}
        self.fails_to_start, self.open = fails_to_start, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += not self.fails_to_start
        return self.fails_to_start

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, device) -> int:  # noqa: N802
        return 0 if bus == b"0000:1B:00.0" else 6

    def _put(self, name: str, pointer, kind) -> int:
        if self.values[name] is None:
            return 3
        ctypes.cast(pointer, ctypes.POINTER(kind))[0] = self.values[name]
        return 0

    def nvmlDeviceGetUtilizationRates(self, device, pointer) -> int:  # noqa: N802
        return self._put("busy", pointer, ctypes.c_uint)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, found) -> int:  # noqa: N802
        assert ctypes.sizeof(found[0]) == 24, "nvmlProcessInfo_t"
        return self._put("processes", count, ctypes.c_uint)

    def nvmlDeviceGetClockInfo(self, device, kind: int, pointer) -> int:  # noqa: N802
        assert kind == 1, "NVML_CLOCK_SM"
        return self._put("clock", pointer, ctypes.c_uint)

    def nvmlDeviceGetMaxClockInfo(self, device, kind: int, pointer) -> int:  # noqa: N802
        return self._put("highest", pointer, ctypes.c_uint)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device, pointer) -> int:  # noqa: N802
        return self._put("reasons", pointer, ctypes.c_ulonglong)


def state_of(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, bus: str | None = "0000:1B:00.0") -> GpuState | None:
    monkeypatch.setattr(gpu_state, "_library", lambda: nvml)
    monkeypatch.setattr(driver, "bus_id", lambda index: bus)
    state = gpu_state.gpu_state()
    assert nvml.open == 0, "NVML is shut down again"
    return state


def test_a_free_gpu_at_its_highest_clock_is_not_warned_of() -> None:
    assert warnings_of(FREE, FREE) == ()
    assert warnings_of(None, None) == ()


@pytest.mark.parametrize(
    ("before", "during", "words"),
    [
        ({"busy": 60}, {}, ["shared", "60 % busy"]),
        ({}, {"processes": 3}, ["shared", "3 processes"]),
        ({}, {"clock": 1530, "reasons": ("power limit",)}, ["throttled", "1530 MHz of 1980 MHz", "power limit"]),
        ({}, {"clock": 1000}, ["throttled", "1000 MHz of 1980 MHz"]),
    ],
)
def test_each_fault_has_its_sentence(before: dict, during: dict, words: list[str]) -> None:
    (warning,) = warnings_of(GpuState(**vars(FREE) | before), GpuState(**vars(FREE) | during))
    assert all(word in warning for word in words)


def test_a_busy_gpu_is_ours_while_we_run_and_a_step_below_the_highest_clock_is_nothing() -> None:
    assert warnings_of(FREE, GpuState(busy=100, processes=1, clock=1965, highest_clock=1980, reasons=())) == ()


def test_what_nvml_says_is_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(monkeypatch, Nvml(busy=7, processes=2, clock=1500, highest=1980, reasons=0x4 | 0x20 | 0x1))
    assert state == GpuState(7, 2, 1500, 1980, ("power limit", "too hot (driver)"))


def test_what_nvml_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(monkeypatch, Nvml(None, None, None, None, None))
    assert state == GpuState(None, None, None, None, ())
    assert warnings_of(state, state) == ()


def test_without_nvml_or_device_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(monkeypatch, Nvml(), bus=None) is None
    assert state_of(monkeypatch, Nvml(), bus="0000:FF:00.0") is None
    assert state_of(monkeypatch, Nvml(fails_to_start=9)) is None
    monkeypatch.setattr(gpu_state, "_library", lambda: None)
    assert gpu_state.gpu_state() is None


class Driver:
    """A driver that knows one graph of kernels, copies and host functions."""

    KINDS = (0, 0, 1, 2, 0, 3)

    def cuGraphGetNodes(self, graph, nodes, count) -> int:  # noqa: N802
        pointer = ctypes.cast(count, ctypes.POINTER(ctypes.c_size_t))
        if nodes is None:
            pointer[0] = len(self.KINDS)
        else:
            nodes[:] = range(1, len(self.KINDS) + 1)
        return 0

    def cuGraphNodeGetType(self, node, kind) -> int:  # noqa: N802
        ctypes.cast(kind, ctypes.POINTER(ctypes.c_int))[0] = self.KINDS[node.value - 1]
        return 0


def test_launches_are_the_kernel_nodes_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", Driver)
    assert driver.kernel_nodes(1) == 3
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert driver.kernel_nodes(1) is None


class Place(ctypes.Structure):
    """One end of a `CUDA_MEMCPY3D`, as cuda.h has it."""

    _fields_ = (
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t), ("lod", ctypes.c_size_t),
        ("kind", ctypes.c_uint), ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p), ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class Copy(ctypes.Structure):
    """A `CUDA_MEMCPY3D`."""

    _fields_ = (
        ("source", Place), ("target", Place), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )  # fmt: skip


PINNED, UNKNOWN = 0x1000, 0x2000  # addresses: of the host's memory, and of memory that the driver never saw


class Copying(Driver):
    """Whose graph has one copy, between memories of these types; of an address alone it knows what is PINNED."""

    def __init__(self, source: int, target: int, address: int = 0) -> None:
        self.copy = Copy(source=Place(kind=source), target=Place(kind=target, device=address))

    def cuGraphMemcpyNodeGetParams(self, node, copy) -> int:  # noqa: N802
        assert self.KINDS[node.value - 1] == 1
        assert ctypes.sizeof(copy) == ctypes.sizeof(self.copy)
        ctypes.memmove(copy, ctypes.byref(self.copy), ctypes.sizeof(self.copy))
        return 0

    def cuPointerGetAttribute(self, kind, attribute, address) -> int:  # noqa: N802
        assert attribute == 2
        ctypes.cast(kind, ctypes.POINTER(ctypes.c_uint))[0] = HOST if address.value == PINNED else DEVICE
        return int(address.value == UNKNOWN)


HOST, DEVICE, UNIFIED = 1, 2, 4


@pytest.mark.parametrize(
    ("source", "target", "address", "told"),
    [
        (DEVICE, HOST, 0, True), (HOST, DEVICE, 0, False), (DEVICE, DEVICE, 0, False), (UNIFIED, UNIFIED, PINNED, True),
        (UNIFIED, UNIFIED, UNKNOWN, True), (UNIFIED, UNIFIED, 0x3000, False), (HOST, UNIFIED, 0x3000, False),
    ],
)  # fmt: skip
def test_a_graph_that_copies_to_the_host_is_known(
    source: int, target: int, address: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_library", lambda: Copying(source, target, address))
    assert driver.copies_to_host(1) == told
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert not driver.copies_to_host(1)
