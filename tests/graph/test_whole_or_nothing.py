"""Ctrl-C, SIGTERM, kill -9, a full disk: the whole file or nothing, and the next run works."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxfuse
from onnxfuse import staging
from onnxfuse.errors import OutputError
from onnxfuse.graph import save
from onnxfuse.staging import PREFIX, drop_leftovers
from tests.graph.test_save import hub_cache, session_outputs

# The command line, with a pause behind the model's bytes, when its data have been copied as well. What runs the tests
# may ignore signals, as nohup does, and hand that on.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from onnxfuse import cli
from onnxfuse.graph import save
whole = save._serialized
def written(proto):
    yield from whole(proto)
    print("written", flush=True)
    time.sleep(60)
save._serialized = written
cli.main()
"""


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def arguments(source: Path, target: Path) -> list[str]:
    return ["optimize", str(source), "-o", str(target), "--arch", "sm_80", "--quiet"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_or_what_the_next_one_removes(tmp_path: Path, number: signal.Signals) -> None:
    source, target = hub_cache(tmp_path), tmp_path / "out.onnx"
    before = names(tmp_path)
    command = [sys.executable, "-c", SLOW, *arguments(source, target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        assert [name for name in names(tmp_path) if name.startswith(PREFIX)]
        drop_leftovers(tmp_path)
        assert [name for name in names(tmp_path) if name.startswith(PREFIX)], "its process lives"
        process.send_signal(number)
        assert not process.stderr.read().strip()
    left = [name for name in names(tmp_path) if name not in before]
    if number == signal.SIGKILL:
        assert left
        assert all(name.startswith(PREFIX) for name in left)
    else:
        assert (process.returncode, left) == (128 + number, [])
    subprocess.run([sys.executable, "-m", "onnxfuse", *arguments(source, target)], check=True)
    assert session_outputs(target) == session_outputs(source)
    assert names(tmp_path) == sorted([*before, "out.onnx", "out.onnx.data", "out.onnx.data/model.onnx_data"])


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("full", ["at the data", "at the model"])
def test_a_disk_that_fills_up_leaves_what_was_there(
    tmp_path: Path, full: str, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = hub_cache(tmp_path), tmp_path / "out.onnx"
    if forced:
        (tmp_path / "out.onnx.data").mkdir()
        (tmp_path / "out.onnx.data" / "model.onnx_data").write_text("old data")
        target.write_text("old model")
    before = contents(tmp_path)

    def refuse(*_: object) -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if full == "at the model":
            patch.setattr(save, "_serialized", refuse)
        else:
            patch.setattr(shutil, "copyfile", lambda *paths: list(refuse()))
        with pytest.raises(OutputError, match="No space left"):
            onnxfuse.optimize_file(source, target, arch="sm_80", force=forced)
    assert contents(tmp_path) == before
    onnxfuse.optimize_file(source, target, arch="sm_80", force=forced)
    assert session_outputs(target) == session_outputs(source)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_disk_that_fills_up_is_one_line(tmp_path: Path) -> None:
    """A limit on a file's size stands in for the disk."""
    source, target = hub_cache(tmp_path), tmp_path / "out.onnx"
    before = names(tmp_path)
    command = [sys.executable, "-m", "onnxfuse", *arguments(source, target)]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    assert (done.returncode, done.stderr) == (3, f"error: {target}: cannot be written: File too large\n")
    assert names(tmp_path) == before


def publish(folder: Path, *names: str) -> None:
    with staging.staging(folder) as files:
        for name in names:
            files.place(folder / name).write_text("new")
        files.publish()


def test_where_one_file_cannot_take_its_place_none_does(tmp_path: Path) -> None:
    """A folder is in the last one's way; the first was there before, the second not, nor its folder."""
    (tmp_path / "first").write_text("old")
    (tmp_path / "last").mkdir()
    with pytest.raises(IsADirectoryError):
        publish(tmp_path, "first", "a/b/second", "last")
    assert names(tmp_path) == ["first", "last"]
    assert (tmp_path / "first").read_text() == "old"


def test_a_file_system_without_links_keeps_what_was_there_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_where_one_file_cannot_take_its_place_none_does(tmp_path)


@pytest.mark.parametrize(("seconds", "left"), [(staging.UNLOCKED_SECONDS + 60, False), (5, True)])
def test_a_folder_without_a_lock_is_left_until_it_is_old(tmp_path: Path, seconds: int, left: bool) -> None:
    hidden = tmp_path / f"{PREFIX}0{staging.SUFFIX}"
    hidden.mkdir()
    os.utime(hidden, (time.time() - seconds,) * 2)
    drop_leftovers(tmp_path)
    assert hidden.exists() == left


def test_what_a_killed_verify_wrote_is_removed_by_the_next(tmp_path: Path) -> None:
    source = hub_cache(tmp_path)
    hold = "onnxfuse.verify.verify.open_session = lambda *_: (print('held', flush=True), time.sleep(60))"
    call = "onnxfuse.verify.verify.verify(path, path, per_site=True)"
    code = (
        f"import time, onnxfuse.verify.verify; from pathlib import Path; path = Path({str(source)!r}); {hold}; {call}"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "held\n"
        process.kill()
    assert [name for name in names(tmp_path) if name.startswith(PREFIX)]
    drop_leftovers(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(PREFIX)]


def test_a_scratch_folder_is_for_its_user_alone_and_gone_afterwards() -> None:
    with staging.scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
