"""Every document that a command prints or writes as JSON is what docs/json.schema.json says, and nothing else is."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from jsonschema import Draft202012Validator

import onnxfuse
from onnxfuse import __version__
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.report.document import SCHEMA
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import Builder, of_sizes

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "ff_geglu.onnx"
DESCRIBED = json.loads((ROOT / "docs" / "json.schema.json").read_text())
VALIDATOR = Draft202012Validator(DESCRIBED)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command prints, by its name; but for one of a model whose sizes are known, with few kernels."""
    folder = tmp_path_factory.mktemp("json")
    model, fused = folder / "model.onnx", folder / "fused.onnx"
    onnx.save(of_sizes(onnx.load(MODEL), {"batch": 2, "sequence": 7}), model)
    commands = {
        "optimize": ("optimize", model, "-o", fused, "--arch", "sm_80,ptx", "--report", folder / "report.json"),
        "explain": ("explain", model, "--arch", "sm_80,ptx"),
        "explain --site": ("explain", MODEL, "--arch", "sm_80,ptx", "--site", "*MatMul*"),
        "verify": ("verify", model, fused, "--per-site"),
        "inspect": ("inspect", fused, "--rebuild"),
        "bench": ("bench", model, fused, "--device", "cpu", "--runs", "1", "--per-site"),
    }
    printed = {name: json.loads(command(*words, "--json").stdout) for name, words in commands.items()}
    for op in ("Neg", "Abs"):
        b = Builder()
        onnx.save(b.model(b(op, b.input("x", (2, 3)))), folder / f"{op}.onnx")
    failed = command("verify", folder / "Neg.onnx", folder / "Abs.onnx", "--json")
    assert failed.returncode == 1
    printed["verify that fails"] = json.loads(failed.stdout)
    printed["optimize --report"] = json.loads((folder / "report.json").read_text())
    return printed


def test_every_document_is_as_described(documents: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(DESCRIBED)
    for name, printed in documents.items():
        faults = [error.message for error in VALIDATOR.iter_errors(printed)]
        assert not faults, f"{name}: {faults}"
        assert (printed["schema"], printed["onnxfuse"]) == (SCHEMA, __version__)
    assert documents["optimize --report"] == documents["optimize"]
    assert documents["explain"] == documents["optimize"]
    assert documents["verify"]["passed"]
    assert not documents["verify that fails"]["passed"]


def test_every_document_names_its_model_and_its_architectures(documents: dict[str, Any]) -> None:
    assert documents["explain --site"]["model"] == str(MODEL)
    for name in ("verify", "bench"):
        assert documents[name]["original_model"] == documents["explain"]["model"]
        assert Path(documents[name]["original_model"]).name == "model.onnx"
        assert Path(documents[name]["model"]).name == "fused.onnx"
    for name in ("optimize", "explain", "verify", "bench", "inspect"):
        assert sorted(documents[name]["architectures"]) == ["ptx", "sm_80"]
    assert documents["verify that fails"]["architectures"] == []


def places(value: Any) -> Iterator[dict[str, Any]]:
    """Every object with named fields in a document; other mappings have names of their own."""
    if isinstance(value, list):
        for each in value:
            yield from places(each)
    if isinstance(value, dict):
        yield value
        for name, each in value.items():
            if name not in ("shapes", "versions", "path", "not_in_float64"):
                yield from places(each)


@pytest.mark.parametrize("name", ["explain", "verify", "bench", "inspect"])
def test_a_field_more_or_less_is_none_of_what_is_described(documents: dict[str, Any], name: str) -> None:
    for index, place in enumerate(places(documents[name])):
        for field in place:
            altered = copy.deepcopy(documents[name])
            del list(places(altered))[index][field]
            assert not VALIDATOR.is_valid(altered), f"without {field}"
        altered = copy.deepcopy(documents[name])
        list(places(altered))[index]["unheard of"] = 1
        assert not VALIDATOR.is_valid(altered)


def test_a_loaded_model_has_no_path() -> None:
    b = Builder()
    model = b.model(b("Neg", b.input("x", (2, 3))))
    report = onnxfuse.optimize(model, arch="sm_80")[1].to_dict()
    assert VALIDATOR.is_valid(report)
    assert report["model"] is None
    assert make_report(analyse_model(model, ())).to_dict()["architectures"] == []
