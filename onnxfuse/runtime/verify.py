"""Is the optimised model as good as the original? Both are compared with the same model in float64; see accuracy.py."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from onnxfuse.errors import ModelError
from onnxfuse.fused_sites import uses_tf32
from onnxfuse.probe import Probe, fused_values, write_probed
from onnxfuse.progress import Progress, counted, silent
from onnxfuse.reference import write_float64
from onnxfuse.runtime.accuracy import OutputCheck, Value, check_output
from onnxfuse.runtime.feeds import Array, InputSpec, from_bfloat16, input_specs, make_feeds
from onnxfuse.runtime.session import CPU, CUDA, Provider, default_providers, onnxruntime, open_session

BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16

Feeds = Mapping[str, Array]
Values = Mapping[str, Value]


@dataclass(frozen=True)
class RunCheck:
    """The verdict on one run.

    Attributes:
        shapes: the shape of each input.
        outputs: one check for each output.
        sites: one check for each value that a fused node makes, where these were asked for.
    """

    shapes: dict[str, tuple[int, ...]]
    outputs: tuple[OutputCheck, ...]
    sites: tuple[OutputCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every output and site passed."""
        return all(check.passed for check in (*self.outputs, *self.sites))

    def to_dict(self) -> dict[str, Any]:
        """This run in what `--json` prints; None for what was not measured or is not finite."""
        outputs, sites = (
            [{**_plain(asdict(check)), "passed": check.passed} for check in checks]
            for checks in (self.outputs, self.sites)
        )
        return {"passed": self.passed, "shapes": self.shapes, "outputs": outputs, "sites": sites}

    def __str__(self) -> str:
        inputs = "  ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.shapes.items())
        return "\n".join([inputs, *map(str, self.outputs), *(f"site {check}" for check in self.sites)])


def _plain(value: Any) -> Any:
    """JSON has no infinity: an error in ulp of a zero, or one between the ends of float64, is none that it can say."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class VerifyResult:
    """The verdict on a model.

    Attributes:
        provider: the ONNX Runtime execution provider that ran both models.
        runs: one verdict for each run.
    """

    provider: str
    runs: tuple[RunCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every run passed."""
        return all(run.passed for run in self.runs)

    @property
    def outputs(self) -> tuple[OutputCheck, ...]:
        """The checks of all runs' outputs."""
        return tuple(output for run in self.runs for output in run.outputs)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"passed": self.passed, "provider": self.provider, "runs": [run.to_dict() for run in self.runs]}

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return "\n".join([*(f"{self.provider}  {run}" for run in self.runs), f"verify {verdict}"])


def verify(
    original: Path,
    optimized: Path,
    *,
    inputs: Feeds | Sequence[Feeds] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    runs: int = 1,
    per_site: bool = False,
    progress: Progress = silent,
) -> VerifyResult:
    """Run both models in ONNX Runtime, on CUDA where it is usable, and judge the optimised one.

    The sessions live one after the other, so memory holds one model at a time. Where fused nodes multiply in TF32 on
    CUDA, a second reference tells how much that may change, and takes the time of the first once more.

    Args:
        original: the model before.
        optimized: the model after.
        inputs: an array for each input, by name, or several such runs; random ones by default.
        shapes: shapes of random inputs, by name.
        sizes: sizes of dynamic axes, by symbol; run i takes the i-th of each, and there are as many runs as sizes.
        seed: of the first run's random inputs; the next runs' are the next ones.
        runs: how many random runs, at least.
        per_site: compare what each fused node makes as well.
        progress: called with what is being done, how much is done, and how much there is.

    Raises:
        ModelError: a model cannot be run, or the inputs do not fit it, or the models have different outputs.
        DeviceError: ONNX Runtime is missing.
    """
    original, optimized, providers = Path(original), Path(optimized), default_providers()
    with TemporaryDirectory(prefix="onnxfuse-") as name:
        folder = Path(name)
        probes = fused_values(original, optimized) if per_site else []
        paths = _Paths.make(original, optimized, probes, folder)
        session = open_session(paths.original, providers)
        feeds = list(_feeds(input_specs(session), inputs, shapes, sizes or {}, seed, runs))
        each = counted("running the original", feeds, progress)
        before = [_outputs(session, original, feed, guessed=inputs is None) for feed in each]
        del session  # before the next model is loaded
        after = _run(paths.optimized, optimized, providers, feeds, progress)
        exact = _run_reference(paths.original, original, feeds, progress)
        tf32 = providers[0] == CUDA and uses_tf32(optimized)
        rounded = _run_reference(paths.original, original, feeds, progress, tf32) if tf32 else [{} for _ in feeds]
    if before[0].keys() != after[0].keys():
        names = [", ".join(run[0]) for run in (after, before)]
        raise ModelError(f"{optimized}: its outputs are {names[0]}; those of {original} are {names[1]}")
    checked = (_check_run(*values, probes) for values in zip(feeds, before, after, exact, rounded, strict=True))
    return VerifyResult(str(providers[0]), tuple(checked))


@dataclass(frozen=True)
class _Paths:
    """The files that are run: the models themselves, or copies with more outputs."""

    original: Path
    optimized: Path

    @staticmethod
    def make(original: Path, optimized: Path, probes: Sequence[Probe], folder: Path) -> _Paths:
        if not probes:
            return _Paths(original, optimized)
        return _Paths(
            write_probed(original, probes, folder / "original.onnx"),
            write_probed(optimized, probes, folder / "optimized.onnx"),
        )


def _feeds(
    specs: Sequence[InputSpec],
    inputs: Feeds | Sequence[Feeds] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    sizes: Mapping[str, Sequence[int]],
    seed: int,
    runs: int,
) -> Iterator[dict[str, Array]]:
    """The inputs of each run, checked."""
    if inputs is not None:
        for given in [inputs] if isinstance(inputs, Mapping) else inputs:
            yield make_feeds(specs, given, shapes)
        return
    for run in range(max(runs, *map(len, sizes.values()), 1)):
        symbols = {symbol: several[run % len(several)] for symbol, several in sizes.items()}
        yield make_feeds(specs, None, shapes, seed + run, symbols)


def _check_run(
    feed: Feeds, before: Values, after: Values, exact: Values, rounded: Values, probes: Sequence[Probe]
) -> RunCheck:
    checks = {name: check_output(name, before[name], after[name], exact[name], rounded.get(name)) for name in before}
    added = {probe.name for probe in probes if not probe.is_output}
    shapes = {name: array.shape for name, array in feed.items()}
    outputs = tuple(check for name, check in checks.items() if name not in added)
    return RunCheck(shapes, outputs, tuple(checks[probe.name] for probe in probes))


def _run(
    path: Path, label: Path, providers: Sequence[Provider], feeds: Sequence[Feeds], progress: Progress
) -> list[dict[str, Value]]:
    session = open_session(path, providers)
    specs = input_specs(session)
    try:
        checked = [make_feeds(specs, feed) for feed in feeds]
    except ModelError as error:
        raise ModelError(f"{label}: the original's inputs do not fit: {error}") from error
    return [_outputs(session, label, feed) for feed in counted("running the optimised model", checked, progress)]


def _run_reference(
    path: Path, label: Path, feeds: Sequence[Feeds], progress: Progress, tf32: bool = False
) -> list[dict[str, Value]]:
    """Run in float64 on the CPU. Unoptimised: constant folding would hold every weight in double at once."""
    what = "computing what TF32 makes of the original" if tf32 else "computing the reference"
    options = onnxruntime().SessionOptions()
    options.graph_optimization_level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    with TemporaryDirectory(prefix="onnxfuse-") as folder:
        session = open_session(write_float64(path, Path(folder), tf32), [CPU], options)
        return [_outputs(session, label, feed) for feed in counted(what, feeds, progress)]


def _outputs(session: Any, path: Path, feeds: Feeds, guessed: bool = False) -> dict[str, Value]:
    values = {spec.name: to_ort_value(spec, feeds[spec.name]) for spec in input_specs(session)}
    names = [output.name for output in session.get_outputs()]
    try:
        results = session.run_with_ort_values(names, values)
    except Exception as error:  # onnxruntime's exceptions share no base class
        used = ", ".join(f"{name} [{', '.join(map(str, array.shape))}]" for name, array in feeds.items())
        hint = f"; give the sizes that it accepts with --shape NAME=2,77,768 (tried {used})" if guessed else ""
        raise ModelError(f"{path}: the model fails to run{hint}: {error}") from error
    return {name: _from_ort_value(name, value) for name, value in zip(names, results, strict=True)}


def to_ort_value(spec: InputSpec, array: Array) -> Any:
    """An `onnxruntime.OrtValue` for an input, on the CPU."""
    runtime = onnxruntime()
    if spec.element != "bfloat16":
        return runtime.OrtValue.ortvalue_from_numpy(array)
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)


def _from_ort_value(name: str, value: Any) -> Value:
    if not value.is_tensor():
        raise ModelError(f"output {name!r}: outputs of type {value.data_type()} are not supported")
    if value.element_type() == BFLOAT16:
        raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return Value(from_bfloat16(np.frombuffer(raw, np.uint16).reshape(value.shape())), "bfloat16")
    array = value.numpy()
    return Value(array, array.dtype.name)
