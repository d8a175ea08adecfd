"""Factors whose rows TMA cannot read: which kernels copy them, what that costs, and what else a plan keeps for them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.device import spec_of
from onnxfuse.limits import MAX_M
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule import learned_cost
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import copying_rows, with_rows_copied
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED
from onnxfuse.schedule.kernel_family import Candidate, Problem
from onnxfuse.schedule.plan import estimated, replan, retuned
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import ProductPlan
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.helpers.thinning import Taken
from tests.perf.drawn import Drawn
from tests.perf.every_tile import plan_as_it_lies

DEVICE = spec_of("sm_90a")
TMA_FAMILIES = {HOPPER, HOPPER_SWAPPED}
F16, BF16, F32 = 10, 16, 1


def plan_for(order: str, k: int, n: int, element: int = F16, m: int = 2048, kind: str = "residual") -> ProductPlan:
    found = plan_as_it_lies(Drawn(kind, m, k, n, order, element, True, 0), DEVICE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("order", "k", "n", "element", "copied"),
    [
        ("kn", 1365, 512, F16, ("lhs",)),
        ("kn", 2730, 1024, BF16, ("lhs",)),
        ("nk", 2730, 1024, F16, ("lhs", "rhs")),
        ("nk", 2730, 1023, F16, ("lhs", "rhs")),
        ("nk", 2730, 1023, F32, ("lhs", "rhs")),
        ("nk", 2732, 1023, F32, ()),  # rows of four fp32 numbers are rows of 16 bytes
        ("kn", 2728, 1024, F16, ()),
        ("kn", 2728, 1023, F16, ("rhs",)),  # rows along n
        ("kn", 2730, 1023, BF16, ("lhs", "rhs")),
        ("kn", 2728, 1023, F32, ("rhs",)),
    ],
)
def test_what_is_copied(order: str, k: int, n: int, element: int, copied: tuple[str, ...]) -> None:
    """Rows of no multiple of 16 bytes, by kernels that read by TMA, where all that is narrow can be copied."""
    plan = plan_for(order, k, n, element)
    assert {variant.spec.copied for variant in plan.variants if variant.family in TMA_FAMILIES} <= {copied}
    assert {variant.spec.copied for variant in plan.variants if variant.family not in TMA_FAMILIES} <= {()}
    assert any(variant.spec.copied for variant in plan.variants) == bool(copied)
    last = plan.variants[-1]
    assert (last.spec.copied, last.spec.checked, last.min_m) == ((), True, 0), "what takes over needs no memory"
    for variant in plan.variants:
        assert variant.family.why_not(variant.spec, variant.tile, DEVICE) is None
        assert ("copied" in str(variant)) == bool(variant.spec.copied)


@pytest.mark.parametrize("element", [F16, BF16, F32])
def test_for_every_number_of_rows_something_needs_no_memory(element: int, taken: Taken) -> None:
    """Also where every width is one element, so that the kernel of some rows could take any pointer."""
    sizes = ((189, 95), (355, 77), (643, 331), (1365, 1001))
    for (k, n), kind in taken([*itertools.product(sizes, ("bias", "geglu", "qkv"))], 3):
        plan = plan_for("nk", k, n, element, kind=kind)
        without = [each for each in plan.variants if not each.spec.copied]
        for m in (0, 1, 17, 300, 4096, MAX_M):
            first = next(each for each in plan.variants if each.min_m <= m <= each.max_m)
            behind = [each for each in without if each.min_m <= m <= each.max_m]
            assert behind, (k, n, kind, m)
            assert first.spec.copied in ((), ("lhs", "rhs"))
            assert behind[-1].spec.checked or max(a.width for a in behind[-1].spec.factors) == 1


def test_few_rows_are_read_as_they_lie() -> None:
    """A copy is a launch more."""
    plan = plan_for("kn", 2730, 1024)
    at = {m: next(each for each in plan.tried if each.min_m <= m <= each.max_m) for m in (1, 8, 512, 8192)}
    assert [bool(at[m].spec.copied) for m in at] == [False, False, True, True]  # type: ignore[union-attr]


@pytest.mark.parametrize(("order", "launches"), [("kn", 1), ("nk", 3)])
def test_a_copy_costs_what_it_moves_and_its_launches(
    order: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, and but for what was learnt, a tile takes what it takes of rows of whole cache lines."""
    monkeypatch.setattr(learned_cost, "networks", lambda arch: None)
    odd, even = (plan_for(order, k, 1024, kind="geglu") for k in (2730, 2752))
    narrow, wide = (replace(plan.variants[-1].spec, checked=False) for plan in (odd, even))
    entries = [entry for us, entry in odd.ranked[-1].tiles if entry.family in TMA_FAMILIES and math.isfinite(us)]
    problem = Problem(16384, 1024, 2730)
    of_copies, of_even = (
        estimated(spec, entries, replace(problem, k=k), DEVICE) for spec, k in ((narrow, 2730), (wide, 2752))
    )
    copied = replace(narrow, copied=HOPPER.copied(narrow))
    assert of_copies - of_even == pytest.approx(float(copying_rows(copied, problem, DEVICE)))
    moved = 2 * 2 * 2730 * (16384 + (2 * 1024 if order == "nk" else 0))  # bytes
    known = calibration(DEVICE)
    expected = launches * known.launch + moved / (known.bytes * DEVICE.multiprocessors)
    assert float(copying_rows(copied, problem, DEVICE)) == pytest.approx(expected)


@pytest.mark.parametrize("k", [2728, 2730])
def test_rows_of_rhs_along_n_leave_k_as_it_is(k: int) -> None:
    """Only where those of lhs are copied as well, k ends on a cache line."""
    plan = plan_for("kn", k, 1023, kind="geglu")
    spec = next(each.spec for each in plan.variants if each.spec.copied)
    problem = Problem(16384, 1023, k)
    assert with_rows_copied(spec, problem).k == {2728: 2728, 2730: 2752}[k]
    moved = 2 * 2 * k * (2 * 1023 + (16384 if k == 2730 else 0))
    known = calibration(DEVICE)
    expected = len(spec.copied) * known.launch + known.launch + moved / (known.bytes * DEVICE.multiprocessors)
    assert float(copying_rows(spec, problem, DEVICE)) == pytest.approx(expected)


SMALL_IMAGES = [(2048, 512, 7), (512, 2048, 7), (192, 1152, 7), (1024, 256, 14)]  # ResNet's and EfficientNet's


@pytest.mark.parametrize(("k", "channels", "side"), SMALL_IMAGES)
def test_images_whose_rows_begin_anywhere_are_one_kernel(k: int, channels: int, side: int) -> None:
    b = Builder(FLOAT16)
    weight, bias = b.array(np.ones((channels, k, 1, 1)), "weight"), b.array(np.ones(channels), "bias")
    x = b.input("x", (64, k, side, side))
    model = b.model(b("Relu", b("Conv", x, weight, bias, kernel_shape=[1, 1])))
    (site,) = analyse_model(model, (DEVICE,)).sites
    assert site.strategy is Strategy.ONE_KERNEL
    assert site.plans[0].variants[0].spec.copied == ("rhs",)


def of_tile(plan: ProductPlan, copies: bool) -> Candidate:
    return next(entry for _, entry in plan.ranked[-1].tiles if (entry.family in TMA_FAMILIES) == copies)


@pytest.mark.parametrize("copies", [True, False])
def test_a_plan_of_one_tile_keeps_what_takes_over(copies: bool) -> None:
    plan = plan_for("kn", 2730, 1024)
    entry = of_tile(plan, copies)
    first, *rest = replan(plan, entry).variants
    assert (first.tile, bool(first.spec.copied)) == (entry.tile, copies)
    assert rest == [plan.variants[-1]]
    assert replan(replan(plan, of_tile(plan, not copies)), entry).variants == (first, *rest)


def test_measured_times_choose_between_both() -> None:
    plan = plan_for("kn", 2730, 1024)

    def measured(copying: float, other: float) -> dict[int, dict[str, float]]:
        finite = {each.size: [entry for us, entry in each.tiles if math.isfinite(us)] for each in plan.ranked}
        return {
            m: {str(each.tile): copying if each.family in TMA_FAMILIES else other for each in tiles}
            for m, tiles in finite.items()
        }

    for copying, other in ((50.0, 20.0), (20.0, 50.0)):
        found = retuned(plan, measured(copying, other))
        assert {bool(each.spec.copied) for each in found.variants[:-1]} == {copying < other}
