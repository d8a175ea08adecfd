"""The pass of Olive writes a fused model. Olive needs torch, so CI has a stand-in for the few names that are used.

Where olive-ai is installed it runs the pass itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import onnx
import pytest

from onnxfuse.errors import SettingError
from onnxfuse.graph.functions import DOMAIN

MODEL = Path(__file__).parents[2] / "models" / "ff_geglu.onnx"
NAMES = {
    "olive.hardware.accelerator": {"AcceleratorSpec": object},
    "olive.model": {"ONNXModelHandler": SimpleNamespace},
    "olive.model.utils": {"resolve_onnx_path": lambda folder, name: str(Path(folder) / name)},
    "olive.package_config": {"OlivePackageConfig": None},
    "olive.passes": {"Pass": object},
    "olive.passes.pass_config": {"BasePassConfig": object, "PassConfigParam": SimpleNamespace},
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`onnxfuse.olive` over modules of these names."""
    own = tmp_path / "olive_config.json"
    own.write_text(json.dumps({"passes": {"Other": {"module_path": "olive.other"}}, "extra_dependencies": {}}))
    config = SimpleNamespace(get_default_config_path=lambda: str(own))
    for name in ("olive", "olive.hardware", *NAMES):
        stand_in = ModuleType(name)
        for key, value in NAMES.get(name, {}).items():
            setattr(stand_in, key, config if key == "OlivePackageConfig" else value)
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, "onnxfuse.olive", raising=False)
    yield importlib.import_module("onnxfuse.olive")
    sys.modules.pop("onnxfuse.olive", None)


def test_the_pass_writes_a_fused_model(module: ModuleType, tmp_path: Path) -> None:
    defaults = {name: param.default_value for name, param in module.OnnxFuse._default_config(None).items()}
    config = SimpleNamespace(**defaults | {"arch": "sm_80"})
    given = SimpleNamespace(model_path=str(MODEL))
    made = module.OnnxFuse()._run_for_config(given, config, str(tmp_path / "out"))
    assert (made.model_path, made.onnx_file_name) == (str(tmp_path / "out"), MODEL.name)
    fused = onnx.load(Path(made.model_path) / made.onnx_file_name)
    assert any(node.domain == DOMAIN for node in fused.graph.node)


def test_the_package_config_has_olives_own_passes_as_well(module: ModuleType) -> None:
    passes = module.package_config()["passes"]
    assert list(passes) == ["Other", "OnnxFuse"]
    path, _, name = passes["OnnxFuse"]["module_path"].rpartition(".")
    assert getattr(sys.modules[path], name) is module.OnnxFuse


def without_olive(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process in which `import olive` fails, whatever is installed."""
    hide = "import runpy, sys; sys.modules['olive'] = None; sys.argv[0:1] = []; "
    return subprocess.run([sys.executable, "-c", hide + arguments[0], *arguments[1:]], capture_output=True, text=True)


def test_without_olive_the_command_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    target = tmp_path / "package.json"
    run = "runpy.run_module('onnxfuse.olive', run_name='__main__', alter_sys=True)"
    result = without_olive(run, "onnxfuse.olive", str(target))
    (line,) = result.stderr.splitlines()
    assert result.returncode == SettingError.exit_code
    assert line.startswith("error: ")
    assert "pip install olive-ai" in line
    assert not target.exists()


def test_without_olive_the_import_says_what_to_install() -> None:
    result = without_olive("import onnxfuse.olive")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "pip install olive-ai" in last


@pytest.mark.skipif(importlib.util.find_spec("olive") is None, reason="pip install olive-ai brings Olive")
def test_olive_itself_runs_the_pass(tmp_path: Path) -> None:
    local = {
        "type": "LocalSystem",
        "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
    }
    workflow = {
        "input_model": {"type": "ONNXModel", "model_path": str(MODEL)},
        "systems": {"local": local},
        "passes": {"fuse": {"type": "OnnxFuse", "arch": "sm_80"}},
        **{"host": "local", "target": "local", "output_dir": "out", "cache_dir": "cache"},
    }
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    commands = ["onnxfuse.olive package.json", "olive run --config workflow.json --package-config package.json"]
    for command in commands:
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, env=offline, check=True)
    (made,) = (tmp_path / "out").rglob("*.onnx")
    assert any(node.domain == DOMAIN for node in onnx.load(made).graph.node)
