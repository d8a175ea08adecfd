"""The strategy that a site gets: by what it loses at every number of rows, and in agreement of all architectures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES, resolve
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule import cost_model, portable
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_tile import HopperTile
from onnxfuse.schedule.kernel_family import Candidate
from onnxfuse.schedule.kernel_spec import Tile
from onnxfuse.schedule.small_m import SMALL_M
from onnxfuse.schedule.small_m_tile import SmallMTile
from onnxfuse.schedule.strategy import Strategy, Times, Traffic, advantage, choose, estimate_from, least_loss
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder

ONE, EPILOGUE_ONLY, ALONE = Strategy.ONE_KERNEL, Strategy.EPILOGUE_ONLY, Strategy.LEFT_ALONE
MATH = ("f16", "bf16", "tf32", "fp32", "3xtf32")
LIBRARY_ADVANTAGE = {
    (arch, math): factor
    for arch, device in ARCHITECTURES.items()
    for math, factor in calibration(device).library_advantage.items()
}
TRAFFIC = Traffic(weights=2 * 4096 * 8192, lhs=2 * 4096, product=2 * 8192, rest=2 * 4096, passes=5)
PORTABLE = Candidate(portable.PORTABLE, Tile(64, 64, 32, 2, 2, 3), 1.0)
SMALL_M_CANDIDATE = Candidate(SMALL_M, SmallMTile(32, 32, 1, 8), 1.0)


def times(one: float, epilogue_only: float, alone: float = 1000.0) -> dict[Strategy, float]:
    return {ONE: one, EPILOGUE_ONLY: epilogue_only, ALONE: alone}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([times(1, 2)], ONE),
        ([times(2, 1)], EPILOGUE_ONLY),
        ([times(2, 2, 2)], ONE),
        ([times(3, 3, 2)], ALONE),
        ([times(1, 1.3), times(1, 1.3), times(2, 1)], EPILOGUE_ONLY),  # twice as fast there outweighs two small losses
        ([times(1, 1.5), times(1, 1.5), times(2, 1)], ONE),
        ([times(100, 130), times(1, 0.5)], EPILOGUE_ONLY),  # a ratio counts the same for short and long kernels
    ],
)
def test_the_strategy_that_loses_least(rows: list[Times], expected: Strategy) -> None:
    assert least_loss(rows) is expected
    assert least_loss(rows[::-1]) is expected


def test_a_strategy_that_was_not_timed_everywhere_is_not_taken() -> None:
    assert least_loss([{ONE: 3.0, ALONE: 2.0}, times(3, 1, 2)]) is ALONE


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ({"sm_100": times(2, 1), "sm_120": times(2, 1)}, EPILOGUE_ONLY),
        ({"sm_100": times(9, 1), "sm_80": times(1, 2)}, ONE),
        ({"sm_100": times(9, 1, 5), "sm_120": times(9, 5, 1)}, ONE),
        ({"sm_100": times(2, 1), "ptx": times(1, 2)}, EPILOGUE_ONLY),
        ({"ptx": times(2, 1)}, EPILOGUE_ONLY),
    ],
)
def test_architectures_must_agree_and_ptx_has_no_say_beside_others(best: dict[str, Times], expected: Strategy) -> None:
    assert choose({ARCHITECTURES[arch]: [times] for arch, times in best.items()}) is expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("m", [1, 128, 8192])
@pytest.mark.parametrize("microseconds", [1.0, 50.0, 2000.0])
def test_a_kernel_as_fast_as_the_library_is_always_taken(arch: str, m: int, microseconds: float) -> None:
    estimated = estimate_from(ARCHITECTURES[arch], microseconds, replace(TRAFFIC, passes=1), m, microseconds)
    assert estimated[ONE] < min(estimated[EPILOGUE_ONLY], estimated[ALONE])


@pytest.mark.parametrize("math", MATH)
def test_the_architectures_own_kernel_is_as_fast_as_the_library(math: str) -> None:
    device = ARCHITECTURES["sm_90a"]
    assert advantage(device, math, Candidate(HOPPER, HopperTile(128, 128, pingpong=True), 1.0), 64) == 1.0
    assert advantage(device, math, PORTABLE, 64) == LIBRARY_ADVANTAGE.get(("sm_90a", math), 1.0)
    assert advantage(ARCHITECTURES["sm_80"], math, PORTABLE, 64) == 1.0


@pytest.mark.parametrize(("arch", "math"), LIBRARY_ADVANTAGE)
def test_one_tile_of_few_rows_waits_for_memory_as_the_library_does(arch: str, math: str) -> None:
    """64 rows of 4096 x 4096 in TF32, weights [k, n], took 52 us where cuBLAS took 27; 16 rows, 20 and 23."""
    device = ARCHITECTURES[arch]
    assert advantage(device, math, SMALL_M_CANDIDATE, 16) == 1.0
    assert advantage(device, math, SMALL_M_CANDIDATE, 17) == advantage(device, math, PORTABLE, 17) > 1.0


@pytest.mark.parametrize(("arch", "math"), LIBRARY_ADVANTAGE)
def test_a_faster_library_is_taken_where_multiplying_takes_longest(arch: str, math: str) -> None:
    device, factor = ARCHITECTURES[arch], advantage(ARCHITECTURES[arch], math, PORTABLE, 8192)
    assert least_loss([estimate_from(device, 2000.0 / factor, TRAFFIC, 8192, 2000.0)]) is EPILOGUE_ONLY
    assert least_loss([estimate_from(device, 14.0, TRAFFIC, 16, 14.0)]) is ONE  # bound by reading the weights
    assert least_loss([estimate_from(device, 2000.0 / factor, replace(TRAFFIC, passes=1), 8192, 2000.0)]) is ALONE


@pytest.mark.parametrize(("keys", "strategy"), [("keys", EPILOGUE_ONLY), (4096, ONE)])
def test_rows_of_lhs_that_may_begin_anywhere_are_left_to_the_library(keys: str | int, strategy: Strategy) -> None:
    """Attention's second product: its lhs, the probabilities, has rows as long as there are keys."""
    b = Builder(FLOAT16)
    probabilities, values = b.input("p", ("batch", 8, 4096, keys)), b.input("v", ("batch", 8, keys, 128))
    heads = b("Transpose", b("MatMul", probabilities, values), perm=[0, 2, 1, 3])
    model = b.model(b("Reshape", heads, b.integers(0, 0, -1)))
    (site,) = analyse_model(model, resolve("sm_90a,sm_80", list)).sites
    assert site.strategy is strategy


# ---- Against what was measured ---------------------------------------------------------------------------------------

MEASURED = json.loads((Path(__file__).parents[2] / "results" / "h200-tune.json").read_text())
LARGEST = 2e7  # columns times depth: larger weights take long to make and tell nothing new
WORST = 1.25  # of the best strategy's time


def planned(row: dict) -> Strategy:
    """The strategy that the cost model gives a problem of the committed result."""
    sizes, epilogue = row["problem"].rsplit(" ", 1)
    m, k, n = map(int, sizes.split(","))
    b = Builder({"fp16": FLOAT16, "fp32": FLOAT}[row["dtype"]])
    parts = 1 if epilogue == "gelu" else 2
    t = b("MatMul", b.input("x", (m, k)), b.array(np.zeros((k, parts * n), b.numpy), "weight"))
    t = b("Add", t, b.array(np.zeros(parts * n), "bias"))
    if parts == 1:
        model = b.model(b("Gelu", t))
    else:
        value, gate = b("Split", t, outputs=2, axis=-1, num_outputs=2)
        model = b.model(b("Mul", value, b("Gelu", gate)))
    return analyse_model(model, [ARCHITECTURES["sm_90a"]], keep_weights=True).sites[0].strategy


def weight_size(row: dict) -> int:
    _, k, n = map(int, row["problem"].rsplit(" ", 1)[0].split(","))
    return k * n


@pytest.mark.parametrize(
    "row",
    [row for row in MEASURED["rows"] if weight_size(row) < LARGEST],
    ids=lambda row: f"{row['dtype']} {row['problem']}",
)
def test_the_cost_model_loses_little_against_what_was_measured(row: dict) -> None:
    times = row["microseconds"]
    strategies = {"behind the product": EPILOGUE_ONLY, "left alone": ALONE}
    strategy = planned(row)
    own = min(time for name, time in times.items() if strategies.get(name, ONE) is strategy)
    assert own <= WORST * min(times.values()), f"{strategy.value}: {times}"


def linear(b: Builder, spelling: str) -> str:
    """A product and its bias by these nodes."""
    x = b.input("x", (32, 187, 1100) if spelling == "MatMul, Add" else (5984, 1100))
    bias = b.array(np.ones(1664), "bias")
    weight = b.array(np.ones((1100, 1664)), "weight")
    if spelling == "Gemm":
        return b("Gemm", x, weight, bias)
    op, *_ = spelling.split(", ")
    return b("Add", b(op, x, weight), bias)


@pytest.mark.parametrize("spelling", [*calibration(ARCHITECTURES["sm_90a"]).biasing])
def test_the_runtime_takes_longer_to_add_a_bias_than_memory_does(spelling: str) -> None:
    """Its own nodes take so much longer than as long as memory; where more follows, as long as was assumed before."""
    device = ARCHITECTURES["sm_90a"]
    b = Builder(FLOAT16)
    out = linear(b, spelling)
    models = (b.model(out), b.model(b("Relu", out)))
    (alone,), (followed,) = (analyse_model(model, [device], keep_weights=True).sites for model in models)
    memory = cost_model.from_memory(5984 * 1664 * 2 * 2, device)
    (own,), (others,) = alone.estimates[device], followed.estimates[device]
    known = calibration(device)
    a_pass = known.launch + memory
    assert others[ALONE] - own[ALONE] == pytest.approx(a_pass - (known.biasing[spelling] - 1) * memory)


def test_what_is_not_known_of_the_library_is_not_known_of_its_bias() -> None:
    biased = replace(TRAFFIC, biased="Gemm")
    hopper, ampere = ARCHITECTURES["sm_90a"], ARCHITECTURES["sm_80"]
    assert estimate_from(ampere, 9.0, biased, 512, 5.0) == estimate_from(ampere, 9.0, TRAFFIC, 512, 5.0)
    slower, before = (estimate_from(hopper, 9.0, each, 512, 5.0) for each in (biased, TRAFFIC))
    assert slower[ALONE] > before[ALONE]
    assert {**slower, ALONE: 0} == {**before, ALONE: 0}
