"""Which axes become the kernel's loops: by their place in the tensors, never by their sizes."""

from __future__ import annotations

import pytest

from onnxfuse.axes import map_axes
from onnxfuse.dtypes import F16
from onnxfuse.errors import NotFusable
from tests.fusions import fusion


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


def test_what_needs_three_groups_is_refused_with_its_axes() -> None:
    sizes = {"b": None, "h": None, "m": None, "n": 8, "k": 8}
    operands = [("b 1 1 n", F16), ("m n", F16)]
    with pytest.raises(NotFusable, match="b h m") as caught:
        map_axes(fusion(sizes, lhs="b h m k", out="b h m n", operands=operands))
    assert caught.value.reason == "axes_do_not_flatten"


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
