"""Simplified steps mean the same, and the activations that exporters spell out become the cheap ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.dtypes import F32
from onnxfuse.ir.fusion import Fusion, Out, Step
from onnxfuse.ir.simplify import simplify
from tests.helpers.fusions import fusion
from tests.helpers.reference_fusion import evaluate

SIZES = {"m": 3, "n": 5, "k": 4}
X = "acc0"


def epilogue(*steps: tuple, value: str = "") -> Fusion:
    """`("op", inputs...)` makes t0, t1, ... in order; the last is stored."""
    built = fusion(SIZES, dtype=F32)
    made = tuple(Step(f"t{index}", step[0], tuple(step[1:])) for index, step in enumerate(steps))
    return replace(built, steps=made, outs=(Out(built.outs[0].tensor, value or made[-1].result),))


def check_same(before: Fusion) -> Fusion:
    after = simplify(before)
    rng = np.random.default_rng(0)
    values = {"lhs": rng.standard_normal((3, 4)), "rhs": rng.standard_normal((4, 5))}
    np.testing.assert_allclose(evaluate(after, values), evaluate(before, values), rtol=1e-12, atol=1e-14)
    assert [step.result for step in after.steps] == [f"t{index}" for index in range(len(after.steps))]
    return after


def ops(built: Fusion) -> list[str]:
    return [step.op for step in built.steps]


ERF = [("div", X, 1.4140625), ("erf", "t0"), ("add", "t1", 1.0)]
ERF_MUL = [("mul", 0.70703125, X), ("erf", "t0"), ("add", 1.0, "t1")]


@pytest.mark.parametrize("start", [ERF, ERF_MUL])
@pytest.mark.parametrize(
    "end",
    [
        [("mul", X, "t2"), ("mul", "t3", 0.5)],
        [("mul", 0.5, "t2"), ("mul", X, "t3")],
        [("mul", X, 0.5), ("mul", "t3", "t2")],
        [("mul", "t2", 0.5), ("mul", "t3", X)],
    ],
)
def test_every_spelling_of_erf_gelu_becomes_gelu(start, end) -> None:
    after = check_same(epilogue(*start, *end))
    assert ops(after).count("gelu") == 1
    assert set(ops(after)) == {"gelu", "mul"}
    assert len(after.steps) == 3


def test_tanh_gelu_becomes_a_sigmoid() -> None:
    cube = [("mul", X, X), ("mul", X, "t0"), ("mul", 0.044715, "t1"), ("add", X, "t2"), ("mul", 0.79788, "t3")]
    after = check_same(epilogue(*cube, ("tanh", "t4"), ("add", 1.0, "t5"), ("mul", X, "t6"), ("mul", 0.5, "t7")))
    assert "tanh" not in ops(after)
    assert ops(after).count("sigmoid") == 1


@pytest.mark.parametrize("end", [[("div", 1.0, "t2")], [("reciprocal", "t2")]])
def test_spelled_out_sigmoid(end) -> None:
    after = check_same(epilogue(("neg", X), ("exp", "t0"), ("add", "t1", 1.0), *end, ("mul", X, "t3")))
    assert ops(after) == ["sigmoid", "mul"]


def test_a_gate_keeps_its_other_factor() -> None:
    after = check_same(epilogue(*ERF, ("mul", X, "t2"), ("mul", "t3", 0.5), ("tanh", X), ("mul", "t5", "t4")))
    assert sorted(ops(after)) == ["gelu", "mul", "mul", "mul", "tanh"]


def test_what_somebody_else_reads_is_not_taken_apart() -> None:
    after = check_same(epilogue(*ERF, ("mul", X, "t2"), ("mul", "t3", 0.5), ("add", "t4", "t1")))
    assert "erf" in ops(after)
    assert "gelu" not in ops(after)


@pytest.mark.parametrize("divisor", [0.0, math.inf, 1e-320])
def test_a_division_without_a_reciprocal_stays(divisor: float) -> None:
    assert ops(simplify(epilogue(("div", X, divisor)))) == ["div"]


@settings(max_examples=200)
@given(st.data())
def test_any_graph_means_what_it_meant(data: st.DataObject) -> None:
    steps: list[tuple] = []
    values: list = [X, 0.5, 1.0, 2.0]
    for index in range(data.draw(st.integers(1, 14))):
        op = data.draw(st.sampled_from(["mul", "mul", "mul", "add", "erf", "tanh", "exp", "neg", "div", "sigmoid"]))
        pick = st.sampled_from([value for value in values if isinstance(value, str)])
        first = data.draw(pick)
        if op in ("mul", "add"):
            pair = [first, data.draw(st.sampled_from(values))]
            steps.append((op, *(pair if data.draw(st.booleans()) else pair[::-1])))
        elif op == "div":
            steps.append((op, first, data.draw(st.sampled_from([0.5, 1.4140625, 3.0]))))
        elif op == "exp":
            steps += [("tanh", first), ("exp", f"t{len(steps)}")]
        else:
            steps.append((op, first))
        values.append(f"t{len(steps) - 1}")
        if index == 10:
            break
    check_same(epilogue(*steps))
