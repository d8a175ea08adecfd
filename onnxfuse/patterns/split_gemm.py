"""Split GEMM: one product whose equal column ranges meet in one pointwise value (GEGLU, SwiGLU, GLU, ReGLU)."""

from __future__ import annotations

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion
from onnxfuse.graph import Graph
from onnxfuse.patterns.epilogue_graph import LOAD
from onnxfuse.patterns.lowering import acc_offsets, leaves, lower
from onnxfuse.patterns.matcher import Match

NAME = "split_gemm"
# The kernel takes four parts, but the four-way splits that exporters write are LSTM gates, which gain nothing yet.
PARTS = (2, 3)


def looks_like(match: Match) -> bool:
    """The value has fewer columns than the product."""
    return match.columns < match.product.n


def check(match: Match) -> None:
    """The parts are all of the product's equal ranges, and every operand is as wide as a part or as the product.

    Raises:
        NotFusable: any other split.
    """
    label, n, columns = match.product.label, match.product.n, match.columns
    starts = list(range(0, n, columns))
    if n % columns or len(starts) not in PARTS or acc_offsets(match) != starts:
        ranges = ", ".join(f"[{start}:{start + columns}]" for start in acc_offsets(match))
        raise NotFusable(
            "not_equal_parts", label, f"combines columns {ranges} of {n}, not its two or three equal parts"
        )
    for leaf in leaves(match, LOAD):
        width = match.operands[leaf.operand].columns
        if leaf.offset is not None and (leaf.offset not in starts or width not in (columns, n)):
            raise NotFusable("operand_split_differs", label, f"{leaf.operand!r} is split unlike the product")


def becomes(graph: Graph, match: Match) -> Fusion:
    """A product of as many parts."""
    return lower(graph, match, NAME)
