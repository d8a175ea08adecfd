"""What a plan may know of a GPU. Passed in, never asked for: the plan and the kernels see no driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfuse.errors import DeviceError, SettingError

PTX = "ptx"
SECTOR = 32  # bytes that memory delivers at once at least
CACHE_LINE = 128  # bytes


@dataclass(frozen=True)
class DeviceSpec:
    """One architecture to compile for.

    Attributes:
        arch: `sm_80`, `sm_90a`, ..., or `ptx`: an intermediate form that the driver compiles on any later GPU.
        multiprocessors: streaming multiprocessors of a typical chip of this architecture.
        shared_bytes: shared memory that one block may use, in bytes.
    """

    arch: str
    multiprocessors: int
    shared_bytes: int

    @property
    def capability(self) -> int:
        """Compute capability as one number, 90 for sm_90a; PTX is compiled for 80 and runs on all later chips."""
        return 80 if self.arch == PTX else int(re.sub(r"\D", "", self.arch))

    @property
    def flavour(self) -> int:
        """Where it runs: 0 on later chips of the same major version, 1 on exactly this one, 2 (PTX) on any later."""
        if self.arch == PTX:
            return 2
        return 1 if self.arch.endswith("a") else 0


# Shared memory per block: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
ARCHITECTURES = {
    spec.arch: spec
    for spec in (
        DeviceSpec("sm_80", 108, 163 * 1024),
        DeviceSpec("sm_86", 84, 99 * 1024),
        DeviceSpec("sm_89", 128, 99 * 1024),
        DeviceSpec("sm_90a", 132, 227 * 1024),
        DeviceSpec("sm_100", 148, 227 * 1024),
        DeviceSpec("sm_120", 170, 99 * 1024),
        DeviceSpec(PTX, 108, 99 * 1024),
    )
}
WITHOUT_GPU = ("sm_80", "sm_90a", PTX)


def spec_of(arch: str) -> DeviceSpec:
    """Look up an architecture by the name that a user types.

    Raises:
        SettingError: the name is not in the table.
    """
    if arch not in ARCHITECTURES:
        raise SettingError(f"unknown architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def nearest(capability: int) -> str:
    """The architecture whose code a GPU of a compute capability runs: the newest of its own major version, else PTX."""
    own = [spec for spec in ARCHITECTURES.values() if spec.arch != PTX and spec.capability <= capability]
    exact = [spec for spec in own if spec.capability == capability]
    related = [spec for spec in own if spec.capability // 10 == capability // 10 and spec.flavour == 0]
    return max(exact or related, key=lambda spec: spec.capability, default=ARCHITECTURES[PTX]).arch


def resolve(arch: str | Sequence[str] | None, at_hand: Callable[[], Sequence[str]]) -> tuple[DeviceSpec, ...]:
    """The architectures that a user asks for; `at_hand` names those of the machine's GPUs, and called only if needed.

    Each comes once, the newest first and PTX last, however they were given: equal wishes make equal files, and a GPU
    that runs the code of several takes the newest.

    Raises:
        SettingError: an unknown name, or `native` on a machine without a GPU.
    """
    names = [] if arch is None else (arch.split(",") if isinstance(arch, str) else list(arch))
    resolved: list[str] = []
    for name in (name.strip() for name in names or ["native"]):
        found = list(at_hand()) if name == "native" else [name]
        if not found and names:
            raise SettingError("no GPU at hand: name the architectures, for example --arch sm_90a")
        resolved += found or WITHOUT_GPU
    wanted = {spec_of(name) for name in resolved}
    return tuple(sorted(wanted, key=lambda spec: (spec.arch == PTX, -spec.capability)))


def tuning_device(devices: Sequence[DeviceSpec], at_hand: Sequence[str]) -> DeviceSpec:
    """The architecture that can be measured: that of the machine's first GPU.

    Raises:
        DeviceError: there is no GPU.
        SettingError: it is not among the architectures to compile for.
    """
    if not at_hand:
        raise DeviceError("tuning measures on a GPU, and there is none; leave out --tune and the cost model decides")
    local = spec_of(at_hand[0])
    if local not in devices:
        raise SettingError(f"tuning measures on this machine's {local.arch}, which is not among the architectures")
    return local
