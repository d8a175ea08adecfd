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
COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique")


def build_library(source: str, folder: Path, *options: str) -> ctypes.CDLL:
    """The library of a source that begins with an include of the emulator; a copy in `folder`, with its own memory."""
    library = folder / "kernel.so"
    name = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()
    (folder / "kernel.cpp").write_text(source)
    compiled = _of_this_run() / f"{name}.so"
    if not compiled.exists():
        headers = (f"-I{_precompiled()}", f"-I{EMULATOR}")
        command = [*COMPILER, *headers, *options, "-shared", "kernel.cpp", "-o", library.name]
        subprocess.run(command, cwd=folder, check=True)
        _publish(library, compiled)
    else:
        shutil.copy(compiled, library)
    return ctypes.CDLL(str(library))


def _precompiled() -> Path:
    """A folder with the emulator's header compiled: half of a kernel's time."""
    folder = _of_this_run()
    compiled = folder / f"{HEADER}.gch"
    if not compiled.exists():
        own = folder / f"{HEADER}.{os.getpid()}"
        subprocess.run([*COMPILER, "-x", "c++-header", str(EMULATOR / HEADER), "-o", str(own)], check=True)
        own.rename(compiled)
    return folder


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
