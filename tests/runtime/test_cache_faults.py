"""The caches under faults: killed writers, several processes, full disks, read-only folders.

Never a half entry, never a wrong one, and never an error: a cache that fails costs time.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.runtime.cache import ABANDONED_SECONDS, UNFINISHED, drop_abandoned, read_entry
from onnxfuse.runtime.compile import compile_cached, compile_source
from onnxfuse.tune.timing_cache import FOLDER
from tests.helpers import cache_process
from tests.helpers.bridge_build import ROOT
from tests.helpers.cache_process import IMAGE, KERNELS, check, entry, key, place, write
from tests.runtime.test_compile import SMALL

KILLS = 50


def start(action: str, folder: Path, amount: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.helpers.cache_process", action, str(folder), str(amount)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def assert_whole(folder: Path) -> None:
    """Whatever has an entry's name is a whole and right entry."""
    for number in range(KERNELS):
        check(folder, number)
        assert not place(folder, number).exists() or read_entry(place(folder, number), IMAGE) == entry(number)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(UNFINISHED)}
    assert names <= {place(folder, number).name for number in range(KERNELS)} | {FOLDER}


def test_a_killed_process_leaves_no_half_entry(tmp_path: Path) -> None:
    finish(start("kill", tmp_path, KILLS))
    assert_whole(tmp_path)


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    write(tmp_path, 0)
    leftovers = [tmp_path / f"{UNFINISHED}folder", tmp_path / FOLDER / f"{UNFINISHED}file"]
    leftovers[0].mkdir()
    (leftovers[0] / "kernel.cu").write_text("half")
    leftovers[1].write_text("{")
    write(tmp_path, 1)
    assert all(path.exists() for path in leftovers), "another process may still be writing it"
    past = time.time() - 2 * ABANDONED_SECONDS
    for path in leftovers:
        os.utime(path, (past, past))
    write(tmp_path, 2)
    assert all(path.exists() for path in leftovers), "once a process"
    drop_abandoned.cache_clear()
    write(tmp_path, 2)
    assert not any(path.exists() for path in leftovers)
    assert [check(tmp_path, number) for number in range(KERNELS)] == [2] * KERNELS


def test_processes_at_once_read_what_one_of_them_wrote(tmp_path: Path) -> None:
    processes = [start(action, tmp_path, 1.5) for action in ("write", "check", "write", "check")]
    for process in processes:
        finish(process)
    assert_whole(tmp_path)
    assert not list(tmp_path.rglob(f"{UNFINISHED}*"))
    write(tmp_path, 0)
    assert check(tmp_path, 0) == 2


def test_an_entry_under_another_key_is_no_answer(tmp_path: Path) -> None:
    write(tmp_path, 0)
    place(tmp_path, 0).rename(place(tmp_path, 1))
    assert read_entry(place(tmp_path, 1), IMAGE) is None
    first, second = (next((tmp_path / FOLDER).iterdir()), tmp_path / "other.json")
    first.rename(second)
    write(tmp_path, 2)
    second.replace(next((tmp_path / FOLDER).iterdir()))
    assert check(tmp_path, 2) == 1, "the kernel, and not the times of another key"


@pytest.mark.parametrize("limit", [0, 1, 1000, 80_000, 150_000, 290_000])
def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """A file may grow to so many bytes: what a full disk does, at every file of an entry."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        write(tmp_path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_whole(tmp_path)
    assert not list(tmp_path.rglob(f"{UNFINISHED}*"))
    write(tmp_path, 0)
    assert check(tmp_path, 0) == 2


def in_own_mount(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A shell that has a small disk of its own at `folder`; skipped where the machine does not allow one."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    before = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    mount = f"mount -t tmpfs -o size=256k none '{folder}'"
    if subprocess.run([*before, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    command = [*before, f"{mount}\n{script}", "sh", sys.executable, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_a_full_disk_and_a_read_only_folder_cost_time_only(tmp_path: Path) -> None:
    """256 KiB hold not one entry: writers and readers go on, full or read-only, and no entry is half."""
    done = in_own_mount(
        tmp_path,
        """
        "$1" -m tests.helpers.cache_process write "$2" 0.5
        "$1" -m tests.helpers.cache_process check "$2" 0.2
        test -z "$(ls "$2" | grep -v '^timings$')"
        test -z "$(find "$2" -name '.writing-*')"
        mount -o remount,ro "$2"
        "$1" -m tests.helpers.cache_process write "$2" 0.2
        "$1" -m tests.helpers.cache_process check "$2" 0.2
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_compilation_without_a_place_to_write_is_right() -> None:
    device = ARCHITECTURES["sm_80"]
    assert compile_cached(SMALL, [device], Path("/proc/onnxfuse")) == [compile_source(SMALL, device)]
    cache_process.write_times(Path("/proc/onnxfuse"), key(0), {"one kernel": 1.0})
