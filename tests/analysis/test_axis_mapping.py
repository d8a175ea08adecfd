"""Which axes become the kernel's loops: by their place in the tensors; their sizes count where a batch has few rows."""

from __future__ import annotations

import pytest

from onnxfuse.analysis.axis_mapping import ENOUGH_FOR_A_TILE, levels, map_axes, reads_rows
from onnxfuse.dtypes import F16
from onnxfuse.errors import NotFusable
from tests.helpers.fusions import fusion


@pytest.mark.parametrize(
    ("lhs", "out", "operand", "mapping"),
    [
        ("m k", "m n", "n", "m=m n=n k=k"),
        ("b m k", "b m n", "n", "m=b*m n=n k=k"),
        ("b h m k", "b h m n", "b h m n", "m=b*h*m n=n k=k"),
        ("b m k", "b m n", "b m n", "m=b*m n=n k=k"),
        ("b m k", "b m n", "m n", "batch=b m=m n=n k=k"),
        ("b m k", "b m n", "b 1 n", "batch=b m=m n=n k=k"),
        ("b h m k", "b h m n", "m n", "batch=b*h m=m n=n k=k"),
        ("b h m k", "b h m n", "b 1 1 1", "batch=b m=h*m n=n k=k"),
    ],
)
def test_row_axes_flatten_where_every_tensor_steps_through_them_alike(lhs, out, operand, mapping) -> None:
    sizes = {"b": None, "h": None, "m": None, "n": 8, "k": 8}
    built = fusion({a: s for a, s in sizes.items() if a in out + "k"}, lhs=lhs, out=out, operands=[(operand, F16)])
    assert str(map_axes(built)) == mapping


@pytest.mark.parametrize(
    ("sizes", "operand", "mapping"),
    [
        ({"b": 64, "h": 1, "m": ENOUGH_FOR_A_TILE}, "b 1 1 n", "batch=b*h m=m n=n k=k"),
        ({"b": 64, "h": 1, "m": ENOUGH_FOR_A_TILE - 1}, "b 1 1 n", "m=b*h*m n=n k=k"),
        ({"b": 64, "h": 8, "m": ENOUGH_FOR_A_TILE // 8 - 1}, "b 1 1 n", "m=b*h*m n=n k=k"),
        ({"b": 64, "h": 8, "m": ENOUGH_FOR_A_TILE // 8}, "b 1 1 n", "batch=b m=h*m n=n k=k"),
        ({"b": None, "h": 1, "m": 8}, "b 1 1 n", "m=b*h*m n=n k=k"),
        ({"b": 64, "h": 1, "m": None}, "b 1 1 n", "batch=b*h m=m n=n k=k"),
        ({"b": 64, "h": 1, "m": 8}, "m n", "m=b*h*m n=n k=k"),
    ],
)
def test_few_rows_of_a_batch_have_tiles_with_those_of_others(sizes, operand, mapping) -> None:
    built = fusion({**sizes, "n": 8, "k": 8}, lhs="b h m k", out="b h m n", operands=[(operand, F16)])
    found = map_axes(built)
    assert str(found) == mapping
    assert levels(built, built.operands[0], found.m) == (1 if found.batch else 2)


@pytest.mark.parametrize(
    ("lhs", "rhs", "operand", "out", "mapping", "two_levels"),
    [
        # What two levels of a tensor walk: heads split, merged, split and transposed; images; two kinds of broadcast.
        ("b m k", "k (n1 n2)", "(n1 n2)", "b n1 m n2", "m=b*m n=n1*n2 k=k", {"out": "mn"}),
        ("b m k", "k (n1 n2)", "b n1 m n2", "b n1 m n2", "m=b*m n=n1*n2 k=k", {"operand0": "mn", "out": "mn"}),
        ("b m k", "k (n1 n2)", "b 1 n1 n2", "b n1 m n2", "batch=b m=m n=n1*n2 k=k", {"out": "n"}),
        ("b k1 m k2", "(k1 k2) n", "n", "b m n", "batch=b m=m n=n k=k1*k2", {"lhs": "k"}),
        ("b m k", "(n1 n2) k", "(n1 n2)", "b n1 n2 m", "m=b*m n=n1*n2 k=k", {"out": "m"}),
        ("b (m1 m2) k", "k n", "b n m1 m2", "b n m1 m2", "m=b*m1*m2 n=n k=k", {"operand0": "m", "out": "m"}),
        ("b m k", "k (n1 n2)", "n1 1 n2", "(b m) (n1 n2)", "m=b*m n=n1*n2 k=k", {}),
        ("b h m k", "k n", "m n", "b h m n", "batch=b*h m=m n=n k=k", {}),
        ("(b m) k", "k n", "n", "m b n", "m=b*m n=n k=k", {"out": "m"}),
        ("b h m k", "k n", "b 1 m n", "m h b n", "batch=b m=h*m n=n k=k", {"operand0": "m", "out": "m"}),
        ("b h m k", "b h k n", "b 1 m n", "b h m n", "batch=b*h m=m n=n k=k", {"operand0": "b"}),
        ("b h m k", "b h k n", "b m n", "b m h n", "batch=b*h m=m n=n k=k", {"operand0": "b", "out": "b"}),
        ("b h g m k", "b h n k", "b 1 1 m n", "b h g m n", "batch=b*h m=g*m n=n k=k", {"operand0": "bm"}),
        ("m k", "b k n", "m 1", "b m n", "batch=b m=m n=n k=k", {}),
        ("h m k", "b h k n", "n", "b h m n", "batch=b*h m=m n=n k=k", {"lhs": "b"}),
        ("b m h k", "b n h k", "n", "b h m n", "batch=b*h m=m n=n k=k", {"lhs": "b", "rhs": "b"}),
        ("b h m k", "b k h n", "n", "b m h n", "batch=b*h m=m n=n k=k", {"rhs": "b", "out": "b"}),
        ("b h m k", "h k n", "n", "b h m n", "batch=b*h m=m n=n k=k", {"rhs": "b"}),
        ("b m h k", "h k n", "n", "b m h n", "batch=h m=b*m n=n k=k", {}),
        ("b m1 h m2 g k", "b h g k n", "n", "b h g m1 m2 n", None, {}),
        ("b h m k", "b h k n", "n", "b h m n", "batch=b*h m=m n=n k=k", {}),
    ],
)
def test_what_lies_apart_is_walked_in_two_levels(lhs, rhs, operand, out, mapping, two_levels) -> None:
    names = {"b": 2, "h": 4, "g": 2, "m": 40, "m1": 3, "m2": 5, "n": 8, "n1": 2, "n2": 8, "k": 8, "k1": 2, "k2": 8}
    text = " ".join((lhs, rhs, out)).replace("(", "").replace(")", "").split()
    sizes = {axis: size for axis, size in names.items() if axis in text}
    built = fusion(sizes, lhs=lhs, rhs=rhs, out=out, operands=[(operand, F16)])
    if mapping is None:
        with pytest.raises(NotFusable):
            map_axes(built)
        return
    found = map_axes(built)
    assert str(found) == mapping
    tensors = (*built.inputs, built.outs[0].tensor)
    loops = {loop[0]: getattr(found, loop) for loop in ("batch", "m", "n", "k")}
    walked = {
        tensor.name: "".join(name for name, loop in loops.items() if levels(built, tensor, loop) == 2)
        for tensor in tensors
    }
    assert {name: loops for name, loops in walked.items() if loops} == two_levels


@pytest.mark.parametrize(
    ("lhs", "rhs", "operand", "out"),
    [
        ("b c h m k", "k n", "b h n", "b c h m n"),  # m in three groups of an operand
        ("b c h m k", "k n", "n", "b m h c n"),  # and of the output
        ("b m k", "k (n1 n2 n3)", "n1 n2 n3", "b n3 n2 n1 m"),
    ],
)
def test_what_needs_three_groups_is_refused_with_its_axes(lhs, rhs, operand, out) -> None:
    text = " ".join((lhs, rhs, out)).replace("(", "").replace(")", "").split()
    with pytest.raises(NotFusable, match="groups") as caught:
        map_axes(fusion(dict.fromkeys(text, 4), lhs=lhs, rhs=rhs, out=out, operands=[(operand, F16)]))
    assert caught.value.reason == "axes_do_not_flatten"


@pytest.mark.parametrize(("lhs", "rhs"), [("b k1 m k2", "(k2 k1) n"), ("m k1 b k2", "n k2 k1")])
def test_the_kernels_read_lhs_along_k_or_m(lhs, rhs) -> None:
    text = f"{lhs} {rhs} b m".replace("(", "").replace(")", "").split()
    with pytest.raises(NotFusable) as caught:
        map_axes(fusion(dict.fromkeys(text, 4), lhs=lhs, rhs=rhs, out="b m n" if "b" in lhs else "m n"))
    assert caught.value.reason == "lhs_transposed"


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "mapping"),
    [
        ("k m", "k n", "m n", "m=m n=n k=k"),
        ("b k m", "n k", "b n m", "batch=b m=m n=n k=k"),
        ("k b m", "n k", "b m n", "m=b*m n=n k=k"),
        ("k m b", "n k", "b m n", "m=m*b n=n k=k"),
        ("m k b", "k n", "b m n", "batch=m m=b n=n k=k"),
        ("b k (m1 m2)", "k n", "b n m1 m2", "batch=b m=m1*m2 n=n k=k"),
    ],
)
def test_m_may_be_the_contiguous_axis_of_lhs(lhs, rhs, out, mapping) -> None:
    text = f"{lhs} {rhs}".replace("(", "").replace(")", "").split()
    built = fusion(dict.fromkeys(text, 4), lhs=lhs, rhs=rhs, out=out)
    found = map_axes(built)
    assert str(found) == mapping
    assert reads_rows(built, found)


def test_two_strides_do_not_walk_k_where_m_is_contiguous() -> None:
    sizes = {"b": 2, "k1": 2, "k2": 8, "m": 8, "n": 8}
    with pytest.raises(NotFusable) as caught:
        map_axes(fusion(sizes, lhs="k1 b k2 m", rhs="(k1 k2) n", out="b m n"))
    assert caught.value.reason == "axes_do_not_flatten"


def test_an_axis_of_size_one_does_not_join_axes_that_lie_apart() -> None:
    sizes = {"b": 2, "h": 1, "m": 40, "n": 8, "k": 8}
    built = fusion(sizes, lhs="b h m k", out="m h b n", operands=[("b 1 1 n", F16)])
    assert str(map_axes(built)) == "batch=b*h m=m n=n k=k"


def test_an_axis_of_size_one_flattens_with_anything() -> None:
    built = fusion({"b": 1, "m": None, "n": 8, "k": 8}, lhs="b m k", out="b m n", operands=[("m n", F16)])
    assert str(map_axes(built)) == "m=b*m n=n k=k"


@pytest.mark.parametrize(
    ("dims", "kind"), [("m n", "tile"), ("n", "row"), ("m 1", "column"), ("1 1", "scalar"), ("", "scalar")]
)
@pytest.mark.parametrize("size", [1, 8])
def test_kinds_follow_from_axes_not_from_sizes(dims: str, kind: str, size: int) -> None:
    """M == n, and size 1, must not confuse them."""
    built = fusion({"m": size, "n": size, "k": size}, operands=[(dims, F16)])
    assert map_axes(built).kind(built.operands[0]) == kind


@pytest.mark.parametrize(("rhs", "parts"), [("k n", 1), ("n k", 1), ("k (p n)", 2), ("(p n) k", 3)])
def test_the_part_axis_is_no_loop(rhs: str, parts: int) -> None:
    built = fusion({"m": 4, "n": 8, "k": 8, "p": parts}, rhs=rhs, parts=parts)
    assert str(map_axes(built)) == "m=m n=n k=k"
