"""What the cost model knows: each constant with a unit and a source, and a fit that finds what was put in."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.schedule.calibration import FOLDER, Calibration, calibration, entries, kept, replaced
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED
from tests.perf import calibrate
from tests.schedule.test_plan import planned

ROOT = Path(__file__).parents[2]
DEVICE = ARCHITECTURES["sm_90a"]
ROWS = [
    {"problem": problem, "order": order, "tile": "128x64 cooperative k split by 2", "us": 1.0}
    for problem in ("128, 5120, 1280 residual", "128, 2560, 1280 residual")
    for order in ("kn", "nk")
]


def test_there_is_one_file_an_architecture() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(ARCHITECTURES)
    for device in ARCHITECTURES.values():
        assert calibration(device).products["f16"] > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_constant_has_a_unit_and_a_source(arch: str) -> None:
    constants = dict(entries(arch))
    paces = constants.pop("pace")
    for name, entry in {**constants, **paces}.items():
        assert set(entry) == {"value", "unit", "source"}, name
        assert entry["source"].startswith("assumed") or (ROOT / entry["source"]).is_file(), name


def test_every_pace_is_of_a_candidate() -> None:
    spec = planned(DEVICE).variants[0].spec
    paces = calibration(DEVICE).pace
    offered = {str(entry.tile) for family in PRODUCTS for entry in family.candidates(spec, DEVICE, 1280)}
    assert {*paces["portable_half"]} <= offered
    used = [entry.pace for family in (HOPPER, HOPPER_SWAPPED) for entry in family.candidates(spec, DEVICE, 1280)]
    assert set(used) == set(paces["hopper"].values())


def test_other_constants_nest() -> None:
    known = calibration(DEVICE)
    outer, inner = (replace(known, hopper_meeting=each) for each in (1.0, 2.0))
    with replaced(DEVICE, outer):
        with replaced(DEVICE, inner):
            assert calibration(DEVICE) is inner
        assert calibration(DEVICE) is outer
    assert calibration(DEVICE) is known


def test_what_is_kept_is_made_anew_of_other_constants() -> None:
    known = calibration(DEVICE)
    meeting = kept(lambda device: calibration(device).hopper_meeting, 1)
    assert [meeting(DEVICE), meeting(DEVICE)] == [known.hopper_meeting] * 2
    assert meeting.cache_info().misses == 1
    with replaced(DEVICE, replace(known, hopper_meeting=-1.0)):
        assert meeting(DEVICE) == -1.0
    assert meeting(DEVICE) == known.hopper_meeting


def test_a_fit_finds_the_constant_that_times_were_made_with() -> None:
    known = calibration(DEVICE)
    kernels = calibrate.priced(calibrate.timed(ROWS, DEVICE), DEVICE)
    with replaced(DEVICE, calibrate.scaled(known, "hopper_meeting", 1.4)):
        errors = calibrate.residuals(kernels, DEVICE)
    assert len(errors) == len(ROWS)
    made = [
        replace(each, timed=replace(each.timed, us=math.exp(error)))
        for each, (error, _) in zip(kernels, errors, strict=True)
    ]

    def score(other: Calibration) -> float:
        with replaced(DEVICE, other):
            return calibrate.mean_square(made, DEVICE)

    assert score(known) > 0
    found = calibrate.fit(["hopper_meeting"], known, score)
    assert found.hopper_meeting == pytest.approx(1.4 * known.hopper_meeting)
    assert score(found) == pytest.approx(0.0, abs=1e-12)


def test_regret_is_what_the_choice_by_estimates_costs() -> None:
    """Tiles of two problems: the second best by time is chosen of one, the best of the other."""
    kernels = calibrate.timed(ROWS, DEVICE)[:1] * 5
    named = [("a x", 10.0, 0.0), ("a y", 12.0, -0.5), ("b x", 5.0, 0.1), ("b y", 4.0, 0.1), ("alone x", 1.0, 0.0)]
    errors = [
        (error, replace(each, name=name, tile=name[-1], us=us))
        for each, (name, us, error) in zip(kernels, named, strict=True)
    ]
    assert calibrate.regrets(errors) == pytest.approx([0.2, 0.0])
