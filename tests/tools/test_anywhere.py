"""What the benchmark of drawn problems draws, poses and prints."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfuse.device import spec_of
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, cpu_session
from tests.perf import anywhere, drawn, every_tile

DEVICE = spec_of("sm_90a")
TILES = {"a": (2.0, 1.0), "b": (1.6, 2.0)}  # microseconds and estimate
ROW: dict[str, Any] = {"problem": "one", "floor_us": 11.0, "stock_us": 3.0, "cublas_us": 2.0, "ours_us": 4.0}
TILED = {"problem": "two", "chosen": "a", "tiles": TILES}
UNTIMED = {"problem": "three"}


def small(kind: str, element: int = FLOAT, batch: int = 2, order: str = "kn") -> drawn.Drawn:
    return drawn.Drawn(kind, 6, 32, 16, order, element, True, batch)


def test_a_seed_gives_the_same_problems_and_another_gives_others() -> None:
    first, again, other = ([*itertools.islice(drawn.draw(seed), 50)] for seed in (1, 1, 2))
    assert first == again != other
    assert {each.kind for each in first} == {*drawn.PARTS}
    assert all(1 <= each.m <= drawn.MOST_ROWS and each.m % (each.batch or 1) == 0 for each in first)


@pytest.mark.parametrize("kind", drawn.PARTS)
@pytest.mark.parametrize(("order", "batch"), [("kn", 0), ("kn", 2), ("nk", 0), ("nk", 2)])
def test_each_site_computes_what_the_check_expects(kind: str, order: str, batch: int) -> None:
    problem = small(kind, batch=batch, order=order)
    session = cpu_session(drawn.model(problem, 2, 1))
    rng = np.random.default_rng(0)
    feeds = {
        entry.name: rng.standard_normal(
            problem.out_shape if "residual" in entry.name else problem.lhs_shape, np.float32
        )
        for entry in session.get_inputs()
    }
    outputs = session.run(None, feeds)
    weights, biases = drawn.stored(problem, 0)
    x = feeds["x0"].reshape(problem.m, problem.k).astype(np.float64)
    products = [x @ (weight if order == "kn" else weight.T) for weight in weights]
    products = [p + b for p, b in zip(products, biases, strict=True)] if biases else products
    if kind == "residual":
        products[0] = products[0] + feeds["residual0"].reshape(problem.m, problem.n)
    expected = anywhere.epilogue(kind, products, np)
    assert len(outputs) == 2 * len(expected) == 2 * problem.outputs
    for actual, each in zip(outputs, expected, strict=False):
        np.testing.assert_allclose(actual.reshape(problem.m, problem.n), each, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16, FLOAT])
def test_every_kind_has_tiles_to_time(element: int) -> None:
    problems = [drawn.Drawn(kind, 300, 512, 256, "kn", element, True, 0) for kind in drawn.PARTS]
    found = {problem.kind: every_tile.planned(problem, DEVICE, 3) for problem in problems}
    for kind, planned in found.items():
        assert planned is not None, kind
        assert planned.chosen in [str(choice.variant.tile) for choice in planned.choices]
        assert len(planned.fusion.rhs) == (drawn.PARTS[kind] if kind in ("dual", "qkv") else 1)


def test_what_is_printed_of_rows_with_sessions_with_tiles_and_with_neither() -> None:
    assert anywhere.regret(TILED) == pytest.approx(0.25)
    text = anywhere.summary([ROW, TILED, UNTIMED, ROW | TILED])
    assert "slower than stock by more than 2 %: 2 of 2" in text
    assert "floor over 10 us: 2 problems, 2.000 of cuBLAS, worst 2.00" in text
    assert "regret: median 25.0%" in text
    assert [anywhere.text(row).split(":")[0] for row in (ROW, TILED, UNTIMED)] == ["one", "two", "three"]


def test_a_prepared_problem_has_both_models_and_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_tile, "NEAREST", 1)
    ready = anywhere.prepare(replace(small("bias", FLOAT16), dynamic=False), 0, tmp_path, DEVICE, 0)
    assert ready.original.exists()
    assert ready.fused.exists()
    assert ready.kernel
