"""`export-genai` writes a folder that ONNX Runtime GenAI takes: fused models, the bridge, everything else as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse.errors import ModelError
from onnxfuse.genai import export_genai
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.progress import silent
from onnxfuse.runtime.session import library_path
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import FLOAT, Builder
from tests.helpers.optimized_layers import Sizes, layers

SMALL = Sizes(width=64, hidden=128, heads=4, groups=2)
FUSED = 6 + 5  # products and normalisations of two layers
DECODER = {"session_options": {"log_id": "onnxruntime-genai"}, "filename": "model.onnx", "head_size": 16}


def folder(place: Path, model: Mapping[str, object], *files: str) -> Path:
    """What GenAI's builder writes: models with data beside them, a configuration, a tokenizer."""
    place.mkdir()
    (place / "tokenizer").mkdir()
    (place / "tokenizer" / "vocabulary.json").write_text("{}")
    (place / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 7}}))
    for file in files:
        proto = layers("llama", SMALL, (1, 5), 2, FLOAT)
        onnx.save(proto, place / file, save_as_external_data=True, location=f"{file}.data", size_threshold=256)
    return place


def contents(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def planned(path: Path) -> Analysis:
    """The fusions without a kernel."""
    return analyse_model(path, ())


def test_the_folder_runs_as_before(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "in", {"decoder": DECODER, "vocab_size": 9}, "model.onnx"), tmp_path / "out"
    before = contents(source)
    result = command("export-genai", source, target, "--arch", "sm_90a")
    assert result.returncode == 0, result.stderr
    assert contents(source) == before
    config = json.loads((target / "genai_config.json").read_text())
    options = config["model"]["decoder"].pop("session_options")
    assert options == {"log_id": "onnxruntime-genai", "custom_ops_library": "libonnxfuse.so"}
    assert config["model"]["decoder"] == {key: DECODER[key] for key in ("filename", "head_size")}
    assert (target / "libonnxfuse.so").read_bytes() == Path(library_path()).read_bytes()
    assert not (target / "libonnxfuse.so").is_symlink()
    assert contents(target)["tokenizer/vocabulary.json"] == before["tokenizer/vocabulary.json"]
    fused = onnx.load(target / "model.onnx", load_external_data=False)
    assert sum(node.domain == DOMAIN for node in fused.graph.node) == FUSED
    feed = {"x": np.random.default_rng(0).standard_normal((1, 5, 64)).astype(np.float32)}
    outputs = []
    for place, library in ((source, ""), (target, str(target / "libonnxfuse.so"))):
        session_options = onnxruntime.SessionOptions()
        if library:
            session_options.register_custom_ops_library(library)
        session = onnxruntime.InferenceSession(place / "model.onnx", session_options, ["CPUExecutionProvider"])
        outputs.append(session.run(None, feed)[0])
    assert np.abs(outputs[1] - outputs[0]).max() <= 2e-6 * np.abs(outputs[0]).max()


def test_every_model_of_a_pipeline_is_fused(tmp_path: Path) -> None:
    """One that is named twice is written once; one of nothing but a lookup is left as it is, without the library."""
    stages = [{"prompt": {"filename": "a.onnx"}}, {"token": {"filename": "a.onnx", "session_options": None}}]
    parts = {"decoder": {"pipeline": stages}, "embedding": {"filename": "plain.onnx"}}
    source = folder(tmp_path / "in", parts, "a.onnx")
    b = Builder()
    onnx.save(b.model(b("Neg", b.input("x", (2, 3)))), source / "plain.onnx")
    reports = export_genai(source, tmp_path / "out", Path(library_path()), planned, silent)
    assert {file: len(report.fused) for file, report in reports.items()} == {"a.onnx": FUSED, "plain.onnx": 0}
    model = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    named = [settings["session_options"] for stage in model["decoder"]["pipeline"] for settings in stage.values()]
    assert named == [{"custom_ops_library": "libonnxfuse.so"}] * 2
    assert "session_options" not in model["embedding"]


def plain(place: Path) -> Path:
    source = folder(place, {"decoder": DECODER})
    b = Builder()
    onnx.save(b.model(b("Neg", b.input("x", (2, 3)))), source / "model.onnx")
    return source


def without_config(place: Path) -> Path:
    place.mkdir()
    return place


FAULTS = {
    "is no JSON": lambda place: (source := folder(place, {}), (source / "genai_config.json").write_text("{"))[0],
    "name a folder of GenAI's model builder": without_config,
    "names no model": lambda place: folder(place, {"vocab_size": 9}),
    "nothing in it can be fused": plain,
    "lies outside": lambda place: folder(place, {"decoder": DECODER | {"filename": "../model.onnx"}}),
    "are no object": lambda place: folder(place, {"decoder": DECODER | {"session_options": ["x"]}}, "model.onnx"),
    "GenAI loads one library": lambda place: folder(
        place, {"decoder": DECODER | {"session_options": {"custom_ops_library": "own.so"}}}, "model.onnx"
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_cannot_be_done_is_said_and_nothing_is_written(message: str, tmp_path: Path) -> None:
    source = FAULTS[message](tmp_path / "in")
    with pytest.raises(ModelError, match=message):
        export_genai(source, tmp_path / "out", Path(library_path()), planned, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {"decoder": DECODER}, "model.onnx")
    (tmp_path / "out").mkdir()
    result = command("export-genai", source, tmp_path / "out", "--arch", "sm_90a")
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)
    assert not list((tmp_path / "out").iterdir())
