"""GEMM epilogue: a product and the pointwise ops behind it, with an activation among them."""

from __future__ import annotations

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion
from onnxfuse.graph import Graph
from onnxfuse.patterns.lowering import is_nonlinear, lower
from onnxfuse.patterns.matcher import Match

NAME = "gemm_epilogue"


def looks_like(match: Match) -> bool:
    """The value has all the product's columns."""
    return match.columns == match.product.n


def check(match: Match) -> None:
    """An activation follows.

    Raises:
        NotFusable: only sums and scales follow.
    """
    if not is_nonlinear(match):
        raise NotFusable("no_activation", match.product.label, "only sums and scales follow the product")


def becomes(graph: Graph, match: Match) -> Fusion:
    """A product of one part."""
    return lower(graph, match, NAME)
