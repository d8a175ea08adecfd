"""Limits that C++ and CUDA state again are those of onnxfuse/limits.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import onnxfuse
from onnxfuse import limits

ROOT = Path(onnxfuse.__file__).parent
STATED = {
    "kernels/cuda/common/arguments.cuh": {
        "ONNXFUSE_MAX_PARTS": limits.MAX_PARTS,
        "ONNXFUSE_MAX_LOADS": limits.MAX_LOADS,
        "ONNXFUSE_MAX_OUTS": limits.MAX_OUTS,
    },
    "runtime/bridge/archive.h": {"kMaxMaps": limits.MAX_MAPS},
    "runtime/bridge/archive.cc": {"kMaxBox": limits.MAX_BOX},
}


@pytest.mark.parametrize("file", STATED)
def test_other_languages_state_the_same_limits(file: str) -> None:
    text = (ROOT / file).read_text()
    for name, value in STATED[file].items():
        assert re.findall(rf"\b{name}\b(?: =)? (\d+)", text) == [str(value)], name
