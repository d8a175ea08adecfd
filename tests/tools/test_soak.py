"""The soak itself: a short one on the CPU passes, and a wrong output, a failing run and a leak do not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tools import soak
from tests.tools.soak import DEVICE_LIMIT, HOST_LIMIT, Expected, Memory, Subject


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return soak.subjects(tmp_path_factory.mktemp("soak"), "cpu")


@dataclass
class RunClock:
    """A clock that each run moves on by a second, so that a busy machine makes as many runs as an idle one."""

    runs: list[None] = field(default_factory=list)

    def __call__(self) -> float:
        return float(len(self.runs))

    def of(self, model: Subject) -> Subject:
        def run(*arguments: Any) -> list[np.ndarray]:
            self.runs.append(None)
            return model.session.run(*arguments)

        return replace(model, session=SimpleNamespace(run=run))


def test_a_short_one_passes(models: list[Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CHECK_EVERY", 5)
    clock = RunClock()
    outcome = soak.soak([clock.of(model) for model in models], 24, 4, "cpu", clock)
    assert outcome.wrong == []
    assert outcome.failures == []
    assert all(outcome.runs.values())
    assert sum(outcome.runs.values()) == len(clock.runs) >= 24
    assert outcome.checked == len(clock.runs) // soak.CHECK_EVERY
    times = [sample[0] for sample in outcome.samples]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0, len(clock.runs)), "memory is sampled from before the first run until the end"


def test_a_wrong_output_is_found(models: list[Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CHECK_EVERY", 1)
    clock = RunClock()
    gate = clock.of(models[1])
    few_rows = tuple(corrupted(case) for case in gate.cases[:6])  # many take minutes to judge on a busy machine
    outcome = soak.soak([replace(gate, cases=few_rows)], 2, 2, "cpu", clock)
    assert outcome.wrong
    assert not outcome.passed


def corrupted(case: Expected) -> Expected:
    """The same feed with one element of the reference, and of the original, somewhere else."""
    original, exact = [array.copy() for array in case.original], [array.copy() for array in case.exact]
    original[0].flat[0] += 64
    exact[0].flat[0] += 64
    return Expected(case.feed, original, exact)


def test_a_run_that_fails_ends_it(models: list[Subject]) -> None:
    gate = models[1]
    broken = replace(gate.cases[0], feed={"x": gate.cases[0].feed["x"][:, :7]})
    outcome = soak.soak([replace(gate, cases=(broken,))], seconds=60, threads=2, device="cpu")
    assert outcome.failures
    assert outcome.seconds < 30
    assert not outcome.passed


@pytest.mark.parametrize(
    ("grows", "leaks"), [(lambda t: 100 if t > 10 else 0, False), (lambda t: t, True), (lambda t: -t, False)]
)
def test_growth_is_of_the_second_half(grows, leaks: bool) -> None:
    """What is allocated at first and kept is none; what goes on growing is."""
    limit = HOST_LIMIT // 10
    memory = Memory([(t, grows(t) * limit, 0) for t in range(100)])
    assert (memory.growth(1) > HOST_LIMIT) == leaks
    assert memory.growth(2) == 0


def test_growth_is_a_failure(models: list[Subject]) -> None:
    outcome = soak.soak(models, seconds=0.2, threads=1, device="cpu")
    assert not replace(outcome, host_growth=HOST_LIMIT + 1).passed
    assert not replace(outcome, device_growth=DEVICE_LIMIT + 1).passed


def test_the_command_writes_its_result(models: list[Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "subjects", lambda *_: models)
    out = tmp_path / "soak.json"
    code = soak.main(["--seconds", "1", "--threads", "2", "--device", "cpu", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["passed"] == (code == 0)
    assert result["wrong"] == []
    assert result["runs"].keys() == {"unet_block", "gate"}
