"""Is the optimised model as good as the original? Both are compared with the same model in float64; see accuracy.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.errors import DeviceError, ModelError, SettingError
from onnxfuse.graph.functions import count_fused
from onnxfuse.graph.fused_nodes import uses_tf32
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.input_facts import input_facts
from onnxfuse.known_inputs import InputFacts
from onnxfuse.progress import Progress, counted, silent
from onnxfuse.runtime.accuracy import ENOUGH, OutputCheck, Value, check_output, check_together
from onnxfuse.runtime.feeds import Array, InputSpec, input_specs, make_feeds
from onnxfuse.runtime.ort_values import run as run_session
from onnxfuse.runtime.session import CUDA, Provider, default_providers, open_session
from onnxfuse.staging import scratch_folder
from onnxfuse.verify.kernel_check import KernelCheck, check_kernels
from onnxfuse.verify.probe import Probe, fused_values, write_probed
from onnxfuse.verify.reference_run import ReferenceRuns

# ONNX Runtime 1.27 to 1.32 ends the process in it, on the CPU, where a Transpose of the first two of three axes comes
# before a product with a weight in fp16. It only turns numbers into fp32 once instead of in each run.
CRASHING = ("FuseFp16InitializerToFp32NodeTransformer",)
Feeds = Mapping[str, Array]
Values = Mapping[str, Value]


@dataclass(frozen=True)
class RunCheck:
    """The verdict on one run.

    Attributes:
        shapes: the shape of each input.
        outputs: one check for each output.
        sites: one check for each value that a fused node makes, where these were asked for.
        switches: what the inputs were by which an If of the model chooses.
    """

    shapes: dict[str, tuple[int, ...]]
    outputs: tuple[OutputCheck, ...]
    sites: tuple[OutputCheck, ...] = ()
    switches: dict[str, bool] = field(default_factory=dict)

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
        known = {"passed": self.passed, "shapes": self.shapes, "switches": self.switches}
        return {**known, "outputs": outputs, "sites": sites}

    def __str__(self) -> str:
        given = {name: f"={str(value).lower()}" for name, value in self.switches.items()}
        inputs = "  ".join(
            f"{name}[{', '.join(map(str, shape))}]{given.get(name, '')}" for name, shape in self.shapes.items()
        )
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
        kept: how many nodes of the reference do not run in float64, by operator and type: `LSTM in float32`.
        kernels: what was found in the fused nodes' kernels where none could run; None where they ran, or none is there.
        fused_nodes: how many the optimised model has.
    """

    provider: str
    runs: tuple[RunCheck, ...]
    kept: dict[str, int] = field(default_factory=dict)
    kernels: KernelCheck | None = None
    fused_nodes: int = 0

    @property
    def passed(self) -> bool:
        """Whether every run passed, and the kernels where they were looked at."""
        return all(run.passed for run in self.runs) and (self.kernels is None or self.kernels.passed)

    @property
    def outputs(self) -> tuple[OutputCheck, ...]:
        """The checks of all runs' outputs."""
        return tuple(output for run in self.runs for output in run.outputs)

    def _unswitched(self) -> dict[str, bool]:
        """The inputs that choose a branch and were the same in all runs."""
        set_to = {name: {run.switches[name] for run in self.runs} for name in self.runs[0].switches}
        return {name: values.pop() for name, values in set_to.items() if len(values) == 1}

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        runs = [run.to_dict() for run in self.runs]
        return {
            "passed": self.passed,
            "provider": self.provider,
            "not_in_float64": self.kept,
            "fused_nodes": self.fused_nodes,
            "kernels": self.kernels and self.kernels.to_dict(),
            "runs": runs,
        }

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        if self.passed and self.kernels is not None:
            verdict += ": the original nodes agree; no kernel was run, for there is no GPU"
        kept = ", ".join(f"{what} ({count})" for what, count in self.kept.items())
        notes = [f"reference in float64, except for {kept}"] if kept else []
        notes += [str(self.kernels)] if self.kernels else []
        notes += [
            f"{name} was {str(value).lower()} in every run: the other branch was not run"
            for name, value in self._unswitched().items()
        ]
        notes += [] if self.fused_nodes else ["the optimised model has no fused node: this says nothing of any kernel"]
        return "\n".join([*(f"{self.provider}  {run}" for run in self.runs), *notes, f"verify {verdict}"])


def verify(
    original: Path,
    optimized: Path,
    *,
    inputs: Feeds | Sequence[Feeds] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    runs: int | None = None,
    per_site: bool = False,
    session_options: Any = None,
    require_gpu: bool = False,
    progress: Progress = silent,
) -> VerifyResult:
    """Run both models in ONNX Runtime, on CUDA where it is usable, and judge the optimised one.

    Without CUDA the fused nodes' original nodes run, and the kernels are looked at instead: whether they are in the
    file, and what they claim to be. Sessions live one after the other: memory holds one model at a time. Where fused
    nodes multiply in TF32 on CUDA, a second reference tells how much that may change, in as much time as the first.

    Args:
        original: the model before.
        optimized: the model after.
        inputs: an array for each input, by name, or several such runs; random ones by default.
        shapes: shapes of random inputs, by name.
        sizes: sizes of dynamic axes, by symbol; run i takes the i-th of each, and there are as many runs as sizes.
        seed: of the first run's random inputs; the next runs' are the next ones.
        runs: how many random runs; by default what all branches take, or on a GPU small outputs (accuracy.py).
        per_site: compare what each fused node makes as well.
        session_options: an `onnxruntime.SessionOptions` for all sessions, as models with custom operators need it.
        require_gpu: refuse to judge where no kernel can run.
        progress: called with what is being done, how much is done, and how much there is.

    Raises:
        ModelError: a model cannot be run, or the inputs do not fit it, or the models have different outputs.
        SettingError: a shape or size is given for something that the model does not have, or a number of runs beside
            inputs.
        DeviceError: ONNX Runtime is missing; or a GPU is, and is required.
    """
    original, optimized, providers = Path(original), Path(optimized), _providers(require_gpu)
    with scratch_folder() as folder:
        probes = fused_values(original, optimized) if per_site else []
        paths = _Paths.make(original, optimized, probes, folder)
        open_probed = functools.partial(_open, probes=probes, providers=providers, session_options=session_options)
        draw = functools.partial(_feeds, inputs=inputs, shapes=shapes, sizes=sizes or {}, seed=seed)
        wanted, facts = _wanted(runs, inputs, providers[0]), input_facts(load_model(original))
        first = functools.partial(_run_original, label=original, draw=draw, wanted=wanted, inputs=inputs)
        feeds, names, before = first(open_probed(paths.original, original), facts, progress=progress)
        after = _run(open_probed(paths.optimized, optimized), optimized, (original, names), feeds, progress)
        reference = ReferenceRuns(paths.original, original, session_options)
        exact, rounded = reference.both(feeds, progress, tf32=providers[0] == CUDA and uses_tf32(optimized))
    checked = _check_runs(feeds, before, after, exact, rounded, probes, facts.switches)
    kernels = None if providers[0] == CUDA else check_kernels(optimized, progress)
    return VerifyResult(str(providers[0]), checked, reference.kept, kernels, count_fused(load_model(optimized).proto))


def _providers(require_gpu: bool) -> list[Provider]:
    providers = default_providers()
    if require_gpu and providers[0] != CUDA:
        raise DeviceError("no CUDA device is usable by ONNX Runtime, so no kernel can run; --require-gpu asks for one")
    return providers


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


def _wanted(
    runs: int | None, inputs: Feeds | Sequence[Feeds] | None, provider: Provider
) -> int | Callable[[Values], int] | None:
    """How many random runs, or what tells the least number from the first one's outputs; None for that of one."""
    if inputs is not None and runs is not None:
        raise SettingError("runs are for random inputs, and inputs were given")
    return runs or (_runs_wanted if provider == CUDA and inputs is None else None)


def _feeds(
    specs: Sequence[InputSpec],
    facts: InputFacts,
    inputs: Feeds | Sequence[Feeds] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    sizes: Mapping[str, Sequence[int]],
    seed: int,
    *,
    runs: int | None,
) -> Iterator[dict[str, Array]]:
    """The inputs of each run, checked; None for as many runs as the sizes take, in each branch."""
    if inputs is not None:
        for given in [inputs] if isinstance(inputs, Mapping) else inputs:
            yield make_feeds(specs, given, shapes, symbols={symbol: several[0] for symbol, several in sizes.items()})
        return
    together = max((*map(len, sizes.values()), 1))
    for run in range(max(runs, together) if runs else together * facts.settings):
        symbols = {symbol: several[run % len(several)] for symbol, several in sizes.items()}
        setting = facts.setting(run // together)
        drawn = make_feeds(specs, None, shapes, seed + run, symbols, facts.sizes_of(setting))
        yield drawn | {name: np.full_like(drawn[name], value) for name, value in setting.items()}


def _check_runs(
    feeds: Sequence[Feeds],
    before: Sequence[Values],
    after: Sequence[Values],
    exact: Sequence[Values],
    rounded: Sequence[Values],
    probes: Sequence[Probe],
    switches: Sequence[str],
) -> tuple[RunCheck, ...]:
    values = list(zip(before, after, exact, rounded, strict=True))
    checks = [_check_values(*each) for each in values]
    for name in _names_of_few(checks) if len(checks) > 1 else ():
        of_each = ([run.get(name) for run in runs] for runs in zip(*values, strict=True))
        together = check_together([each[name] for each in checks], *of_each)
        for each, check in zip(checks, together, strict=True):
            each[name] = check
    added = {probe.name for probe in probes if not probe.is_output}
    return tuple(
        RunCheck(
            {name: array.shape for name, array in feed.items()},
            tuple(check for name, check in each.items() if name not in added),
            tuple(each[probe.name] for probe in probes),
            {name: bool(feed[name].all()) for name in switches},
        )
        for feed, each in zip(feeds, checks, strict=True)
    )


def _check_values(before: Values, after: Values, exact: Values, rounded: Values) -> dict[str, OutputCheck]:
    compared = (name for name in before if name in after and name in exact)  # else a length differs, which is compared
    return {name: check_output(name, before[name], after[name], exact[name], rounded.get(name)) for name in compared}


def _names_of_few(checks: Sequence[Mapping[str, OutputCheck]]) -> list[str]:
    """The values that every run has and could compare, of few elements in one of them."""
    several = {name: [each[name] for each in checks if name in each] for name in checks[0]}
    return [
        name
        for name, each in several.items()
        if len(each) == len(checks)
        and all(check.tolerance for check in each)
        and min(math.prod(check.shape) for check in each) < ENOUGH
    ]


def _open(path: Path, label: Path, probes: Sequence[Probe], providers: Sequence[Provider], session_options: Any) -> Any:
    """A session on a model or on its copy with more outputs: a refusal of the copy names the site, not the copy."""
    try:
        return open_session(path, providers, session_options, label, CRASHING)
    except ModelError as error:
        sites = [probe.name for probe in probes if probe.name in str(error)]
        if not sites:
            raise
        hint = f"--per-site reads what site {', '.join(sites)} makes; verify without it judges the outputs alone"
        raise ModelError(f"{error}; {hint}") from error


def _run_original(
    session: Any,
    facts: InputFacts,
    label: Path,
    draw: Callable[..., Iterable[dict[str, Array]]],
    wanted: int | Callable[[Values], int] | None,
    inputs: object,
    progress: Progress,
) -> tuple[list[dict[str, Array]], list[str], list[dict[str, Value]]]:
    """The inputs of all runs, the names of the outputs, and the original model's runs."""
    draw = functools.partial(draw, input_specs(session, facts), facts)
    feeds = list(draw(runs=None if callable(wanted) else wanted))
    runs: list[dict[str, Value]] = []
    while len(runs) < len(feeds):
        each = counted("running the original", feeds[len(runs) :], progress)
        runs += [
            run_session(session, label, feed, _hint(feed, facts.switches) if inputs is None else "") for feed in each
        ]
        if callable(wanted):
            feeds += list(draw(runs=max(wanted(runs[0]), len(feeds))))[len(feeds) :]
    return feeds, [output.name for output in session.get_outputs()], runs


def _runs_wanted(values: Values) -> int:
    """How many runs give each value of floats enough elements to be judged by, if it has any."""
    sizes = (value.array.size for value in values.values() if value.array.dtype.kind == "f" and value.array.size)
    return math.ceil(ENOUGH / min((*sizes, ENOUGH)))


def _run(
    session: Any, label: Path, original: tuple[Path, Sequence[str]], feeds: Sequence[Feeds], progress: Progress
) -> list[dict[str, Value]]:
    """The optimised model's runs, once its outputs and inputs are those of the original."""
    specs = input_specs(session)
    try:
        checked = [make_feeds(specs, feed) for feed in feeds]
    except ModelError as error:
        raise ModelError(f"{label}: the original's inputs do not fit: {error}") from error
    names = [output.name for output in session.get_outputs()]
    if set(names) != set(original[1]):
        texts = ", ".join(names), ", ".join(original[1])
        raise ModelError(f"{label}: its outputs are {texts[0]}; those of {original[0]} are {texts[1]}")
    return [run_session(session, label, feed) for feed in counted("running the optimised model", checked, progress)]


def _hint(feeds: Feeds, switches: Sequence[str]) -> str:
    """What to do about sizes that were guessed, and about a branch that takes none of them."""
    used = ", ".join(f"{name} [{', '.join(map(str, array.shape))}]" for name, array in feeds.items())
    off = ", ".join(name for name in switches if not feeds[name].all())
    branch = f"; {off} is false in this run, and --runs 1 leaves it out" if off else ""
    return f"; where a size is the cause, give one that it accepts with --shape NAME=2,77,768 (tried {used}){branch}"
