"""What a node reads beside a product: an expression for each input, from values, numbers, operands and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BOOL, BY_ONNX, FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.graph.constant_propagation import stored_value
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.graph.known_nodes import FIRST_SLICE_OF_INPUTS
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.value_types import element_text
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.match import Columns, Operand
from onnxfuse.patterns.operand_chain import BY_NUMBERS, Chain, before, chain_before
from onnxfuse.patterns.pointwise_table import CHANNELS
from onnxfuse.patterns.views import AxisKind, Dim, Piece, View, ViewAxis, extent, is_column

MASK_OPS = frozenset({"Cast", "Not"})  # that a kernel does to a mask as it reads it
MAX_MASK_NODES = 8  # of them, one after the other
PUTS_SIZES = frozenset({"Cast", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze"})
MAX_SIZE_TENSORS = 32  # between a shape and what it is put together of


@dataclass(frozen=True)
class Range:
    """Of equal ranges of a value's columns the one that an expression is asked for."""

    index: int
    count: int


class Arguments:
    """The inputs of pointwise nodes as expressions.

    Args:
        graph: that the nodes are of.
        epilogue: takes the expressions.
        values: what has grown so far, by name; None for what is no epilogue value.
        of_scores: they are what a softmax over the columns is of: an operand along columns that may be one or as many
            is taken to be as many, for one number more in all of a row changes nothing there.
        is_free: whether what a node makes of an operand may be done as the operand is read.

    Attributes:
        operands: what the expressions read, by name, or a longer one where a tensor is read in several ways.
        masks: by operand, the nodes that make it from a mask of type bool, which the kernel reads in its place.
        passed: by operand, the nodes that make it from what the kernel reads in its place otherwise.
        in_part: values of which some columns are still to be written; none of them is an operand.
        expanded: by operand, what an Expand makes it of and the value whose Shape it takes: broadcasting does the same.
        filled: by operand, the number that a ConstantOfShape fills that value's Shape with.
    """

    def __init__(
        self,
        graph: Graph,
        epilogue: EpilogueGraph,
        values: Mapping[str, Columns | None],
        of_scores: bool = False,
        is_free: Callable[[gs.Node], bool] = lambda node: False,
    ) -> None:
        self._graph = graph
        self._of_scores = of_scores
        self._epilogue = epilogue
        self._values = values
        self._is_free = is_free
        self.operands: dict[str, Operand] = {}
        self.masks: dict[str, tuple[gs.Node, ...]] = {}
        self.passed: dict[str, tuple[gs.Node, ...]] = {}
        self.expanded: dict[str, tuple[gs.Tensor, Columns]] = {}
        self.filled: dict[str, tuple[float, Columns]] = {}
        self.in_part: set[str] = set()

    def broadcast(self, node: gs.Node, view: View) -> View:
        """The value's dimensions with an axis of its own for each of size 1 along which an operand is longer."""
        dims = list(view)
        for tensor in node.inputs:
            shape = None if tensor.name in self._values or tensor.is_empty() else self._graph.shape(tensor.name)
            for place, size in enumerate(reversed(shape or ()), 1):
                if place <= len(dims) and size not in (None, 1) and extent(dims[-place]) == 1:
                    axis = ViewAxis(AxisKind.BROADCAST, (self._graph.index(node), len(dims) - place))
                    dims[-place] = (Piece(axis, size),)
        return tuple(dims)

    def of(self, node: gs.Node, value: Columns, columns: Range, inputs: Sequence[gs.Tensor]) -> list[Ref]:
        """The expressions of a node's inputs, or of what stands for them, for a range of the value's columns."""
        every = zip(inputs, self._of(node, value, inputs), strict=True)
        return [self._range(tensor, ref, value, columns) for tensor, ref in every]

    def _range(self, tensor: gs.Tensor, ref: Ref, value: Columns, columns: Range) -> Ref:
        """The expression of an input for a range, of that for all columns or, where it is put together, for the first.

        Raises:
            NotFusable: it is put together of more or fewer ranges.
        """
        own = self._values.get(tensor.name)
        if own is not None and own.rest:
            if len(own.refs) != columns.count:
                raise NotFusable("columns_differ", "", "combines columns that were put together of other ranges")
            return own.refs[columns.index]
        is_part = own is not None and own.length != value.length  # beside an operand with a number for each part
        if ref < 0 or columns.index == 0 or is_part:
            return ref
        return self._epilogue.moved(ref, columns.index * int(value.length) // columns.count)

    def _of(self, node: gs.Node, value: Columns, inputs: Sequence[gs.Tensor]) -> list[Ref]:
        channels = CHANNELS.get(qualified_op(node))
        if channels is None:
            return [self.argument(tensor, value) for tensor in inputs]
        beside = replace(value, view=value.view[channels : channels + 1])
        first, *vectors = inputs
        return [self.argument(first, value), *(self.argument(tensor, beside) for tensor in vectors)]

    def expands(self, node: gs.Node) -> bool:
        """Whether a node makes an operand as large as a value that has grown, as expand_as does, or casts such a mask.

        A fused node has no such value whose shape others could read; and beside the value nobody needs the Expand.
        """
        if qualified_op(node) == "ConstantOfShape":
            return self._fills(node)
        if qualified_op(node) != "Expand":
            return any(maker.inputs[0].name in self.expanded for maker in self._mask_makers(node.outputs[0]))
        tensor, shape = node.inputs
        value = self._shaped(shape)
        if value is None or tensor.name in self._values:
            return False
        self.expanded[str(node.outputs[0].name)] = tensor, value
        return True

    def _fills(self, node: gs.Node) -> bool:
        """Whether a node makes as many numbers as a value that has grown, as `zeros_like` does by TorchScript."""
        value, filled = self._shaped(node.inputs[0]), node.attrs.get("value")
        number = np.zeros(1) if filled is None else stored_value(filled)
        name = str(node.outputs[0].name)
        if value is None or number is None or self._graph.dtype(name) not in FLOATS_BY_ONNX:
            return False
        self.filled[name] = float(number.item()), value
        return True

    def _shaped(self, shape: gs.Tensor) -> Columns | None:
        """The value that has a shape: what a Shape is of, or what its sizes are put together of again, as Flax does."""
        known = self._graph.known_value(shape)
        sizes = None if known is None else (*known.ravel().tolist(),)
        queue = [shape]
        for read, maker in ((each, maker) for each in queue for maker in each.inputs):
            if qualified_op(maker) in PUTS_SIZES and len(queue) < MAX_SIZE_TENSORS:
                queue += maker.inputs
            if qualified_op(maker) == "Shape" and not maker.attrs.get("start", 0) and "end" not in maker.attrs:
                whole = maker.inputs[0].name
                is_all = sizes is not None and None not in sizes and sizes == self._graph.shape(whole)
                value = self._values.get(whole) if read is shape or is_all else None
                if value is not None:
                    return value
        return None

    def argument(self, tensor: gs.Tensor, beside: Columns) -> Ref:
        """An input's expression: a value of the match, a number, or an operand; -1 for an input left out."""
        filled, shaped = self.filled.get(tensor.name, (None, beside))
        tensor, shaped = self.expanded.get(tensor.name, (tensor, shaped))
        if shaped.view != beside.view:
            raise NotFusable("views_differ", "", f"{tensor.name!r} is expanded to another shape than that of the value")
        if filled is not None:
            return self._epilogue.constant(filled)
        if tensor.is_empty():
            return -1
        value = self._values.get(tensor.name)
        if value is not None:
            return value.ref
        number = self._number(tensor)
        if number is not None:
            return self._epilogue.constant(number)
        maker = self._maker_from_mask(tensor)
        return self._operand(tensor, beside) if maker is None else self._from_mask(maker, beside)

    def _number(self, tensor: gs.Tensor) -> float | None:
        """A scalar that the model fixes, unless a run may round it otherwise than a body, which cannot compute it."""
        known = self._graph.known_value(tensor)
        if known is None or known.size != 1 or known.ndim > 1 or known.dtype == object:
            return None
        if self._graph.opset < FIRST_SLICE_OF_INPUTS and self._graph.is_computed_in_16_bits(tensor):
            return None
        return float(known.reshape(()).item())

    def _maker_from_mask(self, tensor: gs.Tensor) -> gs.Node | None:
        """The Cast or Not that makes an operand from a mask of the same shape."""
        makers = list(islice(self._mask_makers(tensor), MAX_MASK_NODES + 1))
        return makers[0] if 0 < len(makers) <= MAX_MASK_NODES else None

    def _mask_makers(self, tensor: gs.Tensor) -> Iterator[gs.Node]:
        """Those between a mask and an operand, the last one first."""
        while len(tensor.inputs) == 1 and qualified_op(tensor.inputs[0]) in MASK_OPS:
            maker = tensor.inputs[0]
            mask, number = str(maker.inputs[0].name), self._graph.dtype(tensor.name)
            alike = self._graph.shape(mask) == self._graph.shape(tensor.name)
            if not alike or self._graph.dtype(mask) != BOOL.onnx or number not in BY_ONNX:
                return
            yield maker
            tensor = maker.inputs[0]

    def _from_mask(self, maker: gs.Node, beside: Columns) -> Ref:
        """What a Cast or a Not makes of a mask's zeros and ones; others may need the node as well."""
        mask = maker.inputs[0]
        ref = self.argument(mask, beside)
        if maker.outputs[0].name not in self._values:
            self.masks[maker.outputs[0].name] = (*self.masks.get(mask.name, ()), maker)
        return ref if maker.op == "Cast" else self._epilogue.apply("sub", self._epilogue.constant(1.0), ref)

    def bias(self, tensor: gs.Tensor, beside: Columns) -> None:
        """Take in what a product's own node adds.

        Raises:
            NotFusable: as for any operand, or it is read in another way as well.
        """
        self._operand(tensor, beside, is_own=True)

    def _operand(self, tensor: gs.Tensor, beside: Columns, is_own: bool = False) -> Ref:
        """The expression of a tensor that the epilogue reads, along the dimensions of the value beside it.

        Raises:
            NotFusable: it does not provably broadcast to them, or is of a type that no kernel reads.
        """
        name = str(tensor.name)
        operand = Operand(name, self._beside(name, self._shape_of(name, beside), beside.view), beside.view)
        chained = None if is_own or self._of_scores else self._chain(tensor, operand)
        if chained is not None:
            return self._computed(tensor, *chained, beside)
        if self._key(operand) != name and (is_own or self._of_scores):
            raise NotFusable("views_differ", "", f"reads {name!r} in two ways")
        return self._load(operand, beside)

    def _shape_of(self, name: str, beside: Columns) -> tuple[Size, ...]:
        if name in self.in_part:
            raise NotFusable("unknown_op", "", f"reads {name!r}, of which some columns are not written yet")
        number, shape = self._graph.dtype(name), self._graph.shape(name)
        if number not in BY_ONNX:
            raise NotFusable("unsupported_dtype", "", f"reads {name!r}, which is {element_text(number)}")
        if shape is None:
            raise NotFusable("unknown_broadcast", "", f"how {name!r} broadcasts over the product is not known")
        if len(shape) > len(beside.view):
            raise NotFusable("broadcasts_the_product", "", f"{name!r} has more dimensions than the product")
        return shape

    def _load(self, operand: Operand, beside: Columns) -> Ref:
        key = self._key(operand)
        self.operands[key] = operand
        return self._epilogue.load(key, beside.length if operand.has_columns else None)

    def _key(self, operand: Operand) -> str:
        """What a tensor is called in expressions: products of one input may read it in ways of their own."""
        ways = (operand.name + "\0" * ways for ways in count())
        return next(key for key in ways if operand.is_read_like(self.operands.get(key, operand)))

    def _chain(self, tensor: gs.Tensor, operand: Operand) -> tuple[Chain, Operand] | None:
        """What makes a repeated operand, where a kernel can do it as it reads what it is made of; and that."""
        if not operand.is_repeated:
            return None
        chain = chain_before(self._graph, tensor, lambda each: self._number(each) is not None, self._may_pass)
        if chain is None or (chain.window is not None and not operand.has_all_columns):
            return None
        first = before(self._graph, chain, operand)
        return (chain, first) if self._key(first) == first.name else None

    def _may_pass(self, node: gs.Node) -> bool:
        return self._is_free(node) and all(tensor.name not in self._values for tensor in (*node.inputs, *node.outputs))

    def _computed(self, tensor: gs.Tensor, chain: Chain, first: Operand, beside: Columns) -> Ref:
        """The expression of what a chain makes of its first value."""
        self.passed[tensor.name] = chain.nodes
        start = chain.window.start if chain.window else 0
        ref = self._epilogue.moved(self._load(first, beside), start)
        for node in chain.by_numbers:
            numbers = map(self._number, node.inputs)
            inputs = [ref if number is None else self._epilogue.constant(number) for number in numbers]
            dtype = FLOATS_BY_ONNX[self._graph.dtype(node.outputs[0].name) or 0]
            ref = self._epilogue.stored(self._epilogue.apply(BY_NUMBERS[node.op], *inputs), dtype)
        return ref

    def _beside(self, name: str, shape: tuple[Size, ...], view: View) -> View:
        """An operand's dimensions; every one must be provably of size 1 or that of the value's own."""
        own = view[len(view) - len(shape) :]
        if any(size != 1 and extent(dim) == 1 for size, dim in zip(shape, own, strict=True)):
            raise NotFusable("broadcasts_the_product", "", f"{name!r} is longer than the product along a dimension")
        if not all(self._is_alike(size, dim) for size, dim in zip(shape, own, strict=True)):
            raise NotFusable("unknown_broadcast", "", f"{name!r} is not provably of the product's shape or 1")
        return tuple(() if self._is_one(size) else dim for size, dim in zip(shape, own, strict=True))

    def _is_one(self, size: Size) -> bool:
        """An attention of no rows or keys is an error in any case."""
        return size == 1 or (self._of_scores and symbolic.is_one_or_none(size))

    def _is_alike(self, size: Size, dim: Dim) -> bool:
        """Whether an operand's dimension is of size 1 or as long as a value's."""
        is_open = size is None or isinstance(size, str)
        are_keys = self._of_scores and is_open and any(map(is_column, dim))
        is_bounded = symbolic.is_bounded(size, extent(dim)) or symbolic.is_bounded(extent(dim), size)
        return size == extent(dim) or self._is_one(size) or is_bounded or are_keys
