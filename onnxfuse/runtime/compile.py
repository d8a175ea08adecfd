"""CUDA source -> machine code, by NVRTC and pip packages alone: no CUDA toolkit, driver or GPU is needed."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from onnxfuse.device import ARCHITECTURES, PTX, DeviceSpec
from onnxfuse.errors import CompileError
from onnxfuse.runtime.cache import Entry, entry_key, read_entry, write_entry
from onnxfuse.runtime.cupy_folder import give_cupy_a_folder
from onnxfuse.settings import compile_jobs

SOURCE_NAME = "kernel.cu"
HEADER = "cuda_fp16.h"
_FIRST_USE = threading.Lock()
HEADER_PACKAGE = "nvidia-cuda-runtime==13.0.*"
NVRTC_PACKAGE = "nvidia-cuda-nvrtc==13.0.*"

_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_COMPILE_TIME = re.compile(r"^.*Compile time = .*$\n?", re.MULTILINE)
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class CompiledImage:
    """One compiled kernel.

    Attributes:
        data: cubin, or PTX text without its final zero byte.
        log: what the compiler printed.
        registers: of one thread; None for PTX, which has none yet.
        spill_bytes: stores and loads of one thread that registers could not hold; None for PTX.
        local_bytes: local memory of one thread; None for PTX.
    """

    data: bytes
    log: str
    registers: int | None
    spill_bytes: int | None
    local_bytes: int | None


def compile_cached(source: str, devices: Sequence[DeviceSpec], cache_dir: Path | None) -> list[CompiledImage]:
    """Compile one kernel once, or read it from the cache; `cache_dir` None works without one.

    Args:
        source: CUDA C++.
        devices: one architecture, or one and PTX of the same number: see `shares_compilation`.
        cache_dir: folder of the cache.

    Raises:
        CompileError: NVRTC or its headers are missing, or it refused the source.
    """
    if cache_dir is None:
        return compile_images(source, devices)
    version = nvrtc_version()
    folders = [cache_dir / entry_key(source, compile_options(device), version) for device in devices]
    entries = [read_entry(folder, _image_name(device)) for folder, device in zip(folders, devices, strict=True)]
    if None not in entries:
        return [image_of(entry.data, entry.log) for entry in entries if entry is not None]
    images = compile_images(source, devices)
    for folder, device, image in zip(folders, devices, images, strict=True):
        meta = {
            "arch": device.arch, "options": compile_options(device), "nvrtc": version, "registers": image.registers
        }  # fmt: skip
        write_entry(folder, _image_name(device), Entry(source, image.data, image.log), meta)
    return images


@contextmanager
def kernel_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for work on kernels: behind an error, or Ctrl-C, it waits for what has begun, and nothing else begins."""
    pool = ThreadPoolExecutor(compile_jobs())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _image_name(device: DeviceSpec) -> str:
    return "kernel.ptx" if device.arch == PTX else "kernel.cubin"


def shares_compilation(device: DeviceSpec) -> bool:
    """Whether PTX falls off on the way to an architecture's machine code: the text is that of its virtual one."""
    return device.arch != PTX and device.flavour == 0 and device.capability == ARCHITECTURES[PTX].capability


def compile_source(source: str, device: DeviceSpec) -> CompiledImage:
    """Compile one kernel for one architecture; as `compile_images`."""
    return compile_images(source, (device,))[0]


def compile_images(source: str, devices: Sequence[DeviceSpec]) -> list[CompiledImage]:
    """Compile one kernel once. Safe to call from several threads at once: NVRTC runs without Python's lock.

    Args:
        source: CUDA C++.
        devices: one architecture, or one that shares its compilation and PTX.

    Raises:
        CompileError: NVRTC or its headers are missing, or it refused the source; the source is then written to a file.
    """
    nvrtc = _nvrtc()
    with _program(nvrtc, source) as program:
        try:
            nvrtc.compileProgram(program, compile_options(devices[0]))
            log = _log(nvrtc, program)
            return [
                image_of(_ptx(nvrtc, program), "") if device.arch == PTX else image_of(_cubin(nvrtc, program), log)
                for device in devices
            ]
        except nvrtc.NVRTCError as error:
            log = _log(nvrtc, program)
            raise CompileError(f"NVRTC: {error}; source in {_keep(source)}\n{log}", log) from None


@contextmanager
def _program(nvrtc: ModuleType, source: str) -> Iterator[int]:
    program = nvrtc.createProgram(source, SOURCE_NAME, (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)


def compile_options(device: DeviceSpec) -> tuple[str, ...]:
    """NVRTC's options for one architecture.

    Raises:
        CompileError: the CUDA headers are not installed.
    """
    arch = f"compute_{device.capability}" if device.arch == PTX else device.arch
    # -default-device: lambdas inside of device functions need no annotation. -v: ptxas reports registers and spills.
    return (f"-arch={arch}", "-std=c++17", "-default-device", f"-I{header_folder()}", "--ptxas-options=-v")


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC.

    Raises:
        CompileError: NVRTC is not installed, or cannot compile.
    """
    major, minor = _nvrtc().getVersion()
    return major, minor


def image_of(data: bytes, log: str) -> CompiledImage:
    """An image with the figures that its log reports."""
    stack, registers = _STACK.search(log), _REGISTERS.search(log)
    return CompiledImage(
        data=data,
        log=log,
        registers=int(registers[1]) if registers else None,
        spill_bytes=int(stack[2]) + int(stack[3]) if stack else None,
        local_bytes=int(stack[1]) if stack else None,
    )


@cache
def header_folder() -> Path:
    """The folder of cuda_fp16.h, from the pip package or else an installed toolkit.

    Raises:
        CompileError: it is not installed.
    """
    from cuda import pathfinder

    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None or not (Path(folder) / HEADER).is_file():
        raise CompileError(f"{HEADER} is not installed; it comes with the pip package {HEADER_PACKAGE}")
    return Path(folder)


def _nvrtc() -> ModuleType:
    """NVRTC, ready for several threads: two first compilations at once would fail to open its builtins."""
    with _FIRST_USE:
        return _first_nvrtc()


@cache
def _first_nvrtc() -> ModuleType:
    """CuPy's binding, which finds the library in the pip packages and needs no driver."""
    try:
        give_cupy_a_folder()
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompileError(f"NVRTC does not load: {error}; it comes with the pip package {NVRTC_PACKAGE}") from error
    module: ModuleType = nvrtc
    _warm_up(module)
    return module


def _warm_up(nvrtc: ModuleType) -> None:
    """Compile nothing, which opens the builtins: a library of its own beside NVRTC."""
    with _program(nvrtc, "") as program:
        try:
            nvrtc.compileProgram(program, ())
        except nvrtc.NVRTCError as error:
            log = _log(nvrtc, program)
            advice = f"reinstall the pip package {NVRTC_PACKAGE}, its builtins may be missing"
            raise CompileError(f"NVRTC cannot compile: {error}; {advice}\n{log}".rstrip(), log) from None


def _log(nvrtc: ModuleType, program: int) -> str:
    """What the compiler printed, but for how long it took: equal compilations have equal logs."""
    text: str = nvrtc.getProgramLog(program)
    return _COMPILE_TIME.sub("", text.rstrip("\0 \n"))


def _ptx(nvrtc: ModuleType, program: int) -> bytes:
    text: str | bytes = nvrtc.getPTX(program)
    return (text.encode() if isinstance(text, str) else text).rstrip(b"\0")


def _cubin(nvrtc: ModuleType, program: int) -> bytes:
    """CuPy cuts the last byte off a cubin as if it ended a string; that byte is a zero of the last program header."""
    data: bytes = nvrtc.getCUBIN(program)
    return data + b"\0"


def _keep(source: str) -> Path:
    """Write a refused source to where the error message can point."""
    with tempfile.NamedTemporaryFile("w", prefix="onnxfuse-", suffix=".cu", delete=False) as file:
        file.write(source)
    return Path(file.name)
