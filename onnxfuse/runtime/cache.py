"""Compiled kernels on disk, found by what they were compiled from.

One readable folder an entry, named by the SHA-256 of source, options and compiler version:

    <key>/kernel.cu      the source
          kernel.cubin   or kernel.ptx
          log.txt        what the compiler printed
          meta.json      architecture, options, version, and the checksum of the other three

An entry is written to a temporary folder and renamed, so it is there as a whole or not at all. What cannot be read back
is compiled again, and a folder that cannot be written to costs time, not correctness.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCE, LOG, META = "kernel.cu", "log.txt", "meta.json"


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
    return entry if isinstance(meta, dict) and meta.get("sha256") == _checksum(entry) else None


def write_entry(folder: Path, image_name: str, entry: Entry, meta: Mapping[str, object]) -> None:
    """Write an entry, or nothing where the folder cannot be written to."""
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            (staging / SOURCE).write_text(entry.source, encoding="utf-8")
            (staging / image_name).write_bytes(entry.data)
            (staging / LOG).write_text(entry.log, encoding="utf-8")
            text = json.dumps({**meta, "sha256": _checksum(entry)}, indent=2)
            (staging / META).write_text(text, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # a damaged entry; or another process's, which is as good
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _checksum(entry: Entry) -> str:
    return hashlib.sha256(b"\0".join((entry.source.encode(), entry.data, entry.log.encode()))).hexdigest()
