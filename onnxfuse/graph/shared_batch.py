"""A batch that inputs have in common, and each calls otherwise.

TensorFlow has no names for dimensions. What is exported from it has `unk__638` and `unk__639` for the batches of ids
and mask, and where the two met, no size of what follows could be proved: no attention with a mask was a kernel. Where
sizes meet they are equal, or one of them is 1, and Keras trains no model on inputs that differ so. The written model
keeps the names, and a fused node that reads both refuses a run with two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph, all_graphs
from onnxfuse.graph.named_sizes import canonical
from onnxfuse.graph.symbolic import Monomial, Size

_NAMELESS = re.compile(r"unk__\d+")  # what ONNX's own inference of shapes calls a dimension without a name
_ELEMENTWISE = frozenset(("Add", "And", "Div", "Max", "Min", "Mul", "Or", "Sub", "Where"))
_PRODUCT = "MatMul"


def shared_batches(graph: Graph) -> dict[str, str]:
    """Names of inputs' first dimensions, and for each the first one that is the same size wherever they meet.

    What two make where they meet has a size of no name, until it is known that theirs is one: more may meet behind it.

    Args:
        graph: the main graph.
    """
    shared: dict[str, str] = {}
    while found := _found(graph, shared):
        shared = {name: found.get(kept, kept) for name, kept in shared.items()} | found
        graph = all_graphs(graph.model, sizes=shared)[0]
    return shared


def _found(graph: Graph, known: Mapping[str, str]) -> dict[str, str]:
    """The same of names that meet in a graph in which others are known."""
    inputs = [value.type.tensor_type.shape.dim for value in graph.model.proto.graph.input]
    names = list(dict.fromkeys(dims[0].dim_param for dims in inputs if len(dims) > 1))
    nameless = {canonical(name): name for name in names if _NAMELESS.fullmatch(name) and name not in known}
    if len(nameless) <= 1:
        return {}
    first = {name: name for name in nameless.values()}
    for one, other in (pair for node in graph.nodes for pair in _meeting(graph, node)):
        if one in nameless and other in nameless:
            kept, gone = sorted((first[nameless[one]], first[nameless[other]]), key=names.index)
            first = {name: kept if same == gone else same for name, same in first.items()}
    return {name: same for name, same in first.items() if name != same}


def _meeting(graph: Graph, node: gs.Node) -> Iterator[tuple[str, str]]:
    """Names that sizes differ by that meet along a dimension; those of a product's matrices meet otherwise."""
    if node.domain or node.op not in (*_ELEMENTWISE, _PRODUCT):
        return
    shapes = [shape[::-1] for tensor in node.inputs if (shape := graph.shape(tensor.name)) is not None]
    inner = 2 if node.op == _PRODUCT else 0
    for one, other in combinations(shapes, 2):
        for pair in zip(one[inner:], other[inner:], strict=False):
            yield from _names(*pair)


def _names(one: Size, other: Size) -> Iterator[tuple[str, str]]:
    """The name that one of two products of sizes has in place of the other's, where all else is the same."""
    if one is None or other is None or one == other:
        return
    first, second = Monomial.of(one), Monomial.of(other)
    left, right = ([*each.elements()] for each in (first.atoms - second.atoms, second.atoms - first.atoms))
    if first.factor == second.factor and len(left) == len(right) == 1:
        yield left[0], right[0]
