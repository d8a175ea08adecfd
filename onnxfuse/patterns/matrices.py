"""Pairs of columns times 2 x 2 matrices, the rotary embedding as Flux's authors write it.

`f[..., 0] * x[..., 0] + f[..., 1] * x[..., 1]`, where `x` is `[..., n, 1, 2]` and `f` `[..., n, 2, 2]`: what is read of
`f` has two numbers for each pair of columns, and what is taken out of `x` has one. So a product of both has the columns
of both parts, of which every one is made of that part of `x` alone.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.match import Columns
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.views import COLUMNS, Piece, View, is_column


def of_all_parts(graph: Graph, node: gs.Node, part: Columns, product: Product) -> View | None:
    """The dimensions of all parts' columns that a node makes of one part; None where it makes as many as it reads.

    Args:
        graph: the scope.
        node: pointwise; its other inputs may have a number for each part.
        part: columns of one of several parts that take turns.
        product: the columns are of.
    """
    width, parts = part.length, product.turns
    if parts == 1 or product.run > 1 or isinstance(width, str) or width * parts != product.n or part.rest:
        return None
    if not _are_apart(part.view) or not any(_counts(graph, tensor, parts) for tensor in node.inputs):
        return None
    return (*part.view[:-1], (Piece(COLUMNS, parts, width),))


def _are_apart(view: View) -> bool:
    """Whether columns are beside a last dimension of size 1, where another part has its own."""
    columns = view[-2] if len(view) > 1 and not view[-1] else ()
    return bool(columns) and is_column(columns[-1]) and columns[-1].step == 1


def _counts(graph: Graph, tensor: gs.Tensor, parts: int) -> bool:
    """Whether the last dimension of an operand is as long as there are parts."""
    shape = None if tensor.is_empty() else graph.shape(tensor.name)
    return shape is not None and shape[-1:] == (parts,)
