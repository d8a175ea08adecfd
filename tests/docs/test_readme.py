"""The tables of the README and of docs/reasons.md are the code's."""

from __future__ import annotations

import ast
import json
import re
import shutil
import statistics
from pathlib import Path

import click
import pytest

import onnxfuse
from onnxfuse.cli import commands
from onnxfuse.device import resolve
from onnxfuse.errors import EXIT_CODES
from onnxfuse.pipeline import analyse_model
from onnxfuse.settings import SETTINGS

PACKAGE = Path(onnxfuse.__file__).parent
README = (PACKAGE.parent / "README.md").read_text()
REASONS = (PACKAGE.parent / "docs" / "reasons.md").read_text()
HOW_IT_WORKS = (PACKAGE.parent / "docs" / "how-it-works.md").read_text()


def raised_reasons() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "NotFusable":
                reason = node.args[0]
                if isinstance(reason, ast.Constant):
                    found.add(reason.value)
    return found


def test_the_table_of_reasons_is_complete_and_holds_no_other() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", REASONS, re.MULTILINE)) == raised_reasons()
    assert "](docs/reasons.md)" in README


def test_the_table_of_settings_is_settings_py() -> None:
    table = README.split("## Settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \| ([^|]+) \|$", table, re.MULTILINE)
    assert rows == [(setting.name, setting.default, setting.meaning) for setting in SETTINGS]


def test_the_table_of_exit_codes_is_errors_py_and_in_every_help() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|$", README.split("## In Python")[0], re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    for command in (commands, *commands.commands.values()):
        shown = command.get_help(click.Context(command, terminal_width=200, max_content_width=200))
        assert all(re.search(rf"^ +{code}  {re.escape(meaning)}$", shown, re.MULTILINE) for code, meaning in rows)


def test_the_figures_are_those_of_the_committed_result() -> None:
    results = json.loads((PACKAGE.parent / "results" / "h200.json").read_text())
    section = README.split("## What it is worth")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    sites = [
        [
            f"{row['m']}, {row['k']}, {row['n']}",
            f"{row['stock_us']:.1f} us",
            f"{row['fused_us']:.1f} us",
            f"{row['ratio']:.2f}x",
        ]
        for row in results["sites"]
    ]
    assert all(site in rows for site in sites)
    for model in results["models"]:
        times = [f"{model[which]['median']:.3f} ms" for which in ("original", "optimized")]
        launches = " -> ".join(map(str, model["launches"]))
        assert [*times, f"{model['ratio']:.2f}x", launches] in [row[1:] for row in rows]
        assert model["verify"]["passed"]
    assert all(str(results[key]) in section for key in ("gpu", "driver", "onnxruntime", "date", "command"))


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("h200-strangers", "models that nobody"),
        ("h200-strangers-30", "more, timed"),
        ("h200-strangers-41", "others, timed"),
        ("h200-convolutions", "networks of convolutions"),
    ],
)
def test_the_figures_of_strangers_are_those_of_the_committed_results(name: str, models: str) -> None:
    rows = json.loads((PACKAGE.parent / "results" / f"{name}.json").read_text())["rows"]
    gains = [row["ratio"] for row in rows]
    text = rf"Of (\d+) {models}[^`]*? geometric mean is (\S+)x and ([^`]*?) \(`results/{name}.json`\)"
    ((count, mean, least),) = re.findall(text, " ".join(README.split()))
    assert (int(count), float(mean)) == (len(gains), round(statistics.geometric_mean(gains), 2))
    assert least == f"the least {min(gains):.2f}x" or (least == "none is slower by 2 %" and min(gains) > 0.98)


def test_the_second_tiers_figures_are_those_of_the_committed_result() -> None:
    rows = json.loads((PACKAGE.parent / "results" / "h200-tune.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["problem"], row["dtype"]) == ("2048, 640, 2560 geglu", "fp32"))
    times = dict(row["microseconds"])
    stock, epilogue_only = times.pop("left alone"), times.pop("behind the product")
    words = " ".join(HOW_IT_WORKS.split())
    assert f"takes {stock:.1f} us in stock ONNX Runtime, {min(times.values()):.1f} us in one kernel" in words
    assert f"and {epilogue_only:.1f} us in two (`results/h200-tune.json`)" in words


def test_the_fusion_is_what_explain_prints() -> None:
    analysis = analyse_model(PACKAGE.parent / "models" / "unet_block.onnx", resolve("sm_80", list))
    gate = next(site.fusion for site in analysis.sites if site.fusion.pattern == "split_gemm")
    assert f"```\n{gate}\n```" in README


def test_the_test_command_is_what_ci_runs() -> None:
    script = (PACKAGE.parent / ".ci" / "run").read_text()
    assert "pip install --quiet --disable-pip-version-check -e '.[cpu,dev,genai]'" in script
    assert "pip install -e '.[cpu,dev]' && pytest -n auto" in README
    # By themselves, where `set -e` ends the script: whether the tests pass, and then what runs beside them.
    assert script.rstrip().splitlines()[-2:] == ["pytest -n auto", 'wait "$versions"']


def test_the_synopsis_has_every_option_of_every_command() -> None:
    lines = README.split("## The command line\n\n")[1].split("\n\n")[0]
    entries = {text.split()[0]: text for text in lines.split("    onnxfuse ")[1:]}
    assert set(entries) == set(commands.commands)
    for name, text in entries.items():
        options = [option for option in commands.commands[name].params if isinstance(option, click.Option)]
        shown = re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)
        for option in options:
            assert {*option.opts, *option.secondary_opts} & set(shown), f"{name} {option.opts}"
        assert set(shown) <= {flag for option in options for flag in (*option.opts, *option.secondary_opts)}, name


def test_what_is_written_in_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(PACKAGE.parent / "models" / "ff_geglu.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
        assert names["report"].fused
        assert names["session"].get_inputs()
