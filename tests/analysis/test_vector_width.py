"""Widths and their reasons, one line a case; a claimed width is legal at every index, and twice as much is not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse, columns_in_turn, is_transposed
from onnxfuse.dtypes import BF16, BOOL, F16, F32, DType
from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import Axis, Fusion, RhsPart, Tensor
from onnxfuse.limits import WIDEST_BYTES
from tests.helpers.addresses import accesses, is_legal, lines
from tests.helpers.fusions import fusion

SIZES = {"m": 504, "n": 136, "k": 248}
BATCH = {"b": 2}
HEADS = {"b": 2, "m": 504, "n1": 3, "n2": 64, "k": 248}
FULL = (8, "16 bytes")


def odd(pitch: int) -> tuple[int, str]:
    return 1, f"row pitch {pitch} is odd"


def even(pitch: int, width: int) -> tuple[int, str]:
    return width, f"row pitch {pitch} is a multiple of {width} only"


def analysed(sizes, **kwargs):
    built = fusion(sizes, **kwargs)
    mapping = map_axes(built)
    found = analyse(built, mapping)
    return built, mapping, found


def facts(width) -> tuple[int, str]:
    return width.elements, width.reason


# What each size does to lhs[m, k], rhs[k, n], rhs[n, k], and to [m, n] tensors of 2 and of 4 bytes. A k of one element
# is never stepped along: [m, 1] lies as [1, m], and [n, 1] as [1, n].
BY_SIZE = [
    ((504, 136, 248), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((504, 136, 249), odd(249), FULL, odd(249), FULL, (4, "16 bytes")),
    ((504, 137, 248), FULL, odd(137), FULL, odd(137), odd(137)),
    ((505, 136, 248), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((505, 137, 248), FULL, odd(137), FULL, odd(137), odd(137)),
    ((505, 136, 249), odd(249), FULL, odd(249), FULL, (4, "16 bytes")),
    ((504, 137, 249), odd(249), odd(137), odd(249), odd(137), odd(137)),
    ((505, 137, 249), odd(249), odd(137), odd(249), odd(137), odd(137)),
    ((503, 135, 247), odd(247), odd(135), odd(247), odd(135), odd(135)),
    ((504, 138, 250), even(250, 2), even(138, 2), even(250, 2), even(138, 2), even(138, 2)),  # a pad of 2 on all
    ((504, 132, 252), even(252, 4), even(132, 4), even(252, 4), even(132, 4), (4, "16 bytes")),
    ((None, 136, 248), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((None, 137, 248), FULL, odd(137), FULL, odd(137), odd(137)),
    ((137, 137, 137), odd(137), odd(137), odd(137), odd(137), odd(137)),  # m == n == k
    ((1, 136, 248), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((504, 136, 1), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((5320, 33928, 3464), FULL, FULL, FULL, FULL, (4, "16 bytes")),
    ((504, 136, 60), even(60, 4), FULL, even(60, 4), FULL, (4, "16 bytes")),
]


@pytest.mark.parametrize("downcast", [True, False], ids=["f16 out", "f32 out"])
@pytest.mark.parametrize("residual", [F16, F32, None], ids=str)
@pytest.mark.parametrize(("sizes", "lhs", "kn", "nk", "two_bytes", "four_bytes"), BY_SIZE, ids=lambda value: str(value))
def test_every_size(sizes, lhs, kn, nk, two_bytes, four_bytes, residual, downcast: bool) -> None:
    sized = dict(zip("mnk", sizes, strict=True))
    operands = [("m n", residual)] if residual else []
    for order, rhs in (("k n", kn), ("n k", nk)):
        _, _, found = analysed(sized, rhs=order, operands=operands, out_dtype=F16 if downcast else F32)
        assert facts(found.lhs) == lhs
        assert facts(found.rhs) == rhs
        assert [facts(width) for width in found.operands] == [four_bytes if residual == F32 else two_bytes] * len(
            operands
        )
        assert facts(found.outs[0]) == (two_bytes if downcast else four_bytes)


# Operands of the epilogue of lhs[b, m, k] * rhs[k, (p n)]: kind, width, whether it is read down the columns, reason.
OPERANDS = [
    ("n", F16, {}, "row", 8, False, "16 bytes"),
    ("n", F32, {}, "row", 4, False, "16 bytes"),
    ("n", F16, {"n": 137}, "row", 1, False, "137 elements along n are odd"),
    ("n", F32, {"n": 138}, "row", 2, False, "138 elements along n are a multiple of 2 only"),
    ("1 n", F16, {}, "row", 8, False, "16 bytes"),
    ("1 1 n", BF16, {"n": 134}, "row", 2, False, "134 elements along n are a multiple of 2 only"),
    ("b 1 n", F16, {}, "row", 8, False, "16 bytes"),
    ("b 1 n", F16, {"n": 137}, "row", 1, False, "row pitch 137 is odd"),
    ("m 1", F16, {}, "column", 1, False, "does not vary along n"),
    ("b m 1", F32, {}, "column", 1, False, "does not vary along n"),
    ("1 1", F16, {}, "scalar", 1, False, "does not vary along n"),
    ("", F32, {}, "scalar", 1, False, "does not vary along n"),
    ("b 1 1", F16, {}, "scalar", 1, False, "does not vary along n"),
    ("m n", F16, {}, "tile", 8, False, "16 bytes"),  # one for all of the batch
    ("1 m n", F16, {"n": 137}, "tile", 1, False, "row pitch 137 is odd"),
    ("b m n", BF16, {}, "tile", 8, False, "16 bytes"),
    ("b m n", F32, {"n": 134}, "tile", 2, False, "row pitch 134 is a multiple of 2 only"),
    ("b m n", F16, {"n": 134}, "tile", 2, False, "row pitch 134 is a multiple of 2 only"),
    ("b m n", F16, {"b": None, "m": None}, "tile", 8, False, "16 bytes"),
    ("m b n", F16, {}, "tile", 8, False, "16 bytes"),
    ("n m", F16, {}, "tile", 8, True, "16 bytes"),
    ("n m", F32, {}, "tile", 4, True, "16 bytes"),
    ("b n m", F16, {"m": 77}, "tile", 1, True, "row pitch 77 is odd"),
    ("b n m", F16, {"m": 78}, "tile", 2, True, "row pitch 78 is a multiple of 2 only"),
    ("b n m", F16, {"n": 137}, "tile", 8, True, "16 bytes"),
    ("b n m", F16, {"m": None}, "tile", 8, True, "16 bytes where m is a multiple of 8"),
    ("b n m", F32, {"m": None}, "tile", 4, True, "16 bytes where m is a multiple of 4"),
    ("n m", F16, {"m": 136}, "tile", 8, True, "16 bytes"),  # m == n: by their names, never by their sizes
    ("n m", F16, {"m": 137, "n": 137}, "tile", 1, True, "row pitch 137 is odd"),
    ("m n b", F16, {}, "tile", 1, False, "b, not n, is its contiguous axis"),
    ("m n b", F16, {"b": 1}, "tile", 8, False, "16 bytes"),  # an axis of size 1 is never stepped along
    ("n b m", F16, {"n": 1}, "tile", 8, True, "16 bytes"),
    ("b m n", F16, {"n": 1}, "tile", 8, True, "16 bytes"),  # one column: m is contiguous
    ("m n", F16, {"n": 1, "m": 1}, "tile", 1, False, "one element along n"),
    ("(p n)", F16, {"n": 136}, "row", 8, False, "16 bytes"),
    ("(p n)", F16, {"n": 137}, "row", 1, False, "second half starts at byte 274"),
    ("(p n)", F16, {"n": 68}, "row", 4, False, "second half starts at byte 136"),
    ("(p n)", F32, {"n": 137}, "row", 1, False, "second half starts at byte 548"),
    ("(p n)", F32, {"n": 138}, "row", 2, False, "second half starts at byte 552"),
    ("(p n)", F16, {"n": 137, "p": 3}, "row", 1, False, "second of 3 parts starts at byte 274"),
    ("b m (p n)", F16, {"n": 137}, "tile", 1, False, "second half starts at byte 274"),  # its pitch is even: 274
    ("b m (p n)", F16, {"n": 136}, "tile", 8, False, "16 bytes"),
    ("b m n", BOOL, {"n": 144}, "tile", 16, False, "16 bytes"),
    ("b m n", BOOL, {}, "tile", 8, False, "row pitch 136 is a multiple of 8 only"),
    ("b m n", BOOL, {"n": 134}, "tile", 2, False, "row pitch 134 is a multiple of 2 only"),
    ("b m n", BOOL, {"n": 137}, "tile", 1, False, "row pitch 137 is odd"),
    ("m n", BOOL, {"n": 144, "b": None}, "tile", 16, False, "16 bytes"),  # one mask for all of the batch
    ("b 1 n", BOOL, {"n": 144}, "row", 16, False, "16 bytes"),
    ("n", BOOL, {"n": 140}, "row", 4, False, "140 elements along n are a multiple of 4 only"),
    ("b m 1", BOOL, {}, "column", 1, False, "does not vary along n"),
    ("b 1 1", BOOL, {}, "scalar", 1, False, "does not vary along n"),
    ("n m", BOOL, {"m": 512}, "tile", 16, True, "16 bytes"),
    ("b n m", BOOL, {}, "tile", 8, True, "row pitch 504 is a multiple of 8 only"),
    ("b n m", BOOL, {"m": None}, "tile", 16, True, "16 bytes where m is a multiple of 16"),
    ("(p n)", BOOL, {"n": 137}, "row", 1, False, "second half starts at byte 137"),
    ("b m (p n)", BOOL, {"n": 136}, "tile", 8, False, "second half starts at byte 136"),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "dtype", "change", "kind", "width", "transposed", "reason"), OPERANDS, ids=str)
def test_every_operand(dims, dtype, change, kind, width, transposed, reason) -> None:
    packed = "p" in dims
    sizes = SIZES | BATCH | ({"p": 2} if packed else {}) | change
    built, mapping, found = analysed(
        sizes, lhs="b m k", rhs="k (p n)" if packed else "k n", out="b m n", operands=[(dims, dtype)],
        parts=sizes.get("p", 1),
    )  # fmt: skip
    assert mapping.kind(built.operands[0]) == kind
    assert facts(found.operands[0]) == (width, reason)
    assert is_transposed(built, built.operands[0], mapping) == transposed
    assert found.operands[0].guarded == (" where " in reason)


def test_each_tensor_of_one_epilogue_has_its_own_width() -> None:
    """fp16 residual, fp32 scale, bfloat16 column, a transposed tile and a scalar: none takes the least width of all."""
    operands = [("m n", F16), ("n", F32), ("m 1", BF16), ("n m", F32), ("1", F16), ("m n", F32)]
    _, _, found = analysed({"m": 78, "n": 136, "k": 249}, operands=operands, out_dtype=F32)
    assert [width.elements for width in found.operands] == [8, 4, 1, 2, 1, 4]
    assert (found.lhs.elements, found.rhs.elements, found.outs[0].elements) == (1, 8, 4)


ODD_HALF = {"m": 504, "n": 137, "p": 2, "k": 248}


@pytest.mark.parametrize(
    ("rhs", "sizes", "width", "reason"),
    [
        ("k (p n)", ODD_HALF, 1, "second half starts at byte 274"),
        ("k (p n)", ODD_HALF | {"n": 132}, 4, "second half starts at byte 264"),
        ("k (p n)", ODD_HALF | {"n": 136}, 8, "16 bytes"),
        ("(p n) k", ODD_HALF, 8, "16 bytes"),  # a half is 137 whole rows
        ("(p n) k", ODD_HALF | {"k": 249}, 1, "row pitch 249 is odd"),
    ],
)
def test_parts_of_a_weight(rhs: str, sizes, width: int, reason: str) -> None:
    _, _, found = analysed(sizes, rhs=rhs, parts=2)
    assert facts(found.rhs) == (width, reason)


# Outputs of lhs[b, h, m, k] in all 24 orders: width, whether it is written down the columns, reason.
ORDERS = [
    ("b h m n", 8, False, "16 bytes"),
    ("b h n m", 8, True, "16 bytes"),
    ("b m h n", 8, False, "16 bytes"),
    ("b m n h", 1, False, "h, not n, is its contiguous axis"),
    ("b n h m", 8, True, "16 bytes"),
    ("b n m h", 1, False, "h, not n, is its contiguous axis"),
    ("h b m n", 8, False, "16 bytes"),
    ("h b n m", 8, True, "16 bytes"),
    ("h m b n", 8, False, "16 bytes"),
    ("h m n b", 1, False, "b, not n, is its contiguous axis"),
    ("h n b m", 8, True, "16 bytes"),
    ("h n m b", 1, False, "b, not n, is its contiguous axis"),
    ("m b h n", 8, False, "16 bytes"),
    ("m b n h", 1, False, "h, not n, is its contiguous axis"),
    ("m h b n", 8, False, "16 bytes"),
    ("m h n b", 1, False, "b, not n, is its contiguous axis"),
    ("m n b h", 1, False, "h, not n, is its contiguous axis"),
    ("m n h b", 1, False, "b, not n, is its contiguous axis"),
    ("n b h m", 8, True, "16 bytes"),
    ("n b m h", 1, False, "h, not n, is its contiguous axis"),
    ("n h b m", 8, True, "16 bytes"),
    ("n h m b", 1, False, "b, not n, is its contiguous axis"),
    ("n m b h", 1, False, "h, not n, is its contiguous axis"),
    ("n m h b", 1, False, "b, not n, is its contiguous axis"),
]


@pytest.mark.parametrize(("whole", "start"), [(512, 384), (512, 4), (516, 128), (513, 1), (512, 0)])
@pytest.mark.parametrize("rhs", ["k n", "n k"])
def test_windows_of_a_weight(rhs: str, whole: int, start: int) -> None:
    """Every access begins a multiple of the width behind the tensor's first element, whatever the row."""
    built = fusion({"m": 504, "n": 128, "k": 248}, rhs=rhs)
    wide = replace(built.rhs[0], wide=(rhs.split().index("n"), whole))
    built = replace(built, rhs=(wide,), parts=(RhsPart(0, None, start),))
    width = analyse(built, map_axes(built)).rhs
    own = rhs == "k n"
    first = [row * whole + start if own else (row + start) * 248 for row in range(3)]
    step = math.gcd(*first, 128 if own else 248)
    assert width.elements == min(step & -step, 8)
    assert (width.reason == "16 bytes") == (width.elements == 8)


def test_all_orders_are_there() -> None:
    assert {order for order, *_ in ORDERS} == {" ".join(order) for order in itertools.permutations("bhmn")}


@pytest.mark.parametrize(("order", "width", "transposed", "reason"), ORDERS, ids=str)
def test_every_order_of_an_output(order: str, width: int, transposed: bool, reason: str) -> None:
    built, mapping, found = analysed({"b": 2, "h": 3, "m": 16, "n": 24, "k": 8}, lhs="b h m k", out=order)
    assert facts(found.outs[0]) == (width, reason)
    assert is_transposed(built, built.outs[0].tensor, mapping) == transposed


@pytest.mark.parametrize(
    ("sizes", "out", "width", "transposed", "reason"),
    [
        (HEADS, "b n1 m n2", 8, False, "16 bytes"),
        (HEADS | {"n2": 6}, "b n1 m n2", 2, False, "row pitch 6 is a multiple of 2 only"),
        (HEADS | {"n2": 5}, "b n1 m n2", 1, False, "row pitch 5 is odd"),
        (HEADS | {"m": None}, "b n1 m n2", 8, False, "16 bytes"),
        (HEADS, "b n1 n2 m", 8, True, "16 bytes"),
        (HEADS | {"m": 77}, "b n1 n2 m", 1, True, "row pitch 77 is odd"),
        (HEADS | {"m": None}, "b n1 n2 m", 8, True, "16 bytes where m is a multiple of 8"),
        (HEADS | {"n2": 5}, "b m n1 n2", 1, False, "row pitch 15 is odd"),
        (HEADS | {"n1": 4, "n2": 6}, "b m n1 n2", 8, False, "16 bytes"),  # 24 columns in one run
        (HEADS | {"n1": 4, "n2": 6}, "b n1 m n2", 2, False, "row pitch 6 is a multiple of 2 only"),
        (HEADS | {"n1": 1, "n2": 6}, "b n1 m n2", 2, False, "row pitch 6 is a multiple of 2 only"),
        (HEADS, "b m n2 n1", 1, False, "n1, not n2, is its contiguous axis"),
    ],
)
def test_split_heads(sizes, out: str, width: int, transposed: bool, reason: str) -> None:
    built, mapping, found = analysed(sizes, lhs="b m k", rhs="k (n1 n2)", out=out)
    assert facts(found.outs[0]) == (width, reason)
    assert is_transposed(built, built.outs[0].tensor, mapping) == transposed


@pytest.mark.parametrize(
    ("operand", "width", "reason"),
    [
        ("(n1 n2)", 8, "16 bytes"),
        ("n1 1 n2", 8, "16 bytes"),
        ("n2", 8, "16 bytes"),  # once for every head
        ("n1 1 1", 1, "innermost axis n2 is broadcast"),
        ("1 1 1", 1, "does not vary along n1 n2"),
    ],
)
def test_operands_of_split_heads(operand: str, width: int, reason: str) -> None:
    _, _, found = analysed(HEADS, lhs="b m k", rhs="k (n1 n2)", out="b n1 m n2", operands=[(operand, F16)])
    assert facts(found.operands[0]) == (width, reason)


@pytest.mark.parametrize(
    ("sizes", "lhs", "width", "reason"),
    [
        ({"b": 2, "m": 77, "k1": 5, "k2": 64, "n": 8}, "b k1 m k2", 8, "16 bytes"),
        ({"b": 2, "m": 77, "k1": 8, "k2": 36, "n": 8}, "b k1 m k2", 4, "row pitch 36 is a multiple of 4 only"),
        ({"b": 2, "m": 77, "k1": 5, "k2": 4, "n": 8}, "b m k1 k2", 4, "row pitch 20 is a multiple of 4 only"),
        ({"b": 2, "m": 77, "k1": 8, "k2": 9, "n": 8}, "b m k1 k2", 8, "16 bytes"),
    ],
)
def test_merged_heads(sizes, lhs: str, width: int, reason: str) -> None:
    _, _, found = analysed(sizes, lhs=lhs, rhs="(k1 k2) n", out="b m n")
    assert facts(found.lhs) == (width, reason)


@pytest.mark.parametrize(
    ("lhs", "change", "width", "reason", "guarded"),
    [
        ("k m", {}, 8, "16 bytes", False),
        ("k m", {"m": 505}, 1, "row pitch 505 is odd", False),
        ("k m", {"m": 510}, 2, "row pitch 510 is a multiple of 2 only", False),
        ("k m", {"m": 505, "k": 249}, 1, "row pitch 505 is odd", False),
        ("k m", {"k": 249}, 8, "16 bytes", False),  # k is no part of an access
        ("k m", {"m": None}, 8, "16 bytes where m is a multiple of 8", True),
        ("m k", {"m": None}, 8, "16 bytes", False),
    ],
)
def test_transposed_inputs(lhs: str, change, width: int, reason: str, guarded: bool) -> None:
    _, _, found = analysed(SIZES | change, lhs=lhs)
    assert facts(found.lhs) == (width, reason)
    assert found.lhs.guarded == guarded


@pytest.mark.parametrize(
    ("lhs", "out", "width", "reason"),
    [
        ("m1 b m2 k", "m1 b m2 n", 8, "16 bytes"),  # the batch between m axes, of lhs
        ("b m1 m2 k", "m1 b m2 n", 8, "16 bytes"),  # of the output
        ("m1 b m2 k", "n m1 b m2", 8, "16 bytes"),
        ("m1 b m2 k", "b n m1 m2", 4, "row pitch 12 is a multiple of 4 only"),
        ("b m1 m2 k", "m1 n b m2", 4, "row pitch 12 is a multiple of 4 only"),
    ],
)
def test_a_batch_between_the_rows(lhs: str, out: str, width: int, reason: str) -> None:
    sizes = {"b": 2, "m1": 2, "m2": 12, "n": 24, "k": 8}
    _, _, found = analysed(sizes, lhs=lhs, out=out)
    assert facts(found.outs[0]) == (width, reason)


# ---- Every index of random tensors -----------------------------------------------------------------------------------

EXTENTS = (1, 2, 3, 4, 5, 6, 8, 16)
ROWS, COLUMNS = ("b", "m"), ("n1", "n2")


@st.composite
def random_fusions(draw: st.DrawFn) -> tuple[Fusion, dict[str, int]]:
    """A fusion whose tensors have any axes in any order, and the sizes of a run; b and m may be unknown before it."""
    sizes = {axis: draw(st.sampled_from(EXTENTS)) for axis in (*ROWS, *COLUMNS, "k1", "k2")}
    parts = draw(st.integers(1, 3))
    unknown = draw(st.sets(st.sampled_from(ROWS)))
    known: dict[str, int | None] = {axis: None if axis in unknown else size for axis, size in sizes.items()}
    if parts > 1:
        sizes["p"] = known["p"] = parts

    def order(*axes: str) -> str:
        return " ".join(draw(st.permutations(axes)))

    packed = "p n1 n2" if parts > 1 else "n1 n2"
    rhs = draw(st.sampled_from([f"k1 k2 ({packed})", f"({packed}) k1 k2"]))
    operands = []
    for _ in range(draw(st.integers(0, 2))):
        axes = draw(st.sets(st.sampled_from([*ROWS, *COLUMNS, *(["p"] if parts > 1 else [])])))
        operands.append((order(*sorted(axes)), draw(st.sampled_from([F16, BF16, F32, BOOL]))))
    lhs = draw(st.sampled_from(["b m k1 k2", "m b k1 k2", "b k1 m k2", "k1 b m k2", "k1 k2 b m", "b k1 k2 m"]))
    built = fusion(
        known, lhs=lhs, rhs=rhs, out=order(*ROWS, *COLUMNS), operands=operands, parts=parts,
        dtype=draw(st.sampled_from([F16, F32])), out_dtype=draw(st.sampled_from([F16, F32])),
    )  # fmt: skip
    return built, sizes


@given(random_fusions(), st.integers(0, 15))
def test_every_access_of_the_width_is_contiguous_aligned_and_inside(drawn, offset: int) -> None:
    """Twice the width would break a rule or exceed 16 bytes; and a view is legal where its offset is a multiple."""
    built, sizes = drawn
    try:
        mapping = map_axes(built)
    except NotFusable:
        assume(False)
    found = analyse(built, mapping)
    widths = [found.lhs, *[found.rhs] * len(built.rhs), *found.operands, *found.outs]
    for (role, tensor, along, loops), width in zip(accesses(built, mapping), widths, strict=True):
        elements, unknown = width.elements, [axis for axis in tensor.axes if built.size(axis) is None]
        assert elements * tensor.dtype.bytes <= WIDEST_BYTES
        # Where the run has another size than the widest access asks for, the launch rule takes the narrow kernel.
        run = sizes | {axis: WIDEST_BYTES * sizes[axis] for axis in unknown if width.guarded}
        assert is_legal(lines(tensor, along, loops, run), elements), (role, str(tensor), str(width))
        assert is_legal(lines(tensor, along, loops, run, offset), elements) == (offset % elements == 0)
        worst = run | {axis: 3 for axis in unknown if not width.guarded}
        twice = is_legal(lines(tensor, along, loops, worst), 2 * elements)
        assert 2 * elements * tensor.dtype.bytes > WIDEST_BYTES or not twice, (role, str(tensor), str(width))


@given(
    st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3), st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([F16, BF16, F32, BOOL]),
)  # fmt: skip
def test_parts_in_turn_are_moved_as_wide_as_is_legal(extents: list[int], parts: int, dtype: DType) -> None:
    names = ("b", "m", "n")[-len(extents) :]
    sizes = dict(zip(names, extents, strict=True)) | {"p": parts}
    tensor = Tensor("x", dtype, tuple((name,) for name in sizes))
    built = replace(fusion({"m": 4, "n": 8, "k": 8}), axes=tuple(Axis(*each) for each in sizes.items()))
    columns = columns_in_turn(built, tensor, ("n",))
    flat = np.arange(math.prod(sizes.values())).reshape(-1, sizes["n"] * parts)
    if not columns:
        assert sizes["n"] == 1 or parts in (1, 3)
        return
    assert columns * parts * dtype.bytes <= WIDEST_BYTES
    assert is_legal(flat, columns * parts)
    assert 2 * columns * parts * dtype.bytes > WIDEST_BYTES or not is_legal(flat, 2 * columns * parts)


@pytest.mark.parametrize("axes", ["m p n", "n p m", "p n", "m p", "p"])
def test_parts_that_lie_otherwise_take_no_turns(axes: str) -> None:
    built = replace(fusion({"m": 4, "n": 8, "k": 8}), axes=tuple(Axis(name, 8) for name in "mnp"))
    tensor = Tensor("x", F16, tuple((name,) for name in axes.split()))
    assert columns_in_turn(built, tensor, ("n",)) == 0
