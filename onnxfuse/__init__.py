"""onnxfuse: rewrite the places where a matrix product is followed by cheap arithmetic into single GPU kernels.

model, report = onnxfuse.optimize("model.onnx")
session = onnxfuse.InferenceSession("model.fused.onnx")
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from onnxfuse.device import resolve
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import ModelProto
from onnxfuse.packing import Progress
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.report import Report
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.session import InferenceSession, library_path, register

__version__ = version("onnxfuse")
__all__ = ["InferenceSession", "OnnxfuseError", "Report", "library_path", "optimize", "register"]


def optimize(
    model: str | Path | ModelProto,
    *,
    arch: str | Sequence[str] | None = None,
    fp32: str = "tf32",
    dump: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[ModelProto, Report]:
    """Fuse a model.

    Args:
        model: a path, or a loaded model, which is copied and not changed.
        arch: architectures to compile for, as a list or comma-separated (`sm_90a,sm_80`); `native` means the GPUs at
            hand. By default the GPUs at hand, and with none sm_80, sm_90a and PTX.
        fp32: how fp32 products are computed: `tf32`, as ONNX Runtime's CUDA provider does by default, or `exact`.
        dump: a folder that gets one numbered file a stage for each fusion.
        progress: called with what is being done, how much is done, and how much there is.

    Returns:
        The fused model, and what was fused, what was not, and why.

    Raises:
        ModelError: the model cannot be read or is invalid.
        SettingError: an unknown architecture or fp32 mode.
        CompileError: NVRTC refused a kernel.
    """
    devices = resolve(arch, local_architectures)
    analysis = analyse_model(model, devices, fp32)
    return optimize_model(analysis, dump=Path(dump) if dump is not None else None, progress=progress)
