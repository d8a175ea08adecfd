"""The C++ sample: it builds without ONNX Runtime's headers and gives a Python session's bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfuse
from tests.helpers import corpus

SAMPLE = Path(__file__).parents[2] / "samples" / "cpp"
MODEL = "tiny/btb.tiny.torchscript.op17.fp16.dynamic.onnx"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (runtime,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    build = tmp_path_factory.mktemp("sample")
    subprocess.run(["cmake", "-S", SAMPLE, "-B", build, f"-DONNXRUNTIME_LIBRARY={runtime}"], check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "sample"


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "block.fused.onnx"
    model, report = onnxfuse.optimize(corpus.materialize(MODEL), arch="sm_80")
    assert report.fused
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("with_library", [False, True])
def test_the_sample_gives_the_bits_of_a_python_session(sample: Path, fused: Path, tmp_path, with_library) -> None:
    feed = corpus.feed(MODEL, 0)
    arguments = []
    for name, array in feed.items():
        (tmp_path / f"{name}.in").write_bytes(np.ascontiguousarray(array).tobytes())
        arguments.append(f"{name}={','.join(map(str, array.shape))}:{tmp_path / name}.in")
    library = ["--library", onnxfuse.library_path()] if with_library else []
    subprocess.run([sample, fused, *library, *arguments], check=True, cwd=tmp_path)
    session = onnxruntime.InferenceSession(fused)
    for output, expected in zip(session.get_outputs(), session.run(None, feed), strict=True):
        assert (tmp_path / f"{output.name}.bin").read_bytes() == expected.tobytes()


def test_the_samples_errors_end_in_one_line(sample: Path, fused: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([], "usage: sample MODEL"),
        ([fused, "nosuch=1:/dev/null"], "the model has no input 'nosuch'"),
        ([fused, "x"], "x: expected NAME=2,4,64:FILE"),
        ([tmp_path / "missing.onnx"], "missing.onnx"),
        ([fused, "--library", tmp_path / "missing.so"], "missing.so"),
        ([fused, "--cuda"], "this ONNX Runtime was built without CUDA"),
    ):
        result = subprocess.run([sample, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 1
        last = result.stderr.splitlines()[-1]  # behind the runtime's own warnings about a model
        assert last.startswith("error: ")
        assert message in last
