"""Measured times on disk, found by what was measured: one JSON file for each site and number of rows.

    <SHA-256 of the key>.json    the key, microseconds by implementation (`"one kernel 128x96 ping-pong": 22.8`), their
    checksum

The key names the GPU, the driver, the versions and every kernel's source, so a figure is never used where another would
be measured; the checksum is of the key and the times. A file is written to the side and renamed: a run that is
interrupted keeps what it had measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxfuse.runtime.cache import UNFINISHED, checksum, drop_abandoned

FOLDER = "timings"

Key = Mapping[str, Any]


def read_times(folder: Path | None, key: Key) -> dict[str, float] | None:
    """The times of a key, or None where they are missing or damaged, or there is no cache."""
    if folder is None:
        return None
    try:
        entry = json.loads(_path(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    times = entry.get("microseconds") if isinstance(entry, dict) else None
    return times if isinstance(times, dict) and entry.get("sha256") == _checksum(key, times) else None


def write_times(folder: Path | None, key: Key, times: Mapping[str, float]) -> None:
    """Keep times, or do nothing where there is no cache or it cannot be written to."""
    if folder is None:
        return
    path = _path(folder, key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(path.parent)
        _put(path, {"key": key, "microseconds": dict(times), "sha256": _checksum(key, times)})


def _put(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry whole: a reader sees it, or the one before."""
    handle, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=2)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _checksum(key: Key, times: Mapping[str, float]) -> str:
    return checksum(_text(key), _text(times))


def _text(values: Mapping[str, Any]) -> bytes:
    """The same for equal values in whichever order."""
    return json.dumps(dict(values), sort_keys=True).encode()


def _path(folder: Path, key: Key) -> Path:
    return folder / FOLDER / f"{hashlib.sha256(_text(key)).hexdigest()}.json"
