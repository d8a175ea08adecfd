"""Grow from products of one input over parts and pointwise nodes, in graph order.

Growth follows readers and absorbs what a table knows: pointwise ops, Split and Slice along the columns, and the shape
arithmetic of a computed chunk. It stops at everything else, and remembers why.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph import Graph, Size, node_label
from onnxfuse.known_values import is_complete
from onnxfuse.operators import qualified_op
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.match import Columns, Operand
from onnxfuse.patterns.pointwise import Lower, pointwise_row
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.split_bounds import sequence_sizes, slice_bounds, split_sizes

MAX_NODES = 256  # of one product; a growth this long is no epilogue, and the matcher stays linear in the model's size
MAX_INPUTS = 64  # of a node; no shape and no sum has more


@dataclass(frozen=True)
class Stop:
    """Why growth ended at a node, and the absorbed nodes that it would have needed, as bits."""

    refusal: NotFusable
    needs: int


class Growth:
    """What has been absorbed: nodes, the values that they make, and why growth stopped where it did.

    Attributes:
        products: the anchors; they have one lhs and equally many rows.
        nodes: absorbed nodes, every one behind those that it reads.
        needs: for each node, itself and all absorbed nodes that it needs, as bits by position in `nodes`.
        values: what the nodes make; None for what is no epilogue value: shape arithmetic and sequences.
    """

    def __init__(self, graph: Graph, products: tuple[Product, ...], is_taken: Callable[[gs.Node], bool]) -> None:
        self.graph = graph
        self.products = products
        self.epilogue = EpilogueGraph()
        self.values: dict[str, Columns | None] = {}
        self.nodes: list[gs.Node] = []
        self.needs: list[int] = []
        self.operands: dict[str, Operand] = {}
        self.stops: list[Stop] = []
        self._is_taken = is_taken
        self._sequences: dict[str, list[Columns]] = {}
        self._makers: dict[str, int] = {}
        self._queue: list[int] = []
        self._reached: dict[int, int] = {}  # queued nodes, and the absorbed ones that led to each
        self._run()

    def _run(self) -> None:
        for position, product in enumerate(self.products):
            self._absorb_product(product)
            self._offer(position)
        while self._queue and len(self.nodes) < MAX_NODES * len(self.products):
            index = heapq.heappop(self._queue)
            node = self.graph.nodes[index]
            try:
                self._absorb(node)
            except NotFusable as stop:
                refusal = NotFusable(stop.reason, node_label(node), stop.detail)
                self.stops.append(Stop(refusal, self._reached[index]))
            else:
                self._offer(len(self.nodes) - 1)

    def _offer(self, position: int) -> None:
        """Queue the readers of an absorbed node, each once."""
        for tensor in self.nodes[position].outputs:
            for reader in tensor.outputs:
                index = self.graph.index(reader)
                if index not in self._reached:
                    heapq.heappush(self._queue, index)
                self._reached[index] = self._reached.get(index, 0) | self.needs[position]

    @property
    def rows(self) -> tuple[Size, ...]:
        """Sizes of the products' dimensions but the last."""
        return self.products[0].rows

    def _absorb_product(self, product: Product) -> None:
        if product.bias is not None and product.beta != 0.0:
            self._operand(product.node.inputs[2], product.n)
        self._take(product.node, Columns(made_value(self.epilogue, product, self.operands), product.n))

    def _take(self, node: gs.Node, *values: Columns | None) -> None:
        index = len(self.nodes)
        self.needs.append(self._needs_of(node) | 1 << index)
        self.nodes.append(node)
        for tensor, value in zip(node.outputs, values, strict=True):
            self.values[tensor.name] = value
            self._makers[tensor.name] = index

    def _needs_of(self, node: gs.Node) -> int:
        needs = 0
        for tensor in node.inputs:
            maker = self._makers.get(tensor.name)
            needs |= 0 if maker is None else self.needs[maker]
        return needs

    def _absorb(self, node: gs.Node) -> None:
        """Absorb one reader; NotFusable says why not."""
        if self._is_taken(node):
            raise NotFusable("taken", "", "belongs to the fusion of a later product")
        inputs = node.inputs[:MAX_INPUTS]
        columns = [value for tensor in inputs if (value := self.values.get(tensor.name)) is not None]
        op = qualified_op(node)
        if op == "SequenceAt":
            self._absorb_sequence_at(node)
        elif op == "Shape" or not columns:
            self._absorb_known(node)
        elif op in COLUMN_OPS:
            COLUMN_OPS[op](self, node)
        elif (lower := pointwise_row(node)) is not None:
            self._absorb_pointwise(node, columns, lower)
        else:
            raise NotFusable("unknown_op", "", f"{op} is not pointwise")

    def _absorb_known(self, node: gs.Node) -> None:
        """Shape arithmetic on the product's own shape belongs to the match when all that it feeds does."""
        if len(node.inputs) > MAX_INPUTS:
            raise NotFusable("unknown_shape_arithmetic", "", f"{node.op} of {len(node.inputs)} inputs")
        others = [tensor for tensor in node.inputs if tensor.name not in self.values]
        known = all(is_complete(self.graph.known_value(tensor)) for tensor in others)
        if not known or any(self.graph.known_value(tensor) is None for tensor in node.outputs):
            raise NotFusable("unknown_shape_arithmetic", "", f"{node.op} reads what is not known before the run")
        self._take(node, None)

    def _absorb_pointwise(self, node: gs.Node, columns: list[Columns], lower: Lower) -> None:
        if len(node.inputs) > MAX_INPUTS:
            raise NotFusable("too_many_operands", "", f"{node.op} of {len(node.inputs)} inputs")
        if len({value.length for value in columns}) != 1:
            raise NotFusable("columns_differ", "", "combines values with different numbers of columns")
        length = columns[0].length
        inputs = [self._argument(tensor, length) for tensor in node.inputs]
        self._check_keeps_shape(node)
        self._take(node, Columns(lower(self.epilogue, inputs, node.attrs), length))

    def _check_keeps_shape(self, node: gs.Node) -> None:
        number = self.graph.dtype(node.outputs[0].name)
        if number not in BY_ONNX:
            raise NotFusable("unsupported_dtype", "", f"makes ONNX element type {number}")
        shape = self.graph.shape(node.outputs[0].name)
        if shape is not None and len(shape) != len(self.rows) + 1:
            raise NotFusable("broadcasts_the_product", "", "an operand has more dimensions than the product")

    def _argument(self, tensor: gs.Tensor, length: int) -> Ref:
        """An input's expression: a value of the match, a number, or an operand; -1 for an input left out."""
        if tensor.is_empty():
            return -1
        value = self.values.get(tensor.name)
        if value is not None:
            return value.ref
        known = self.graph.known_value(tensor)
        if known is not None and known.size == 1 and known.ndim <= 1 and known.dtype != object:
            return self.epilogue.constant(float(known.reshape(()).item()))
        return self._operand(tensor, length)

    def _operand(self, tensor: gs.Tensor, length: int) -> Ref:
        name = str(tensor.name)
        shape = self.graph.shape(name)
        if self.graph.dtype(name) not in BY_ONNX:
            raise NotFusable("unsupported_dtype", "", f"reads {name!r} of ONNX element type {self.graph.dtype(name)}")
        if shape is None:
            raise NotFusable("unknown_broadcast", "", f"how {name!r} broadcasts over the product is not known")
        if len(shape) > len(self.rows) + 1:
            raise NotFusable("broadcasts_the_product", "", f"{name!r} has more dimensions than the product")
        varies, columns = self._varies(name, shape, length)
        self.operands[name] = Operand(name, varies, columns, len(shape))
        return self.epilogue.load(name, has_columns=columns > 1)

    def _varies(self, name: str, shape: tuple[Size, ...], length: int) -> tuple[tuple[bool, ...], int]:
        """Which dimensions of the product an operand has; every one must be provably 1 or the product's own size."""
        target = (*self.rows, length)
        padded = (1,) * (len(target) - len(shape)) + shape
        for own, full in zip(padded, target, strict=True):
            if own != 1 and (own is None or own != full):
                raise NotFusable("unknown_broadcast", "", f"{name!r} is not provably of the product's shape or 1")
        return tuple(own != 1 for own in padded), length if padded[-1] != 1 else 1

    def _check_column_axis(self, axis: int, verb: str) -> None:
        if axis not in (-1, len(self.rows)):
            raise NotFusable("not_the_last_axis", "", f"{verb} along an axis that is not the product's columns")

    def _single(self, node: gs.Node) -> Columns:
        value = self.values.get(node.inputs[0].name)
        if value is None:
            raise NotFusable("unknown_op", "", f"{node.op} of shape arithmetic")
        return value

    def _absorb_split(self, node: gs.Node) -> None:
        value = self._single(node)
        self._check_column_axis(node.attrs.get("axis", 0), "splits")
        self._take(node, *self._ranges(value, split_sizes(self.graph, node, value.length)))

    def _absorb_split_to_sequence(self, node: gs.Node) -> None:
        value = self._single(node)
        self._check_column_axis(node.attrs.get("axis", 0), "splits")
        ranges = self._ranges(value, sequence_sizes(self.graph, node, value.length))
        self._take(node, None)
        self._sequences[str(node.outputs[0].name)] = ranges

    def _absorb_sequence_at(self, node: gs.Node) -> None:
        position = self.graph.known_integers(node.inputs[1])
        ranges = self._sequences.get(node.inputs[0].name, [])
        if position is None or not -len(ranges) <= position[0] < len(ranges):
            raise NotFusable("bounds_not_constant", "", "which element of the sequence is not known before the run")
        self._take(node, ranges[position[0]])

    def _absorb_slice(self, node: gs.Node) -> None:
        value = self._single(node)
        starts, ends, axes, steps = slice_bounds(self.graph, node)
        self._check_column_axis(axes[0] if len(axes) == 1 else 0, "slices")
        if steps != [1]:
            raise NotFusable("strided_slice", "", f"slices with step {steps[0]}")
        start, stop, _ = slice(starts[0], ends[0]).indices(value.length)
        if stop <= start:
            raise NotFusable("empty_slice", "", "slices no column")
        self._take(node, self._range(value, start, stop))

    def _absorb_bias_split_gelu(self, node: gs.Node) -> None:
        """The left half of the biased columns times the gelu of the right half."""
        value = self._single(node)
        biased = self.epilogue.apply("add", value.ref, self._argument(node.inputs[1], value.length))
        half = value.length // 2
        first, second = self._ranges(Columns(biased, value.length), [half, half])
        gated = self.epilogue.apply("mul", first.ref, self.epilogue.apply("gelu", second.ref))
        self._take(node, Columns(gated, first.length))

    def _ranges(self, value: Columns, sizes: list[int]) -> list[Columns]:
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        if starts[-1] != value.length:
            raise NotFusable("invalid_model", "", f"splits {value.length} columns into {starts[-1]}")
        return [self._range(value, start, stop) for start, stop in pairwise(starts)]

    def _range(self, value: Columns, start: int, stop: int) -> Columns:
        return Columns(self.epilogue.moved(value.ref, start), stop - start)


COLUMN_OPS: dict[str, Callable[[Growth, gs.Node], None]] = {
    "Split": Growth._absorb_split,
    "Slice": Growth._absorb_slice,
    "SplitToSequence": Growth._absorb_split_to_sequence,
    "com.microsoft::BiasSplitGelu": Growth._absorb_bias_split_gelu,
}


def made_value(epilogue: EpilogueGraph, product: Product, operands: Mapping[str, Operand]) -> Ref:
    """What a product's node makes: the sums with the node's own factors, bias and activation."""
    ref = epilogue.acc(product.out)
    if product.alpha != 1.0:
        ref = epilogue.apply("mul", ref, epilogue.constant(product.alpha))
    if product.bias is not None and product.beta != 0.0:
        bias = epilogue.load(product.bias, has_columns=operands[product.bias].columns > 1)
        if product.beta != 1.0:
            bias = epilogue.apply("mul", bias, epilogue.constant(product.beta))
        ref = epilogue.apply("add", ref, bias)
    return ref if product.activation is None else product.activation(epilogue, ref)
