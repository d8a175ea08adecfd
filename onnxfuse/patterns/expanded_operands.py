"""Operands of scores that are expanded in front of an attention, as the mask of a batch's windows.

A kernel walks each loop of a tensor by one stride. A mask `[windows, m, n]` beside scores of `[batch windows, heads, m,
n]`, or a bias along one half of the keys, has some of a loop's axes and lacks others: an Expand gives it those.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxfuse.graph.graph import SIXTEEN_BIT, Graph
from onnxfuse.graph.told_shape import ToldShape, is_tiled
from onnxfuse.patterns.match import Match, Operand
from onnxfuse.patterns.told_shapes import told_sizes
from onnxfuse.patterns.views import Dim, Piece, View, extent, refined

Loops = Sequence[Sequence[Piece]]


def with_expanded_operands(graph: Graph, match: Match) -> Iterator[Match]:
    """The scores of an attention with operands that have all axes of a loop or none, for every way to cut the loops."""
    read = dict.fromkeys(leaf.operand for leaf in match.reads)
    beside = [match.operands[name].beside for name in read]
    *outer, rows, columns = _fine(match.live_outs[0].view, beside)
    around = [piece for dim in outer for piece in dim if piece.size != 1]
    for cut in range(max(len(around) - 1, 0), -1, -1):
        loops = (around[:cut], around[cut:], rows, columns)
        wide = {name: _expanded(match.operands[name], loops, beside) for name in read}
        shapes = {name: _shape(graph, match, match.operands[name], view) for name, view in wide.items()}
        told = {name: shape for name, shape in shapes.items() if shape is not None}
        if told and len(told) == sum(wide[name] != match.operands[name].view for name in read):
            operands = {name: replace(match.operands[name], view=wide[name]) for name in told}
            yield replace(match, operands=match.operands | operands, expanded=told)


def _fine(view: View, others: Sequence[View]) -> View:
    """A view whose pieces are split wherever others split them."""
    for other in others:
        view = refined(view, other)
    return view


def _expanded(operand: Operand, loops: Loops, others: Sequence[View]) -> View:
    """The operand's view with the axes that it lacks of loops that it has others of."""
    beside = _fine(operand.beside, others)
    pad = len(beside) - len(operand.view)
    view = ((),) * pad + operand.view
    own = [piece for dim in _fine(view, [*others, operand.beside]) for piece in dim]
    apart = [piece for loop in loops if any(piece in own for piece in loop) for piece in loop if piece not in own]
    wide = tuple(
        operand.beside[index] if not dim and any(piece in apart for piece in beside[index]) else dim
        for index, dim in enumerate(view)
    )
    return wide[next((index for index, dim in enumerate(wide[:pad]) if dim), pad) :]


def _shape(graph: Graph, match: Match, operand: Operand, wide: View) -> ToldShape | None:
    """What an operand is expanded to, 1 where it stays as it is; None where nothing tells that, or all stays."""
    own: Iterator[Dim | None] = reversed(operand.view)
    pairs = itertools.zip_longest(reversed(wide), own)
    sizes = [1 if dim == before else extent(dim) for dim, before in pairs]
    told = None if wide == operand.view else told_sizes(graph, match.products[0], sizes[::-1])
    return told if told is not None and _keeps_its_bits(graph, operand.name, told) else None


def _keeps_its_bits(graph: Graph, name: str, shape: ToldShape) -> bool:
    """Whether ONNX Runtime's CPU provider rounds an operand as it did."""
    tensor = graph.tensor(name)
    is_given = not tensor.inputs or graph.known_value(tensor) is not None
    return is_given or graph.dtype(name) not in SIXTEEN_BIT or is_tiled(graph, name, shape)
