"""The runs of whole corpus models that a GPU judges work: two of them on the CPU, by their fallback functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import numpy_helper

import onnxfuse
from tests.helpers import corpus
from tests.helpers.corpus_runs import KEYS, verified

ON_CPU = ("tiny/ff_geglu.tiny.torchscript.op17.fp16.dynamic.onnx", "tiny/ff_swiglu.tiny.dynamo.op20.fp32.dynamic.onnx")


@pytest.mark.parametrize("key", ON_CPU)
def test_a_model_is_verified_with_each_of_its_feeds(key: str, tmp_path: Path) -> None:
    result = verified(key, tmp_path, "ptx")
    assert result.passed, str(result)
    fed = [{name: array.shape for name, array in corpus.feed(key, index).items()} for index in range(2)]
    assert [{name: run.shapes[name] for name in feed} for run, feed in zip(result.runs, fed, strict=True)] == fed


def test_a_changed_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused model whose kernels read other numbers than the original fails."""
    optimize = onnxfuse.optimize

    def altered(model, **settings):
        made, report = optimize(model, **settings)
        weight = next(tensor for tensor in made.graph.initializer if len(tensor.dims) == 2)
        weight.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(weight), weight.name))
        return made, report

    monkeypatch.setattr(onnxfuse, "optimize", altered)
    assert not verified(ON_CPU[1], tmp_path, "ptx").passed


def test_both_exporters_and_types_of_every_family_run() -> None:
    entries = [corpus.manifest()[key] for key in KEYS]
    for family in {entry["model"] for entry in entries}:
        ways = {(entry["exporter"], entry["dtype"]) for entry in entries if entry["model"] == family}
        assert ways == {(exporter, dtype) for exporter in ("dynamo", "torchscript") for dtype in ("fp16", "fp32")}
