"""Activations that choose by a comparison, as people write them: which are steps of a kernel, and which stay nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnxfuse.patterns.choices import LARGER
from tests.helpers.matching import K, N, check_meaning, linear, only, sites
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.patterns.test_normalisation import analysed
from tests.tools import sweep

FEED = {"x": (3 * np.random.default_rng(3).standard_normal((4, 50, K))).astype(np.float32)}
Activation = Callable[[Builder, str], str]


def by_zero(b: Builder, x: str, above: str, below: str, op: str = "Greater") -> str:
    return b("Where", b(op, x, b.array(0.0)), above, below)


def leaky(b: Builder, x: str) -> str:
    return by_zero(b, x, x, b("Mul", x, b.array(0.1)))


def elu(b: Builder, x: str) -> str:
    return by_zero(b, x, x, b("Sub", b("Exp", x), b.array(1.0)), "GreaterOrEqual")


def turned(b: Builder, x: str) -> str:
    return by_zero(b, x, b("Mul", x, b.array(0.25)), x, "Less")


def number_first(b: Builder, x: str) -> str:
    return b("Where", b("LessOrEqual", b.array(1.5), x), b("Sub", b("Mul", x, b.array(3.0)), b.array(3.0)), x)


def xielu(b: Builder, x: str) -> str:
    """Of Apertus, with numbers of its configuration: expm1 is Exp less 1 where exporters write it."""
    linear_part = b("Mul", x, b.array(0.5))
    above = b("Add", b("Mul", b("Mul", x, x), b.array(0.8)), linear_part)
    small = b("Sub", b("Exp", b("Min", x, b.array(-1e-6))), b.array(1.0))
    return by_zero(b, x, above, b("Add", b("Mul", b("Sub", small, x), b.array(1.3)), linear_part))


def expanded(b: Builder, x: str, *more: int) -> str:
    """Zeros as Flax makes them: as many as there are, whose sizes are put together of those again."""
    sizes = b("Gather", b("Shape", x), b.integers(0, 1), axis=0)
    return b("Expand", b.array(0.0), b("Concat", *map(b.integers, more), sizes, b.integers(N), axis=0))


def of_zeros(b: Builder, x: str) -> str:
    """As Flax has an ELU."""
    return by_zero(b, x, x, b("Sub", b("Exp", by_zero(b, x, expanded(b, x), x)), b.array(1.0)))


def twice(b: Builder, x: str) -> str:
    return leaky(b, b("Add", elu(b, x), b.array(-0.5)))


CONTINUOUS: dict[str, Activation] = {f.__name__: f for f in (leaky, elu, turned, number_first, xielu, of_zeros, twice)}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_continuous_choice_is_a_step(name: str) -> None:
    b = Builder()
    model = b.model(b("Mul", CONTINUOUS[name](b, linear(b)), b.array(2.0)))
    match, fusion = only(model)
    assert [out.name for out in fusion.outputs] == [model.graph.output[0].name]
    assert len(match.nodes) == len(model.graph.node)
    check_meaning(model, fusion, FEED)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_without_the_bridge_the_nodes_run(name: str) -> None:
    b = Builder(FLOAT16)
    model = b.model(CONTINUOUS[name](b, linear(b)))
    fused = sweep.rewritten(analysed(model))
    assert len(fused.graph.node) == 1
    feed = {"x": FEED["x"].astype(np.float16)}
    np.testing.assert_array_equal(*(run(each, feed)[0] for each in (model, fused)))


@pytest.mark.parametrize("op", LARGER)
def test_it_is_the_models_choice(op: str) -> None:
    """Of numbers on both sides, and NaN."""
    b = Builder()
    x = linear(b)
    model = b.model(by_zero(b, x, b("Mul", x, b.array(2.0)), b("Neg", x), op))
    _, fusion = only(model)
    x_with_nan = FEED["x"].copy()
    x_with_nan[1, 3, 0] = np.nan
    check_meaning(model, fusion, {"x": x_with_nan})


def step(b: Builder, x: str) -> str:
    return by_zero(b, x, b.array(1.0), b.array(0.0))


def jumps(b: Builder, x: str) -> str:
    return by_zero(b, x, b("Add", x, b.array(0.01)), x)


def by_an_operand(b: Builder, x: str) -> str:
    return b("Where", b("Greater", x, b.input("threshold", (1,))), x, b("Mul", x, b.array(0.1)))


def of_another_value(b: Builder, x: str) -> str:
    return b("Where", b("Greater", b("Mul", x, b.array(2.0)), b.array(0.0)), x, b("Mul", x, b.array(0.1)))


def jumps_under_a_mask(b: Builder, x: str) -> str:
    return by_zero(b, x, b("Where", b.raw(np.arange(N) % 2 == 0, "mask"), x, b.array(5.0)), x)


def of_more_zeros(b: Builder, x: str) -> str:
    """Which make two of what is chosen from."""
    return by_zero(b, x, x, expanded(b, x, 2))


JUMPS: dict[str, Activation] = {
    f.__name__: f for f in (step, jumps, by_an_operand, of_another_value, jumps_under_a_mask, of_more_zeros)
}


@pytest.mark.parametrize("name", JUMPS)
def test_what_rounding_could_turn_round_stays(name: str) -> None:
    """A value that is rounded to 0 or is not would come out as another number."""
    b = Builder()
    model = b.model(JUMPS[name](b, linear(b)))
    made = {out.name for each in sites(model) if isinstance(each, tuple) for out in each[1].outputs}
    assert model.graph.output[0].name not in made
    feed = FEED | ({"threshold": np.zeros(1, np.float32)} if name == by_an_operand.__name__ else {})
    np.testing.assert_array_equal(*(run(each, feed)[0] for each in (model, sweep.rewritten(analysed(model)))))


def test_a_comparison_that_others_read_stays() -> None:
    b = Builder()
    x = linear(b)
    mask = b("Greater", x, b.array(0.0))
    model = b.model(b("Where", mask, x, b("Mul", x, b.array(0.1))), b("Cast", b("Not", mask), to=b.dtype))
    made = {out.name for each in sites(model) if isinstance(each, tuple) for out in each[1].outputs}
    assert not made & {out.name for out in model.graph.output}


def test_rounding_as_the_model_does_leaves_the_choice() -> None:
    b = Builder()
    model = b.model(leaky(b, linear(b)))
    (site,) = analysed(model, rounding="onnx").sites
    assert model.graph.output[0].name not in [out.name for out in site.fusion.outputs]
