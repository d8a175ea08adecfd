"""docs/extending.md, followed to the letter in a copy of the project: a page that goes stale fails."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
GUIDES = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
COPIED = ("onnxfuse", "tests", "models", "results", "docs", ".ci", "README.md", "pyproject.toml")
# This folder's modules before those of an editable installation, which stands before every folder.
PYTEST = """
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)
sys.path.insert(0, "")
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def listings(guide: str) -> list[tuple[str, str]]:
    """The language and text of each listing of a guide, in order."""
    section = PAGE.split(f"## {guide}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def apply(project: Path, language: str, text: str) -> None:
    """What a reader does with a listing."""
    {"diff": change, "console": run}.get(language, append)(project, text)


def append(project: Path, text: str) -> None:
    """A listing that begins with the name of a file, as a comment."""
    head = re.match(r"(?:#|//) ([\w/.]+)\n", text)
    assert head, f"no file is named: {text[:80]}"
    with (project / head[1]).open("a") as file:
        file.write(text[head.end() :])


def change(project: Path, text: str) -> None:
    """A diff without line numbers: what it keeps and removes stands in the file once, as whole lines."""
    head, *lines = text.splitlines(keepends=True)
    path = project / head.removeprefix("--- ").strip()
    before, after = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
    content = "\n" + path.read_text()
    assert content.count("\n" + before) == 1, f"{path.name}: not the lines that the page shows:\n{before}"
    path.write_text(content.replace("\n" + before, "\n" + after)[1:])


def run(project: Path, text: str) -> None:
    """Commands with the copy's package."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "pytest", program
        command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", *arguments]
        result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_does_what_it_says(guide: str, project: Path) -> None:
    steps = listings(guide)
    assert steps[-1][0] == "console", "a guide ends with its proof"
    for language, text in steps:
        apply(project, language, text)


@pytest.mark.parametrize("guide", GUIDES)
def test_the_proof_of_a_guide_needs_its_changes(guide: str, project: Path) -> None:
    """Its new tests alone, without what it changes, fail."""
    for language, text in listings(guide):
        if language in ("python", "console") and not text.startswith("# onnxfuse/"):
            if language == "console":
                with pytest.raises(AssertionError, match=r"failed|error"):
                    run(project, text.replace("pytest", "pytest -x"))
            else:
                append(project, text)


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one = 1\ntwo = 2\n")
    change(tmp_path, "--- a.py\n one = 1\n-two = 2\n+two = 3\n")
    assert (tmp_path / "a.py").read_text() == "one = 1\ntwo = 3\n"
    for stale in (" one = 1\n two = 2\n", " ne = 1\n", "-two = 2\n"):
        with pytest.raises(AssertionError, match="not the lines"):
            change(tmp_path, f"--- a.py\n{stale}")
