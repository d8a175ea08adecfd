"""The shape of a Reshape in a fallback function, from its input's dimensions or those of the product's input."""

from __future__ import annotations

from onnxfuse.graph.fallback_body import OWN, FallbackShape
from onnxfuse.patterns.fallback_shape import Base, shape_of
from onnxfuse.patterns.views import COLUMNS, AxisKind, Piece, ViewAxis


def test_a_fallback_shape_keeps_dimensions_or_takes_them_of_base() -> None:
    own = [ViewAxis(AxisKind.LHS, (index,)) for index in range(5)]
    b, s, h, d = map(Piece, (*own[:2], COLUMNS, COLUMNS), ("b", "s", 4, 8))
    lhs = Base("x", ((b,), (s,), (Piece(own[2], 6),)))
    split = shape_of(((b,), (s,), (h, d)), ((b,), (s,), (h,), (d,)), lhs)
    assert (split.entries, split.is_constant) == ((0, 0, 4, 8), True)
    transposed = ((b,), (h,), (s,), (d,)), ((b, h), (s,), (d,))
    assert shape_of(*transposed, lhs) == FallbackShape((-1, 0, 8), (None, 2, None), OWN)
    assert shape_of(*transposed, lhs, prefer_base=True) == FallbackShape((-1, 0, 8), (None, 1, None))
    flat = shape_of(((b, s), (h, d)), ((b,), (s,), (h,), (d,)), lhs)
    assert (flat.of_base, flat.base) == ((0, None, None, None), 0)
    assert shape_of(((b, s), (h, d)), ((Piece(own[3], "p"),), (Piece(own[4], "q"),), (h, d)), lhs) is None
