"""What onnxfuse looks for. A pattern answers three questions: what it looks like, when it is legal, what it becomes."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion
from onnxfuse.graph import Graph
from onnxfuse.patterns import gemm_epilogue, split_gemm
from onnxfuse.patterns.matcher import Match, cut, grow
from onnxfuse.patterns.product import is_anchor, read_product

PATTERNS = (split_gemm, gemm_epilogue)

__all__ = ["PATTERNS", "Match", "is_anchor", "match_site"]


def match_site(graph: Graph, node: gs.Node) -> tuple[Match, Fusion]:
    """The fusion that starts at an anchor.

    Raises:
        NotFusable: with the reason and the node at fault.
    """
    match = cut(grow(graph, read_product(graph, node)))
    pattern = next(pattern for pattern in PATTERNS if pattern.looks_like(match))  # all columns, or some
    try:
        pattern.check(match)
    except NotFusable as refusal:
        raise match.hindrance or refusal from None  # the match is too small to pass because of it
    return match, pattern.becomes(graph, match)
