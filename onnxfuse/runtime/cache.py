"""Compiled kernels on disk, found by what they were compiled from.

One readable folder an entry, named by the SHA-256 of source, options and compiler version:

    <key>/kernel.cu      the source
          kernel.cubin   or kernel.ptx
          log.txt        what the compiler printed
          meta.json      architecture, options, version, and the checksum of the key and the other three

An entry is written to a temporary folder and renamed, so it is there as a whole or not at all, also where the process
is killed. What cannot be read back, or lies under another key, is compiled again, and a folder that cannot be written
to costs time, not correctness. What a killed process left is removed by the first write of a later one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCE, LOG, META = "kernel.cu", "log.txt", "meta.json"
UNFINISHED = ".writing-"  # what a name starts with while it is written
ABANDONED_SECONDS = 3600  # no write takes this long


@dataclass(frozen=True)
class Entry:
    """One compiled kernel: its source, its image and what the compiler printed."""

    source: str
    data: bytes
    log: str


def entry_key(source: str, options: Sequence[str], version: tuple[int, int]) -> str:
    """Name of an entry. Where the headers lie does not change what is compiled, so `-I` options do not count."""
    counted = [option for option in options if not option.startswith("-I")]
    return hashlib.sha256(json.dumps([source, counted, version]).encode()).hexdigest()


def read_entry(folder: Path, image_name: str) -> Entry | None:
    """An entry, or None where it is missing or damaged."""
    try:
        entry = Entry(
            source=(folder / SOURCE).read_text(encoding="utf-8"),
            data=(folder / image_name).read_bytes(),
            log=(folder / LOG).read_text(encoding="utf-8"),
        )
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entry if isinstance(meta, dict) and meta.get("sha256") == _checksum(folder.name, entry) else None


def write_entry(folder: Path, image_name: str, entry: Entry, meta: Mapping[str, object]) -> None:
    """Write an entry, or nothing where the folder cannot be written to."""
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(folder.parent)
        staging = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
        try:
            _write_files(staging / "new", image_name, entry, {**meta, "sha256": _checksum(folder.name, entry)})
            with suppress(OSError):  # a damaged entry, or another process's, which is as good; moved as a whole too
                folder.rename(staging / "old")
            (staging / "new").rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _write_files(folder: Path, image_name: str, entry: Entry, meta: Mapping[str, object]) -> None:
    folder.mkdir()
    (folder / SOURCE).write_text(entry.source, encoding="utf-8")
    (folder / image_name).write_bytes(entry.data)
    (folder / LOG).write_text(entry.log, encoding="utf-8")
    (folder / META).write_text(json.dumps(meta, indent=2), encoding="utf-8")


@functools.cache
def drop_abandoned(folder: Path) -> None:
    """Remove what processes that were killed had begun to write; once a process, for a folder may have many entries."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process finished it, or removes it as well
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def checksum(*parts: bytes) -> str:
    """Of an entry's key and of all that it holds."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _checksum(key: str, entry: Entry) -> str:
    return checksum(key.encode(), entry.source.encode(), entry.data, entry.log.encode())
