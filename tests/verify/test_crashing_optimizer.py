"""A model that ends ONNX Runtime's process when its CPU provider loads it with all optimisers: verify loads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import onnxfuse
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT16, Builder

LOAD = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two axes swapped before a product in fp16: no fusion is needed for the crash."""
    b = Builder(FLOAT16)
    swapped = b("Transpose", b.input("x", ("a", "b", 32)), perm=[1, 0, 2])
    product = b("MatMul", swapped, b.array(draw(32, 96), "weight"))
    onnx.save(b.model(b("Relu", b("Add", product, b.array(draw(96), "bias")))), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_verify_loads_what_ends_the_process_otherwise(model: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    assert onnxfuse.optimize_file(model, fused, arch="sm_90a").fused
    command = [sys.executable, "-m", "onnxfuse", "verify", str(model), str(fused)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(model)], capture_output=True, check=False)
    if loaded.returncode == 0:
        pytest.skip("this ONNX Runtime loads the model: verify need not leave an optimiser out any more")
