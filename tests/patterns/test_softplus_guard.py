"""A softplus with a threshold, as torch's exporter writes it: where it is one step, and where a choice remains."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from onnxfuse.patterns.softplus_guard import LEAST
from tests.helpers.matching import K, N, check_meaning, linear, only, sites
from tests.helpers.onnx_build import Builder, run
from tests.helpers.reference_fusion import evaluate
from tests.patterns.test_normalisation import analysed
from tests.tools import sweep

FEED = {"x": (30 * np.random.default_rng(3).standard_normal((4, 50, K))).astype(np.float32)}


def guarded(b: Builder, x: str, by: float = 1.0, least: float = 20.0, opset_op: str = "Greater") -> str:
    """As onnxscript writes it, of `by x` where that is not x."""
    u = x if by == 1 else b("Mul", x, b.array(by))
    softplus = b("Softplus", u) if by == 1 else b("Div", b("Softplus", u), b.array(by))
    return b("Where", b(opset_op, u, b.array(least)), x, softplus)


def test_from_the_threshold_on_it_is_its_input() -> None:
    """Of every number of fp32 up to 32, and of some beyond; those are whole to a unit that exp(-x) is far below."""
    bits = np.arange(np.float32(LEAST).view(np.uint32), np.float32(32).view(np.uint32), dtype=np.uint32)
    for x in (bits.view(np.float32), np.logspace(1.5, 38, 1000, dtype=np.float32)):
        wide = x.astype(np.float64)
        np.testing.assert_array_equal((wide + np.log1p(np.exp(-wide))).astype(np.float32), x)


@pytest.mark.parametrize("least", [LEAST, 20.0, 1e30])
@pytest.mark.parametrize("by", [1.0, 2.0, 0.5])
def test_it_is_a_softplus(by: float, least: float) -> None:
    b = Builder()
    model = b.model(guarded(b, linear(b), by, least))
    match, fusion = only(model)
    assert [out.name for out in fusion.outputs] == [model.graph.output[0].name]
    assert len(match.nodes) == len(model.graph.node)
    assert not any(step.op == "where" for step in fusion.steps)
    check_meaning(model, fusion, FEED)


def test_steps_behind_it_join() -> None:
    """As of a normal distribution's deviation, of half of the columns."""
    b = Builder()
    mean, raw = b("Split", linear(b), outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Add", mean, b("Sqrt", b("Add", guarded(b, raw), b.array(1e-3)))))
    _, fusion = only(model)
    assert [out.name for out in fusion.outputs] == [model.graph.output[0].name]
    check_meaning(model, fusion, FEED)


def test_without_the_bridge_the_nodes_run() -> None:
    b = Builder()
    model = b.model(b("Mul", guarded(b, linear(b)), b.array(0.5)))
    fused = sweep.rewritten(analysed(model))
    assert len(fused.graph.node) == 1
    np.testing.assert_array_equal(*(run(each, FEED)[0] for each in (model, fused)))


def of_exponentials(b: Builder, x: str, less: float = 0.0, alike: str = "", added: float = 0.0) -> str:
    """As JAX has `logaddexp`: where the difference is no number, x and a number stand for what is none either."""
    difference = b("Sub", x, b.array(less))
    known = b("Not", b("Equal", difference, alike or difference))
    far = b("Neg", b("Abs", difference))
    made = b("Add", b("Max", x, b.array(less)), b("Log", b("Add", b("Exp", far), b.array(1.0))))
    return b("Where", known, b("Add", x, b.array(added)), made)


@pytest.mark.parametrize("less", [0.0, 1.5])
def test_what_is_no_number_needs_no_choice(less: float) -> None:
    b = Builder()
    x = linear(b)
    model = b.model(b("Mul", x, b("Tanh", of_exponentials(b, x, less, added=less))))
    match, fusion = only(model)
    assert [out.name for out in fusion.outputs] == [model.graph.output[0].name]
    assert len(match.nodes) == len(model.graph.node)
    assert not any(step.op == "where" for step in fusion.steps)
    none = FEED["x"].copy()
    none[0, 0, 0], none[1, 1, 1] = np.nan, np.inf
    check_meaning(model, fusion, FEED)
    fused = sweep.rewritten(analysed(model))
    for x_of_run in (FEED["x"], none):
        np.testing.assert_array_equal(*(run(each, {"x": x_of_run})[0] for each in (model, fused)))


def test_what_is_no_number_is_none_in_the_kernel() -> None:
    """Where x is none, and only there."""
    b = Builder()
    model = b.model(of_exponentials(b, linear(b)))
    _, fusion = only(model)
    x = np.stack([np.full((1, K), value, np.float32) for value in (np.nan, 1e30)])
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    np.testing.assert_array_equal(np.isnan(evaluate(fusion, stored | {"x": x})[0]), np.isnan(run(model, {"x": x})[0]))


def of_another(b: Builder, x: str) -> str:
    return of_exponentials(b, x, alike=b("Tanh", x))


def infinitely_less(b: Builder, x: str) -> str:
    """Of which the difference to an infinity is no number, and what is taken then is one."""
    return of_exponentials(b, x, less=np.inf)


def of_its_shape(b: Builder, x: str) -> str:
    """What is chosen is no function of the difference."""
    difference = b("Sub", x, b.array(0.0))
    return b("Where", b("Not", b("Equal", difference, difference)), b("Add", x, b.array(0.0)), b("Tanh", x))


def another_value(b: Builder, x: str) -> str:
    return b("Where", b("Greater", x, b.array(20.0)), b("Tanh", x), b("Softplus", x))


def by_another_number(b: Builder, x: str) -> str:
    u = b("Mul", x, b.array(2.0))
    return b("Where", b("Greater", u, b.array(20.0)), x, b("Div", b("Softplus", u), b.array(3.0)))


def by_a_threshold_of_the_run(b: Builder, x: str) -> str:
    return b("Where", b("Greater", x, b.input("least", (1,))), x, b("Softplus", x))


NEAR = {
    "a threshold at which they differ": lambda b, x: guarded(b, x, least=5.0),
    **{f.__name__: f for f in (another_value, by_another_number, of_another, infinitely_less, of_its_shape)},
    by_a_threshold_of_the_run.__name__: by_a_threshold_of_the_run,
}


@pytest.mark.parametrize("case", NEAR)
def test_a_choice_that_means_something_stays(case: str) -> None:
    b = Builder()
    model = b.model(NEAR[case](b, linear(b)))
    made = {name for each in sites(model) if isinstance(each, tuple) for name in (out.name for out in each[1].outputs)}
    assert model.graph.output[0].name not in made


def test_a_comparison_that_others_read_stays() -> None:
    b = Builder()
    x = linear(b)
    made = guarded(b, x)
    chosen = b("Where", b.nodes[-2].output[0], b.array(1.0), b.array(0.0))
    model = b.model(made, b("Expand", chosen, b.integers(1, 1, N)))
    found = [each for each in sites(model) if isinstance(each, tuple)]
    assert all(made not in [out.name for out in fusion.outputs] for _, fusion in found)


def test_rounding_as_the_model_does_leaves_the_choice() -> None:
    b = Builder()
    model = b.model(guarded(b, linear(b)))
    (site,) = analysed(model, rounding="onnx").sites
    assert model.graph.output[0].name not in [out.name for out in site.fusion.outputs]
