"""The models in models/: valid, small, free of paths, described, and with the sites they are there for."""

from __future__ import annotations

import ast
from pathlib import Path

import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests.end_to_end.test_corpus import count

FOLDER = Path(__file__).parents[2] / "models"
# Model -> split gates, products with an activation.
SITES = {"unet_block": (1, 0), "ff_geglu": (1, 0), "bert": (0, 3), "vit": (0, 2), "lstm_gates": (0, 0)}


def test_every_model_is_listed_here_and_described() -> None:
    names = {path.stem for path in FOLDER.glob("*.onnx")}
    assert names == set(SITES)
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{name}.onnx`" in text for name in names)


@pytest.mark.parametrize("name", SITES)
def test_models_are_valid_and_free_of_paths(name: str) -> None:
    path = FOLDER / f"{name}.onnx"
    onnx.checker.check_model(onnx.load(path), full_check=True)
    data = path.read_bytes()
    assert not any(mark in data for mark in (b"site-packages", b"/tmp/", b"/home/", b"/root/", b"export.py"))


@pytest.mark.parametrize("name", SITES)
def test_models_have_their_sites(name: str) -> None:
    sites = analyse_model(FOLDER / f"{name}.onnx", resolve("sm_80", list)).sites
    found = count([site.fusion for site in sites])
    assert (found["packed_gates"], found["activations"]) == SITES[name]


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 2_000_000
    assert (FOLDER / "unet_block.onnx").stat().st_size < 500_000


def test_the_package_does_not_import_torch() -> None:
    for path in FOLDER.parent.glob("onnxfuse/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not {name.split(".")[0] for name in names} & {"torch", "diffusers", "transformers"}, path
