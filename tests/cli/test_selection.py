"""What the user leaves out is left alone with its reason, and the rest is fused as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.errors import SettingError
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.selection import FoundFusion, make_selection
from tests.helpers import corpus
from tests.helpers.many_commands import run_command as command
from tests.helpers.thinning import Taken

# Two blocks, each with a packed gate and a product with a residual behind it.
KEY = "tiny/phi3.tiny.dynamo.op20.fp32.dynamic.onnx"


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return corpus.materialize(KEY)


@pytest.fixture(scope="module")
def everything(model: onnx.ModelProto) -> dict[str, Any]:
    return reported(model)


def reported(model: onnx.ModelProto, **selection: Any) -> dict[str, Any]:
    """What `explain` tells, which compiles nothing."""
    return make_report(analyse_model(model, resolve("ptx", list), selection=make_selection(**selection))).to_dict()


def fused(model: onnx.ModelProto, **selection: Any) -> dict[str, str]:
    """Pattern by anchor, and nothing gets lost: what is not fused is listed."""
    report = reported(model, **selection)
    left = {entry["anchor"] for entry in report["skipped"] if entry["reason"] == "not_selected"}
    found = {entry["anchor"]: entry["pattern"] for entry in report["fused"]}
    assert not left & found.keys()
    return found


def anchors(everything: dict[str, Any], pattern: str) -> set[str]:
    return {entry["anchor"] for entry in everything["fused"] if entry["pattern"] == pattern}


def test_by_pattern(model: onnx.ModelProto, everything: dict[str, Any]) -> None:
    gates = anchors(everything, "split_gemm")
    assert len(gates) == 2
    assert fused(model, only="split_gemm").keys() == gates
    assert not fused(model, skip=["split_gemm"]).keys() & gates
    assert fused(model, only=["split_gemm", "gemm_epilogue"], skip="gemm_epilogue").keys() == gates


def test_by_the_name_of_any_node(model: onnx.ModelProto, everything: dict[str, Any], taken: Taken) -> None:
    for entry in taken([entry for entry in everything["fused"] if entry["nodes"]], 3):
        name = entry["nodes"][-1]
        assert fused(model, only=name).keys() == {entry["anchor"]}
        assert entry["anchor"] not in fused(model, skip=[name])


def test_an_edited_report_is_a_plan(model: onnx.ModelProto, everything: dict[str, Any], tmp_path: Path) -> None:
    expected = {entry["anchor"]: entry["pattern"] for entry in everything["fused"]}
    assert fused(model, plan=everything) == expected
    first, second, *others = everything["fused"]
    edited = everything | {"fused": [first | {"skip": True}, *others]}
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    for plan in (edited, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert fused(model, plan=plan) == {
            anchor: pattern for anchor, pattern in expected.items() if anchor not in (first["anchor"], second["anchor"])
        }
    assert not fused(model, plan={"fused": []})


def test_left_alone_means_byte_for_byte(model: onnx.ModelProto) -> None:
    assert onnxfuse.optimize(model, arch="ptx", plan={"fused": []})[0] == model


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"only": "split_gem"}, "'split_gem' is no pattern"),
        ({"skip": ["gemm_epilogue", "*/nowhere/*"]}, "no node of a fusion"),
        ({"plan": {"fused": [{"anchor": "nowhere", "pattern": "split_gemm"}]}}, "'nowhere', which the model does not"),
        ({"plan": {"fused": [{"anchor": "nowhere"}]}}, "not what explain --json prints"),
        ({"plan": {}}, "not what explain --json prints"),
        ({"plan": "nowhere.json"}, "cannot be read as a plan"),
    ],
)
def test_a_selection_that_means_nothing_is_refused(model: onnx.ModelProto, selection: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words.replace("*", r"\*")):
        onnxfuse.optimize(model, arch="ptx", **selection)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    for content in ("", "[1, 2]", "no json", '{"fused": 3}', '{"fused": [3]}'):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(SettingError):
            make_selection(plan=tmp_path / "plan.json")


def test_the_command_line_takes_its_own_explanation(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "model.onnx")
    explained = command("explain", tmp_path / "model.onnx", "--json", "--arch", "sm_80",
                        "--skip", "gemm_epilogue", "--skip", "column_ranges", "--skip", "attention",
                        "--skip", "normalisation", "--skip", "rotation")  # fmt: skip
    assert explained.returncode == 0, explained.stderr
    (tmp_path / "plan.json").write_text(explained.stdout)
    report = tmp_path / "report.json"
    result = command("optimize", tmp_path / "model.onnx", "-o", tmp_path / "fused.onnx", "--arch", "ptx",
                     "--plan", tmp_path / "plan.json", "--report", report)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [entry["pattern"] for entry in json.loads(report.read_text())["fused"]] == ["split_gemm"] * 2
    refused = command("explain", tmp_path / "model.onnx", "--only", "nothing")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def test_a_name_fits_itself_whatever_a_glob_makes_of_it() -> None:
    candidate = FoundFusion("Layer[0]/MatMul", "gemm_epilogue", ("Layer[0]/MatMul", "Layer[0]/Relu?"))
    assert all(candidate.fits(name) for name in candidate.nodes)
    assert candidate.fits("*/MatMul")
    assert not candidate.fits("Layer[1]/MatMul")
