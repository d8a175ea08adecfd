"""The three walls of the house, and the direction of its arrows, read from the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxfuse

ROOT = Path(onnxfuse.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

ONNX_WORLD = (
    "model", "inline", "scopes", "graph", "facts", "known_values", "symbolic_shapes", "patterns", "rewrite", "extract",
    "store", "external_data", "op_names", "reference", "double_ops", "probe", "operators", "fused_sites",
    "declared", "known_nodes", "value_types", "input_facts",
    "input_sizes",
)  # fmt: skip
WALLS = {
    "onnx": ONNX_WORLD,
    "onnx_graphsurgeon": ONNX_WORLD,
    "cupy": ("runtime",),
    "onnxruntime": ("runtime/session", "runtime/verify", "runtime/bench", "runtime/tune"),
}
PURE = (
    "fusion",
    "simplify",
    "axes",
    "vector_width",
    "access_path",
    "kernel_spec",
    "plan",
    "tile_cost",
    "tile_footprint",
    "hopper_tile",
    "small_m_tile",
    "behind_product",
    "pointwise_tile",
    "pointwise_plan",
    "access",
    "variant",
    "kernel_family",
    "families",
    "hopper_family",
    "portable_family",
    "small_m_family",
    "pointwise_family",
    "shared_memory",
    "tier",
)
PLANNING = ("onnxfuse.plan", "onnxfuse.families", "onnxfuse.tile_cost")
LEAVES = ("limits", "progress", "errors", "settings", "dtypes", "device", "selection")
# A room may import those before it in the way of a model; `pipeline` and the front doors see everything.
FORBIDDEN = {
    "kernels": ("onnxfuse.runtime", "onnxfuse.graph", "onnxfuse.patterns", "onnxfuse.rewrite"),
    "patterns": ("onnxfuse.runtime", "onnxfuse.kernels", *PLANNING, "onnxfuse.artifact"),
    "runtime": ("onnxfuse.patterns", "onnxfuse.pipeline", "onnxfuse.rewrite"),
    "rewrite": ("onnxfuse.runtime", "onnxfuse.kernels", *PLANNING),
    "graph": ("onnxfuse.runtime", "onnxfuse.kernels", "onnxfuse.patterns", *PLANNING),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield str(node.module)


def inside(path: Path, rooms: tuple[str, ...]) -> bool:
    name = path.with_suffix("").as_posix()
    return any(name == room or name.startswith(room + "/") for room in rooms)


@pytest.mark.parametrize("library", WALLS)
def test_wall(library: str) -> None:
    users = {path for path in FILES for name in imports(path) if name.split(".")[0] == library}
    assert users, f"nobody imports {library}: the wall guards nothing"
    through = sorted(str(path) for path in users if not inside(path, WALLS[library]))
    assert not through, f"wall of {library}: only {', '.join(WALLS[library])} may import it, but {through} do"


@pytest.mark.parametrize("room", FORBIDDEN)
def test_arrows_point_one_way(room: str) -> None:
    for path in FILES:
        if inside(path, (room,)):
            backwards = [name for name in imports(path) if name.startswith(FORBIDDEN[room])]
            assert not backwards, f"{path} imports {backwards}, which come after {room} in the way of a model"


def test_leaves_import_nothing_of_the_project() -> None:
    for path in FILES:
        if inside(path, LEAVES):
            own = [name for name in imports(path) if name.startswith("onnxfuse") and not name.endswith("errors")]
            assert not own, f"{path} is a leaf but imports {own}"


def test_the_pure_world_sees_no_library_no_file_and_no_environment() -> None:
    allowed = {"onnxfuse", "__future__", "dataclasses", "collections", "math", "functools", "itertools", "typing"}
    allowed |= {"enum", "statistics"}
    for path in FILES:
        if inside(path, PURE):
            foreign = {name.split(".")[0] for name in imports(path)} - allowed
            assert not foreign, f"{path} is pure but imports {foreign}"
            rooms = [
                name
                for name in imports(path)
                if name.startswith(("onnxfuse.runtime", "onnxfuse.kernels", "onnxfuse.graph"))
            ]
            assert not rooms, f"{path} is pure but imports {rooms}"


def test_modules_import_each_other_in_no_circle() -> None:
    names = {"onnxfuse." + path.with_suffix("").as_posix().replace("/", "."): path for path in FILES}
    edges = {name: {found for found in imports(path) if found in names} for name, path in names.items()}
    while edges:
        leaves = {name for name, targets in edges.items() if not targets & edges.keys()}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
