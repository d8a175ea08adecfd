"""The sweep passes what is right and names what is wrong: too few sites, a near miss taken for a gate, changed bits."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.helpers import corpus
from tests.helpers.many_commands import run_helper
from tests.tools import sweep

GATE = "tiny/ff_geglu.tiny.dynamo.op20.fp32.dynamic.onnx"
SITES = dict.fromkeys(sweep.KINDS, 0) | {"packed_gates": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One weightless model of the corpus, without its feeds."""
    (tmp_path / "gate.onnx").write_bytes((corpus.folder() / GATE).read_bytes())
    return tmp_path


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_helper("tests.tools.sweep", *arguments)


def test_the_exit_code_says_whether_all_pass(folder: Path) -> None:
    assert run_command(folder).returncode == 0, "without a manifest only the bits count"
    (folder / "manifest.json").write_text(json.dumps({"gate.onnx": SITES}))
    right = run_command(folder)
    assert right.returncode == 0
    assert "1/1" in right.stdout.splitlines()[-2]
    other = folder / "other.json"
    other.write_text(json.dumps({"gate.onnx": SITES | {"dual_gates": 1}}))
    assert run_command(folder, "--manifest", other).returncode == 1
    assert run_command(folder, "--only", "nothing").returncode == 1


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({"packed_gates": 1}, ""),
        ({"packed_gates": 1, "activations": 1, "residuals": 1}, ""),
        ({}, "packed_gates 0, not 1"),
        ({"packed_gates": 2}, "packed_gates 2, not 1"),
        ({"packed_gates": 1, "dual_gates": 1}, "dual_gates 1, not 0"),
    ],
)
def test_sites_are_held_against_the_manifest(found: dict[str, int], fault: str) -> None:
    assert "; ".join(sweep.Outcome(sweep.Counter(found), SITES).faults) == fault


def test_a_changed_bit_is_found() -> None:
    original = corpus.materialize(GATE)
    changed = onnx.ModelProto()
    changed.CopyFrom(original)
    weight = max(changed.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    value = onnx.numpy_helper.to_array(weight).copy()
    value[0] = np.nextafter(value[0], np.inf)
    weight.CopyFrom(onnx.numpy_helper.from_array(value, weight.name))
    feeds = [corpus.feed(GATE, 0), corpus.feed(GATE, 1)]
    assert sweep.difference(original, original, feeds) == ""
    assert "differs with feed" in sweep.difference(original, changed, feeds)


def test_a_model_that_is_refused_fails(folder: Path) -> None:
    (folder / "gate.onnx").write_bytes(b"no model")
    assert sweep.sweep_model(folder / "gate.onnx", None).faults
