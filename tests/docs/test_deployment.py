"""The snippets of docs/deployment.md run, with a stand-in for Optimum that opens sessions as it does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse.graph.functions import DOMAIN
from tests.docs.test_docs import ROOT
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.patterns.test_quantized import K, dual_gate

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
FILES = {"ORTModelForCausalLM": "{file_name}", "ORTDiffusionPipeline": "unet/model.onnx"}


def stand_in(name: str) -> object:
    """A class of Optimum whose models are sessions."""

    def from_pretrained(
        folder: str, *, session_options: onnxruntime.SessionOptions, file_name: str = ""
    ) -> onnxruntime.InferenceSession:
        path = Path(folder) / FILES[name].format(file_name=file_name)
        assert sum(node.domain == DOMAIN for node in onnx.load(path).graph.node) == 1
        return onnxruntime.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])

    return SimpleNamespace(from_pretrained=from_pretrained)


@pytest.mark.parametrize("name", FILES)
def test_a_snippet_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder(FLOAT16)
    model = b.model(*dual_gate(b, b.input("x", (2, 3, K))))
    for folder in ("llama", "pipeline/unet"):
        (tmp_path / folder).mkdir(parents=True)
        onnx.save(model, tmp_path / folder / "model.onnx")
    optimum, runtime = ModuleType("optimum"), ModuleType("optimum.onnxruntime")
    setattr(runtime, name, stand_in(name))
    monkeypatch.setitem(sys.modules, "optimum", optimum)
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", runtime)
    monkeypatch.chdir(tmp_path)
    (snippet,) = (text for text in SNIPPETS if name in text)
    made: dict[str, onnxruntime.InferenceSession] = {}
    exec(snippet, made)
    session = made["model" if "model" in made else "pipeline"]
    x = {"x": np.ones((2, 3, K), np.float16)}
    original = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, x)[0], original.run(None, x)[0])
