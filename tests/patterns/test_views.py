"""Views against NumPy's own reshape and transpose."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.device import resolve
from onnxfuse.errors import NotFusable
from onnxfuse.patterns.views import AxisKind, View, axis_view, extent, refined, regroup
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT16, Builder


def as_numpy(view: View, base: np.ndarray) -> np.ndarray:
    """The tensor of a view, from that of its own axes: split into pieces, permute, group."""
    (whole,) = refined((tuple(piece for dim in axis_view(base.shape, AxisKind.LHS) for piece in dim),), view)
    pieces = [piece for piece in whole if piece.size != 1]
    order = [piece for dim in refined(view, (whole,)) for piece in dim if piece.size != 1]
    split = base.reshape([piece.size for piece in pieces])
    return split.transpose([pieces.index(piece) for piece in order]).reshape([extent(dim) for dim in view])


@settings(max_examples=300)
@given(st.data())
def test_chains_of_views_move_elements_as_numpy_does(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    base = np.arange(math.prod(shape)).reshape(shape)
    view, value = axis_view(shape, AxisKind.LHS), base
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(value.ndim)))
            view, value = tuple(view[index] for index in order), value.transpose(order)
        else:
            wanted = data.draw(factored(value.size))
            try:
                view = regroup(view, wanted)
            except NotFusable:
                continue
            value = value.reshape(wanted)
    np.testing.assert_array_equal(as_numpy(view, base), value)


@st.composite
def factored(draw: st.DrawFn, total: int) -> list[int]:
    sizes = []
    while total > 1 and len(sizes) < 4:
        sizes.append(draw(st.sampled_from([size for size in range(1, total + 1) if total % size == 0])))
        total //= sizes[-1]
    return [*sizes, total]


def test_a_reshape_across_axes_does_not_factor() -> None:
    with pytest.raises(NotFusable, match="across"):
        regroup(axis_view((4, 6), AxisKind.LHS), [6, 4])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["b", "s", 4, 8], [("b",), ("s",), (4,), (8,)]),
        (["b", None, 4, 8], [("b",), ("s",), (4,), (8,)]),
        ([None, 32], [("b", "s"), (32,)]),
        (["b*s", 32], [("b", "s"), (32,)]),
        (["b", "s", 1, 32], [("b",), ("s",), (), (32,)]),
        (["s", "b", 32], None),
        ([None, None, 32], None),
        (["b", "s", 33], None),
        (["t", None, 32], None),
        (["b", 2, None], None),
    ],
)
def test_sizes_that_only_the_run_knows_are_matched_by_symbol(wanted, expected) -> None:
    view = axis_view(("b", "s", 32), AxisKind.LHS)
    if expected is None:
        with pytest.raises(NotFusable):
            regroup(view, wanted)
    else:
        found = regroup(view, wanted)
        assert [tuple(piece.size for piece in dim) for dim in found] == expected


@pytest.mark.parametrize("wanted", [["b", 4, "s", 2], ["2*b", 2, "s", 2], ["2*b", 2, None], ["b", 2, 2, "2*s"]])
def test_what_is_a_multiple_of_a_symbol_is_split_at_numbers(wanted: list[int | str | None]) -> None:
    """And one piece again where it is merged; with numbers in place of the symbols, elements move as in NumPy."""
    view = axis_view(("4*b", "2*s"), AxisKind.LHS)
    split = regroup(view, wanted)
    assert [size for size in wanted if size] == [extent(dim) for dim, size in zip(split, wanted, strict=True) if size]
    assert regroup(split, ["4*b", "2*s"]) == view
    known = as_run(split, {"b": 3, "s": 5})
    base = np.arange(120).reshape(12, 10)
    np.testing.assert_array_equal(as_numpy(known[::-1], base), base.reshape([*map(extent, known)]).T)


def as_run(view: View, sizes: dict[str, int]) -> View:
    """A view of which a run knows the sizes."""

    def number(size: int | str) -> int:
        return math.prod(sizes.get(factor) or int(factor) for factor in str(size).split("*"))

    return tuple(tuple(replace(piece, size=number(piece.size)) for piece in dim) for dim in view)


@pytest.mark.parametrize("wanted", [[4, "b", "s", 2], ["b", 3, None], [2, None], ["4*b", "s", 3]])
def test_what_is_no_multiple_is_not_split(wanted: list[int | str | None]) -> None:
    with pytest.raises(NotFusable):
        regroup(axis_view(("4*b", "2*s"), AxisKind.LHS), wanted)


def test_unnamed_sizes_equal_nothing_but_themselves() -> None:
    view = axis_view((None, None, 6), AxisKind.LHS)
    assert regroup(view, [extent(view[0]), None, 6]) == view
    assert [len(dim) for dim in regroup(view, [None, 6])] == [2, 1]
    with pytest.raises(NotFusable):
        regroup(view, [extent(view[1]), None, 6])


@pytest.mark.parametrize("length", [10, 3000, 5000])
def test_dimensions_whose_names_are_kilobytes_long_are_no_traceback(length: int) -> None:
    """Of two such together nobody can speak: a site that would have to is left alone, with a reason."""
    b = Builder(FLOAT16)
    rows = b("Reshape", b.input("x", ("a" * length, "b" * length, 64)), b.integers(-1, 64))
    product = b("MatMul", rows, b.array(draw(64, 32)))
    model = b.model(b("Relu", b("Add", product, b.array(draw(32)))))
    analysis = analyse_model(model, resolve("sm_80", list))
    assert len(analysis.sites) + len(analysis.skipped) == 1
