"""Result files: JSON with one line for each row and numbers of seven digits, so that a change shows row by row.

Those of thousands of kernels, which a fit reads and nobody else, end in `.xz` and are compressed: a fifth of the bytes.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 7  # enough to round once more for a table


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result; lists of objects are its rows."""
    fields = ",\n".join(f" {json.dumps(name)}: {_field(value)}" for name, value in _rounded(result).items())
    text = f"{{\n{fields}\n}}\n".encode()
    path.write_bytes(lzma.compress(text, preset=lzma.PRESET_EXTREME) if _is_compressed(path) else text)


def read_result(path: Path) -> dict[str, Any]:
    """What was written."""
    data = path.read_bytes()
    result: dict[str, Any] = json.loads(lzma.decompress(data) if _is_compressed(path) else data)
    return result


def _is_compressed(path: Path) -> bool:
    return path.suffix == ".xz"


def _field(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
        return f"[\n{rows}\n ]"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
