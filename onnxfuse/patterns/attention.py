"""Attentions: a product, pointwise nodes, a softmax over the last axis, and a product of that.

Both products grow as any other does: the first as far as the softmax, the second as far as a kernel without operands of
its own computes. What somebody else reads between is a reason, and no output: no kernel makes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxfuse.errors import NotFusable
from onnxfuse.graph.fallback_body import OWN, FallbackShape
from onnxfuse.graph.graph import Graph, element_readers, node_label
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.graph.value_types import element_text
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Fusion
from onnxfuse.ir.join import join
from onnxfuse.ir.simplify import simplify
from onnxfuse.patterns.build_fusion import lower
from onnxfuse.patterns.diagonal import diagonal_of
from onnxfuse.patterns.epilogue_graph import LOAD
from onnxfuse.patterns.expanded_operands import with_expanded_operands
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.operand_views import COMPUTED_VIEWS, SCALES
from onnxfuse.patterns.partition import Partition
from onnxfuse.patterns.pointwise_table import pointwise_row
from onnxfuse.patterns.probability_guard import NUMBERS, guard_of, masked_again
from onnxfuse.patterns.product import Product, is_anchor, read_product
from onnxfuse.patterns.region_growth import GrownRegion
from onnxfuse.patterns.row_shift import shift_of
from onnxfuse.patterns.softmax_forms import Softmax, softmax_of
from onnxfuse.patterns.told_shapes import told_of_views, told_shape
from onnxfuse.patterns.view_ops import VIEWS
from onnxfuse.patterns.views import Dim, ends_in_columns

MAX_BETWEEN = 32  # nodes that are looked at between a product and a softmax; no score has more
NO_MAXIMUM = "its exponentials are of scores from which no maximum of their row is subtracted"
UNROUNDED = "it is written in several nodes, between which the kernel would not round as they do"
CUT = "a part of its probabilities is multiplied: what stands beside the keys' scores, as a sink, no kernel knows"
CHANGED = "{} makes other numbers of its probabilities in front of the product of them, which no kernel does"
CHANGING = frozenset({"Add", "Div", "Mul", "Sub", "Where"})
MAX_BEHIND = 8  # steps from a softmax to the product of it
Lowered = tuple[Match, Fusion]
LAST_AXIS_OPSET = 13  # before, Softmax is over all dimensions from its axis on
ONE_KEY = "there is one key, of which every probability is 1"
VALUES = 2  # their place among a fused node's inputs, behind the query and the keys


class OtherScores(NotFusable):
    """What a product makes is no score of a softmax but part of one, as a bias is."""

    def __init__(self, softmax: gs.Node) -> None:
        detail = "the last axis of the scores is not the keys"
        super().__init__("no_attention_kernel", node_label(softmax), detail)


@dataclass(frozen=True)
class Candidate:
    """A softmax between two products.

    Attributes:
        products: that may make the scores, the nearest first.
        softmax: over rows.
        behind: the nodes between it and the second product.
        second: that product.
        turned: whether the probabilities are its second input, as channels by tokens are multiplied by them.
        guarded: whether rows of NaN become 0 among them.
        masked: whether the scores under a mask are to be minus infinity, where the model has the lowest number.
        refusal: why nothing fuses, if that is clear already.
    """

    products: tuple[gs.Node, ...]
    softmax: Softmax
    behind: tuple[gs.Node, ...]
    second: gs.Node
    guarded: bool
    masked: bool = False
    refusal: NotFusable | None = None
    turned: bool = False


def candidates(graph: Graph) -> Iterator[Candidate]:
    """Every softmax of a scope that a product reads and a product feeds, the last one first."""
    for softmax in filter(None, (softmax_of(graph, node) for node in reversed(graph.nodes))):
        behind = _behind(graph, softmax)
        products = tuple(_products_before(graph, softmax)) if behind is not None else ()
        if behind is not None and products:
            yield replace(behind, products=products)


def _behind(graph: Graph, softmax: Softmax) -> Candidate | None:
    """What follows a softmax as far as a product of it; None where there is none."""
    value, nodes, guarded, masked = softmax.last.outputs[0], list[gs.Node](), False, False
    refusal: NotFusable | None = None
    for _ in range(MAX_BEHIND):
        guard, passed = guard_of(graph, value) or masked_again(graph, softmax.scores, value), _reader(graph, value)
        if guard is not None and (guard.is_alone or passed is None):
            refusal = refusal or (None if guard.is_alone else _is_read_beside(softmax.last, value))
            value, guarded, masked = guard.value, guarded or guard.clears, masked or guard.masks
            nodes += guard.nodes
            continue
        if passed is None:
            passed, why = _other_reader(graph, value)
            refusal = refusal or _no_kernel(softmax.last, why)
        if passed is None:
            return None
        if element_readers(value) != [passed] or graph.is_escaping(value.name):
            refusal = refusal or _is_read_beside(softmax.last, value)
        if is_anchor(graph, passed):
            turned = passed.inputs[0] is not value
            return Candidate((), softmax, tuple(nodes), passed, guarded, masked, refusal, turned)
        value = passed.outputs[0]
        nodes.append(passed)
    return None


def _reader(graph: Graph, value: gs.Tensor) -> gs.Node | None:
    """The product of a probability, or a node that hands it on to one: a Cast, a view."""
    readers = element_readers(value)
    second = next((reader for reader in readers if _multiplies(graph, reader, value)), None)
    handed = (reader for reader in readers if qualified_op(reader) in ("Cast", "Identity", *VIEWS))
    return second or next(handed, None)


def _other_reader(graph: Graph, value: gs.Tensor) -> tuple[gs.Node | None, str]:
    """What else may lead from probabilities to a product, and why no kernel is an attention with it."""
    for reader in value.outputs:
        if qualified_op(reader) == "Slice":
            return reader, CUT
        if qualified_op(reader) in CHANGING and graph.shape(reader.outputs[0].name) == graph.shape(value.name):
            return reader, CHANGED.format(node_label(reader))
    return None, ""


def _is_read_beside(softmax: gs.Node, value: gs.Tensor) -> NotFusable:
    detail = f"{value.name!r} is read by others than the product of it, or is an output of the graph"
    return NotFusable("probability_is_read", node_label(softmax), detail)


def _multiplies(graph: Graph, node: gs.Node, value: gs.Tensor) -> bool:
    return is_anchor(graph, node) and node.op != "Conv" and any(factor is value for factor in node.inputs[:2])


def _products_before(graph: Graph, softmax: Softmax) -> Iterator[gs.Node]:
    """The products that pointwise nodes lead to a softmax from."""
    queue, seen = [softmax.scores], set[int]()
    for tensor in queue:
        for maker in tensor.inputs:
            if graph.index(maker) in seen or len(seen) >= MAX_BETWEEN:
                continue
            seen.add(graph.index(maker))
            if is_anchor(graph, maker):
                yield maker
            elif pointwise_row(maker) is not None or qualified_op(maker) in (*VIEWS, "Concat"):
                queue += maker.inputs


@dataclass(frozen=True)
class Attentions:
    """Makes attentions of candidates.

    Attributes:
        graph: the scope.
        points: who owns its nodes.
        rounds: whether fusions round every intermediate as the model does.
    """

    graph: Graph
    points: InsertionPoints
    rounds: bool

    def matches(self, candidate: Candidate, product: gs.Node) -> Iterator[tuple[Match, Attention]]:
        """The attentions of a softmax and the product that makes its scores, that with the furthest result first.

        Raises:
            NotFusable: what keeps it from being one fusion.
        """
        if candidate.refusal is not None:
            raise candidate.refusal
        if candidate.softmax.is_spelled_out and not shift_of(self.graph, candidate.softmax.scores):
            raise _no_kernel(candidate.softmax.first, NO_MAXIMUM)
        if self.rounds and len(candidate.softmax.nodes) > 1:
            raise _no_kernel(candidate.softmax.first, UNROUNDED)
        _check_axis(self.graph, candidate.softmax)
        _check_types(self.graph, candidate)
        (first, scores), seconds = self._products(candidate, product)
        ends: list[Lowered] = []
        for end in seconds:
            ends.append(end)
            yield self._attention(candidate, (first, scores), end)
        for expanded in with_expanded_operands(self.graph, first):
            for end in ends:
                yield self._attention(candidate, (expanded, self._lowered(expanded)), end)

    def _attention(self, candidate: Candidate, first: Lowered, second: Lowered) -> tuple[Match, Attention]:
        scores = _without_masked(candidate.softmax.first, first[1]) if candidate.masked else first[1]
        attention = join(scores, second[1], candidate.guarded)
        attention = replace(attention, diagonal=diagonal_of(self.graph, attention))
        return self._joined(candidate, first[0], second[0], attention), attention

    def _products(self, candidate: Candidate, product: gs.Node) -> tuple[Lowered, Iterator[Lowered]]:
        """Both products, whose factors are read before they are widened, or behind that where not all of them are."""
        for computed in (COMPUTED_VIEWS, SCALES):
            first = self._scores(candidate.softmax, product, computed)
            seconds = self._sums(candidate, computed)
            furthest = next(seconds)
            if len({tensor.dtype for tensor in (first[1].lhs, *first[1].rhs, *furthest[1].rhs)}) == 1:
                break
        return first, chain((furthest,), seconds)

    def _scores(self, softmax: Softmax, product: gs.Node, computed: tuple[str, ...]) -> Lowered:
        """The fusion from the first product to what the softmax is of."""
        value, grown = softmax.scores, self._grown(product, computed, softmax)
        position = _position(grown, softmax, product)
        partition = Partition(grown, self.points)
        match = partition.closed(grown.needs[position], partition.live.values[position][0])
        readers = [reader for reader in value.outputs if self.graph.index(reader) not in match.told]
        if len(readers) > 1 or self.graph.is_escaping(value.name):
            raise _score_is_read(value, "the softmax")
        if len(match.live_outs) > 1:
            raise _score_is_read(self.graph.tensor(match.live_outs[0].name), "what leads to the softmax")
        view = match.live_outs[0].view
        if match.columns == 1:
            keys = (self.graph.shape(value.name) or (1,))[-1]
            raise _no_kernel(
                softmax.first, ONE_KEY if keys == 1 else "its scores are one column of a product, and no keys"
            )
        if not ends_in_columns(view) or not _is_whole(match):
            raise OtherScores(softmax.first)
        return match, self._lowered(match)

    def _sums(self, candidate: Candidate, computed: tuple[str, ...]) -> Iterator[Lowered]:
        """The fusions from the second product on, of its type, that read nothing beside it; the largest first."""
        product = candidate.second
        grown = self._grown(product, computed, turned=candidate.turned)
        if _is_scaled_by_the_run(grown):
            grown = self._grown(product, tuple(op for op in computed if op not in SCALES), turned=candidate.turned)
        partition = Partition(grown, self.points)
        refusal: NotFusable | None = _no_kernel(product, "the second product is none by itself")
        for position in reversed(self._ends(partition)):
            try:
                match = partition.match(grown.needs[position], position)
                if len(match.live_outs) == 1 and not match.reads and _is_whole(match):
                    yield match, self._lowered(match)
                    refusal = None
            except NotFusable as stop:
                refusal = refusal and stop
        if refusal is not None:
            raise refusal

    def _ends(self, partition: Partition) -> list[int]:
        """Where values are of the product's type, or of the values' where a product of fp32 widens them.

        What merges dimensions that only the run knows is left to its reader: as a view in front of a product it leaves
        its rows what they are, and behind this fusion nobody could tell them apart. What the product itself has as
        one dimension nobody merges.
        """
        (product,) = partition.grown.products
        types = {self.graph.dtype(name) for name in (product.out, product.rhs)}
        own = partition.live.value(product.out).columns
        found, kept = [], own.view if own else ()
        for end, value in enumerate(values[0] for values in partition.live.values):
            if value.columns is None or any(_merges_unknown(dim) for dim in value.columns.view if dim not in kept):
                continue
            if self.graph.dtype(value.name) in types:
                found.append(end)
        return found

    def _grown(
        self, node: gs.Node, computed: tuple[str, ...], softmax: Softmax | None = None, turned: bool | None = None
    ) -> GrownRegion:
        """What grows from a product, read through as many views as nobody else owns; the scores of a softmax."""
        # Batches may lie apart: they are heads.
        if node.op not in ("MatMul", "Einsum") or self.rounds:
            computed = ()
        read = functools.partial(read_product, self.graph, node, accepts=lambda found: True, turned=turned)
        product = read(computed=computed)
        if product.quantized is not None:
            raise _no_kernel(node, "a factor is a weight of few bits")
        if any(self.points.is_taken(view.node) for view in product.views):
            product = read(through=self.points.is_free, computed=computed)
        shift = shift_of(self.graph, softmax.scores) if softmax is not None and not self.rounds else ()
        grown = GrownRegion(self.graph, (product,), self.points.is_taken, self.rounds, softmax is not None, shift)
        if grown.refused:
            raise grown.refused[0][1]
        return grown

    def _lowered(self, match: Match) -> Fusion:
        fusion = lower(self.graph, match, "attention")
        return fusion if self.rounds else simplify(fusion)

    def _joined(self, candidate: Candidate, first: Match, second: Match, attention: Attention) -> Match:
        """Both matches and what lies between as one."""
        ends = (candidate.softmax.first, candidate.softmax.last, *candidate.behind)
        inner = (*candidate.softmax.nodes, *candidate.behind)
        nodes = {*first.nodes, *map(self.graph.index, inner), *second.nodes}
        shapes = {index: _of_values(shape, attention, second) for index, shape in second.shapes.items()}
        spared = only_feeding(self.graph, [index for index in nodes if index in shapes])
        told = dict(self._told(first.products[0], ends))
        told.update(shape for each in (*first.products, *second.products) for shape in told_of_views(self.graph, each))
        for node in inner:
            if any(self.graph.index(reader) not in nodes | spared | told.keys() for reader in node.outputs[0].outputs):
                raise _is_read_beside(candidate.softmax.last, node.outputs[0])
        match = replace(
            second,
            products=(*first.products, *second.products),
            nodes=tuple(sorted(nodes)),
            copied=tuple(sorted({*first.copied, *second.copied} - nodes)),
            folded=tuple(sorted({*first.folded, *second.folded, *spared} - nodes)),
            constants=tuple(dict.fromkeys((*first.constants, *second.constants))),
            shapes={**first.shapes, **shapes},
            expanded=first.expanded,
            told=told | first.told,
        )
        return self.points.placed(match)

    def _told(self, product: Product, nodes: Iterable[gs.Node]) -> Iterator[tuple[int, ToldShape]]:
        """What takes the place of Shapes of probabilities: they are as large as the scores, whoever reads them."""
        for value in (node.outputs[0] for node in nodes):
            sizes = self.graph.shape(value.name)
            for reader in value.outputs:
                told = None if sizes is None else told_shape(self.graph, product, reader, sizes)
                if told is not None:
                    yield self.graph.index(reader), told


def _is_scaled_by_the_run(grown: GrownRegion) -> bool:
    """Whether a product has a factor that only the run knows: a number before one of its inputs."""
    made = (grown.values[product.out] for product in grown.products)
    return bool(grown.epilogue.leaves(LOAD, tuple(value.ref for value in made if value is not None)))


def _without_masked(softmax: gs.Node, scores: Fusion) -> Fusion:
    """Scores of minus infinity for the number that a mask puts in their place in the last step."""
    *before, last = scores.steps or (None,)
    if last is None or last.op != "where" or last.result != scores.outs[0].value:
        raise _no_kernel(softmax, "zeros are chosen by a mask that is not the last step of the scores")
    inputs = tuple(-math.inf if isinstance(value, float) else value for value in last.inputs)
    return replace(scores, steps=(*before, replace(last, inputs=inputs)))


def _position(grown: GrownRegion, softmax: Softmax, product: gs.Node) -> int:
    """Where what the softmax is of stands in what has grown."""
    maker = softmax.scores.inputs[0]
    for position, node in enumerate(grown.nodes):
        if node is maker:
            return position
    stops = [stop.refusal for stop in grown.stops if stop.refusal.node != node_label(softmax.first)]
    raise stops[0] if stops else _no_kernel(product, "no pointwise nodes lead from the product to the softmax")


def _merges_unknown(dim: Dim) -> bool:
    return len(dim) > 1 and any(isinstance(piece.size, str) for piece in dim)


def _is_whole(match: Match) -> bool:
    """Whether a match has all columns of one product."""
    return [(product.n, start) for product, start in match.ranges] == [(match.columns, 0)]


def _score_is_read(value: gs.Tensor, by: str) -> NotFusable:
    detail = f"{value.name!r} is read by others than {by}, or is an output of the graph"
    return NotFusable("score_is_read", node_label(value.inputs[0]), detail)


def _check_axis(graph: Graph, softmax: Softmax) -> None:
    if softmax.is_spelled_out:  # over the last one, as its forms are
        return
    shape = graph.shape(softmax.scores.name)
    axis = int(softmax.first.attrs.get("axis", -1 if graph.opset >= LAST_AXIS_OPSET else 1))
    if shape is None or axis % max(len(shape), 1) != len(shape) - 1:
        raise _no_kernel(softmax.first, f"the softmax is along axis {axis}, which is not known to be the last")


def _check_types(graph: Graph, candidate: Candidate) -> None:
    for node in (*candidate.softmax.nodes, *candidate.behind):
        for tensor in node.outputs:
            if graph.dtype(tensor.name) not in (TensorProto.BOOL, *NUMBERS):
                raise _no_kernel(node, f"makes {element_text(graph.dtype(tensor.name))}")


def _no_kernel(node: gs.Node, detail: str) -> NotFusable:
    return NotFusable("no_attention_kernel", node_label(node), detail)


def _of_values(shape: FallbackShape, attention: Attention, second: Match) -> FallbackShape:
    """A shape of the second product's, told by the inputs of the whole: its lhs is none of them."""
    if shape.base == OWN:
        return shape
    if shape.is_constant or shape.base == 1:
        return replace(shape, base=VALUES)
    wanted = [None if index is None else attention.scores[index] for index in shape.of_base]
    for place, tensor in enumerate(attention.inputs):
        if all(dim is None or dim in tensor.dims for dim in wanted):
            return replace(
                shape, base=place, of_base=tuple(None if dim is None else tensor.dims.index(dim) for dim in wanted)
            )
    detail = "reshapes the result to sizes of the probabilities that no input has"
    raise NotFusable("unknown_shape", second.label, detail)
