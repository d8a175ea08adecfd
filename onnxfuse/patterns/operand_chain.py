"""What stands between an operand that is repeated and a tensor that a kernel reads as well: a window, numbers, views.

The blocks of a diffusion transformer shift and scale rows by ranges of one product's columns, six of them, and add 1 to
some (adaLN-Zero, Peebles and Xie, 2023). A kernel reads such a range where it lies, and adds 1 to each number as it
reads it; so neither the Split nor the Add is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.match import Operand
from onnxfuse.patterns.operand_views import is_stored
from onnxfuse.patterns.split_bounds import slice_bounds, split_sizes

VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
BY_NUMBERS = {"Add": "add", "Div": "div", "Mul": "mul", "Sub": "sub"}
"""ONNX op -> IR op."""
MAX_NODES = 8  # before an operand; the corpus has three
ACCESS = 16  # bytes, the widest access, which a window must not make narrower


@dataclass(frozen=True)
class Chain:
    """The nodes before an operand.

    Attributes:
        base: what the first of them reads.
        nodes: the first one first.
        window: the first column of those that they take, and how many columns base has; None where they take all.
    """

    base: gs.Tensor
    nodes: tuple[gs.Node, ...]
    window: tuple[int, int] | None = None

    @property
    def by_numbers(self) -> list[gs.Node]:
        """Those that compute."""
        return [node for node in self.nodes if node.op in BY_NUMBERS]


def chain_before(
    graph: Graph, operand: gs.Tensor, is_number: Callable[[gs.Tensor], bool], is_free: Callable[[gs.Node], bool]
) -> Chain | None:
    """The longest chain before an operand that begins with a window or a number; None where there is none.

    Args:
        graph: the scope.
        operand: what a node reads.
        is_number: whether a kernel has a tensor as a number.
        is_free: whether a kernel may do a node's work, which may stay for others.
    """
    chain: Chain | None = Chain(operand, ())
    found: list[Chain] = []
    while chain and len(chain.nodes) < MAX_NODES and len(chain.base.inputs) == 1 and is_free(chain.base.inputs[0]):
        chain = _longer(graph, chain, chain.base.inputs[0], is_number)
        found += [chain] if chain and chain.nodes[0].op not in VIEWS and not is_stored(graph, chain.base) else []
    return found[-1] if found else None


def _longer(graph: Graph, chain: Chain, node: gs.Node, is_number: Callable[[gs.Tensor], bool]) -> Chain | None:
    """The chain with one more node, where nobody else reads what that makes.

    Else two nodes would do its work, and for the sake of one ONNX Runtime's CPU provider rounds a value of 16 bits that
    it keeps in fp32 for the sake of the other.
    """
    op = qualified_op(node)
    nodes = (node, *chain.nodes)
    if len(chain.base.outputs) > 1 or any(graph.is_escaping(made.name) for made in node.outputs):
        return None
    if op in VIEWS:
        return Chain(node.inputs[0], nodes, chain.window) if _keeps_sizes(graph, node) else None
    if op in BY_NUMBERS:
        base = _computed_from(graph, node, is_number)
        return None if base is None else Chain(base, nodes, chain.window)
    window = _window(graph, node, chain.base) if op in ("Slice", "Split") and chain.window is None else None
    return None if window is None else Chain(node.inputs[0], nodes, window)


def before(graph: Graph, chain: Chain, operand: Operand) -> Operand:
    """What a chain begins with, along the dimensions that an operand has."""
    shape, own = (graph.shape(name) or () for name in (chain.base.name, operand.name))
    dims = iter([dim for size, dim in zip(own, operand.view, strict=True) if size != 1])
    view = tuple(() if size == 1 else next(dims) for size in shape)
    return Operand(str(chain.base.name), view, operand.beside, chain.window and chain.window[1])


def _keeps_sizes(graph: Graph, node: gs.Node) -> bool:
    """Whether a view adds or drops nothing but dimensions of size 1."""
    read, made = (graph.shape(tensor.name) for tensor in (node.inputs[0], node.outputs[0]))
    is_known = all(is_complete(graph.known_value(tensor)) for tensor in node.inputs[1:])
    if not read or not made or None in (*read, *made) or not is_known:
        return False
    kept, left = ([size for size in sizes if size != 1] for sizes in (read, made))
    return read[-1] == made[-1] != 1 and kept == left


def _computed_from(graph: Graph, node: gs.Node, is_number: Callable[[gs.Tensor], bool]) -> gs.Tensor | None:
    """The only input of a node that is no number, of the shape and type of what it makes."""
    others = [tensor for tensor in node.inputs if not is_number(tensor)]
    made = node.outputs[0].name
    if len(others) != 1 or graph.shape(others[0].name) is None or graph.dtype(made) not in BY_ONNX:
        return None
    alike = graph.shape(others[0].name) == graph.shape(made) and graph.dtype(others[0].name) == graph.dtype(made)
    return others[0] if alike else None


def _window(graph: Graph, node: gs.Node, made: gs.Tensor) -> tuple[int, int] | None:
    """The first of the columns that a node makes a value of, and all that it reads; None where it is no such node."""
    shape, number = graph.shape(node.inputs[0].name), graph.dtype(node.inputs[0].name)
    if not shape or not isinstance(shape[-1], int) or number not in BY_ONNX:
        return None
    whole = shape[-1]
    try:
        start = _start(graph, node, made, len(shape), whole)
    except NotFusable:
        return None
    if start is None or any(columns * BY_ONNX[number].bytes % ACCESS for columns in (start, whole)):
        return None
    return start, whole


def _start(graph: Graph, node: gs.Node, made: gs.Tensor, rank: int, whole: int) -> int | None:
    """The first column; None where a node takes other dimensions apart.

    Raises:
        NotFusable: only the run knows it.
    """
    if node.op == "Split":
        index = next(index for index, output in enumerate(node.outputs) if output is made)
        return sum(split_sizes(graph, node, whole)[:index]) if node.attrs.get("axis", 0) % rank == rank - 1 else None
    bounds = list(zip(*slice_bounds(graph, node), strict=True))
    if len(bounds) != 1 or bounds[0][2] % rank != rank - 1 or bounds[0][3] != 1:
        return None
    return slice(bounds[0][0], bounds[0][1]).indices(whole)[0]
