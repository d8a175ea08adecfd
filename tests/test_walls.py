"""The walls of the house, read from the imports themselves: one table of rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import onnxfuse

ROOT = Path(onnxfuse.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
BASE = {"errors", "dtypes", "device", "settings", "progress", "limits", "staging", "known_inputs"}
MOST_AT_THE_ROOT = 18


@dataclass(frozen=True)
class Room:
    """The rooms that its files import, beside their own, and the libraries behind walls that they may use."""

    rooms: frozenset[str]
    libraries: frozenset[str] = frozenset()


def room(rooms: str, libraries: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(libraries.split()))


ONNX = "onnx onnx_graphsurgeon"
WALLED = {*ONNX.split(), "cupy", "onnxruntime"}
HOUSE = {
    "base": room(""),
    "graph": room("base", ONNX),
    "ir": room("base"),
    "runtime": room("base", "cupy onnxruntime"),
    "patterns": room("base graph ir", ONNX),
    "analysis": room("base ir"),
    "schedule": room("base ir analysis"),
    "kernels": room("base ir schedule"),
    "lowering": room("base graph ir patterns analysis schedule kernels runtime"),
    "tune": room("base graph ir analysis schedule kernels runtime lowering", "onnxruntime"),
    "verify": room("base graph runtime", f"{ONNX} onnxruntime"),
    "bench": room("base graph runtime", f"{ONNX} onnxruntime cupy"),
    "report": room("base ir analysis schedule kernels runtime lowering"),
    "front door": room("base graph ir patterns analysis runtime lowering tune verify bench report"),
}


def room_of(name: str) -> str:
    """The room of a module, by its dotted name after `onnxfuse`."""
    first = name.split(".")[0]
    if (ROOT / first).is_dir():
        return first
    return "base" if first in BASE else "front door"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if (ROOT.parent / name.replace(".", "/")).with_suffix(".py").exists()]
            yield from found or [str(node.module)]


def dotted(path: Path) -> str:
    return path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def test_every_room_is_in_the_table() -> None:
    folders = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert folders | {"base", "front door"} == set(HOUSE)
    assert len([path for path in FILES if len(path.parts) == 1]) <= MOST_AT_THE_ROOT


@pytest.mark.parametrize("name", HOUSE)
def test_a_room_imports_what_the_table_says(name: str) -> None:
    for path in FILES:
        if room_of(dotted(path)) == name:
            own = {found.removeprefix("onnxfuse.") for found in imports(path) if found.startswith("onnxfuse.")}
            through = {found for found in own if room_of(found) not in HOUSE[name].rooms | {name}}
            assert not through, f"{path} in {name} imports {sorted(through)}"
            foreign = {found.split(".")[0] for found in imports(path)} & WALLED - HOUSE[name].libraries
            assert not foreign, f"{path} in {name} imports {sorted(foreign)}"


@pytest.mark.parametrize("library", sorted(WALLED))
def test_a_wall_guards_something(library: str) -> None:
    assert any(found.split(".")[0] == library for path in FILES for found in imports(path))


def test_rooms_lie_in_no_circle() -> None:
    edges = {name: set(each.rooms) for name, each in HOUSE.items()}
    while edges:
        leaves = {name for name, targets in edges.items() if not targets & edges.keys()}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in leaves}


PURE = {"__future__", "onnxfuse", "dataclasses", "collections", "math", "functools", "itertools", "typing"}
PURE |= {"enum", "statistics", "numpy"}  # numbers alone: nothing that a machine or a GPU changes
READS_A_FILE = "schedule/calibration"


@pytest.mark.parametrize("name", ["ir", "analysis", "schedule"])
def test_a_pure_room_sees_no_library_no_file_and_no_environment(name: str) -> None:
    for path in FILES:
        if room_of(dotted(path)) == name and not path.as_posix().startswith(READS_A_FILE):
            foreign = {found.split(".")[0] for found in imports(path)} - PURE
            assert not foreign, f"{path} is pure but imports {sorted(foreign)}"


def test_modules_import_each_other_in_no_circle() -> None:
    names = {f"onnxfuse.{dotted(path)}": path for path in FILES}
    edges = {name: {found for found in imports(path) if found in names} - {name} for name, path in names.items()}
    while edges:
        leaves = {name for name, targets in edges.items() if not targets & edges.keys()}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
