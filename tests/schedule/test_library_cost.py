"""What the library's product takes: terms, and what was learnt of timed products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.schedule import library_cost, networks
from onnxfuse.schedule.calibration import calibration, replaced
from onnxfuse.schedule.kernel_family import Problem
from tests.perf.calibrate import planned_spec
from tests.perf.learn import DEVICE
from tests.perf.learn_library import timings
from tests.perf.result_file import read_result

ROWS = read_result(Path(__file__).parents[2] / "results/h200-library.json.xz")["rows"]
LEARNT = networks.networks(library_cost.learnt(DEVICE.arch))
SPEC = planned_spec(64, 64, 1, "kn", "bias", "f16", DEVICE)


LONG = calibration(DEVICE).library_sustained["most"]


def factor(sizes: Problem) -> np.ndarray:
    return library_cost.factor(SPEC, sizes, library_cost.of_floats(SPEC, sizes, DEVICE), DEVICE)


def test_products_at_once_take_what_each_takes() -> None:
    m, n, k = np.array([[1, 1, 300, 16384], [768, 1283, 8, 14336], [4096, 9918, 1280, 64]])
    together = library_cost.library(SPEC, Problem(m, n, k), 1, DEVICE)
    apart = [library_cost.library(SPEC, Problem(*sizes), 1, DEVICE) for sizes in zip(m, n, k, strict=True)]
    np.testing.assert_allclose(together, np.array(apart, float), rtol=1e-6)
    assert np.ptp(factor(Problem(m, n, k))) > 0.1


def test_parts_are_one_product_or_one_each() -> None:
    two = replace(SPEC, parts=2)
    wide, one = (library_cost.library(SPEC, Problem(300, n, 4096), 1, DEVICE) for n in (28672, 14336))
    assert library_cost.library(two, Problem(300, 14336, 4096), 1, DEVICE) == wide
    assert one < library_cost.library(two, Problem(300, 14336, 4096), 2, DEVICE) / 2 < LONG * one
    short = library_cost.library(SPEC, Problem(300, 1024, 1024), 1, DEVICE)
    assert library_cost.library(two, Problem(300, 1024, 1024), 2, DEVICE) == 2 * short


def test_products_that_multiply_for_long_take_as_long_as_kernels_do_then() -> None:
    """The chip slows down for whatever multiplies; not for what waits for memory, nor within the first microseconds."""
    products = {"short": (128, 768, 768), "of memory": (8, 28672, 4096), "long": (4096, 14336, 4096)}
    known = calibration(DEVICE)
    before = replace(known, library_sustained={**known.library_sustained, "most": 1.0})
    now = {name: library_cost.library(SPEC, Problem(*sizes), 1, DEVICE) for name, sizes in products.items()}
    with replaced(DEVICE, before):
        then = {name: library_cost.library(SPEC, Problem(*sizes), 1, DEVICE) for name, sizes in products.items()}
    assert now["short"] == then["short"]
    assert then["of memory"] <= now["of memory"] < 1.02 * then["of memory"]
    assert 1.1 * then["long"] < now["long"] <= LONG * then["long"]


def test_an_empty_product_has_a_finite_estimate() -> None:
    m, n, k = np.array([[0, 300, 300, 300], [768, 0, 768, 768], [1024, 1024, 0, 1024]])
    found = factor(Problem(m, n, k))
    assert (found[:3] == 1).all()
    assert found[3] == factor(Problem(300, 768, 1024)) != 1


def test_products_unlike_those_that_were_timed_take_what_the_terms_say() -> None:
    sizes, batches = Problem(300, 768, 1024), Problem(300, 768, 1024, batch=4)
    terms = library_cost.of_floats(SPEC, sizes, DEVICE)
    assert library_cost.factor(SPEC, batches, terms, DEVICE) == 1
    assert library_cost.factor(replace(SPEC, lhs_order="km"), sizes, terms, DEVICE) == 1
    assert library_cost.factor(SPEC, sizes, terms, ARCHITECTURES["sm_80"]) == 1


@pytest.mark.parametrize("element", [10, 16, 1])
def test_what_was_timed_is_estimated_better(element: int) -> None:
    """What it gains on products that were not learnt from is in docs/kernel-notes.md."""
    known = timings([row for row in ROWS if row["weight"][3] == element], DEVICE)
    assert known.names == LEARNT.names
    off = known.left - LEARNT(known.features)
    assert np.square(off).mean() < np.square(known.left).mean() / 2
    assert np.abs(np.median(off)) < 0.02
