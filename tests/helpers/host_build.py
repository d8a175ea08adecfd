"""Kernel sources as libraries of this machine, by its C++ compiler and the emulator's headers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

EMULATOR = Path(__file__).parents[1] / "emulator"
HEADER = "cuda_host.h"
COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique")


def build_library(source: str, folder: Path, *options: str) -> ctypes.CDLL:
    """The library of a source that begins with an include of the emulator."""
    (folder / "kernel.cpp").write_text(source)
    headers = (f"-I{_precompiled(folder.parent)}", f"-I{EMULATOR}")
    subprocess.run([*COMPILER, *headers, *options, "-shared", "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def _precompiled(parent: Path) -> Path:
    """A folder with the emulator's header compiled, beside those of this process's tests: half of a kernel's time."""
    folder = parent / "precompiled"
    if not folder.exists():
        folder.mkdir()
        source, compiled = EMULATOR / HEADER, folder / f"{HEADER}.gch"
        subprocess.run([*COMPILER, "-x", "c++-header", str(source), "-o", str(compiled)], check=True)
    return folder
