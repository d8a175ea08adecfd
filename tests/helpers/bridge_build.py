"""Finds the bridge's library, or builds it, and builds the stand-in for the CUDA driver."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from onnxfuse.errors import DeviceError
from onnxfuse.runtime.session import library_path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "onnxfuse"


@functools.cache
def bridge_library() -> Path:
    """The library of the installed package, or one built from the sources at hand where those are newer."""
    with contextlib.suppress(DeviceError):
        installed = Path(library_path())
        if all(source.stat().st_mtime < installed.stat().st_mtime for source in _sources()):
            return installed
    return _built("libonnxfuse.so", _sources(), _cmake)


@functools.cache
def sanitized_library() -> Path:
    """The same sources with the address and undefined-behaviour sanitizers."""
    return _built("libonnxfuse.so", _sources(), _cmake_sanitized)


def sanitizer_environment() -> dict[str, str]:
    """The environment in which a Python process loads that library: faults end it, and Python's buffers are guarded."""
    # The sanitizer catches throws, so it must find the C++ runtime when the process starts.
    names = ("libasan.so", "libstdc++.so")
    paths = [subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip() for name in names]
    return {
        "LD_PRELOAD": " ".join(paths),
        "PYTHONMALLOC": "malloc",  # buffers with red zones around them
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


@functools.cache
def fake_driver_folder() -> Path:
    """A folder whose libcuda.so.1 computes on the CPU; for LD_LIBRARY_PATH."""
    return _built("libcuda.so.1", [ROOT / "tests" / "helpers" / "fake_libcuda.cc"], _fake_driver).parent


@functools.cache
def fake_cublaslt() -> Path:
    """A stand-in for cuBLASLt, which computes on the CPU; the bridge finds it once a process has loaded it."""
    return _built("libcublasLt.so.13", [ROOT / "tests" / "helpers" / "fake_cublaslt.cc"], _fake_cublaslt)


@functools.cache
def custom_op_library() -> Path:
    """A shared library of a user's own operator, `own::Double`."""
    sources = [ROOT / "tests" / "custom_op.cc", PACKAGE / "runtime" / "bridge" / "ort_abi.h"]
    return _built("libcustom_op.so", sources, _custom_op)


def _sources() -> list[Path]:
    return [*sorted((PACKAGE / "runtime" / "bridge").iterdir()), ROOT / "CMakeLists.txt"]


def _built(name: str, sources: list[Path], build) -> Path:
    """A file in a folder named after the sources' content, so that parallel and later test runs share one build."""
    arguments = PACKAGE / "kernels" / "cuda" / "common" / "arguments.cuh"
    content = b"\0".join(path.read_bytes() for path in (*sources, arguments))
    folder = Path(tempfile.gettempdir()) / f"onnxfuse-{build.__name__}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not (folder / name).exists():
        scratch = Path(tempfile.mkdtemp(prefix="onnxfuse-build-"))
        build(scratch)
        folder.mkdir(exist_ok=True)
        os.replace(scratch / name, folder / name)  # noqa: PTH105 (atomic: another worker may build the same)
        shutil.rmtree(scratch)
    return folder / name


def _cmake(folder: Path, *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    _run("cmake", "-S", ROOT, "-B", folder, *generator, *options)
    _run("cmake", "--build", folder)


def _cmake_sanitized(folder: Path) -> None:
    _cmake(folder, "-DONNXFUSE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug")


def _fake_driver(folder: Path) -> None:
    options = ("-std=c++17", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1")
    _run("c++", *options, f"-I{PACKAGE}", ROOT / "tests" / "helpers" / "fake_libcuda.cc", "-o", folder / "libcuda.so.1")


def _fake_cublaslt(folder: Path) -> None:
    options = ("-std=c++17", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcublasLt.so.13")
    _run("c++", *options, ROOT / "tests" / "helpers" / "fake_cublaslt.cc", "-o", folder / "libcublasLt.so.13")


def _custom_op(folder: Path) -> None:
    options = ("-std=c++17", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    source = ROOT / "tests" / "custom_op.cc"
    _run("c++", *options, f"-I{PACKAGE / 'runtime' / 'bridge'}", source, "-o", folder / "libcustom_op.so")


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
