"""What is planned once for equal sites is what would be planned for each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxfuse.device import resolve
from onnxfuse.lowering import plan_site
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.pipeline import Fp32, analyse_model
from tests.end_to_end.test_linear_time import BLOCK_NODES
from tests.end_to_end.test_linear_time import model as blocks
from tests.end_to_end.test_quantized_models import llama
from tests.helpers import corpus
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.helpers.quantized import Form

DEVICES = resolve("sm_90a,sm_80", list)
KEPT = {name: function for name, function in vars(plan_site).items() if name.startswith("kept_")}
CASES: list[tuple[str, Fp32]] = [("layers", "tf32"), ("layers", "exact"), ("quantized", "tf32"), ("windows", "tf32")]
WIDTHS = (64, 64, 192, 64, 128, 63, 1, 64, 64, 40, 256, 64)
CASES.append((corpus.families("btb_320", size="real")[-1], "tf32"))


def layers(count: int) -> ModelProto:
    return blocks(count * BLOCK_NODES)


def windows() -> ModelProto:
    """Ranges of one product's columns, of some widths, at even and odd places, each with steps of its own."""
    b = Builder(FLOAT16)
    y = b("MatMul", b.input("x", ("rows", 192)), b.array(np.ones((192, sum(WIDTHS))), "weight"))
    ends = np.cumsum(WIDTHS)
    ranges = zip(ends - WIDTHS, ends, strict=True)
    taken = [b("Slice", y, b.integers(start), b.integers(end), b.integers(1)) for start, end in ranges]
    steps = ("Relu", "Tanh", "Relu", "Sigmoid", "Relu", "Relu", "Tanh", "Relu", "Relu", "Tanh", "Relu", "Relu")
    return b.model(*(b(step, each) for step, each in zip(steps, taken, strict=True)))


def analysed(model: ModelProto, fp32: Fp32 = "tf32") -> tuple[Site, ...]:
    return analyse_model(model, DEVICES, fp32).sites


def decided(model: ModelProto, fp32: Fp32) -> list[str]:
    """Every decision about every site as text, which tells a number from another to its last bit, and 0.0 from -0.0."""
    return [str(_decided(site)) for site in analysed(model, fp32)]


def _decided(site: Site) -> list[Any]:
    made = [each for each in (site.epilogue_only, site.whole) if isinstance(each, Implementation)]
    return [site.fusion, site.mapping, site.plans, site.strategy, site.estimates, *(each.plans for each in made)]


def forgotten() -> None:
    for function in KEPT.values():
        function.cache_clear()


def made() -> dict[str, int]:
    return {name: function.cache_info().misses for name, function in KEPT.items()}


MADE = {"layers": lambda: layers(2), "quantized": lambda: llama(Form(4, 32)), "windows": windows}


def built(name: str) -> ModelProto:
    if name in MADE:
        return MADE[name]()
    return onnx.load(corpus.folder() / name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "fp32"), CASES)
def test_what_is_kept_is_what_would_be_made_anew(name: str, fp32: Fp32, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each site, under its own names."""
    model = built(name)
    kept = decided(model, fp32)
    assert kept
    for alike in ("nameless", "in_first_window"):
        monkeypatch.setattr(plan_site, alike, lambda fusion: fusion)
    for each, function in KEPT.items():
        monkeypatch.setattr(plan_site, each, function.__wrapped__)
    assert decided(model, fp32) == kept


def test_equal_layers_are_planned_once() -> None:
    """However many there are, and in whichever model; the first has no layer before it."""
    forgotten()
    assert len(analysed(layers(2)))
    planned = made()
    assert planned["kept_plan"]
    assert planned["kept_attention_plan"]
    assert len(analysed(layers(5)))
    assert made() == planned


def test_windows_that_lie_alike_are_planned_once() -> None:
    """Of one width, a cache line or two apart; names of the steps and places of the windows are no part of a plan."""

    def slices(count: int) -> ModelProto:
        b = Builder(FLOAT16)
        y = b("MatMul", b.input("x", ("rows", 192)), b.array(np.ones((192, 256 * count)), "weight"))
        starts = [256 * index for index in range(count)]
        taken = [b("Slice", y, b.integers(start), b.integers(start + 256), b.integers(1)) for start in starts]
        return b.model(*(b("Relu", each) for each in taken))

    planned = []
    for count in (8, 24):
        forgotten()
        assert analysed(slices(count))
        planned.append(made()["kept_plan"])
    assert planned[0] == planned[1]


def test_sites_of_either_zero_have_their_own_kernels() -> None:
    b = Builder()
    scaled = [b("Mul", b("Tanh", b("MatMul", b.input(x, ("rows", 64)), b.array(np.ones((64, 64))))), b.array(zero))
              for x, zero in (("x", 0.0), ("y", -0.0))]  # fmt: skip
    sites = analysed(b.model(*scaled))
    assert len(sites) == len(scaled)
    for site in sites:
        for plan in site.plans:
            assert {str(variant.spec.steps) for variant in plan.variants} == {str(site.fusion.steps)}
