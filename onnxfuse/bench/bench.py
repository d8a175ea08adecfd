"""How long do both models take? Timed in turn, run by run, with inputs and outputs on the device.

MEASURES says what is timed. Host and GPU are told apart without a profiler: the host's part of a run ends when the call
returns, and the GPU's is what CUDA events say of replays of one captured run, whose graph also tells the launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.bench.contender import Clock, Contender, Timed, captured, graph_run, host_part, open_on, timed
from onnxfuse.bench.gpu_state import GpuState, gpu_state, warnings_of
from onnxfuse.bench.sites import SiteTimes, time_sites
from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.input_facts import input_facts
from onnxfuse.progress import Progress, silent
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import Array, input_specs, make_feeds
from onnxfuse.runtime.session import cuda_usable, onnxruntime

MEASURES = {
    "latency": "from the call to the results",
    "host": "from the call to its return, the GPU still at work",
    "graph": "from the call to the results, the run in a CUDA graph of ONNX Runtime",
    "gpu": "on the GPU alone: CUDA events around replays of one captured run, the gaps inside the graph included",
}
DEVICES = {"cuda": tuple(MEASURES), "cpu": ("latency",)}
STATE_RUNS = 20  # right before the GPU's clock is read


@dataclass(frozen=True)
class Latency:
    """Time of one run in milliseconds: the median, and the 10th, 90th and 99th percentile."""

    median: float
    p10: float
    p90: float
    p99: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ms  (p10 {self.p10:.3f}, p90 {self.p90:.3f}, p99 {self.p99:.3f})"


@dataclass(frozen=True)
class Comparison:
    """Both models by one measure.

    Attributes:
        name: a key of MEASURES.
        original: the original's time; None where it cannot be measured so.
        optimized: the optimised model's.
        why_not: what was in the way.
    """

    name: str
    original: Latency | None
    optimized: Latency | None
    why_not: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast the optimised model is, by the medians."""
        return self.original.median / self.optimized.median if self.original and self.optimized else None

    @property
    def lines(self) -> list[str]:
        """This measure as a terminal shows it."""
        head = f"{self.name:<10} {MEASURES[self.name]}"
        rows = [("original", self.original), ("optimised", self.optimized)]
        texts = [f"  {label:<9} {time}" for label, time in rows if time is not None]
        texts += [] if self.ratio is None else [f"  ratio     {self.ratio:.2f}x"]
        return [head, *texts, *([f"  not measured: {self.why_not}"] if self.why_not else [])]

    def to_dict(self) -> dict[str, Any]:
        """This measure in what `--json` prints; times in milliseconds."""
        return {"how": MEASURES[self.name], **asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class BenchResult:
    """What was timed, where, and how long it took.

    Attributes:
        comparisons: one for each measure, `latency` first.
        launches: kernels of one run of the original and of the optimised model; None where no run can be captured.
        sites: each distinct fused node, where these were asked for.
        runs: timed runs of each model and measure.
        shapes: the shape of each input.
        device: the GPU's name, or `CPU`.
        versions: of the driver, CUDA, ONNX Runtime and onnxfuse, where they are known.
        warnings: what is against trusting the times.
    """

    comparisons: tuple[Comparison, ...]
    launches: tuple[int | None, int | None]
    sites: tuple[SiteTimes, ...]
    runs: int
    shapes: dict[str, tuple[int, ...]]
    device: str
    versions: dict[str, str]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        inputs = "  ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.shapes.items())
        about = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        lines = [f"{self.device}  {about}", f"{inputs}  {self.runs} runs of each, in turn"]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [line for comparison in self.comparisons for line in comparison.lines]
        if any(count is not None for count in self.launches):
            before, after = ("?" if count is None else str(count) for count in self.launches)
            lines.append(f"launches   {before} -> {after} kernels of one run")
        return "\n".join(lines)

    @property
    def ratio(self) -> float:
        """How many times as fast a run of the optimised model is, by the medians."""
        ratio = self.comparisons[0].ratio
        assert ratio is not None, "a model whose runs cannot be timed is an error"
        return ratio

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; times in milliseconds, of sites in microseconds."""
        first = self.comparisons[0]
        return {
            "original": vars(first.original),
            "optimized": vars(first.optimized),
            "ratio": self.ratio,
            "measures": [comparison.to_dict() for comparison in self.comparisons],
            "launches": list(self.launches),
            "sites": [site.to_dict() for site in self.sites],
            "runs": self.runs,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "device": self.device,
            "versions": self.versions,
            "warnings": list(self.warnings),
        }


def bench(
    original: Path,
    optimized: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    runs: int = 50,
    warmup: int = 10,
    device: str = "cuda",
    measures: Sequence[str] | None = None,
    per_site: bool = False,
    session_options: Any = None,
    progress: Progress = silent,
) -> BenchResult:
    """Time both models.

    Args:
        original: the model before.
        optimized: the model after.
        inputs: an array for each input, by name; random ones by default.
        shapes: shapes of random inputs, by name.
        seed: of the random inputs.
        runs: timed runs of each model, at least 1.
        warmup: runs of each before.
        device: `cuda`, or `cpu`, where fused nodes are their original nodes.
        measures: some of MEASURES, `latency` always; by default all that the device has.
        per_site: time each distinct fused node and what it stands for as well.
        session_options: an `onnxruntime.SessionOptions` for all sessions, as models with custom operators need it.
        progress: called with what is being done, how much is done, and how much there is.

    Raises:
        DeviceError: there is no CUDA device, or ONNX Runtime has no CUDA provider that starts.
        ModelError: a model cannot be run, or the inputs do not fit it.
    """
    _check_runnable(runs, device)
    paths = Path(original), Path(optimized)
    before = gpu_state() if device == "cuda" else None
    facts = input_facts(load_model(paths[0]))
    specs = input_specs(open_on(paths[0], device, session_options=session_options), facts)
    feeds = make_feeds(specs, inputs, shapes, seed, known=facts.sizes)
    race = _Race(paths, feeds, device, session_options, runs, warmup, progress)
    wanted = (name for name in DEVICES[device] if name == "latency" or measures is None or name in measures)
    return BenchResult(
        comparisons=tuple(map(race.compare, wanted)),
        launches=(race.launches[0], race.launches[1]),
        sites=time_sites(paths[1], feeds, device, progress, session_options) if per_site else (),
        runs=runs,
        shapes={name: array.shape for name, array in feeds.items()},
        device=(driver.device_name() or "unknown GPU") if device == "cuda" else "CPU",
        versions=_versions(),
        warnings=warnings_of(before, race.state),
    )


def _check_runnable(runs: int, device: str) -> None:
    if runs < 1:
        raise ModelError(f"runs is {runs}; at least one run is needed")
    if device == "cuda" and not cuda_usable():
        raise DeviceError("no CUDA device is usable by ONNX Runtime; bench needs one, and onnxruntime-gpu")


class _Race:
    """Both models, timed measure by measure; sessions that the next measure does not need go before its own come."""

    def __init__(
        self,
        paths: tuple[Path, Path],
        feeds: Mapping[str, Array],
        device: str,
        session_options: Any,
        runs: int,
        warmup: int,
        progress: Progress,
    ) -> None:
        self.paths, self.feeds, self.device, self.options = paths, feeds, device, session_options
        self.runs, self.warmup, self.progress = runs, warmup, progress
        self.launches: list[int | None] = [None, None]
        self.state: GpuState | None = None
        self._plain: dict[int, Contender] = {}

    def plain(self, index: int) -> Contender:
        """A model in an ordinary session."""
        if index not in self._plain:
            self._plain[index] = Contender(self.paths[index], self.feeds, self.device, session_options=self.options)
        return self._plain[index]

    def graph(self, index: int) -> Timed:
        """A model in a CUDA graph of ONNX Runtime.

        It also captures runs that no replay repeats, as of NonZero, and then writes anywhere: only what can be a graph
        of our own becomes one.
        """
        self._plain.clear()
        captured(self.paths[index], self.feeds, self.device, self.options)
        return graph_run(self.paths[index], self.feeds, self.device, self.options)

    def gpu(self, index: int) -> Timed:
        """A model in a graph of our own; its launches are noted."""
        self._plain.clear()
        found = captured(self.paths[index], self.feeds, self.device, self.options)
        self.launches[index] = found.launches
        return found.seconds

    def compare(self, name: str) -> Comparison:
        """Both models by one measure."""
        timers, why_not = self._timers(name)
        first, second = self._timed(name, timers)
        if name == "latency" and self.device == "cuda":
            self.state = self._state_behind_runs()
        return Comparison(name, first, second, why_not)

    def _timers(self, name: str) -> tuple[list[Timed | None], str]:
        """What times each model by one measure; None where it cannot, and why."""
        timers: list[Timed | None] = []
        why_not = ""
        for index, path in enumerate(self.paths):
            try:
                timers.append(_TIMERS[name](self, index))
            except Exception as error:  # onnxruntime's and CUDA's exceptions share no base class
                if name == "latency" or isinstance(error, DeviceError):
                    raise
                why_not = f"{path.name}: {error}"
                timers.append(None)
        return timers, why_not

    def _timed(self, name: str, timers: Sequence[Timed | None]) -> list[Latency | None]:
        """Each timer's figure; those that there are take turns."""
        there = [timer for timer in timers if timer is not None]

        def progress(done: int) -> None:
            self.progress(f"timing {name}", done, self.runs + self.warmup)

        times = iter(alternate(there, self.runs, self.warmup, progress))
        return [None if timer is None else latency_of(next(times)) for timer in timers]

    def _state_behind_runs(self) -> GpuState | None:
        for _ in range(STATE_RUNS):
            for index in range(len(self.paths)):
                self.plain(index).run()
        return gpu_state()


_TIMERS: Mapping[str, Callable[[_Race, int], Timed]] = {
    "latency": lambda race, index: timed(race.plain(index).run),
    "host": lambda race, index: host_part(race.plain(index)),
    "graph": _Race.graph,
    "gpu": _Race.gpu,
}


def interleave(
    first: Callable[[], None],
    second: Callable[[], None],
    runs: int,
    warmup: int,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Time two functions in turn, so that a change of the clock rate or a neighbour's load meets both; in seconds."""
    before, after = alternate([timed(first, clock), timed(second, clock)], runs, warmup)
    return before, after


def alternate(
    timers: Sequence[Timed], runs: int, warmup: int, progress: Callable[[int], None] | None = None
) -> list[list[float]]:
    """What each timer says, run by run in turn; the first `warmup` runs are not kept."""
    times: list[list[float]] = [[] for _ in timers]
    for run in range(-warmup, runs):
        for timer, into in zip(timers, times, strict=True):
            seconds = timer()
            if run >= 0:
                into.append(seconds)
        if progress is not None:
            progress(run + warmup + 1)
    return times


def latency_of(seconds: Sequence[float]) -> Latency:
    """The percentiles of some runs."""
    p10, median, p90, p99 = map(float, np.percentile(np.asarray(seconds) * 1e3, (10, 50, 90, 99)))
    return Latency(median, p10, p90, p99)


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
