"""The documentation is what the code does: links, tables and figures are compared."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import onnxfuse
from onnxfuse.analysis.axis_mapping import levels, map_axes
from tests.helpers.fusions import fusion
from tests.perf import document
from tests.tools import versions

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:onnxfuse|tests|docs|results|samples)/[\w/.-]+)`", text):
        assert (ROOT / name).exists() or "NAME" in name, name
    for module in re.findall(r"python -m (tests(?:\.\w+)+)", text):
        assert importlib.util.find_spec(module), module


def test_the_notes_can_be_read_side_by_side() -> None:
    lines = (ROOT / "docs" / "kernel-notes.md").read_text().splitlines()
    assert not [line for line in lines if len(line) > 130]
    assert not [line for line in lines if re.search(r"\b[Rr]ows? [1-7]\b", line)], "a row is called by its problem"


def test_the_figures_are_those_of_the_committed_results() -> None:
    assert document.TARGET.read_text() == document.document(), "run `python -m tests.perf.document`"


def test_every_room_is_in_the_diagram_and_every_stage_is_a_file() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    diagram = text.split("```mermaid")[1].split("```")[0]
    rooms = {path.parent.name for path in (ROOT / "onnxfuse").glob("*/__init__.py")}
    assert {room for room in rooms if re.search(rf"\b{room}\b", diagram)} == rooms
    for name in re.findall(r"`(\w+/(?:\w+\.py)?)`", text.split("## The stages")[1].split("\n## ")[0]):
        assert (ROOT / "onnxfuse" / name).exists(), name


def test_every_word_of_the_glossary_is_one_of_the_code() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text().split("## Glossary")[1]
    words = re.findall(r"^\| ([a-z][a-z -]*) \| [^|]+ \| [^|]+ \|$", text, re.M)[1:]
    assert len(words) == len(set(words)) == 25
    files = (path for path in (ROOT / "onnxfuse").rglob("*") if path.suffix in {".py", ".cuh", ".cc", ".h"})
    code = re.sub(r"[\s_#/-]+", " ", "\n".join(path.read_text() for path in files).lower())
    for word in words:
        assert re.search(rf"\b{word.replace('-', ' ')}s?\b", code), f"{word} is no word of the code any more"


def test_the_example_of_two_levels_is_what_numpy_and_the_analysis_say() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text().split("## Two levels")[1]
    (offset,) = re.findall(r"^    offset = (.+)$", text, re.M)
    stored = np.arange(2 * 4 * 3 * 64).reshape(2, 4, 3, 64)
    rows, columns = np.mgrid[:6, :256]
    assert (eval(offset, {"r": rows, "c": columns}) == stored.transpose(0, 2, 1, 3).reshape(6, 256)).all()
    axes = {"b": 2, "m": 3, "n1": 4, "n2": 64, "k": 8}
    heads = fusion(axes, lhs="b m k", rhs="k (n1 n2)", out="b n1 m n2", operands=[])
    mapping = map_axes(heads)
    assert f"{mapping.m} {mapping.n}" == "('b', 'm') ('n1', 'n2')"
    assert [levels(heads, heads.outs[0].tensor, loop) for loop in (mapping.m, mapping.n)] == [2, 2]


def test_every_module_has_its_stage() -> None:
    """At the root lie the front door and the base, which the first section tells of; all else is in the tables."""
    page = (ROOT / "docs" / "how-it-works.md").read_text().split("## The stages")[1].split("\n## ")[0]
    names = set()
    for line in page.splitlines():
        room = ""
        for folder, name in re.findall(r"`(?:(\w+)/)?(\w+\.py)?`", line):
            room = folder or room
            names.add(f"{room}/{name}")
    rooms = {name.removesuffix("/") for name in names if name.endswith("/")}
    modules = {path.relative_to(ROOT / "onnxfuse") for path in (ROOT / "onnxfuse").glob("*/*.py")}
    wanted = {path.as_posix() for path in modules if path.name != "__init__.py" and path.parent.name not in rooms}
    assert not wanted - names, f"without a row: {sorted(wanted - names)}"


def test_the_limits_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| ([\d.]+) \| `(\w+)` in `([\w/.]+)` \|$", (ROOT / "docs/limits.md").read_text(), re.M
    )
    assert len(rows) == 11
    for value, name, path in rows:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert str(getattr(module, name)) == value, name


def test_the_version_stands_in_one_place() -> None:
    assert onnxfuse.__version__ == PROJECT["version"]
    sources = [path.read_text() for path in (ROOT / "onnxfuse").rglob("*.py")]
    texts = [node.value for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert PROJECT["version"] not in texts
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_supported_versions_of_onnxruntime_are_said_once_everywhere() -> None:
    newest = versions.NEWEST[0]
    minors = [int(version.split(".")[1]) for version in versions.NEWEST]
    assert minors == list(range(minors[0], minors[-1] - 1, -1)), "no minor version is left out"
    assert len(minors) >= 3
    assert versions.NEWEST[-1] == versions.OLDEST
    for extra in ("cpu", "gpu"):
        assert PROJECT["optional-dependencies"][extra][0].endswith(f">={versions.OLDEST}")
    assert f"ONNX Runtime {versions.OLDEST} to {newest}" in (ROOT / "README.md").read_text()
    assert f"ONNX Runtime {versions.OLDEST} to {newest}" in (ROOT / "CHANGELOG.md").read_text()


def test_one_command_sets_up_and_one_checks() -> None:
    text, script = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "pip install -e '.[cpu,dev]'" in text
    for part in (
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "python -m tests.tools.versions --ends",
        "pytest -n auto",
    ):
        assert part in script
        assert f"`{part}`" in text.replace("\n", " ")


def test_every_file_that_a_comment_or_a_page_names_is_there() -> None:
    """Of the C++ and CUDA's includes the compiler sees to; the examples of docs/extending.md are followed by a test."""
    kinds = {".py", ".cuh", ".cc", ".h", ".md", ".toml"}
    files = [path for top in ("onnxfuse", "tests", "docs") for path in (ROOT / top).rglob("*") if path.suffix in kinds]
    files += ROOT.glob("*.*")
    there = {path.relative_to(ROOT).as_posix() for path in files}
    ends = {name[start:] for name in there for start in range(len(name)) if start == 0 or name[start - 1] == "/"}
    texts = [path for path in files if path.is_relative_to(ROOT / "onnxfuse") or path in PAGES]
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path.name != "extending.md"
        for line in path.read_text().splitlines()
        if not line.startswith("#include <")
        for name in re.findall(r"(?<![\w/.<*-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|cuh|cc|h))\b(?!\.)", line)
        if name not in ends | {"cuda.h"}
    ]
    assert not wrong, "\n".join(wrong)
