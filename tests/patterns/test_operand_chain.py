"""Ranges of a value, and numbers added to them, that repeated operands are made of: a kernel reads what is before."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.adaptive_models import PLACES, RANGES, WIDTH, Ranges, adaptive, feed, unsqueezed_behind
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.tools import sweep


def analysed(model) -> Analysis:
    return analyse_model(model, resolve("sm_90a,sm_80", list), keep_weights=True)


def ops(model) -> set[str]:
    return {node.op_type for node in model.graph.node if not node.domain}


@pytest.mark.parametrize("count", [3, 6, 9])
@pytest.mark.parametrize("ranges", [*RANGES, *PLACES])
def test_ranges_are_read_where_they_lie(ranges: Ranges, count: int) -> None:
    model = adaptive(ranges, count=count)
    for site in analysed(model).sites:
        check_meaning(model, site.fusion, feed())
    assert not ops(sweep.rewritten(analysed(model)))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("count", [3, 4, 6])
@pytest.mark.parametrize("ranges", [*RANGES, *PLACES])
def test_without_us_the_file_computes_the_same_bits(ranges: Ranges, count: int, dtype: int) -> None:
    model = adaptive(ranges, dtype, count=count)
    given = feed(dtype=np.float16 if dtype == FLOAT16 else np.float32)
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [given])


@pytest.mark.parametrize("ranges", RANGES)
def test_windows_have_a_start_and_their_numbers_are_steps(ranges: Ranges) -> None:
    analysis = analysed(adaptive(ranges))
    norms = [site.fusion for site in analysis.sites if site.fusion.pattern == "normalisation"]
    starts = [{load.start for load in fusion.loads if load.start is not None} for fusion in norms]
    assert starts == [{0, WIDTH}, {3 * WIDTH, 4 * WIDTH}]
    assert all(fusion.operands[-1].wide == (len(fusion.operands[-1].dims) - 1, 6 * WIDTH) for fusion in norms)
    assert all([step.op for step in fusion.steps][-3:] == ["add", "mul", "add"] for fusion in norms)


@pytest.mark.parametrize("ranges", PLACES)
def test_a_place_of_the_dimension_before_the_columns_is_a_window_as_well(ranges: Ranges) -> None:
    norms = [site.fusion for site in analysed(adaptive(ranges)).sites if site.fusion.pattern == "normalisation"]
    starts = [{load.start for load in fusion.loads if load.start is not None} for fusion in norms]
    assert starts == [{0, 1}, {3, 4}]
    assert all((fusion.operands[-1].einops, fusion.operands[-1].wide) == ("b s:6 n", (1, 6)) for fusion in norms)


def test_several_places_are_no_window() -> None:
    """Two of them are a dimension of two, which repeats what it is added to."""
    b = Builder()
    x, condition = b.input("x", ("batch", 2, WIDTH)), b.input("condition", ("batch", 4, WIDTH))
    t = b("MatMul", x, b.array(np.eye(WIDTH), "weight"))
    model = b.model(b("Add", t, b("Slice", condition, b.integers(0), b.integers(2), b.integers(1))))
    assert ops(sweep.rewritten(analysed(model))) == {"Slice"}


def test_a_place_of_more_columns_than_a_match_has_stays() -> None:
    """A range of a place would be a window of two dimensions."""
    b = Builder()
    x, condition = b.input("x", ("batch", "rows", WIDTH)), b.input("condition", ("batch", 2, 3 * WIDTH))
    t = b("Add", b("MatMul", x, b.array(np.tile(np.eye(WIDTH), 3), "weight")), places_of(b, condition)[1])
    parts = b("Split", t, outputs=3, axis=-1, num_outputs=3)
    model = b.model(*(b(op, part) for op, part in zip(("Relu", "Tanh", "Sigmoid"), parts, strict=True)))
    given = {"x": draw(2, 5, WIDTH).astype(np.float32), "condition": draw(2, 2, 3 * WIDTH).astype(np.float32)}
    for site in analysed(model).sites:
        check_meaning(model, site.fusion, given)
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [given])


def places_of(b: Builder, value: str) -> list[str]:
    return list(b("Split", value, outputs=2, axis=1, num_outputs=2))


def test_ranges_that_would_make_an_access_narrower_stay() -> None:
    model = adaptive(unsqueezed_behind, width=10)
    for site in analysed(model).sites:
        check_meaning(model, site.fusion, feed(10))
    rewritten = sweep.rewritten(analysed(model))
    assert "Split" in ops(rewritten)
    assert "Add" not in ops(rewritten)


def read_twice(b: Builder, modulation: str, parts: list[str]) -> list[str]:
    return [b("ReduceMax", parts[1], b.integers(-1)), modulation]


@pytest.mark.parametrize("ranges", [*RANGES, *PLACES])
def test_what_others_read_stays(ranges: Ranges) -> None:
    model = adaptive(ranges, ends=read_twice)
    rewritten = sweep.rewritten(analysed(model))
    assert not sweep.difference(model, rewritten, [feed()])
    assert ops(rewritten) & {"Gather", "Slice", "Split"}


def test_a_product_in_front_of_which_ranges_were_taken_keeps_them_together() -> None:
    """Three ranges could be stored apart; then nobody made what those read who take them from all."""
    model = adaptive(unsqueezed_behind, count=3)
    made = [out.tensor.name for site in analysed(model).sites for out in site.fusion.outs]
    read = {tensor.name for site in analysed(model).sites for tensor in site.fusion.operands}
    inputs = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    assert read - inputs <= {*made}


def test_only_what_is_repeated_is_computed_again() -> None:
    """A number that is added to as many elements as a product has costs a kernel more than it saves."""
    b = Builder()
    x, y = b.input("x", ("rows", WIDTH)), b.input("y", ("rows", WIDTH))
    weight = b.array(np.eye(WIDTH), "weight")
    model = b.model(b("Mul", b("MatMul", x, weight), b("Add", y, b.array(np.array(1.0)))))
    assert "Add" in ops(sweep.rewritten(analysed(model)))


def test_an_operand_beside_values_of_other_dimensions_is_one() -> None:
    b = Builder()
    y = b("MatMul", b.input("x", ("batch", "rows", WIDTH)), b.array(np.eye(WIDTH), "weight"))
    scale = b.input("scale", (WIDTH,))
    model = b.model(b("Add", b("Reshape", b("Mul", y, scale), b.integers(-1, WIDTH)), scale))
    (site,) = analysed(model).sites
    assert ([tensor.name for tensor in site.fusion.operands], len(site.fusion.loads)) == (["scale"], 1)
    assert not ops(sweep.rewritten(analysed(model)))
