"""What stands between an operand that is repeated and a tensor that a kernel reads as well: a window, numbers, views.

The blocks of a diffusion transformer shift and scale rows by ranges of one product's columns, six of them, and add 1 to
some (adaLN-Zero, Peebles and Xie, 2023). A kernel reads such a range where it lies, and adds 1 to each number as it
reads it; so neither the Split nor the Add is a launch of its own. The six may be places of a dimension of their own, as
where a table of them is added in each block (PixArt, Sana, Wan): such a window is one place of it and all columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.match import Operand
from onnxfuse.patterns.operand_views import is_stored
from onnxfuse.patterns.split_bounds import slice_bounds, split_sizes
from onnxfuse.patterns.views import AxisKind, Piece, ViewAxis

VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
BY_NUMBERS = {"Add": "add", "Div": "div", "Mul": "mul", "Sub": "sub"}
"""ONNX op -> IR op."""
TAKES = frozenset({"Gather", "Slice", "Split"})
MAX_NODES = 8  # before an operand; the corpus has three
TOP = 2**63 - 1  # the end of any dimension
ONE_PLACE = (Piece(ViewAxis(AxisKind.BROADCAST), 1),)  # has a name, so that the bridge knows where it begins
ACCESS = 16  # bytes, the widest access, which a window must not make narrower


@dataclass(frozen=True)
class Window:
    """What a node takes of a value along one of its dimensions.

    Attributes:
        start: the first column, where those of the dimension's places are counted one after the other.
        whole: the dimension's size.
        step: columns of one place: 1 where it is the dimension of the columns, all where it is the one before.
    """

    start: int
    whole: int
    step: int = 1


@dataclass(frozen=True)
class Chain:
    """The nodes before an operand.

    Attributes:
        base: what the first of them reads.
        nodes: the first one first.
        window: what they take of base; None where that is all.
    """

    base: gs.Tensor
    nodes: tuple[gs.Node, ...]
    window: Window | None = None

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
    window = _window(graph, node, chain.base) if op in TAKES and chain.window is None else None
    return None if window is None else Chain(node.inputs[0], nodes, window)


def before(graph: Graph, chain: Chain, operand: Operand) -> Operand:
    """What a chain begins with, along the dimensions that an operand has."""
    shape, own = (graph.shape(name) or () for name in (chain.base.name, operand.name))
    dims = iter([dim for size, dim in zip(own, operand.view, strict=True) if size != 1])
    window = chain.window
    place = len(shape) - 2 if window and window.step > 1 else None
    view = tuple(ONE_PLACE if index == place else () if size == 1 else next(dims) for index, size in enumerate(shape))
    taken = Operand(str(chain.base.name), view, operand.beside)
    return replace(taken, whole=window.whole, step=window.step) if window else taken


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


def _window(graph: Graph, node: gs.Node, made: gs.Tensor) -> Window | None:
    """What a node takes of the value that it reads; None where it is no such node."""
    shape, number = graph.shape(node.inputs[0].name), graph.dtype(node.inputs[0].name)
    if not shape or not isinstance(shape[-1], int) or number not in BY_ONNX:
        return None
    try:
        window = _taken(graph, node, made, shape)
    except NotFusable:
        return None
    is_narrow = window and any(columns * BY_ONNX[number].bytes % ACCESS for columns in (window.start, shape[-1]))
    return None if is_narrow else window


def _taken(graph: Graph, node: gs.Node, made: gs.Tensor, shape: tuple[Size, ...]) -> Window | None:
    """The same of columns, or of one place of the dimension before them.

    Raises:
        NotFusable: only the run knows it.
    """
    rank, columns = len(shape), shape[-1]
    axis = _axis(graph, node) % rank
    whole = shape[axis]
    if not isinstance(whole, int) or not isinstance(columns, int) or axis < rank - 2:
        return None
    start, size = _range(graph, node, made, whole)
    if axis == rank - 1:
        return None if node.op == "Gather" else Window(start, whole)
    return Window(start * columns, whole, columns) if size == 1 < columns else None


def _axis(graph: Graph, node: gs.Node) -> int:
    """Along which a node takes something; of several the first."""
    return slice_bounds(graph, node)[2][0] if node.op == "Slice" else int(node.attrs.get("axis", 0))


def _range(graph: Graph, node: gs.Node, made: gs.Tensor, whole: int) -> tuple[int, int]:
    """The first place and how many a node takes.

    Raises:
        NotFusable: only the run knows it, or it takes other dimensions apart as well, or several places apart.
    """
    if node.op == "Split":
        index, sizes = [*map(id, node.outputs)].index(id(made)), split_sizes(graph, node, whole)
        return sum(sizes[:index]), sizes[index]
    starts, ends, axes, steps = _place(graph, node) if node.op == "Gather" else slice_bounds(graph, node)
    if len(axes) != 1 or steps != [1]:
        raise NotFusable("strided_slice", "", "a range of several dimensions, or with a step")
    first, end, _ = slice(starts[0], ends[0]).indices(whole)
    return first, end - first


def _place(graph: Graph, node: gs.Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """The bounds of the place that a Gather takes.

    Raises:
        NotFusable: it takes several, or which one is not known before the run.
    """
    places = graph.known_integers(node.inputs[1])
    if places is None or len(places) != 1:
        raise NotFusable("bounds_not_constant", "", "the place is not known before the run")
    return places, [places[0] + 1 or TOP], [0], [1]
