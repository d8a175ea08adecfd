"""Where an input chooses the branch of an If, verify judges every branch. On the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from onnxfuse.errors import ModelError
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.input_facts import input_facts
from onnxfuse.runtime.session import CPU
from onnxfuse.verify import verify

FLAGS = ("use_cache_branch", "second")
CONDITIONS = {"as it is": "same = Identity(use_cache_branch)", "by a view": "same = Squeeze(use_cache_branch)",
              "negated": "same = Not(use_cache_branch)"}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


def choosing(*factors: float, condition: str = CONDITIONS["as it is"]) -> ModelProto:
    """One of four numbers times the input, by two switches, the second one inside of the first one's branches."""
    inner = [
        f"""{name} () => (float[] {name}) {{ {name} = If<
            then_branch = {name}1 () => (float[] {name}y) {{
                {name}f = Constant<value_float = {first}>() {name}y = Mul(x, {name}f) }},
            else_branch = {name}2 () => (float[] {name}n) {{
                {name}g = Constant<value_float = {second}>() {name}n = Mul(x, {name}g) }}>(second) }}"""
        for name, (first, second) in zip("ab", (factors[:2], factors[2:]), strict=True)
    ]
    return onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        chosen (float[m, 64] x, bool[1] use_cache_branch, bool second) => (float[m, 64] y) {{
            {condition}
            y = If<then_branch = {inner[0]}, else_branch = {inner[1]}>(same) }}""")


def saved(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_fault_of_any_branch_is_found(wrong: int, condition: str, tmp_path: Path) -> None:
    factors = [1.5, 2.5, 3.5, 4.5]
    text = CONDITIONS[condition]
    good = saved(choosing(*factors, condition=text), tmp_path / "good.onnx")
    factors[wrong] += 1
    bad = saved(choosing(*factors, condition=text), tmp_path / "bad.onnx")
    assert verify.verify(good, good).passed
    result = verify.verify(good, bad)
    assert [run.passed for run in result.runs].count(False) == 1


def test_each_size_meets_each_branch_and_every_run_says_which_it_took(tmp_path: Path) -> None:
    path = saved(choosing(1.5, 2.5, 3.5, 4.5), tmp_path / "model.onnx")
    sizes = [3, 5, 8]
    result = verify.verify(path, path, sizes={"m": sizes})
    met = {(run.shapes["x"][0], *(run.switches[name] for name in FLAGS)) for run in result.runs}
    assert met == set(itertools.product(sizes, (True, False), (True, False)))
    assert len(result.runs) == len(met)
    lines = [f"use_cache_branch[1]={str(run.switches[FLAGS[0]]).lower()}" for run in result.runs]
    assert all(line in str(run) for line, run in zip(lines, result.runs, strict=True))


def test_a_branch_that_no_run_takes_is_said(tmp_path: Path) -> None:
    path = saved(choosing(1.5, 2.5, 3.5, 4.5), tmp_path / "model.onnx")
    given = {"x": np.ones((2, 64), np.float32), FLAGS[0]: np.array([False]), FLAGS[1]: np.array(True)}
    for options, value in (({"runs": 1}, "true"), ({"inputs": given}, "false")):
        text = str(verify.verify(path, path, **options))
        assert f"use_cache_branch was {value} in every run: the other branch was not run" in text
    assert "in every run" not in str(verify.verify(path, path))


@pytest.mark.parametrize(
    ("kind", "condition"),
    [
        ("float[1]", "same = Cast<to = 9>(use_cache_branch)"),
        ("bool[n]", "same = ReduceMax(use_cache_branch)"),
        ("bool[2]", "one = Constant<value_ints = [1]>() same = Gather(use_cache_branch, one)"),
    ],
)
def test_what_is_no_boolean_or_several_is_no_switch(kind: str, condition: str) -> None:
    model = choosing(1.5, 2.5, 3.5, 4.5, condition=condition)
    graph = onnx.parser.parse_graph(f"g ({kind} use_cache_branch) => (float y) {{}}")
    model.graph.input[1].CopyFrom(graph.input[0])
    assert input_facts(load_model(model)).switches == ("second",)


def without_cache(accepts: str) -> ModelProto:
    """A decoder that adds a mask of all keys, and in the branch without a cache one of its own tokens to theirs."""
    return onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        decoder (float[2, "s", 64] x, float[2, "past", 64] k, float[1, "past + s", 1] mask, bool[1] use_cache_branch)
            => (float[] y) {{
            y = If<
                then_branch = yes () => (float[] a) {{ all = Concat<axis = 1>(k, x) a = Add(all, mask) }},
                else_branch = no () => (float[] b) {{ b = Add({accepts}, mask) }}>(use_cache_branch) }}""")


def test_a_branch_without_a_cache_is_run_with_an_empty_one(tmp_path: Path) -> None:
    path = saved(without_cache("x"), tmp_path / "model.onnx")
    result = verify.verify(path, path)
    assert [run.shapes["k"][1] > 0 for run in result.runs] == [True, False]
    assert result.passed


def test_a_branch_that_takes_no_guessed_size_is_named(tmp_path: Path) -> None:
    path = saved(without_cache("k"), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="use_cache_branch is false in this run, and --runs 1 leaves it out"):
        verify.verify(path, path)
    assert verify.verify(path, path, runs=1).passed
