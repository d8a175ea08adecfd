"""A pass of Olive that fuses an ONNX model: `python -m onnxfuse.olive PACKAGE.json` writes the package config of it.

Olive is no dependency of onnxfuse. It belongs last in a workflow: passes behind it may put the original nodes back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from onnxfuse import OnnxfuseError, OutputError, SettingError, optimize_file
from onnxfuse.graph.save import write_text
from onnxfuse.terminal import print_error

NAME = "OnnxFuse"


def _refuse(error: OnnxfuseError) -> NoReturn:
    print_error(error)
    sys.exit(error.exit_code)


try:
    from olive.hardware.accelerator import AcceleratorSpec
    from olive.model import ONNXModelHandler
    from olive.model.utils import resolve_onnx_path
    from olive.package_config import OlivePackageConfig
    from olive.passes import Pass
    from olive.passes.pass_config import BasePassConfig, PassConfigParam
except ImportError as error:
    missing = f"onnxfuse.olive is a pass of Olive, which cannot be imported ({error}): pip install olive-ai"
    if __name__ == "__main__":
        _refuse(SettingError(missing))
    raise ImportError(missing, name=error.name) from error


class OnnxFuse(Pass):  # type: ignore[misc]
    """Fuses matrix products with what follows them into GPU kernels, which the file carries."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "arch": PassConfigParam(
                type_=str, default_value=None, description="sm_90a,sm_80,ptx or native; by default the GPUs at hand"
            ),
            "fp32": PassConfigParam(type_=str, default_value="tf32", description="tf32 or exact"),
            "rounding": PassConfigParam(type_=str, default_value="fp32", description="fp32 or onnx"),
            "keep_weights": PassConfigParam(
                type_=bool, default_value=False, description="store no weight in another order than the model does"
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: BasePassConfig, output_model_path: str
    ) -> ONNXModelHandler:
        source = Path(model.model_path)
        target = Path(resolve_onnx_path(output_model_path, source.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {name: getattr(config, name) for name in ("arch", "fp32", "rounding", "keep_weights")}
        optimize_file(source, target, force=True, **options)
        return ONNXModelHandler(model_path=str(target.parent), onnx_file_name=target.name)


def package_config() -> dict[str, Any]:
    """Olive's own package config with the pass in it: a config of one pass alone would hide all others."""
    config: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    config["passes"][NAME] = {
        "module_path": f"onnxfuse.olive.{OnnxFuse.__name__}",
        "supported_providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
        "supported_accelerators": ["gpu", "cpu"],
        "supported_precisions": ["*"],
    }
    return config


if __name__ == "__main__":
    if len(sys.argv) != 2:
        _refuse(SettingError("python -m onnxfuse.olive PACKAGE.json: name the one file that it writes"))
    try:
        write_text(Path(sys.argv[1]), json.dumps(package_config(), indent=4))
    except OutputError as error:
        _refuse(error)
