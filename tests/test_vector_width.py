"""Widths and their reasons; a claimed width is legal at every index, and twice as much is not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.axes import map_axes
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.errors import NotFusable
from onnxfuse.vector_width import WIDEST_BYTES, analyse, is_turned, widest
from tests.fusions import fusion

SIZES = {"m": 504, "n": 136, "k": 248}


def widths(sizes, **kwargs):
    built = fusion(sizes, **kwargs)
    return analyse(built, map_axes(built))


@pytest.mark.parametrize(
    ("change", "lhs", "rhs", "out"),
    [
        ({}, 8, 8, 8),
        ({"k": 249}, 1, 8, 8),
        ({"n": 137}, 8, 1, 1),
        ({"m": 505}, 8, 8, 8),
        ({"m": None}, 8, 8, 8),
        ({"k": 250, "n": 132}, 2, 4, 4),
        ({"k": 1, "n": 1, "m": 1}, 1, 1, 1),
    ],
)
def test_odd_sizes_limit_the_tensors_that_have_them(change, lhs: int, rhs: int, out: int) -> None:
    found = widths(SIZES | change)
    assert (found.lhs.elements, found.rhs.elements, found.outs[0].elements) == (lhs, rhs, out)


@pytest.mark.parametrize(
    ("dims", "dtype", "sizes", "width", "reason"),
    [
        ("n", F16, SIZES, 8, "16 bytes"),
        ("n", F32, SIZES, 4, "16 bytes"),
        ("m n", BF16, SIZES, 8, "16 bytes"),
        ("m n", F16, SIZES | {"n": 137}, 1, "137, odd, elements along n"),
        ("m n", F16, SIZES | {"n": 134}, 2, "134, a multiple of 2 only, elements along n"),
        ("m 1", F16, SIZES, 1, "does not vary along n"),
        ("", F32, SIZES, 1, "does not vary along n"),
        ("n m", F16, SIZES, 1, "n is not its contiguous axis"),
        ("(p n)", F16, SIZES | {"n": 137, "p": 2}, 1, "137, odd, elements along n"),
        ("(p n)", F16, SIZES | {"n": 68, "p": 2}, 4, "68, a multiple of 4 only, elements along n"),
    ],
)
def test_width_and_reason(dims: str, dtype, sizes, width: int, reason: str) -> None:
    built = fusion(
        sizes, rhs="k (p n)" if "p" in dims else "k n", operands=[(dims, dtype)], parts=2 if "p" in dims else 1
    )
    found = widest(built, built.operands[0], ("n",))
    assert (found.elements, found.reason) == (width, reason)


def analysed(sizes, **kwargs):
    built = fusion(sizes, **kwargs)
    mapping = map_axes(built)
    return built, mapping, analyse(built, mapping)


HEADS = {"b": 2, "m": 504, "n1": 3, "n2": 64, "k": 248}
B, ODD = {"b": 2}, {"m": 77, "n": 77}


@pytest.mark.parametrize(
    ("sizes", "lhs", "rhs", "out", "width", "turned", "reason"),
    [
        (HEADS, "b m k", "k (n1 n2)", "b n1 m n2", 8, False, "16 bytes"),
        (HEADS | {"n2": 6}, "b m k", "k (n1 n2)", "b n1 m n2", 2, False, "6, a multiple of 2 only, elements along n2"),
        (HEADS | {"n2": 5}, "b m k", "k (n1 n2)", "b n1 m n2", 1, False, "5, odd, elements along n2"),
        (HEADS | {"m": None}, "b m k", "k (n1 n2)", "b n1 m n2", 8, False, "16 bytes"),
        (HEADS, "b m k", "k (n1 n2)", "b n1 n2 m", 8, True, "16 bytes"),
        (HEADS | {"m": 77}, "b m k", "k (n1 n2)", "b n1 n2 m", 1, True, "77, odd, elements along m"),
        (HEADS | {"m": None}, "b m k", "k (n1 n2)", "b n1 n2 m", 8, True, "16 bytes where m is a multiple of 8"),
        (SIZES, "m k", "k n", "n m", 8, True, "16 bytes"),
        (SIZES | ODD, "m k", "k n", "n m", 1, True, "77, odd, elements along m"),  # m == n
        (SIZES | B, "b m k", "k n", "b n m", 8, True, "16 bytes"),
        (SIZES | B, "b m k", "k n", "n b m", 8, True, "16 bytes"),
        (SIZES | B, "b m k", "k n", "m n b", 1, False, "n is not its contiguous axis"),
        (SIZES | B, "b m k", "k n", "n m b", 1, False, "n is not its contiguous axis"),
        (SIZES | {"b": 1}, "b m k", "k n", "m n b", 8, False, "16 bytes"),  # size 1 is never stepped along
        (SIZES | B | {"n": 137}, "b m k", "k n", "m b n", 1, False, "137, odd, elements along n"),
    ],
)
def test_outputs_in_every_order(sizes, lhs, rhs, out, width, turned, reason) -> None:
    built, mapping, found = analysed(sizes, lhs=lhs, rhs=rhs, out=out)
    assert (found.outs[0].elements, found.outs[0].reason) == (width, reason)
    assert is_turned(built, built.outs[0].tensor, mapping) == turned
    assert found.outs[0].guarded == (None in sizes.values() and turned)


@pytest.mark.parametrize(
    ("sizes", "lhs", "width", "reason"),
    [
        ({"b": 2, "m": 77, "k1": 5, "k2": 64, "n": 8}, "b k1 m k2", 8, "16 bytes"),
        ({"b": 2, "m": 77, "k1": 8, "k2": 36, "n": 8}, "b k1 m k2", 4, "36, a multiple of 4 only, elements along k2"),
        ({"b": 2, "m": 77, "k1": 5, "k2": 4, "n": 8}, "b m k1 k2", 4, "20, a multiple of 4 only, elements along k1 k2"),
    ],
)
def test_merged_heads(sizes, lhs: str, width: int, reason: str) -> None:
    _, _, found = analysed(sizes, lhs=lhs, rhs="(k1 k2) n", out="b m n")
    assert (found.lhs.elements, found.lhs.reason) == (width, reason)


@given(st.data())
def test_every_output_order_is_accessed_within_its_runs(data: st.DataObject) -> None:
    """Enumerate every index of a random order of the axes: an access has one stride, one alignment, one run."""
    axes = ["b", "m1", "m2", "n1", "n2"]
    sizes = {axis: data.draw(st.integers(1, 8), axis) for axis in axes} | {"k": 4}
    order = data.draw(st.permutations(axes))
    try:
        built, mapping, found = analysed(sizes, lhs="b m1 m2 k", rhs="k (n1 n2)", out=" ".join(order))
    except NotFusable:
        return
    width = found.outs[0].elements
    turned = is_turned(built, built.outs[0].tensor, mapping)
    flat = np.arange(np.prod([sizes[axis] for axis in order])).reshape([sizes[axis] for axis in order])
    flat = flat.transpose([order.index(axis) for axis in (*mapping.batch, *mapping.m, *mapping.n)])
    extents = [int(np.prod([sizes[axis] for axis in loop])) for loop in (mapping.batch, mapping.m, mapping.n)]
    lines = flat.reshape(extents).swapaxes(1, 2) if turned else flat.reshape(extents)

    def legal(step: int) -> bool:
        if lines.shape[-1] % step:
            return False
        accesses = lines.reshape(-1, step)
        return bool((accesses[:, 0] % step == 0).all() and (np.diff(accesses) == 1).all())

    assert legal(width)
    assert 2 * width * F16.bytes > WIDEST_BYTES or not legal(2 * width)


@given(st.data())
def test_every_access_of_the_width_is_contiguous_aligned_and_inside(data: st.DataObject) -> None:
    """Enumerate every index of a random tensor; twice the width would break a rule or exceed 16 bytes."""
    dims = data.draw(st.sampled_from(["m n", "b m n", "b n", "n", "m (p n)", "(p n)", "b (p n)"]))
    names = [axis for axis in "bmpn" if axis in dims]
    sizes = {axis: data.draw(st.integers(1, 12), axis) for axis in names} | {"k": 4}
    if "p" in sizes:
        sizes["p"] = 2
    dtype = data.draw(st.sampled_from([F16, F32]))
    lead = " ".join(axis for axis in "bm" if axis in names) or "m"
    sizes.setdefault("m", 1)
    built = fusion(
        sizes, lhs=f"{lead} k", out=f"{lead} n", rhs="k (p n)" if "p" in names else "k n",
        parts=2 if "p" in names else 1, operands=[(dims, dtype)],
    )  # fmt: skip
    width = widest(built, built.operands[0], ("n",)).elements
    flat = np.arange(np.prod([sizes[axis] for axis in names])).reshape([sizes[axis] for axis in names])

    def legal(step: int) -> bool:
        outer = itertools.product(*(range(sizes[axis]) for axis in names[:-1]))
        rows = [flat[index] for index in outer]
        inside = sizes["n"] % step == 0
        aligned = all(row[start] % step == 0 for row in rows for start in range(0, sizes["n"], step))
        contiguous = all((np.diff(row) == 1).all() for row in rows)
        return inside and aligned and contiguous

    assert legal(width)
    assert 2 * width * dtype.bytes > WIDEST_BYTES or not legal(2 * width)
