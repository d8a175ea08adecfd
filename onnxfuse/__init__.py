"""onnxfuse: rewrite the places where a matrix product is followed by cheap arithmetic into single GPU kernels.

model, report = onnxfuse.optimize("model.onnx")
session = onnxfuse.InferenceSession("model.fused.onnx")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

from onnxfuse.device import resolve, tuning_device
from onnxfuse.errors import CompileError, DeviceError, ModelError, OnnxfuseError, OutputError, SettingError
from onnxfuse.graph.external_data import take_in
from onnxfuse.graph.graph import ModelProto
from onnxfuse.graph.save import check_files, check_target, save_model
from onnxfuse.graph.transposed_data import put_in_order
from onnxfuse.pipeline import Analysis, Fp32, Rounding, analyse_model, check_budget, optimize_model, tune_model
from onnxfuse.progress import Progress
from onnxfuse.report.site_report import Report
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.session import InferenceSession, library_path, register
from onnxfuse.selection import make_selection

__version__ = version("onnxfuse")
__all__ = [
    "CompileError", "DeviceError", "InferenceSession", "ModelError", "OnnxfuseError", "OutputError", "Report",
    "SettingError", "library_path", "optimize", "optimize_file", "register",
]  # fmt: skip


class Options(TypedDict, total=False):
    """The options of `optimize`, which tells what they mean."""

    arch: str | Sequence[str] | None
    fp32: Fp32
    rounding: Rounding
    keep_weights: bool
    attention: bool
    only: str | Iterable[str]
    skip: str | Iterable[str]
    plan: str | Path | Mapping[str, Any] | None
    dump: str | Path | None
    progress: Progress | None
    tune: bool
    budget: float | None


def optimize(
    model: str | Path | ModelProto,
    *,
    arch: str | Sequence[str] | None = None,
    fp32: Fp32 = "tf32",
    rounding: Rounding = "fp32",
    keep_weights: bool = False,
    attention: bool = True,
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
        keep_weights: store every weight in the order that it has; by default those that only fused nodes read are
            stored as `[n, k]` for `[k, n]`, or the reverse, where kernels are faster so, under names of their own.
        attention: make one kernel of two products and the softmax between them.
        only: fuse only what fits one of these: a pattern's name, or a glob over the names of a fusion's nodes.
        skip: leave out what fits one of these.
        plan: what `explain --json` prints, edited: fusions removed or marked with `"skip": true`; a file, or parsed.
        dump: a folder that gets one numbered file a stage for each fusion.
        progress: called with what is being done, how much is done, and how much there is.
        tune: choose by measuring on the GPU at hand instead of by the cost model.
        budget: seconds of measuring with `tune`; what does not fit stays as the cost model chose. None means no limit.

    Returns:
        The fused model, and what was fused, what was not, and why. Of a path, the model holds all its data, as
        `onnx.load` makes it: `onnx.save` writes it anywhere, and needs `save_as_external_data=True` over 2 GB. A
        loaded model's external data stay in the folder of the original.

    Raises:
        ModelError: the model, or its external data, cannot be read or is invalid.
        SettingError: an unknown architecture, fp32 or rounding mode, a selection that means nothing in this model,
            tuning without the GPU's own architecture, or a budget without tuning.
        CompileError: NVRTC refused a kernel.
        DeviceError: tuning without a GPU.
    """
    options = Options(
        arch=arch, fp32=fp32, rounding=rounding, keep_weights=keep_weights, attention=attention, only=only, skip=skip,
        plan=plan, dump=dump, progress=progress, tune=tune, budget=budget,
    )  # fmt: skip
    analysis, proto, report = _fuse(model, lambda analysis: None, options)
    return _with_data(proto, analysis), report


def _with_data(proto: ModelProto, analysis: Analysis) -> ModelProto:
    """Weights in the order that the nodes read; of a path the external data as well."""
    put_in_order(proto)
    if analysis.model.path is not None:
        take_in(proto, analysis.model)
    return proto


def optimize_file(source: str | Path, target: str | Path, *, force: bool = False, **options: Unpack[Options]) -> Report:
    """Fuse a model file and write the result, with the external data that it needs beside it.

    In the original's folder the written model reads the original's data. Elsewhere, and where a link leads to them that
    ONNX Runtime follows for the original alone, they are copied into the folder `target`.data; a model over 2 GB gets
    its weights in the file of that name, and so do those of a file that holds one in another order than the written
    model. All files appear at once, or none.

    Args:
        source: the model.
        target: where the fused model goes.
        force: overwrite files that exist; never the source or its data.
        options: those of `optimize`.

    Returns:
        What was fused, what was not, and why.

    Raises:
        OutputError: the target exists or cannot be written.
        ModelError: the model, or its external data, cannot be read or is invalid.
        SettingError: as in `optimize`.
        CompileError: as in `optimize`.
        DeviceError: as in `optimize`.
    """
    source, target = Path(source), Path(target)
    check_target(source, target, force)
    analysis, proto, report = _fuse(
        source, lambda found: check_files(found.model, target, force, found.transposed), options
    )
    save_model(proto, analysis.model, target, force)
    return report


def _fuse(
    model: str | Path | ModelProto, check: Callable[[Analysis], None], options: Options
) -> tuple[Analysis, ModelProto, Report]:
    """Analyse, check before the work begins, tune, compile and rewrite."""
    tune, budget = options.get("tune", False), options.get("budget")
    progress, dump = options.get("progress"), options.get("dump")
    check_budget(tune, budget)
    devices = resolve(options.get("arch"), local_architectures)
    local = tuning_device(devices, local_architectures()) if tune else None
    selection = make_selection(options.get("only", ()), options.get("skip", ()), options.get("plan"))
    modes = options.get("fp32", "tf32"), options.get("rounding", "fp32")
    kept, attention = options.get("keep_weights", False), options.get("attention", True)
    analysis = analyse_model(model, devices, modes[0], selection, modes[1], kept, attention)
    check(analysis)
    if local is not None:
        analysis = tune_model(analysis, local, budget=budget, progress=progress)
    folder = Path(dump) if dump is not None else None
    proto, report = optimize_model(analysis, dump=folder, progress=progress, to_save=True)
    return analysis, proto, report
