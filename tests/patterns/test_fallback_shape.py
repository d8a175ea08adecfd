"""The shape of a Reshape in a fallback function, from its input's dimensions or those of the product's input."""

from __future__ import annotations

from onnxfuse.patterns.fallback_shape import Base, shape_of
from onnxfuse.patterns.views import Piece


def test_a_fallback_shape_keeps_dimensions_or_takes_them_of_base() -> None:
    b, s, h, d = (Piece(axis, size) for axis, size in (("x0", "b"), ("x1", "s"), ("n", 4), ("n", 8)))
    lhs = Base("x", ((b,), (s,), (Piece("x2", 6),)))
    split = shape_of(((b,), (s,), (h, d)), ((b,), (s,), (h,), (d,)), lhs)
    assert (split.entries, split.is_constant) == ((0, 0, 4, 8), True)
    transposed = shape_of(((b,), (h,), (s,), (d,)), ((b, h), (s,), (d,)), lhs)
    assert (transposed.entries, transposed.of_base) == ((-1, 0, 8), (None, 1, None))
    assert shape_of(((b, s), (h, d)), ((Piece("x5", "p"),), (Piece("x6", "q"),), (h, d)), lhs) is None
