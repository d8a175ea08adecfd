"""onnxfuse: rewrite the places where a matrix product is followed by cheap arithmetic into single GPU kernels.

model, report = onnxfuse.optimize("model.onnx")
session = onnxfuse.InferenceSession("model.fused.onnx")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnxfuse.device import resolve, tuning_device
from onnxfuse.errors import CompileError, DeviceError, ModelError, OnnxfuseError, OutputError, SettingError
from onnxfuse.graph import ModelProto
from onnxfuse.pipeline import Fp32, Rounding, analyse_model, check_budget, optimize_model, tune_model
from onnxfuse.progress import Progress
from onnxfuse.report import Report
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.session import InferenceSession, library_path, register
from onnxfuse.selection import make_selection

__version__ = version("onnxfuse")
__all__ = [
    "CompileError", "DeviceError", "InferenceSession", "ModelError", "OnnxfuseError", "OutputError", "Report",
    "SettingError", "library_path", "optimize", "register",
]  # fmt: skip


def optimize(
    model: str | Path | ModelProto,
    *,
    arch: str | Sequence[str] | None = None,
    fp32: Fp32 = "tf32",
    rounding: Rounding = "fp32",
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    plan: str | Path | Mapping[str, Any] | None = None,
    dump: str | Path | None = None,
    progress: Progress | None = None,
    tune: bool = False,
    budget: float | None = None,
) -> tuple[ModelProto, Report]:
    """Fuse a model.

    Args:
        model: a path, or a loaded model, which is copied and not changed.
        arch: architectures to compile for, as a list or comma-separated (`sm_90a,sm_80`); `native` means the GPUs at
            hand. By default the GPUs at hand, and with none sm_80, sm_90a and PTX.
        fp32: how fp32 products are computed: `tf32`, as ONNX Runtime's CUDA provider does by default, or `exact`.
        rounding: `fp32` keeps what a kernel does not store in fp32; `onnx` rounds each intermediate to the type in
            which the model stores it, for the bits of separate nodes as far as the order of sums allows.
        only: fuse only what fits one of these: a pattern's name, or a glob over the names of a fusion's nodes.
        skip: leave out what fits one of these.
        plan: what `explain --json` prints, edited: fusions removed or marked with `"skip": true`; a file or the parsed
            dictionary.
        dump: a folder that gets one numbered file a stage for each fusion.
        progress: called with what is being done, how much is done, and how much there is.
        tune: choose by measuring on the GPU at hand instead of by the cost model.
        budget: seconds of measuring with `tune`; what does not fit stays as the cost model chose. None means no limit.

    Returns:
        The fused model, and what was fused, what was not, and why.

    Raises:
        ModelError: the model cannot be read or is invalid.
        SettingError: an unknown architecture, fp32 or rounding mode, a selection that means nothing in this model,
            tuning without the GPU's own architecture, or a budget without tuning.
        CompileError: NVRTC refused a kernel.
        DeviceError: tuning without a GPU.
    """
    check_budget(tune, budget)
    devices = resolve(arch, local_architectures)
    local = tuning_device(devices, local_architectures()) if tune else None
    analysis = analyse_model(model, devices, fp32, make_selection(only, skip, plan), rounding)
    if local is not None:
        analysis = tune_model(analysis, local, budget=budget, progress=progress)
    return optimize_model(analysis, dump=Path(dump) if dump is not None else None, progress=progress)
