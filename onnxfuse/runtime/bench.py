"""How long do both models take on the GPU? Timed in turn, run by run, with inputs and outputs on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import Array, InputSpec, input_specs, make_feeds
from onnxfuse.runtime.session import CPU, CUDA, cuda_usable, onnxruntime, open_session
from onnxfuse.runtime.verify import to_ort_value


@dataclass(frozen=True)
class Latency:
    """Latency of one run in milliseconds: the median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ms  (p10 {self.p10:.3f}, p90 {self.p90:.3f})"


@dataclass(frozen=True)
class BenchResult:
    """What was timed, where, and how long it took.

    Attributes:
        original: the original's latency.
        optimized: the optimised model's latency.
        runs: timed runs of each.
        shapes: the shape of each input.
        gpu: the device's name.
        versions: of the driver, CUDA, ONNX Runtime and onnxfuse, where they are known.
    """

    original: Latency
    optimized: Latency
    runs: int
    shapes: dict[str, tuple[int, ...]]
    gpu: str
    versions: dict[str, str]

    @property
    def ratio(self) -> float:
        """How many times as fast the optimised model is, by the medians."""
        return self.original.median / self.optimized.median

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; times in milliseconds."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        inputs = "  ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.shapes.items())
        about = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return "\n".join(
            [
                f"{self.gpu}  {about}",
                f"{inputs}  {self.runs} runs of each, in turn",
                f"original   {self.original}",
                f"optimised  {self.optimized}",
                f"ratio      {self.ratio:.2f}x",
            ]
        )


def bench(
    original: Path,
    optimized: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    runs: int = 50,
    warmup: int = 10,
) -> BenchResult:
    """Time both models on the GPU.

    Args:
        original: the model before.
        optimized: the model after.
        inputs: an array for each input, by name; random ones by default.
        shapes: shapes of random inputs, by name.
        seed: of the random inputs.
        runs: timed runs of each model, at least 1.
        warmup: runs of each before.

    Raises:
        DeviceError: there is no CUDA device, or ONNX Runtime has no CUDA provider that starts.
        ModelError: a model cannot be run, or the inputs do not fit it.
    """
    if runs < 1:
        raise ModelError(f"runs is {runs}; at least one run is needed")
    if not cuda_usable():
        raise DeviceError("no CUDA device is usable by ONNX Runtime; bench needs one, and onnxruntime-gpu")
    sessions = [_cuda_session(Path(path)) for path in (original, optimized)]
    specs = [input_specs(session) for session in sessions]
    feeds = make_feeds(specs[0], inputs, shapes, seed)
    before, after = (
        _runner(session, path, each, make_feeds(each, feeds))
        for session, path, each in zip(sessions, (original, optimized), specs, strict=True)
    )
    first, second = interleave(before, after, runs, warmup)
    used = {name: array.shape for name, array in feeds.items()}
    gpu = driver.device_name() or "unknown GPU"
    return BenchResult(_latency(first), _latency(second), runs, used, gpu, _versions())


def interleave(
    first: Callable[[], None],
    second: Callable[[], None],
    runs: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Time two functions in turn, so that a change of the clock rate or a neighbour's load meets both; in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(-warmup, runs):
        for function, into in zip((first, second), times, strict=True):
            start = clock()
            function()
            if run >= 0:
                into.append(clock() - start)
    return times


def _cuda_session(path: Path) -> Any:
    session = open_session(path, [CUDA, CPU])
    if CUDA not in session.get_providers():
        raise DeviceError("ONNX Runtime did not start its CUDA provider; its libraries (CUDA, cuDNN) may be missing")
    return session


def _runner(session: Any, path: Path, specs: Sequence[InputSpec], feeds: Mapping[str, Array]) -> Callable[[], None]:
    """A function that runs the model once, inputs and outputs on the device, and waits for the end."""
    binding = session.io_binding()
    for spec in specs:
        binding.bind_ortvalue_input(spec.name, to_ort_value(spec, feeds[spec.name], "cuda"))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")  # by device: ONNX Runtime allocates, whatever the shape is

    def run() -> None:
        try:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ModelError(f"{path}: the model fails to run; --shape gives other sizes: {error}") from error

    binding.synchronize_inputs()
    return run


def _latency(seconds: Sequence[float]) -> Latency:
    p10, median, p90 = np.percentile(np.asarray(seconds) * 1e3, (10, 50, 90))
    return Latency(float(median), float(p10), float(p90))


def _versions() -> dict[str, str]:
    """The versions that a time depends on."""
    found = {
        "driver": driver.driver_version(),
        "CUDA": driver.cuda_version(),
        "ONNX Runtime": onnxruntime().__version__,
    }
    with suppress(PackageNotFoundError):
        found["onnxfuse"] = version("onnxfuse")
    return {name: number for name, number in found.items() if number is not None}
