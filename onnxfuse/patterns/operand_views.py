"""What a product multiplies: a tensor, and how the product sees it through the views before it.

Views that nothing but products reads, as those that merge the heads of an attention or repeat its keys, can be part of
the fusion: then the kernel reads the tensor before them. A constant is read where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import F32, FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.graph import Graph, Size, element_readers, node_label
from onnxfuse.graph.operators import PRODUCTS, qualified_op
from onnxfuse.patterns.fallback_shape import Base, fallback_shape
from onnxfuse.patterns.view_ops import INPUT_VIEWS, viewed
from onnxfuse.patterns.views import AxisKind, View, axis_view

STORED_VIEWS = frozenset({"Identity", "Transpose"})
SCALES = ("Mul", "Div")  # by a number
COMPUTED_VIEWS = (*SCALES, "Cast")  # of 16 bits to fp32
MAX_STORED_VIEWS = 8
MAX_VIEWS = 16  # before a product; repeated keys and values of grouped queries have five


@dataclass(frozen=True)
class InputView:
    """A node that only regroups an input, widens it, or scales it by a number, which the product may do as well.

    Attributes:
        node: the node.
        shape: replaces the shape that it reads, if the run computes that.
        factor: the number that it multiplies or divides by.
    """

    node: gs.Node
    shape: FallbackShape | None
    factor: gs.Tensor | None = None


@dataclass(frozen=True)
class Source:
    """A tensor and its views.

    Attributes:
        name: the tensor.
        view: its dimensions, in pieces of its own axes.
        seen: what the views make of them.
        views: the nodes between it and the product, the first one first; they go with the product.
        copied: the nodes after a constant, from the product backwards; others may need them as well.
    """

    name: str
    view: View
    seen: View
    views: tuple[InputView, ...] = ()
    copied: tuple[gs.Node, ...] = ()


def any_view(_: gs.Node) -> bool:
    """An input is read through every view."""
    return True


def no_view(_: gs.Node) -> bool:
    """An input is read as the views make it."""
    return False


def sources(
    graph: Graph,
    tensor: gs.Tensor,
    kind: AxisKind,
    through: Callable[[gs.Node], bool] = any_view,
    computed: Collection[str] = (),
) -> Iterator[Source]:
    """The ways to read an input: through as many views as there are, through fewer, as it is.

    Args:
        graph: that the input is of.
        tensor: the input.
        kind: of its axes: LHS or RHS.
        through: which nodes may be views, back to the first that may not.
        computed: what else may be one, of COMPUTED_VIEWS.

    Raises:
        NotFusable: the number of its dimensions is not known.
    """
    stored = _stored(graph, tensor, kind)
    if stored is not None:
        yield stored
        return
    chain = _views_before(graph, tensor, through, computed)
    for first in range(len(chain)):
        try:
            yield _through(graph, chain[first:], kind)
        except NotFusable:
            continue
    own = _own_view(graph, str(tensor.name), kind)
    yield Source(str(tensor.name), own, own)


def spelled_factors(node: gs.Node) -> gs.Node | None:
    """The Mul of a product that is spelled out: Unsqueeze, Mul, ReduceSum; None for any other node."""
    if node.op != "ReduceSum" or not node.inputs or len(node.inputs[0].inputs) != 1:
        return None
    factors = node.inputs[0].inputs[0]
    broadcast = any(tensor.inputs and tensor.inputs[0].op == "Unsqueeze" for tensor in factors.inputs)
    return factors if factors.op == "Mul" and broadcast and len(node.inputs[0].outputs) == 1 else None


def _multiplies(reader: gs.Node) -> bool:
    """Whether a node is a product, or the Mul of one that is spelled out."""
    sums = reader.outputs[0].outputs if reader.op == "Mul" else []
    return qualified_op(reader) in PRODUCTS or any(spelled_factors(node) is reader for node in sums)


def shape_text(shape: tuple[Size, ...] | None) -> str:
    """A shape in a sentence."""
    if shape is None:
        return "of unknown rank"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def is_stored(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether a tensor's value is stored in the model."""
    return graph.is_initializer(tensor.name) or bool(tensor.inputs and tensor.inputs[0].op == "Constant")


def _own_view(graph: Graph, name: str, kind: AxisKind) -> View:
    shape = graph.shape(name)
    if shape is None:
        raise NotFusable("unknown_rank", "", f"the input {name!r} has shape {shape_text(shape)}")
    named = [symbolic.function("?", name, index) if size is None else size for index, size in enumerate(shape)]
    return axis_view(named, kind)


def _stored(graph: Graph, tensor: gs.Tensor, kind: AxisKind) -> Source | None:
    """A constant before nodes that others may read as well."""
    nodes: list[gs.Node] = []
    while tensor.inputs and qualified_op(tensor.inputs[0]) in STORED_VIEWS and len(nodes) < MAX_STORED_VIEWS:
        nodes.append(tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    if not is_stored(graph, tensor):
        return None
    own = seen = _own_view(graph, str(tensor.name), kind)
    for node in reversed(nodes):
        seen = viewed(graph, node, seen) if node.op == "Transpose" else seen
    return Source(str(tensor.name), own, seen, copied=tuple(nodes))


def _views_before(
    graph: Graph, tensor: gs.Tensor, through: Callable[[gs.Node], bool], computed: Collection[str]
) -> list[gs.Node]:
    """Views that feed only products through this tensor, and shape arithmetic; the first one first."""
    chain: list[gs.Node] = []
    while (
        len(chain) < MAX_VIEWS and len(tensor.inputs) == 1 and _feeds_only(graph, tensor, chain[0] if chain else None)
    ):
        node = tensor.inputs[0]
        is_view = qualified_op(node) in INPUT_VIEWS or (node.op in computed and _computes(graph, node))
        if not is_view or not through(node) or graph.is_initializer(tensor.name) or _undoes_a_scatter(node):
            break
        chain.insert(0, node)
        tensor = _viewed(graph, node)
    return chain


def _undoes_a_scatter(node: gs.Node) -> bool:
    """Whether a Transpose puts columns behind rows again that were scattered along the first axis."""
    moves = node.op == "Transpose" and node.attrs.get("perm", [1])[0] != 0
    return moves and any(maker.op == "ScatterND" for maker in node.inputs[0].inputs)


def _computes(graph: Graph, node: gs.Node) -> bool:
    """Whether a node does what an attention's kernel does behind the product, or by itself."""
    return _factor(graph, node) is not None or _widens(graph, node)


def _widens(graph: Graph, node: gs.Node) -> bool:
    """Whether a node is a Cast of 16 bits to fp32."""
    if qualified_op(node) != "Cast":
        return False
    before, after = (FLOATS_BY_ONNX.get(graph.dtype(each.name) or 0) for each in (node.inputs[0], node.outputs[0]))
    return before is not None and before.bytes == 2 and after == F32


def _factor(graph: Graph, node: gs.Node) -> gs.Tensor | None:
    """The number that a node multiplies or divides a tensor by; None where there is none."""
    if qualified_op(node) not in SCALES:
        return None
    numbers = [tensor for tensor in node.inputs if graph.shape(tensor.name) in ((), (1,))]
    return numbers[0] if len(numbers) == 1 and (node.op == "Mul" or numbers[0] is node.inputs[1]) else None


def _viewed(graph: Graph, node: gs.Node) -> gs.Tensor:
    """What a view is of."""
    factor = _factor(graph, node)
    return next(tensor for tensor in node.inputs if tensor is not factor)


def _feeds_only(graph: Graph, tensor: gs.Tensor, view: gs.Node | None) -> bool:
    """Whether nobody reads a value but one view or products; what reads its shape dies with them."""
    readers = element_readers(tensor)
    expected = (reader is view or (view is None and _multiplies(reader)) for reader in readers)
    return all(expected) and not graph.is_escaping(tensor.name)


def _through(graph: Graph, chain: list[gs.Node], kind: AxisKind) -> Source:
    name = str(_viewed(graph, chain[0]).name)
    if graph.is_initializer(name):
        raise NotFusable("unknown_rank", node_label(chain[0]), f"{name!r} is a constant")
    own = view = _own_view(graph, name, kind)
    base, nodes = Base(name, own, int(kind is AxisKind.RHS)), []
    for node in chain:
        factor = _factor(graph, node)
        before, view = view, view if _computes(graph, node) else viewed(graph, node, view)
        nodes.append(InputView(node, fallback_shape(graph, node, before, view, base), factor))
    return Source(name, own, view, tuple(nodes))
