"""Grow a match from a product over parts and pointwise nodes, then cut it where nothing but one value leaves it.

Growth follows readers in graph order and absorbs what a table knows: pointwise ops, Split and Slice along the columns,
and the shape arithmetic of a computed chunk. Cutting finds the furthest value whose ancestors inside the growth are
read by nobody outside: that closure also excludes cycles, since a path that leaves the match and comes back leaves it
somewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph import Graph, Size, node_label
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.known_values import known_integers, known_value
from onnxfuse.patterns.pointwise import POINTWISE
from onnxfuse.patterns.product import Product

MAX_NODES = 256  # a growth this long is no epilogue; keeps the matcher linear in the size of the model
KNOWN_OPS = frozenset({"Shape", "Gather", "Add", "Sub", "Mul", "Div", "Cast", "Unsqueeze", "Squeeze", "Concat"})


@dataclass(frozen=True)
class Columns:
    """A value with the product's rows and `length` columns."""

    ref: Ref
    length: int


@dataclass(frozen=True)
class Operand:
    """A tensor that the epilogue reads.

    Attributes:
        name: the value's name.
        varies: for each dimension of the product's output, whether the operand has it; the last is the columns.
        columns: size along the columns, 1 where it has none.
        rank: the operand's own rank.
    """

    name: str
    varies: tuple[bool, ...]
    columns: int
    rank: int


@dataclass(frozen=True)
class Match:
    """A closed piece of the graph that one kernel can compute.

    Attributes:
        product: the anchor.
        nodes: indices of the matched nodes in the main graph, ascending.
        out: the one value that leaves the match, and its number of columns.
        epilogue: expressions; `root` is the value of `out`.
        operands: what the epilogue reads, by name.
        hindrance: what kept the match from growing further, if that is more than an op which is not pointwise.
    """

    product: Product
    nodes: tuple[int, ...]
    out: str
    columns: int
    epilogue: EpilogueGraph
    root: Ref
    operands: dict[str, Operand] = field(default_factory=dict)
    hindrance: NotFusable | None = None


class Growth:
    """What has been absorbed so far: nodes, the values that they make, and why growth stopped where it did."""

    def __init__(self, graph: Graph, product: Product) -> None:
        self.graph = graph
        self.product = product
        self.epilogue = EpilogueGraph()
        self.values: dict[str, Columns | None] = {}  # None: shape arithmetic, known at optimise time
        self.nodes: list[gs.Node] = []
        self.operands: dict[str, Operand] = {}
        self.stops: list[NotFusable] = []

    def run(self) -> None:
        """Absorb the anchor, then its readers and theirs, in graph order."""
        self._absorb_product()
        queue = [self.graph.index(node) for node in self._readers(self.product.node)]
        seen = set(queue)
        heapq.heapify(queue)
        while queue and len(self.nodes) < MAX_NODES:
            node = self.graph.nodes[heapq.heappop(queue)]
            try:
                self._absorb(node)
            except NotFusable as stop:
                self.stops.append(NotFusable(stop.reason, node_label(node), stop.detail))
                continue
            for reader in self._readers(node):
                index = self.graph.index(reader)
                if index not in seen:
                    seen.add(index)
                    heapq.heappush(queue, index)

    def _readers(self, node: gs.Node) -> Iterator[gs.Node]:
        for tensor in node.outputs:
            yield from tensor.outputs

    def _absorb_product(self) -> None:
        product = self.product
        ref = self.epilogue.acc()
        if product.alpha != 1.0:
            ref = self.epilogue.apply("mul", ref, self.epilogue.constant(product.alpha))
        if product.bias is not None and product.beta != 0.0:
            bias = self._operand(product.node.inputs[2], product.n)
            if product.beta != 1.0:
                bias = self.epilogue.apply("mul", bias, self.epilogue.constant(product.beta))
            ref = self.epilogue.apply("add", ref, bias)
        self._take(product.node, Columns(ref, product.n))

    def _take(self, node: gs.Node, *values: Columns | None) -> None:
        self.nodes.append(node)
        self.values.update({tensor.name: value for tensor, value in zip(node.outputs, values, strict=True)})

    def _absorb(self, node: gs.Node) -> None:
        """Absorb one reader; NotFusable says why not."""
        if node.domain not in (None, "", "ai.onnx"):
            raise NotFusable("unknown_op", "", f"{node.domain}::{node.op} is not in the pointwise table")
        columns = [value for tensor in node.inputs if (value := self.values.get(tensor.name)) is not None]
        if node.op in KNOWN_OPS and (node.op == "Shape" or not columns):
            self._absorb_known(node)
        elif node.op == "Split":
            self._absorb_split(node)
        elif node.op == "Slice":
            self._absorb_slice(node)
        elif node.op in POINTWISE:
            self._absorb_pointwise(node, columns)
        else:
            raise NotFusable("unknown_op", "", f"{node.op} is not pointwise")

    def _absorb_known(self, node: gs.Node) -> None:
        """Shape arithmetic on the product's own shape belongs to the match when all that it feeds does."""
        if node.op != "Shape" and known_value(self.graph, node.outputs[0]) is None:
            raise NotFusable("unknown_shape_arithmetic", "", f"the value of {node.op} is not known before the run")
        self._take(node, None)

    def _absorb_pointwise(self, node: gs.Node, columns: list[Columns]) -> None:
        if len({value.length for value in columns}) != 1:
            raise NotFusable("columns_differ", "", "combines values with different numbers of columns")
        length = columns[0].length
        inputs = [self._argument(tensor, length) for tensor in node.inputs]
        self._check_keeps_shape(node)
        self._take(node, Columns(POINTWISE[node.op](self.epilogue, inputs, node.attrs), length))

    def _check_keeps_shape(self, node: gs.Node) -> None:
        number = self.graph.dtype(node.outputs[0].name)
        if number not in BY_ONNX:
            raise NotFusable("unsupported_dtype", "", f"makes ONNX element type {number}")
        shape = self.graph.shape(node.outputs[0].name)
        if shape is not None and len(shape) != len(self.product.rows) + 1:
            raise NotFusable("broadcasts_the_product", "", "an operand has more dimensions than the product")

    def _argument(self, tensor: gs.Tensor, length: int) -> Ref:
        """An input's expression: a value of the match, a number, or an operand; -1 for an input left out."""
        if tensor.is_empty():
            return -1
        value = self.values.get(tensor.name)
        if value is not None:
            return value.ref
        known = known_value(self.graph, tensor)
        if known is not None and known.size == 1 and known.ndim <= 1 and known.dtype != object:
            return self.epilogue.constant(float(known.reshape(()).item()))
        return self._operand(tensor, length)

    def _operand(self, tensor: gs.Tensor, length: int) -> Ref:
        name = str(tensor.name)
        shape = self.graph.shape(name)
        if self.graph.dtype(name) not in BY_ONNX:
            raise NotFusable("unsupported_dtype", "", f"reads {name!r} of ONNX element type {self.graph.dtype(name)}")
        if shape is None or len(shape) > len(self.product.rows) + 1:
            raise NotFusable("unknown_broadcast", "", f"how {name!r} broadcasts over the product is not known")
        varies, columns = self._varies(name, shape, length)
        self.operands[name] = Operand(name, varies, columns, len(shape))
        return self.epilogue.load(name, has_columns=columns > 1)

    def _varies(self, name: str, shape: tuple[Size, ...], length: int) -> tuple[tuple[bool, ...], int]:
        """Which dimensions of the product an operand has; every one must be provably 1 or the product's own size."""
        target = (*self.product.rows, length)
        padded = (1,) * (len(target) - len(shape)) + shape
        for own, full in zip(padded, target, strict=True):
            if own != 1 and (own is None or own != full):
                raise NotFusable("unknown_broadcast", "", f"{name!r} is not provably of the product's shape or 1")
        return tuple(own != 1 for own in padded), length if padded[-1] != 1 else 1

    def _column_axis(self, axis: int) -> bool:
        return axis in (-1, len(self.product.rows))

    def _single(self, node: gs.Node) -> Columns:
        value = self.values.get(node.inputs[0].name)
        if value is None:
            raise NotFusable("unknown_op", "", f"{node.op} of shape arithmetic")
        return value

    def _absorb_split(self, node: gs.Node) -> None:
        value = self._single(node)
        if not self._column_axis(node.attrs.get("axis", 0)):
            raise NotFusable("not_the_last_axis", "", "splits along an axis that is not the product's columns")
        starts = [0]
        for size in self._split_sizes(node, value.length):
            starts.append(starts[-1] + size)
        if starts[-1] != value.length:
            raise NotFusable("invalid_model", "", f"splits {value.length} columns into {starts[-1]}")
        self._take(node, *(self._range(value, a, b) for a, b in pairwise(starts)))

    def _split_sizes(self, node: gs.Node, length: int) -> list[int]:
        """Sizes are an attribute up to opset 12 and an input from 13 on; without them the parts are equal."""
        if "split" in node.attrs:
            return list(node.attrs["split"])
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            sizes = known_integers(self.graph, node.inputs[1])
            if sizes is None or len(sizes) != len(node.outputs):
                raise NotFusable("bounds_not_constant", "", "the sizes of the split are not known before the run")
            return sizes
        chunk = -(-length // len(node.outputs))
        return [min(chunk, length - start) for start in range(0, length, chunk)]

    def _absorb_slice(self, node: gs.Node) -> None:
        value = self._single(node)
        starts, ends, axes, steps = self._slice_bounds(node)
        if len(axes) != 1 or not self._column_axis(axes[0]):
            raise NotFusable("not_the_last_axis", "", "slices along an axis that is not the product's columns")
        if steps != [1]:
            raise NotFusable("strided_slice", "", f"slices with step {steps[0]}")
        start, stop, _ = slice(starts[0], ends[0]).indices(value.length)
        if stop <= start:
            raise NotFusable("empty_slice", "", "slices no column")
        self._take(node, self._range(value, start, stop))

    def _slice_bounds(self, node: gs.Node) -> tuple[list[int], list[int], list[int], list[int]]:
        """Bounds are attributes up to opset 9 and inputs from 10 on."""
        if "starts" in node.attrs:
            starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
            return starts, ends, list(node.attrs.get("axes", range(len(starts)))), [1] * len(starts)
        bounds = [None if tensor.is_empty() else known_integers(self.graph, tensor) for tensor in node.inputs[1:5]]
        given = [not tensor.is_empty() for tensor in node.inputs[1:5]]
        if any(have and bound is None for have, bound in zip(given, bounds, strict=True)):
            raise NotFusable("bounds_not_constant", "", "the bounds of the slice are not known before the run")
        starts, ends = bounds[0] or [], bounds[1] or []
        axes = bounds[2] if len(bounds) > 2 and bounds[2] is not None else list(range(len(starts)))
        steps = bounds[3] if len(bounds) > 3 and bounds[3] is not None else [1] * len(starts)
        return starts, ends, axes, steps

    def _range(self, value: Columns, start: int, stop: int) -> Columns:
        return Columns(self.epilogue.moved(value.ref, start), stop - start)


def grow(graph: Graph, product: Product) -> Growth:
    """Absorb everything behind a product that an epilogue could compute."""
    growth = Growth(graph, product)
    growth.run()
    return growth


def cut(growth: Growth) -> Match:
    """The largest closed part of a growth.

    Raises:
        NotFusable: nothing beyond the product itself can be closed; the reason is the first thing in the way.
    """
    makers = {tensor.name: node for node in growth.nodes for tensor in node.outputs}
    leak: NotFusable | None = None
    for node in reversed(growth.nodes[1:]):
        value = growth.values[node.outputs[0].name]
        if value is None or len(node.outputs) != 1:
            continue
        inside = _ancestors(growth, makers, node)
        leak_here = _leak(growth, inside, node)
        if leak_here is None:
            return _match(growth, inside, node, value, leak)
        leak = leak or leak_here
    if leak is not None:
        raise leak
    if growth.stops:
        raise growth.stops[0]
    raise NotFusable("nothing_follows", growth.product.label, "no pointwise node reads the product")


def _ancestors(growth: Growth, makers: dict[str, gs.Node], node: gs.Node) -> list[gs.Node]:
    """The absorbed nodes that `node` needs, itself included."""
    inside, stack = {id(node): node}, [node]
    while stack:
        for tensor in stack.pop().inputs:
            maker = makers.get(tensor.name)
            if maker is not None and id(maker) not in inside:
                inside[id(maker)] = maker
                stack.append(maker)
    return list(inside.values())


def _leak(growth: Growth, inside: list[gs.Node], last: gs.Node) -> NotFusable | None:
    """The one rule for intermediates: a value that is read outside the match, or is a graph output, stops it."""
    ids = {id(node) for node in inside}
    for node in inside:
        for tensor in node.outputs if node is not last else ():
            if growth.graph.is_escaping(tensor.name):
                return NotFusable("graph_output", node_label(node), f"{tensor.name!r} is also an output of the graph")
            for reader in tensor.outputs:
                if id(reader) not in ids:
                    detail = f"{tensor.name!r} is also read by {node_label(reader)!r} ({reader.op}) outside the fusion"
                    return NotFusable("several_readers", node_label(node), detail)
    return None


def _match(growth: Growth, inside: list[gs.Node], last: gs.Node, value: Columns, leak: NotFusable | None) -> Match:
    indices = tuple(sorted(growth.graph.index(node) for node in inside))
    out = str(last.outputs[0].name)
    operands = dict(growth.operands)
    hindrance = leak or _stop_behind(growth, last)
    return Match(growth.product, indices, out, value.length, growth.epilogue, value.ref, operands, hindrance)


def _stop_behind(growth: Growth, last: gs.Node) -> NotFusable | None:
    readers = {node_label(reader) for tensor in last.outputs for reader in tensor.outputs}
    return next((stop for stop in growth.stops if stop.node in readers and stop.reason != "unknown_op"), None)
