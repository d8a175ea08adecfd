"""Result files: JSON with one line for each row and numbers of seven digits, so that a change shows row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 7  # enough to round once more for a table


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result; lists of objects are its rows."""
    fields = ",\n".join(f" {json.dumps(name)}: {_field(value)}" for name, value in _rounded(result).items())
    path.write_text(f"{{\n{fields}\n}}\n")


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
