"""The shards of the GPU tests: every test in one of them, and what a failing one is said to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.shard import shard
from tests.tools import memcheck

ROOT = Path(__file__).parents[2]
SANITIZER = """\
#!/bin/sh
while [ "$1" != "--error-exitcode" ]; do shift; done
shift 2
exec "$@"
"""


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_every_item_is_in_one_shard(count: int) -> None:
    items = list(range(23))
    assert sorted(item for part in range(count) for item in shard(items, part, count)) == items


def test_every_file_with_shards_exists() -> None:
    assert all((memcheck.FOLDER / name).is_file() for name in memcheck.SHARDS)


def test_a_failing_shard_is_named_with_its_output(tmp_path: Path) -> None:
    """With a stand-in for the sanitizer that only runs what it is given."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n    assert n != 2, 'two'\n"
    )
    command = [sys.executable, "-m", "tests.tools.memcheck", str(file)]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "test_some.py 1/1: exit code 1" in done.stdout
    assert "two" in done.stdout
    assert "0 of 1 shards are clean" in done.stdout
