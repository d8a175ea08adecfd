"""docs/extending.md, followed to the letter in a copy of the project: a page that goes stale fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
GUIDES = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="no patch: apt-get install patch")

COPIED = ("onnxfuse", "tests", "models", "results", "docs", ".ci", "README.md", "pyproject.toml")
# This folder's modules before those of an editable installation, which stands before every folder.
OURS = """
import runpy
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)
sys.path.insert(0, "")
name, *sys.argv[1:] = sys.argv[1:]
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
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
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # half written
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
    (project / head[1]).parent.mkdir(exist_ok=True)
    with (project / head[1]).open("a") as file:
        file.write(text[head.end() :])


def change(project: Path, text: str) -> None:
    command = ["patch", "-p1", "--forward", "--batch", "--no-backup-if-mismatch"]
    done = subprocess.run(command, input=text, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"patch refuses what the page shows:\n{done.stdout}{text}"


def run(project: Path, text: str) -> None:
    """Commands with the copy's package."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line)
        if program == "pytest":
            arguments = ["pytest", "-q", "-p", "no:cacheprovider", *arguments]
        else:
            assert program == "python", program
            arguments = arguments[arguments[0] == "-m" :]
        command = [sys.executable, "-c", OURS, *arguments]
        # No worker of this run, whose kernels it would take for its own.
        own = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
        result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, env=own)
        assert result.returncode == 0, f"failed: {line}\n{result.stdout[-4000:]}{result.stderr[-2000:]}"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_does_what_it_says(guide: str, project: Path) -> None:
    steps = listings(guide)
    assert steps[-1][0] == "console", "a guide ends with its proof"
    for language, text in steps:
        apply(project, language, text)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("guide", GUIDES)
def test_the_proof_of_a_guide_needs_its_changes(guide: str, project: Path) -> None:
    """Its new tests alone, without what it changes, fail."""
    steps = listings(guide)
    made = [text for language, text in steps if language == "python" and not text.startswith("# onnxfuse/")]
    for text in made:
        append(project, text)
    command = steps[-1][1].splitlines()[0].split()
    tests = [name for name in command[1:] if any(text.startswith(f"# {name}\n") for text in made)]
    assert command[0] == "pytest"
    assert tests, "a proof has tests of its own"
    with pytest.raises(AssertionError, match=r"failed|error"):
        run(project, f"pytest -x {' '.join(tests)}")


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(9)]
    diff = "--- a/a.py\n+++ b/a.py\n@@ -4,3 +4,3 @@\n line 3\n-line 4\n+line four\n line 5\n"
    (tmp_path / "a.py").write_text("".join(["moved\n"] * 20 + lines))
    change(tmp_path, diff)
    assert (tmp_path / "a.py").read_text() == "".join(["moved\n"] * 20 + lines).replace("line 4", "line four")
    for stale in (diff, diff.replace("-line 4", "-line vier"), diff.replace("a.py", "b.py")):
        with pytest.raises(AssertionError, match="patch refuses"):
            change(tmp_path, stale)
