"""Kernel sources as libraries of this machine, by its C++ compiler and the emulator's headers.

The workers of one run share what is compiled: many tests run one kernel, each with other numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

EMULATOR = Path(__file__).parents[1] / "emulator"
HEADER = "cuda_host.h"
RUNTIME = "emulator.cc"  # the same for all kernels
COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique")


def build_library(source: str, folder: Path, *options: str) -> ctypes.CDLL:
    """The library of a source that begins with an include of the emulator; a copy in `folder`, with its own memory."""
    library = folder / "kernel.so"
    name = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()
    (folder / "kernel.cpp").write_text(source)
    compiled = _of_this_run() / f"{name}.so"
    if not compiled.exists():
        headers = (f"-I{_made(HEADER, '.gch', '-x', 'c++-header').parent}", f"-I{EMULATOR}")
        runtime = str(_made(RUNTIME, ".o", "-O2", "-c"))
        command = [*COMPILER, *headers, *options, "-shared", "kernel.cpp", runtime, "-o", library.name]
        subprocess.run(command, cwd=folder, check=True)
        _publish(library, compiled)
    else:
        shutil.copy(compiled, library)
    return ctypes.CDLL(str(library))


def _made(name: str, ending: str, *options: str) -> Path:
    """What the compiler makes of a file of the emulator, once for all kernels."""
    compiled = _of_this_run() / f"{name}{ending}"
    if not compiled.exists():
        own = compiled.with_suffix(f".{os.getpid()}")
        subprocess.run([*COMPILER, *options, str(EMULATOR / name), "-o", str(own)], check=True)
        own.rename(compiled)
    return compiled


def _of_this_run() -> Path:
    """A folder that goes with this run's: beside the kernels that it compiles for GPUs."""
    folder = Path(os.environ["ONNXFUSE_CACHE_DIR"]).with_name("emulated")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _publish(made: Path, shared: Path) -> None:
    """Put a file where other workers find it, as a whole or not at all."""
    own = shared.with_suffix(f".{os.getpid()}")
    shutil.copy(made, own)
    own.rename(shared)
