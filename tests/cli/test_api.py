"""The Python API: what it exports, what it refuses, and where it works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_args, get_type_hints

import onnx
import pytest

import onnxfuse
from onnxfuse.errors import OutputError, SettingError
from onnxfuse.pipeline import FP32_MODES, ROUNDING_MODES, analyse_model
from onnxfuse.runtime import cupy_folder
from tests.graph.test_save import hub_cache, session_outputs
from tests.helpers.onnx_build import of_sizes

ROOT = Path(__file__).parents[2]
GATE = ROOT / "models" / "ff_geglu.onnx"


def test_every_error_that_a_docstring_names_is_exported() -> None:
    texts = [getattr(onnxfuse, name).__doc__ or "" for name in onnxfuse.__all__]
    named = set(re.findall(r"^ +(\w+Error):", "\n".join(texts), re.MULTILINE))
    assert named >= {"ModelError", "SettingError", "CompileError", "DeviceError"}
    assert named <= set(onnxfuse.__all__)


@pytest.mark.parametrize("function", [onnxfuse.optimize, analyse_model])
def test_a_type_checker_knows_the_modes(function: object) -> None:
    hints = get_type_hints(function)
    assert (get_args(hints["fp32"]), get_args(hints["rounding"])) == (FP32_MODES, ROUNDING_MODES)


def test_both_functions_take_the_same_options() -> None:
    options = {name for name, each in signature(onnxfuse.optimize).parameters.items() if each.kind == each.KEYWORD_ONLY}
    assert set(onnxfuse.Options.__annotations__) == options


def test_a_model_with_external_data_is_saved_anywhere(tmp_path: Path) -> None:
    source, saved, written = hub_cache(tmp_path), tmp_path / "a" / "saved.onnx", tmp_path / "written.onnx"
    saved.parent.mkdir()
    onnx.save(onnxfuse.optimize(source, arch="sm_80")[0], saved)
    report = onnxfuse.optimize_file(source, written, arch="sm_80")
    assert report.to_dict() == onnxfuse.optimize(source, arch="sm_80")[1].to_dict()
    assert session_outputs(saved) == session_outputs(source) == session_outputs(written)
    assert onnx.load(saved) == onnx.load(written)
    for force in (False, True):
        with pytest.raises(OutputError, match=r"exists|is the input"):
            onnxfuse.optimize_file(source, source if force else written, arch="sm_80", force=force)


@pytest.mark.parametrize(("tune", "budget"), [(False, 10.0), (False, 0), (True, -1.0), (True, float("nan"))])
def test_a_budget_that_nothing_keeps_is_refused(tune: bool, budget: float) -> None:
    with pytest.raises(SettingError, match="budget"):
        onnxfuse.optimize(GATE, tune=tune, budget=budget)


@pytest.mark.parametrize("front", ["command line", "Python"])
def test_a_home_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path, front: str) -> None:
    """As in a container; a file in the home folder's place refuses even the superuser."""
    model, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(of_sizes(onnx.load(GATE), {"batch": 2, "sequence": 7}), model)
    (tmp_path / "home").touch()
    call = f"import onnxfuse, onnx; onnx.save(onnxfuse.optimize({str(model)!r}, arch='ptx')[0], {str(out)!r})"
    command = {
        "command line": ["-m", "onnxfuse", "optimize", model, "-o", out, "--arch", "ptx"],
        "Python": ["-c", call],
    }
    environment = os.environ | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    for name in ("ONNXFUSE_CACHE_DIR", cupy_folder.VARIABLE):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *command[front]], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "in.onnx", "out.onnx"], (
        "its folder is gone with it"
    )


def test_a_user_without_a_home_gets_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setenv(cupy_folder.VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(cupy_folder.VARIABLE)
    monkeypatch.setattr(Path, "expanduser", homeless)
    cupy_folder.give_cupy_a_folder()
    assert Path(os.environ[cupy_folder.VARIABLE]).is_dir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_the_user_names_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setenv(cupy_folder.VARIABLE, str(tmp_path / "named"))
    cupy_folder.give_cupy_a_folder()
    assert os.environ[cupy_folder.VARIABLE] == str(tmp_path / "named")
