"""Widths and their reasons; a claimed width is legal at every index, and twice as much is not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.axes import map_axes
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.vector_width import WIDEST_BYTES, analyse, widest
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
    found = widest(built, built.operands[0], "n")
    assert (found.elements, found.reason) == (width, reason)


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
    width = widest(built, built.operands[0], "n").elements
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
