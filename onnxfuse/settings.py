"""Every environment variable that onnxfuse reads, in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.errors import SettingError


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting(
        "ONNXFUSE_CACHE_DIR", "~/.cache/onnxfuse", "folder of compiled kernels and measured times; empty: no cache"
    ),
    Setting("ONNXFUSE_COMPILE_JOBS", "number of cores", "how many kernels are compiled at once"),
)


def cache_dir() -> Path | None:
    """Folder of compiled kernels and measured times; None where the user wants no cache, or has no home for one.

    Raises:
        SettingError: the user names a home folder that does not exist.
    """
    value = os.environ.get("ONNXFUSE_CACHE_DIR")
    try:
        return Path("~/.cache/onnxfuse" if value is None else value).expanduser() if value != "" else None
    except RuntimeError:
        if value is None:
            return None
        raise SettingError(f"the cache {value}: this user has no home folder; set ONNXFUSE_CACHE_DIR") from None


def compile_jobs() -> int:
    """How many kernels are compiled at once.

    Raises:
        SettingError: not a positive number.
    """
    value = os.environ.get("ONNXFUSE_COMPILE_JOBS", str(os.cpu_count() or 1))
    if not value.isdecimal() or int(value) < 1:
        raise SettingError(f"ONNXFUSE_COMPILE_JOBS={value!r} is not a positive number")
    return int(value)
