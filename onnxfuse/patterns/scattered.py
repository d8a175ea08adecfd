"""Columns written in turn, as torch.export writes `out[..., ::2] = x` and `out[..., 1::2] = y` of a rotation.

Each is a ScatterND to every second place along the first axis of what the one before it made; the first one's is a
value of which nothing is kept. Together they put together what they write, as a Concat of pairs does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.limits import MAX_PARTS
from onnxfuse.patterns.match import Columns
from onnxfuse.patterns.views import COLUMNS, Piece, is_column

BLANKS = frozenset({"ConstantOfShape", "Expand", "Identity", "Transpose"})
MOST_BEFORE = 4  # nodes that make a value of which nothing is kept


def turn_of(graph: Graph, node: gs.Node, written: Columns) -> tuple[int, int]:
    """Which columns of how many turns a ScatterND writes.

    Raises:
        NotFusable: it writes others than every second, or every third.
    """
    shape, places = graph.shape(node.inputs[0].name) or (None,), graph.known_integers(node.inputs[1])
    whole, dim = shape[0], written.view[0]
    if node.attrs.get("reduction", "none") != "none" or not places or not isinstance(whole, int):
        raise NotFusable("unknown_op", "", "scatters to places that only the run knows")
    turns = whole // len(places)
    in_turn = places == list(range(places[0], whole, turns)) and whole == turns * len(places)
    if not in_turn or not 1 < turns <= MAX_PARTS or not dim or not all(map(is_column, dim)) or written.rest:
        raise NotFusable("unknown_op", "", "scatters to other places than every second")
    return places[0], turns


def together(ranges: Mapping[int, Columns], turns: int) -> Columns | None:
    """What several write in turn, as one value; None while a turn is missing.

    Raises:
        NotFusable: they are no equal ranges of columns.
    """
    if len(ranges) < turns:
        return None
    first, *others = (ranges[turn] for turn in sorted(ranges))
    if isinstance(first.length, str) or any((each.length, each.view) != (first.length, first.view) for each in others):
        raise NotFusable("unknown_op", "", "writes values in turn that are no equal ranges of columns")
    dim = (*first.view[0], Piece(COLUMNS, turns, first.length))
    rest = tuple(each.ref for each in others)
    return replace(first, length=turns * first.length, view=(dim, *first.view[1:]), rest=rest)


def makers_of_blank(graph: Graph, tensor: gs.Tensor) -> tuple[gs.Node, ...]:
    """The nodes that make a value of which nothing is kept, the first one first; a fallback needs them.

    Raises:
        NotFusable: others than such that make one of what is known.
    """
    nodes: list[gs.Node] = []
    while not is_complete(graph.known_value(tensor)):
        maker = tensor.inputs[0] if tensor.inputs else None
        if maker is None or qualified_op(maker) not in BLANKS or len(nodes) == MOST_BEFORE:
            raise NotFusable("unknown_op", "", "scatters to a value of which something may be kept")
        if not all(is_complete(graph.known_value(each)) for each in maker.inputs[1:]):
            raise NotFusable("unknown_op", "", "scatters to a value whose shape only the run knows")
        nodes.append(maker)
        tensor = maker.inputs[0]
    return tuple(reversed(nodes))
