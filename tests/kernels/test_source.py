"""The text of a kernel is made of whole files in the order that their `#include` lines ask for."""

from __future__ import annotations

import re

import pytest

from onnxfuse.kernels.source import GENERATED_USES, TEMPLATES, assembled

INCLUDES = {
    path.relative_to(TEMPLATES).as_posix(): re.findall(r'#include "(.*)"', path.read_text())
    for path in sorted(TEMPLATES.rglob("*.cuh"))
}
ROOTS = sorted(set(INCLUDES) - {*(name for names in INCLUDES.values() for name in names)} - {*GENERATED_USES})


def names_in(source: str) -> list[str]:
    return re.findall(r"^// ---- (\S+\.cuh|generated)$", source, re.MULTILINE)


@pytest.mark.parametrize("root", ROOTS)
def test_every_file_stands_once_behind_what_it_includes(root: str) -> None:
    names = names_in(assembled("// ---- generated", root))
    assert len(names) == len(set(names))
    assert names[-1] == root
    assert names.index("generated") > max(names.index(name) for name in GENERATED_USES)
    for place, name in enumerate(names):
        assert {*INCLUDES.get(name, [])} <= {*names[:place]}, f"{name} stands before what it includes"


def test_what_the_generated_text_uses_stands_before_it() -> None:
    names = names_in(assembled("// ---- generated", "hopper/gemm.cuh", (*GENERATED_USES, "common/copied_rows.cuh")))
    assert names.index("common/copied_rows.cuh") < names.index("generated") < names.index("hopper/epilogue.cuh")
