"""Grow from products of one input over parts and pointwise nodes, in graph order.

Growth follows readers and absorbs what a table knows: pointwise ops, views, what takes columns apart, and the shape
arithmetic of a computed chunk. It stops at everything else, and remembers why.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.value_types import element_text
from onnxfuse.ir.fusion import MAX_STEPS
from onnxfuse.limits import MAX_LOADS
from onnxfuse.patterns.arguments import Arguments, Range
from onnxfuse.patterns.choices import LARGER, choice, compared_and_chosen, comparison_before, is_chosen_by
from onnxfuse.patterns.column_ranges import TAKES_APART, InTurn, NoColumns, concatenated, split_to_sequence, whole
from onnxfuse.patterns.epilogue_graph import ACC, LOAD, EpilogueGraph, Ref
from onnxfuse.patterns.fallback_shape import fallback_shape
from onnxfuse.patterns.match import Columns, Operand
from onnxfuse.patterns.matrices import of_all_parts
from onnxfuse.patterns.pointwise_table import Lower, pointwise_row
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.scattered import makers_of_blank, together, turn_of
from onnxfuse.patterns.softplus_guard import softplus_of, threshold_of
from onnxfuse.patterns.view_ops import VIEWS, viewed
from onnxfuse.patterns.views import common_view, extent

MAX_NODES = 256  # of one product; no epilogue is this long, and the matcher stays linear in the model's size
MAX_INPUTS = 64  # of a node; no shape and no sum has more
ANGULAR = ("Sin", "Cos")


@dataclass(frozen=True)
class Stop:
    """Why growth ended at a node, and the absorbed nodes that it would have needed."""

    refusal: NotFusable
    needs: Region


class GrownRegion:
    """What has been absorbed: nodes, the values that they make, and why growth stopped where it did.

    Attributes:
        products: the anchors; they have one lhs and equally many rows.
        nodes: absorbed nodes, every one after those that it reads.
        needs: for each node, itself and all absorbed nodes that it needs, by position in `nodes`.
        values: what the nodes make; None for what is no epilogue value: shape arithmetic and sequences.
        shapes: by node, the shape that a Reshape reads from outside.
        refused: products that cannot begin it, and why: what grew has none of them.
        arguments: what the nodes read beside the products.
        turns: by product, how many parts growth stopped at whose columns take turns, and of how many columns each is.
        of_scores: whether what grows are the scores of a softmax.
    """

    def __init__(
        self,
        graph: Graph,
        products: tuple[Product, ...],
        is_taken: Callable[[gs.Node], bool],
        rounds: bool = False,
        of_scores: bool = False,
        shift: tuple[gs.Node, ...] = (),
        is_passed: Callable[[gs.Node], bool] | None = None,
    ) -> None:
        self.graph = graph
        self.products = products
        self.epilogue = EpilogueGraph(rounds)
        self.values: dict[str, Columns | None] = {}
        self.nodes: list[gs.Node] = []
        self.needs: list[Region] = []
        self.stops: list[Stop] = []
        self.refused: list[tuple[Product, NotFusable]] = []
        self.shapes: dict[int, FallbackShape] = {}
        self.arguments = Arguments(graph, self.epilogue, self.values, of_scores, self._may_pass)
        self.turns: dict[str, tuple[int, int]] = {}
        self.of_scores = of_scores
        self._is_taken = is_taken
        self._is_passed = is_passed
        self._shift = shift  # nodes before a softmax that change no probability, the last of a value and one beside it
        self._sequences: dict[str, list[Columns]] = {}
        self._scattered: dict[str, dict[int, Columns]] = {}  # by value, what is written of its turns so far
        self._empty: set[str] = set()  # values without a column
        self._makers: dict[str, int] = {}
        self._queue: list[int] = []
        self._reached: dict[int, Region] = {}  # queued nodes, and the absorbed ones that led to each
        self._run()

    def _run(self) -> None:
        self._start()
        while self._queue and len(self.nodes) < MAX_NODES * len(self.products):
            index = heapq.heappop(self._queue)
            node = self.graph.nodes[index]
            try:
                self._absorb(node)
            except NotFusable as stop:
                refusal = NotFusable(stop.reason, node_label(node), stop.detail)
                self.stops.append(Stop(refusal, self._reached[index]))
                self._note_turns(node, stop)
            else:
                self._offer(len(self.nodes) - 1)

    def _note_turns(self, node: gs.Node, stop: NotFusable) -> None:
        """Remember the products of which a node takes one of several parts whose columns take turns."""
        if isinstance(stop, InTurn):
            value = self._single(node)
            made = {leaf.operand for leaf in self.epilogue.leaves(ACC, (value.ref,))}
            whole = (product.out for product in self.products if product.out in made and product.n == value.length)
            self.turns |= dict.fromkeys(whole, (stop.parts, stop.run))

    def _start(self) -> None:
        """The products, and the readers of those that can be taken."""
        for product in self.products:
            try:
                self._absorb_product(product)
            except NotFusable as stop:
                self.refused.append((product, NotFusable(stop.reason, product.label, stop.detail)))
            else:
                self._offer(len(self.nodes) - 1)

    def _offer(self, position: int) -> None:
        """Queue the readers of an absorbed node, each once."""
        for tensor in self.made_by(self.nodes[position]):
            for reader in tensor.outputs:
                index = self.graph.index(reader)
                if index not in self._reached:
                    heapq.heappush(self._queue, index)
                self._reached[index] = self._reached.get(index, Region()) | self.needs[position]

    def _absorb_product(self, product: Product) -> None:
        value = Columns(self.epilogue.acc(product.out), product.n, product.out_view)
        if product.bias is not None and product.beta != 0.0:
            self.arguments.bias(self.graph.tensor(product.bias), replace(value, view=product.biased))
        ref = made_value(self.epilogue, product, self.arguments.operands)
        for op, factor in product.factors:  # of a product without a bias
            ref = self.epilogue.apply(op, ref, self.arguments.argument(factor, value))
        self._take_made(product.node, {product.out: replace(value, ref=ref)})

    def _take(self, node: gs.Node, *values: Columns | None) -> None:
        self._take_made(node, {tensor.name: value for tensor, value in zip(node.outputs, values, strict=True)})

    def _take_made(self, node: gs.Node, made: Mapping[str, Columns | None]) -> None:
        """Take in a node with what it makes; what else it makes is none of the region's."""
        index = len(self.nodes)
        self.needs.append(self._needs_of(node) | Region.of((index,)))
        self.nodes.append(node)
        for name, value in made.items():
            self.values[name] = value
            self._makers[name] = index

    def _take_view(self, node: gs.Node, value: Columns | None, shape: FallbackShape | None) -> None:
        if shape is not None:
            self.shapes[self.graph.index(node)] = shape
        self._take(node, value)

    def shapes_of(self, products: tuple[Product, ...], nodes: Iterable[gs.Node]) -> dict[int, FallbackShape]:
        """By node, the shapes that a match of these products and nodes reads from outside."""
        own = {index: self.shapes[index] for index in map(self.graph.index, nodes) if index in self.shapes}
        views = (view for product in products for view in product.views)
        return own | {self.graph.index(view.node): view.shape for view in views if view.shape is not None}

    def _needs_of(self, node: gs.Node) -> Region:
        inputs = node.inputs[: 1 if self.graph.index(node) in self.shapes else None]
        return self.needed_by(self._makers[tensor.name] for tensor in inputs if tensor.name in self._makers)

    def values_of(self, node: gs.Node) -> list[Columns | None]:
        """What an absorbed node makes."""
        return [self.values[tensor.name] for tensor in self.made_by(node)]

    def made_by(self, node: gs.Node) -> list[gs.Tensor]:
        """The outputs of an absorbed node: of one that stands for a value, as rows that turn, that value alone."""
        return [tensor for tensor in node.outputs if tensor.name in self.values]

    def needed_by(self, positions: Iterable[int]) -> Region:
        """Some absorbed nodes, and all that they need."""
        return Region.union(self.needs[position] for position in positions)

    def those(self, holds: Callable[[gs.Node], bool]) -> Region:
        """The absorbed nodes for which something holds."""
        return Region.of(position for position, node in enumerate(self.nodes) if holds(node))

    def indices(self, positions: Iterable[int]) -> Iterator[int]:
        """The nodes at some positions as indices in the graph."""
        return (self.graph.index(self.nodes[position]) for position in positions)

    def _absorb(self, node: gs.Node) -> None:
        """Absorb one reader; NotFusable says why not."""
        if self._is_taken(node):
            raise NotFusable("taken", "", "what follows belongs to another site")
        columns = self._grown(node.inputs[:MAX_INPUTS])
        op = qualified_op(node)
        if any(node is each for each in self._shift):
            self._take(node, columns[0] if node is self._shift[-1] else None)
        elif op == "SequenceAt":
            self._absorb_sequence_at(node)
        elif op in ("Greater", "Where") and self._is_softplus(node):
            self._absorb_softplus(node)
        elif self._says_which(node, bool(columns)):
            self._take(node, None)
        elif (comparison := comparison_before(node)) is not None and comparison.outputs[0].name in self.values:
            self._absorb_choice(node, comparison)
        elif not columns and (self.arguments.expands(node) or self._hands_on(node)):
            self._take(node, None)
        elif op == "Shape" or not columns or self._reads_type_alone(node):
            self._absorb_known(node)
        elif op in COLUMN_OPS:
            COLUMN_OPS[op](self, node)
        elif op == "Concat":
            self._absorb_concat(node)
        elif op == "ScatterND":
            self._absorb_scatter(node)
        elif op in VIEWS:
            self._absorb_view(node)
        elif (lower := pointwise_row(node)) is not None:
            self._absorb_pointwise(node, node.inputs, lower)
        else:
            raise NotFusable("unknown_op", "", f"{op} is not pointwise")

    def _may_pass(self, node: gs.Node) -> bool:
        """Whether the kernel may do the work of a node before an operand."""
        return self._is_passed is not None and (self._is_passed(node) or not self._is_taken(node))

    def _is_softplus(self, node: gs.Node) -> bool:
        """Whether a node chooses between a softplus and what that is of, where they are one number, or says where."""
        where = threshold_of(self.graph, node) or node
        softplus = None if self.epilogue.rounds else softplus_of(self.graph, where)
        return softplus is not None and self.values.get(softplus.name) is not None

    def _says_which(self, node: gs.Node, is_of_values: bool) -> bool:
        """Whether a node says nothing but which of two values is taken: by a comparison, or where one is no number."""
        if qualified_op(node) in ("Equal", "Not"):
            return not self.epilogue.rounds and threshold_of(self.graph, node) is not None
        is_compared = qualified_op(node) in LARGER and is_of_values and self._may_choose
        return is_compared and is_chosen_by(self.graph, node)

    def _absorb_softplus(self, node: gs.Node) -> None:
        softplus = softplus_of(self.graph, node)
        self._take(node, None if softplus is None else self.values[softplus.name])

    @property
    def _may_choose(self) -> bool:
        """Whether a value may say which of two functions of it is taken: a choice between scores is a mask's."""
        return not self.epilogue.rounds and not self.of_scores

    def _absorb_choice(self, node: gs.Node, comparison: gs.Node) -> None:
        """One of two functions of a value, by whether that is larger than a number."""
        inputs = compared_and_chosen(comparison, node)
        if any(value.rest for value in self._grown(inputs)):
            raise NotFusable("unknown_op", "", "chooses between values that were put together")
        self._absorb_pointwise(node, inputs, choice)

    def _reads_type_alone(self, node: gs.Node) -> bool:
        """Whether a CastLike makes another value alike, as exporters write the numbers beside a product."""
        return qualified_op(node) == "CastLike" and self.values.get(node.inputs[0].name) is None

    def _absorb_known(self, node: gs.Node) -> None:
        """Shape arithmetic on the product's own shape belongs to the match when all that it feeds does."""
        if len(node.inputs) > MAX_INPUTS:
            raise NotFusable("unknown_shape_arithmetic", "", f"{node.op} of {len(node.inputs)} inputs")
        others = [tensor for tensor in node.inputs if tensor.name not in self.values]
        known = all(is_complete(self.graph.known_value(tensor)) for tensor in others)
        if not known or any(self.graph.known_value(tensor) is None for tensor in node.outputs):
            raise NotFusable("unknown_shape_arithmetic", "", f"{node.op} reads what is not known before the run")
        if any(map(self.graph.is_computed_in_16_bits, node.outputs)):
            raise NotFusable(
                "unknown_shape_arithmetic", "", f"{node.op} is computed in 16 bits, which a run may not round"
            )
        self._take(node, *[None] * len(node.outputs))

    def _absorb_view(self, node: gs.Node) -> None:
        value = self._single(node)
        view = viewed(self.graph, node, value.view)
        inside = all(tensor.name in self.values for tensor in node.inputs)
        shape = None if inside else fallback_shape(self.graph, node, value.view, view, self.products[0].base)
        self._take_view(node, replace(value, view=view), shape)

    def _check_pointwise(self, node: gs.Node, columns: list[Columns]) -> None:
        if len(node.inputs) > MAX_INPUTS:
            raise NotFusable("too_many_operands", "", f"{node.op} of {len(node.inputs)} inputs")
        if len({value.length for value in columns}) != 1:
            raise NotFusable("columns_differ", "", "combines values with different numbers of columns")
        if len(node.outputs) != 1:
            raise NotFusable("unknown_op", "", f"{node.op} with {len(node.outputs)} outputs is not pointwise")
        if node.op in ANGULAR and any(extent(product.k) == 1 for product in self.products):
            raise NotFusable("outer_product", "", "k is 1: angles of positions, in which nothing is summed")

    def _grown(self, tensors: Iterable[gs.Tensor]) -> list[Columns]:
        """Those of some tensors that are values."""
        return [value for tensor in tensors if (value := self.values.get(tensor.name)) is not None]

    def _absorb_pointwise(self, node: gs.Node, reads: Sequence[gs.Tensor], lower: Lower) -> None:
        """What a node makes of some tensors, its inputs or what stands for them, element by element."""
        columns = self._grown(reads)
        self._check_pointwise(node, columns)
        part = replace(columns[0], view=common_view([value.view for value in columns]))
        ranges = max(len(value.refs) for value in columns)
        value, ranges = self._of_all_parts(node, part) or (replace(part, rest=()), ranges)
        value = replace(value, view=self.arguments.broadcast(node, value.view))
        inputs = [self.arguments.of(node, value, Range(index, ranges), reads) for index in range(ranges)]
        self._check_keeps_shape(node, len(value.view))
        first, *rest = (self._stored(node, lower(self.epilogue, each, node.attrs)) for each in inputs)
        self._take(node, replace(value, ref=first, rest=tuple(rest)))

    def _of_all_parts(self, node: gs.Node, part: Columns) -> tuple[Columns, int] | None:
        """The columns that a node makes of one part of them, and of how many parts they are."""
        for product in self.products:
            view = of_all_parts(self.graph, node, part, product)
            if view is not None and {leaf.operand for leaf in self.epilogue.leaves(ACC, (part.ref,))} == {product.out}:
                return replace(part, length=product.n, view=view), product.turns
        return None

    def _absorb_concat(self, node: gs.Node) -> None:
        """Ranges of a product's columns, put together again."""
        values = [self.values.get(tensor.name) for tensor in node.inputs if tensor.name not in self._empty]
        known = [value for value in values if value is not None]
        if len(known) == len(values) == 1 < len(node.inputs):
            self._take(node, known[0])
            return
        value = concatenated(known, int(node.attrs.get("axis", 0)))
        self._check_whole(value)
        if len(known) < len(values):
            raise NotFusable("unknown_op", "", "puts together what are not all columns of one product")
        self._take(node, value)

    def _hands_on(self, node: gs.Node) -> bool:
        """Whether a node hands on what is written in part."""
        written = self._scattered.get(node.inputs[0].name) if qualified_op(node) == "Identity" else None
        if written is not None:
            self._note_part(node, written)
        return written is not None

    def _note_part(self, node: gs.Node, written: dict[int, Columns]) -> None:
        self._scattered[str(node.outputs[0].name)] = written
        self.arguments.in_part.add(str(node.outputs[0].name))

    def _absorb_scatter(self, node: gs.Node) -> None:
        """Columns that are written in turn, of one product; the last turn makes them a value."""
        data, _, updates = node.inputs
        value = self.values.get(updates.name)
        if value is None:
            raise NotFusable("unknown_op", "", "scatters another value")
        turn, turns = turn_of(self.graph, node, value)
        if data.name not in self._scattered:
            self.arguments.passed[data.name] = makers_of_blank(self.graph, data)
        written = self._scattered.get(data.name, {}) | {turn: value}
        whole = together(written, turns)
        if whole is not None:
            self._check_whole(whole)
        else:
            self._note_part(node, written)
        self._take(node, whole)

    def _check_whole(self, value: Columns) -> None:
        """What is put together has all columns of one product.

        Raises:
            NotFusable: it has not.
        """
        made = {leaf.operand for leaf in self.epilogue.leaves(ACC, value.refs)}
        if not any({product.out} == made and product.n == value.length for product in self.products):
            raise NotFusable("unknown_op", "", "puts together what are not all columns of one product")

    def _check_fits(self, ref: Ref) -> None:
        """No kernel makes what needs more than a kernel takes, nor anything after it."""
        steps, loads = self.epilogue.count_steps((ref,)), len(self.epilogue.leaves(LOAD, (ref,)))
        if steps > MAX_STEPS:
            raise NotFusable("too_many_steps", "", f"{steps} steps; a kernel takes {MAX_STEPS}")
        if loads > MAX_LOADS:
            raise NotFusable("too_many_operands", "", f"{loads} operands; a kernel takes {MAX_LOADS}")

    def _stored(self, node: gs.Node, ref: Ref) -> Ref:
        self._check_fits(ref)
        return self.epilogue.stored(ref, FLOATS_BY_ONNX[self.graph.dtype(node.outputs[0].name) or 0])

    def _check_keeps_shape(self, node: gs.Node, rank: int) -> None:
        number = self.graph.dtype(node.outputs[0].name)
        if number not in FLOATS_BY_ONNX:
            reason = "cast_to_non_float" if node.op == "Cast" else "unsupported_dtype"
            raise NotFusable(reason, "", f"makes {element_text(number)}")
        shape = self.graph.shape(node.outputs[0].name)
        if shape is not None and len(shape) != rank:
            raise NotFusable("broadcasts_the_product", "", "an operand has more dimensions than the product")

    def _single(self, node: gs.Node) -> Columns:
        value = self.values.get(node.inputs[0].name)
        if value is None:
            raise NotFusable("unknown_op", "", f"{node.op} of shape arithmetic")
        return value

    def _absorb_ranges(self, node: gs.Node) -> None:
        try:
            ranges = TAKES_APART[node.op](self.graph, self.epilogue, node, self._single(node))
        except NoColumns:
            readers = node.outputs[0].outputs
            if not readers or any(reader.op != "Concat" for reader in readers):
                raise NotFusable("empty_slice", "", "slices no column") from None
            self._empty.add(str(node.outputs[0].name))
            self._take(node, None)
        else:
            self._take(node, *ranges)

    def _absorb_split_to_sequence(self, node: gs.Node) -> None:
        ranges = split_to_sequence(self.graph, self.epilogue, node, self._single(node))
        self._take(node, None)
        self._sequences[str(node.outputs[0].name)] = ranges

    def _absorb_sequence_at(self, node: gs.Node) -> None:
        position = self.graph.known_integers(node.inputs[1])
        ranges = self._sequences.get(node.inputs[0].name, [])
        if position is None or not -len(ranges) <= position[0] < len(ranges):
            raise NotFusable("bounds_not_constant", "", "which element of the sequence is not known before the run")
        self._take(node, ranges[position[0]])

    def _absorb_bias_split_gelu(self, node: gs.Node) -> None:
        """The left half of the biased columns times the gelu of the right half."""
        value = self._single(node)
        biased = self.epilogue.apply("add", value.ref, self.arguments.argument(node.inputs[1], value))
        both = whole(self.epilogue, replace(value, ref=biased), -1, "splits")
        first, second = both.ranges([both.length // 2] * 2)
        gated = self.epilogue.apply("mul", first.ref, self.epilogue.apply("gelu", second.ref))
        self._take(node, replace(first, ref=self._stored(node, gated)))

    def _absorb_swiglu(self, node: gs.Node) -> None:
        """A gate and an up, or both in one tensor, the gate's columns first."""
        lower = pointwise_row(node)
        assert lower is not None, "SwiGLU has a row"
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            self._absorb_pointwise(node, node.inputs, lower)
        else:
            both = whole(self.epilogue, self._single(node), -1, "splits")
            gate, up = both.ranges([both.length // 2] * 2)
            made = lower(self.epilogue, [gate.ref, up.ref], node.attrs)
            self._take(node, replace(gate, ref=self._stored(node, made)))


COLUMN_OPS: dict[str, Callable[[GrownRegion, gs.Node], None]] = {
    **dict.fromkeys(TAKES_APART, GrownRegion._absorb_ranges),
    "SplitToSequence": GrownRegion._absorb_split_to_sequence,
    "com.microsoft::BiasSplitGelu": GrownRegion._absorb_bias_split_gelu,
    "com.microsoft::SwiGLU": GrownRegion._absorb_swiglu,
}


def made_value(epilogue: EpilogueGraph, product: Product, operands: Mapping[str, Operand]) -> Ref:
    """What a product's node makes and stores: the sums with the node's own factors, bias and activation."""
    ref = epilogue.acc(product.out)
    if product.alpha != 1.0:
        ref = epilogue.apply("mul", ref, epilogue.constant(product.alpha))
    if product.bias is not None and product.beta != 0.0:
        bias = epilogue.load(product.bias, product.n if operands[product.bias].has_columns else None)
        if product.beta != 1.0:
            bias = epilogue.apply("mul", bias, epilogue.constant(product.beta))
        ref = epilogue.apply("add", ref, bias)
    if product.activation is not None:
        ref = product.activation(epilogue, ref)
    return epilogue.stored(ref, product.dtype)
