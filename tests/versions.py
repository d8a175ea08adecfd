"""The wheel in empty environments, with each version of ONNX Runtime that is supported.

    python -m tests.versions [VERSION ...]

`python -m build` makes the wheel from the source distribution. It is installed, with everything that it depends on, in
a new virtual environment; each version of ONNX Runtime goes to a folder of its own before that. There, with no compiler
on PATH, the command line fuses and verifies a model, the installed library is loaded, and sessions run fused nodes over
the stand-in for the CUDA driver. The exit code is 1 when a version fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.bridge_build import ROOT, fake_driver_folder

# 1.28 does not find the archive from inside a branch or loop, and 1.26 mixes up the overloads of a function, which the
# fallback bodies of fused nodes are.
OLDEST = "1.29"
NEWEST = ("1.32", "1.31", "1.30", OLDEST)
MODEL = ROOT / "models" / "ff_geglu.onnx"
SESSIONS = ("runs", "scopes", "runs_behind_a_product", "lifetimes", "load_errors", "run_errors")
USE = f"""
import onnxfuse, onnxruntime, pathlib, sys
assert pathlib.Path(onnxfuse.__file__).is_relative_to(sys.prefix), onnxfuse.__file__
assert pathlib.Path(onnxfuse.library_path()).is_relative_to(sys.prefix), onnxfuse.library_path()
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxfuse.library_path())
plain = onnxruntime.SessionOptions()
plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxfuse.InferenceSession("fused.onnx", plain, providers=["CPUExecutionProvider"])
original = onnxruntime.InferenceSession({str(MODEL)!r}, plain, providers=["CPUExecutionProvider"])
from onnxfuse.runtime.feeds import input_specs, make_feeds
feed = make_feeds(input_specs(session))
for after, before in zip(session.run(None, feed), original.run(None, feed), strict=True):
    assert after.tobytes() == before.tobytes()
print(onnxruntime.__version__)
"""


def build_wheel(folder: Path) -> Path:
    """The wheel, made from the source distribution as a user of the package index would."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("onnxfuse/py.typed", "onnxfuse/runtime/_bridge/libonnxfuse.so", "onnxfuse/kernels/cuda/arguments.cuh"):
        assert name in names, f"{name} is not in {wheel.name}"
    assert not any(name.endswith((".cc", ".h")) or name.startswith("tests/") for name in names), names
    return wheel


def environment(folder: Path, *packages: str) -> Path:
    """A new virtual environment with some packages; its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install(python, *packages)
    return python


def install(python: Path, *arguments: str) -> None:
    """Install with the environment's own pip."""
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def check(python: Path, folder: Path, version: str) -> str:
    """Use the installed package with one version of ONNX Runtime, which goes to `folder`; returns the exact version."""
    exact = f"{version}.*" if version.count(".") == 1 else version
    install(python, "--no-deps", "--target", str(folder / "packages"), f"onnxruntime=={exact}")
    cache, packages = folder.parent / "cache", folder / "packages"
    bare = {
        "PATH": str(python.parent),
        "HOME": str(folder),
        "ONNXFUSE_CACHE_DIR": str(cache),
        "PYTHONPATH": str(packages),
    }
    command = [str(python), "-m", "onnxfuse"]
    run([*command, "optimize", str(MODEL), "-o", "fused.onnx"], env=bare, cwd=folder)
    run([*command, "verify", str(MODEL), "fused.onnx"], env=bare, cwd=folder)
    library = run([*command, "library"], env=bare, cwd=folder).strip()
    with_driver = bare | {"LD_LIBRARY_PATH": str(fake_driver_folder())}
    for case in SESSIONS:
        run([str(python), "-m", "tests.bridge_session", case, library], env=with_driver, cwd=ROOT)
    return run([str(python), "-c", USE], env=bare, cwd=folder).strip()


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command prints; AssertionError with all of it when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env or dict(os.environ), cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.split("\n", 1)[0])
    parser.add_argument("versions", nargs="*", default=NEWEST, help="of ONNX Runtime; by default the range")
    failed = False
    with tempfile.TemporaryDirectory(prefix="onnxfuse-versions-") as name:
        folder = Path(name)
        python = environment(folder / "base", f"{build_wheel(folder)}[cpu]")
        for version in parser.parse_args().versions:
            place = folder / version
            place.mkdir()
            try:
                print(f"onnxruntime {check(python, place, version)}: fused, verified, loaded and run", flush=True)
            except AssertionError as error:
                failed = True
                print(f"onnxruntime {version}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
