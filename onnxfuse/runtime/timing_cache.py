"""Measured times on disk, found by what was measured: one JSON file for each site and number of rows.

    <SHA-256 of the key>.json    {"key": {...}, "microseconds": {"one kernel 128x96 ping-pong": 22.8, ...}}

The key names the GPU, the driver, the versions and every kernel's source, so a figure is never used where another would
be measured. A file is written to the side and renamed: a run that is interrupted keeps what it had measured.
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

from onnxfuse.runtime.cache import UNFINISHED, drop_abandoned

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
    times = entry.get("microseconds") if isinstance(entry, dict) and entry.get("key") == _plain(key) else None
    if not isinstance(times, dict) or not all(isinstance(time, float) and time > 0 for time in times.values()):
        return None
    return times


def write_times(folder: Path | None, key: Key, times: Mapping[str, float]) -> None:
    """Keep times, or do nothing where there is no cache or it cannot be written to."""
    if folder is None:
        return
    path = _path(folder, key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(path.parent)
        handle, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": _plain(key), "microseconds": dict(times)}, file, indent=2)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)


def _plain(key: Key) -> Any:
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key))


def _path(folder: Path, key: Key) -> Path:
    return folder / FOLDER / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"
