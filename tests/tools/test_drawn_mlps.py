"""What the benchmark of drawn MLPs draws and poses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, cpu_session
from tests.helpers.quantized import Form
from tests.perf import drawn_mlps


def test_a_seed_gives_the_same_mlps_and_another_gives_others() -> None:
    first, again, other = ([*itertools.islice(drawn_mlps.draw(seed), 120)] for seed in (1, 1, 2))
    assert first == again != other
    assert {each.kind for each in first} == {"gelu", "geglu", "swiglu"}
    assert {each.element for each in first} == {FLOAT, FLOAT16, BFLOAT16}
    assert {each.form.block for each in first if each.form} == {16, 32, 64, 128}
    assert all(each.m <= 16 for each in itertools.islice(drawn_mlps.draw(1, 16), 50))


@pytest.mark.parametrize("kind", ["gelu", "geglu", "swiglu"])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_chain_computes_what_the_check_expects(kind: str, order: str, normalised: bool) -> None:
    check(drawn_mlps.Mlp(kind, 5, 32, 48, order, FLOAT, normalised))


@pytest.mark.parametrize("kind", ["gelu", "geglu", "swiglu"])
@pytest.mark.parametrize("form", [Form(), Form(4, 16, True), Form(8, 32, True)], ids=str)
def test_a_chain_of_quantised_weights_computes_what_the_check_expects(kind: str, form: Form) -> None:
    check(drawn_mlps.Mlp(kind, 5, 96, 160, "nk", FLOAT, False, form))


def check(mlp: drawn_mlps.Mlp) -> None:
    x = drawn_mlps.drawn_input(mlp)
    (actual,) = cpu_session(drawn_mlps.model(mlp)).run(None, {"x": x})
    exact = drawn_mlps.expected(mlp, x, np)
    assert np.abs(actual - exact).max() <= 1e-4 * np.abs(exact).max()
