"""ONNX Runtime GenAI generates the same tokens with a fused folder as with the original, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxfuse.genai import export_genai
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.progress import silent
from onnxfuse.runtime.session import library_path
from tests.helpers.genai_decoder import VOCABULARY, decoder, write_folder
from tests.helpers.onnx_build import FLOAT, FLOAT16
from tests.helpers.quantized import Form, quantized_model

genai = pytest.importorskip("onnxruntime_genai", reason="pip install '.[genai]' brings onnxruntime-genai")

PROMPTS = [[1, 17, 4, 9, 5], [1, 3, 22, 11, 8]]
LENGTH = 20

FOLDERS: dict[str, Callable[[], ModelProto]] = {
    "fp32": lambda: decoder(FLOAT),
    "fp16": lambda: decoder(FLOAT16),
    "4 bits, blocks of 32": lambda: quantized_model(decoder(FLOAT16), Form(4, 32)),
    "4 bits, blocks of 128, zero points": lambda: quantized_model(decoder(FLOAT16), Form(4, 128, True)),
    "8 bits": lambda: quantized_model(decoder(FLOAT16), Form(8, 32)),
    "4 bits, activations of fp32": lambda: quantized_model(decoder(FLOAT), Form(4, 32)),
}


def planned(path: Path) -> Analysis:
    """The fusions without a kernel: none runs on the CPU."""
    return analyse_model(path, ())


def generated(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[prompts, LENGTH]`, and the logits `[steps, prompts, VOCABULARY]` that chose them."""
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=LENGTH, min_length=LENGTH, batch_size=len(PROMPTS), do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array(PROMPTS, np.int32))
    logits = []
    while not generator.is_done():
        logits.append(np.array(generator.get_logits(), np.float64).reshape(len(PROMPTS), -1, VOCABULARY)[:, -1])
        generator.generate_next_token()
    return np.array([generator.get_sequence(row) for row in range(len(PROMPTS))]), np.array(logits)


@pytest.mark.parametrize("form", FOLDERS)
def test_the_same_tokens_are_generated(form: str, tmp_path: Path) -> None:
    source, target = write_folder(tmp_path / "in", FOLDERS[form](), {}), tmp_path / "out"
    reports = export_genai(source, target, Path(library_path()), planned, silent)
    assert len(reports["model.onnx"].fused) >= 6  # o, gate with up, and down of each layer
    (before, wanted), (after, found) = generated(source), generated(target)
    assert before.shape == (len(PROMPTS), LENGTH)
    assert len(np.unique(before)) > LENGTH / 3
    assert np.abs(found - wanted).max() < 0.02 * wanted.std()
    np.testing.assert_array_equal(before, after)
