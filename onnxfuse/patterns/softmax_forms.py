"""Softmaxes over the last axis: the op, exponentials of a LogSoftmax, or those of rows over their sums, as in JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import F32
from onnxfuse.graph.graph import Graph, element_readers
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.normalisation_forms import number
from onnxfuse.patterns.row_shift import CASTS, VIEWS, reduced_axes

MAX_NODES = 8  # from the exponentials to the reciprocal of their sum
HANDED_ON = CASTS | VIEWS
INVERSES = frozenset({"Reciprocal", "Div"})


@dataclass(frozen=True)
class Softmax:
    """The nodes that make probabilities of scores, in an order in which they run."""

    nodes: tuple[gs.Node, ...]

    @property
    def first(self) -> gs.Node:
        """That which reads the scores."""
        return self.nodes[0]

    @property
    def last(self) -> gs.Node:
        """That which makes the probabilities."""
        return self.nodes[-1]

    @property
    def scores(self) -> gs.Tensor:
        """What it is of."""
        return self.first.inputs[0]

    @property
    def is_spelled_out(self) -> bool:
        """Whether it is no op of its own, and nothing but the nodes before it subtracts a maximum."""
        return qualified_op(self.first) == "Exp"


def softmax_of(graph: Graph, node: gs.Node) -> Softmax | None:
    """The softmax whose first node this is; None where it is of none."""
    if qualified_op(node) == "Softmax":
        return Softmax((node,))
    if qualified_op(node) == "LogSoftmax":
        return _of_logarithms(graph, node)
    return next(_spelled_out(graph, node), None) if qualified_op(node) == "Exp" else None


def _of_logarithms(graph: Graph, log: gs.Node) -> Softmax | None:
    """Exponentials of all that a LogSoftmax makes, if nobody else reads that."""
    value = log.outputs[0]
    readers = element_readers(value)
    is_alone = len(readers) == 1 and qualified_op(readers[0]) == "Exp" and not graph.is_escaping(value.name)
    return Softmax((log, readers[0])) if is_alone else None


def _spelled_out(graph: Graph, exp: gs.Node) -> Iterator[Softmax]:
    """Exponentials that two nodes read: one to add them up, the other to divide them by their sum."""
    powers = exp.outputs[0]
    readers = element_readers(powers)
    if len(readers) != 2 or graph.is_escaping(powers.name):
        return
    for start, last in (readers, readers[::-1]):
        way = _way(graph, start, last)
        if way and _are_sums(graph, powers, way) and _divides(powers, way, last):
            yield Softmax((exp, *way, last))


def _way(graph: Graph, start: gs.Node, last: gs.Node) -> list[gs.Node]:
    """The nodes from one to another, of which nobody else reads what they make; none where there is no such way."""
    way = [start]
    while len(way) < MAX_NODES:
        value = way[-1].outputs[0]
        readers = element_readers(value)
        if len(readers) != 1 or graph.is_escaping(value.name):
            break
        if readers[0] is last:
            return way
        way.append(readers[0])
    return []


def _are_sums(graph: Graph, powers: gs.Tensor, way: list[gs.Node]) -> bool:
    """Whether nodes add up rows, or make the reciprocals of such sums, and nothing else but hand them on."""
    ops = [qualified_op(node) for node in way]
    shape = graph.shape(powers.name)
    if ops.count("ReduceSum") != 1 or shape is None or graph.shape(way[-1].outputs[0].name) != (*shape[:-1], 1):
        return False
    types = {graph.dtype(node.outputs[0].name) for node in way}
    place = ops.index("ReduceSum")
    behind = [node for node in way[place + 1 :] if qualified_op(node) not in HANDED_ON]
    inverted = not behind or (len(behind) == 1 and _inverts(graph, behind[0]))
    of_rows = reduced_axes(graph, way[place]) in ([-1], [len(shape) - 1])
    return {*ops[:place]} <= CASTS and inverted and of_rows and types <= {graph.dtype(powers.name), F32.onnx}


def _inverts(graph: Graph, node: gs.Node) -> bool:
    """Whether a node makes the reciprocal of what it reads."""
    if qualified_op(node) == "Reciprocal":
        return True
    return qualified_op(node) == "Div" and number(graph, node.inputs[0]) == 1


def _divides(powers: gs.Tensor, way: list[gs.Node], last: gs.Node) -> bool:
    """Whether the last node has exponentials over their sums."""
    total = way[-1].outputs[0]
    if any(qualified_op(node) in INVERSES for node in way):
        return qualified_op(last) == "Mul" and {*map(id, last.inputs)} == {id(powers), id(total)}
    return qualified_op(last) == "Div" and last.inputs[0] is powers and last.inputs[1] is total
