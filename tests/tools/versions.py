"""The wheel in empty environments, with each version of ONNX Runtime that is supported, and fused files without it.

    python -m tests.tools.versions [--ends | VERSION ...]

`python -m build` makes the wheel from the source distribution. It is installed, with everything that it depends on, in
a new virtual environment; each version of ONNX Runtime goes to a folder of its own before that. There, with no compiler
on PATH, the command line fuses and verifies a model, the installed library is loaded, and sessions run fused nodes over
the stand-in for the CUDA driver.

Fused files of several different bodies also run in older versions of ONNX Runtime, in onnx.reference and, inlined by
onnx, in OpenVINO, which has no model-local functions; there the library refuses to register. The exit code is 1 when
something fails. `--ends`, as CI has it, takes the newest and the oldest of the versions: what runs in both ran in those
between whenever they were tried.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from onnxfuse.runtime.feeds import input_specs, make_feeds
from tests.helpers.bridge_build import ROOT, fake_driver_folder
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder, cpu_session

OLDEST = "1.27"  # that the bridge registers in
NEWEST = ("1.32", "1.31", "1.30", "1.29", "1.28", OLDEST)
NO_SCOPES = ("1.28", "1.27")  # which do not find the archive from inside a branch or a loop
OLDEST_ORIGINAL = "1.18.1"  # that was tried with the original nodes of fused files
ORIGINAL_NODES = ("1.26.0", "1.24.4", "1.22.1", "1.20.1", OLDEST_ORIGINAL)
OLD_NUMPY = {OLDEST_ORIGINAL: "numpy==1.26.4"}  # what a version cannot do without
OPENVINO = "openvino==2026.4.1"
MODEL = ROOT / "models" / "ff_geglu.onnx"
ARCHITECTURES = "sm_80,ptx"  # machine code, and what is compiled as it is loaded: each version compiles and reads all
OLD_MODELS = [ROOT / "models" / f"{name}.onnx" for name in ("bert", "lstm_gates", "unet_block")]  # operator set 17
SMALL = ("several_bodies", "lstm_gates")  # of the models, for onnx.reference
FP32 = (*SMALL, "bert")  # of the models, for OpenVINO, which rounds an fp16 model where it likes
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


SAME_BITS = """
import pathlib, sys
import numpy, onnxruntime
library, *models = sys.argv[1:]
def outputs(path, level, feed):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [array.tobytes() for array in session.run(None, feed)]
for name in models:
    feed = dict(numpy.load(name + ".npz"))
    for level in onnxruntime.GraphOptimizationLevel.__members__.values():
        assert outputs(name + ".onnx", level, feed) == outputs(name + ".fused.onnx", level, feed), (name, level)
try:
    onnxruntime.SessionOptions().register_custom_ops_library(library)
except Exception as error:
    assert "onnxfuse needs ONNX Runtime 1.27 or later" in str(error), error
else:
    raise AssertionError("the library is registered in a version that it does not know")
print(onnxruntime.__version__)
"""
REFERENCE = """
import sys
import numpy, onnx
from onnx.reference import ReferenceEvaluator
for name in sys.argv[1:]:
    feed = dict(numpy.load(name + ".npz"))
    before, after = (ReferenceEvaluator(onnx.load(name + end)).run(None, feed) for end in (".onnx", ".fused.onnx"))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True)), name
print(onnx.__version__)
"""
INLINED = """
import sys
import numpy, onnx, onnx.inliner, openvino
core = openvino.Core()
for name in sys.argv[1:]:
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(name + ".fused.onnx")), "inlined.onnx")
    feed = dict(numpy.load(name + ".npz"))
    models = (name + ".onnx", "inlined.onnx")
    before, after = (core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feed) for file in models)
    for x, y in zip(before.values(), after.values(), strict=True):
        numpy.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
print(openvino.__version__)
"""


def build_wheel(folder: Path) -> Path:
    """The wheel, made from the source distribution as a user of the package index would."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "onnxfuse/py.typed",
        "onnxfuse/runtime/_bridge/libonnxfuse.so",
        "onnxfuse/kernels/cuda/common/arguments.cuh",
        "onnxfuse/schedule/calibration/sm_90a.npz",
        "onnxfuse/schedule/calibration/sm_90a.library.npz",
    ):
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
    run([*command, "optimize", str(MODEL), "-o", "fused.onnx", "--arch", ARCHITECTURES], env=bare, cwd=folder)
    run([*command, "verify", str(MODEL), "fused.onnx"], env=bare, cwd=folder)
    library = run([*command, "library"], env=bare, cwd=folder).strip()
    with_driver = bare | {"LD_LIBRARY_PATH": str(fake_driver_folder())}
    cases = ",".join(case for case in SESSIONS if case != "scopes" or version not in NO_SCOPES)
    run([str(python), "-m", "tests.helpers.bridge_session", cases, library], env=with_driver, cwd=ROOT)
    return run([str(python), "-c", USE], env=bare, cwd=folder).strip()


def several_bodies() -> ModelProto:
    """Products with different activations: one body taken for another is far off, not a little."""
    b = Builder(opset=17)
    value = b.input("x", ("rows", 8))
    for index, op in enumerate(("Relu", "Tanh", "Sigmoid", "Relu", "Neg")):
        weight, bias = (b.array(draw(8, n, seed=index)) for n in (8, 1))
        value = b(op, b("Gemm", value, weight, b("Reshape", bias, b.integers(8))))
    return b.model(value, ir_version=8)


def fused_files(python: Path, folder: Path) -> list[str]:
    """Models, their fused files and inputs in a folder; the names that they share."""
    models = {path.stem: onnx.load(path) for path in OLD_MODELS} | {"several_bodies": several_bodies()}
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")
        # Bodies alone run there, and the sites are those of all architectures: this one has the fewest kernels.
        only = ("--arch", "ptx")
        run([str(python), "-m", "onnxfuse", "optimize", f"{name}.onnx", "-o", f"{name}.fused.onnx", *only], cwd=folder)
        feed = make_feeds(input_specs(cpu_session(model)))
        np.savez(folder / f"{name}.npz", **feed)  # type: ignore[arg-type]
    return list(models)


def check_original_nodes(python: Path, folder: Path, names: list[str], version: str) -> str:
    """Fused files run in an older version of ONNX Runtime to the bits of the originals; returns the exact version."""
    packages = folder / version
    needs = [f"onnxruntime=={version}", *([OLD_NUMPY[version]] if version in OLD_NUMPY else [])]
    install(python, "--no-deps", "--target", str(packages), *needs)
    library = run([str(python), "-m", "onnxfuse", "library"], cwd=folder).strip()
    variables = {"PATH": str(python.parent), "PYTHONPATH": str(packages), "LD_LIBRARY_PATH": str(fake_driver_folder())}
    return run([str(python), "-c", SAME_BITS, library, *names], env=variables, cwd=folder).strip()


def check_reference(python: Path, folder: Path) -> str:
    """Small fused files run in onnx.reference to the bits of the originals; returns the version of onnx."""
    return run([str(python), "-c", REFERENCE, *SMALL], cwd=folder).strip()


def check_openvino(python: Path, folder: Path) -> str:
    """Inlined fused files of fp32 run in OpenVINO; returns its version."""
    install(python, "--no-deps", "--target", str(folder / "openvino"), OPENVINO)
    variables = {"PATH": str(python.parent), "PYTHONPATH": str(folder / "openvino")}
    return run([str(python), "-c", INLINED, *FP32], env=variables, cwd=folder).strip()


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command prints; AssertionError with all of it when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env or dict(os.environ), cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.versions", description=__doc__.split("\n", 1)[0])
    parser.add_argument("versions", nargs="*", help="of ONNX Runtime; by default all, onnx.reference and OpenVINO")
    parser.add_argument("--ends", action="store_true", help="the newest and the oldest of them alone")
    options = parser.parse_args()
    chosen, failed = options.versions, False
    with tempfile.TemporaryDirectory(prefix="onnxfuse-versions-") as name:
        folder = Path(name)
        python = environment(folder / "base", f"{build_wheel(folder)}[cpu]")
        fake_driver_folder()  # before several threads want it
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [(label, pool.submit(check)) for label, check in checks(python, folder, chosen, options.ends)]
            for label, job in made:
                try:
                    print(f"{label} {job.result()}", flush=True)
                except AssertionError as error:
                    failed = True
                    print(f"{label}: {error}", flush=True)
    return int(failed)


def checks(python: Path, folder: Path, chosen: list[str], ends: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """What to check: the versions chosen, or everything; of either kind the first and the last alone, if so wished."""
    step = len(NEWEST) - 1 if ends else 1
    for version in chosen or NEWEST[::step]:
        if version not in ORIGINAL_NODES:
            (folder / version).mkdir()
            yield "fused, verified, loaded and run: onnxruntime", partial(check, python, folder / version, version)
    step = len(ORIGINAL_NODES) - 1 if ends else 1
    old = [version for version in ORIGINAL_NODES[::step] if not chosen or version in chosen]
    names = fused_files(python, folder) if old else []
    for version in old:
        yield "the original nodes' bits: onnxruntime", partial(check_original_nodes, python, folder, names, version)
    if not chosen:
        yield "the original nodes' bits: onnx.reference", partial(check_reference, python, folder)
        yield "the original nodes, inlined: openvino", partial(check_openvino, python, folder)


if __name__ == "__main__":
    sys.exit(main())
