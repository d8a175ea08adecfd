"""What region growing and partitioning speak about: columns of a value, operands of an epilogue, a match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from onnxfuse.errors import NotFusable
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.patterns.epilogue_graph import ACC, LOAD, EpilogueGraph, Expression, Ref
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.views import COLUMNS, Piece, View, extent, is_column


def count_of(length: int | str, width: int | str) -> int:
    """How many ranges of a width make up a length; 0 where that is no whole number."""
    if length == width:
        return 1
    if isinstance(length, str) or isinstance(width, str) or length % width:
        return 0
    return length // width


def is_part(length: int | str, start: int, width: int | str) -> bool:
    """Whether the range of some columns is one of equal ranges that make up all of them."""
    return count_of(length, width) > 0 and is_start(start, width)


def is_start(start: int, width: int | str) -> bool:
    """Whether one of equal ranges begins at a column."""
    return start == 0 or (isinstance(width, int) and start % width == 0)


@dataclass(frozen=True)
class Columns:
    """A value with the product's rows and `length` columns, in the order and grouping of `view`.

    Attributes:
        ref: what it is; of several equal ranges that are put together, what the first is.
        rest: what each later one is: no expression of the first one's columns.
    """

    ref: Ref
    length: int | str
    view: View
    rest: tuple[Ref, ...] = ()

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Each of the ranges that are put together; the value itself where none are."""
        return (self.ref, *self.rest)

    @property
    def width(self) -> int | str:
        """Columns of one of them."""
        return self.length if isinstance(self.length, str) else self.length // len(self.refs)


@dataclass(frozen=True)
class Operand:
    """A tensor that the epilogue reads.

    Attributes:
        name: the value's name.
        view: its dimensions in pieces of the product's axes.
        beside: the dimensions of a value that reads it.
        whole: how many places the dimension has of which those that are read are a window; None where they are all.
        step: columns of a place: 1 where the columns' own dimension is it, all of them where the one before is.
    """

    name: str
    view: View
    beside: View
    whole: int | None = None
    step: int = 1

    @property
    def has_columns(self) -> bool:
        """Whether it varies along the columns."""
        return any(is_column(piece) for dim in self.view for piece in dim)

    def is_read_like(self, other: Operand) -> bool:
        """Whether a kernel reads both alike, beside whichever value."""
        return (self.view, self.whole, self.step) == (other.view, other.whole, other.step)

    @property
    def has_all_columns(self) -> bool:
        """Whether its last dimension is the value's columns, side by side."""
        last = self.beside[-1]
        return self.view[-1:] == (last,) == ((Piece(COLUMNS, extent(last)),),)

    def is_window_of(self, columns: int | str) -> bool:
        """Whether a kernel whose parts have so many columns reads a window of it: a place has just as many."""
        return self.whole is not None and self.step in (1, columns)

    @property
    def is_repeated(self) -> bool:
        """Whether it lacks a dimension of the value, along which it is the same."""
        own = (*[()] * (len(self.beside) - len(self.view)), *self.view)
        return any(not dim and extent(value) != 1 for dim, value in zip(own, self.beside, strict=True))


@dataclass(frozen=True)
class LiveOut:
    """A value that lives out of a match: others read it, or it is an output of the graph.

    Attributes:
        name: the value's name.
        refs: its column ranges, each as wide as the match; more than one where it is wider.
        view: its dimensions in pieces of the product's axes.
    """

    name: str
    refs: tuple[Ref, ...]
    view: View


@dataclass(frozen=True)
class Match:
    """A region of the graph that one kernel can compute, with all that lives out of it.

    Attributes:
        products: the anchors, which multiply the same lhs; those of the epilogue's accumulators.
        nodes: indices of the matched nodes in the main graph, ascending; none where it is a range of the columns as the
            product makes it.
        copied: indices of nodes that make a weight or a mask of the match; others may need them as well.
        passed: indices of those of `copied` that make an operand of what the kernel reads; they stay for others.
        shared: indices of those of `copied` between a product and where other matches take other columns of it.
        insertion_point: the index among `places` at which the fused node stands.
        folded: indices of nodes that compute on the shapes of the match's values, and are known before the run.
        constants: what others read of the folded nodes; constants of the rewritten model.
        columns: columns of one part, and of every range of a live-out value.
        live_outs: what lives out of the match, the furthest value last.
        split: product, first column and length of every value of the match that a Split or Slice takes apart.
        epilogue: expressions; the live-out values are among them.
        operands: what the epilogue may read, by name.
        shapes: by node, the shape that a Reshape reads from outside of the match.
        expanded: by operand of scores, what it is expanded to for the kernel.
        told: by node, what takes the place of a Shape of scores that others read.
        stop: what kept the match from growing further, if anything did.
    """

    products: tuple[Product, ...]
    nodes: tuple[int, ...]
    copied: tuple[int, ...]
    insertion_point: int
    folded: tuple[int, ...]
    constants: tuple[str, ...]
    columns: int | str
    live_outs: tuple[LiveOut, ...]
    split: frozenset[tuple[str, int, int]]
    epilogue: EpilogueGraph
    operands: dict[str, Operand] = field(default_factory=dict)
    shapes: dict[int, FallbackShape] = field(default_factory=dict)
    expanded: dict[str, ToldShape] = field(default_factory=dict)
    told: dict[int, ToldShape] = field(default_factory=dict)
    stop: NotFusable | None = None
    shared: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()

    @property
    def passes(self) -> int:
        """Nodes behind a normalisation that read and write every element, each by itself; none behind products."""
        return 0

    @property
    def is_bare(self) -> bool:
        """Whether nothing but products is in it, which the runtime's library makes as well."""
        plain = all(
            product.activation is None and product.quantized is None and product.bias is None
            for product in self.products
        )
        return plain and not self.shared and len(self.nodes) == len(self.products)

    @property
    def convolves(self) -> bool:
        """Whether its products are convolutions that add their biases."""
        return all(product.is_biased_convolution for product in self.products)

    @property
    def stores_several(self) -> bool:
        """Whether it stores several ranges as one value."""
        return any(len(out.refs) > 1 for out in self.live_outs)

    @property
    def places(self) -> tuple[int, ...]:
        """The nodes beside one of which the fused node can stand: its own, or of one that has none what it shares."""
        return self.nodes or self.shared

    @property
    def label(self) -> str:
        """Name of the first anchor."""
        return self.products[0].label

    @property
    def name(self) -> str:
        """That of the first anchor, with the first column where other matches share the anchor."""
        return f"{self.label}/{self.ranges[0][1]}" if self.shared else self.label

    @property
    def out(self) -> str:
        """The furthest value."""
        return self.live_outs[-1].name

    @property
    def roots(self) -> tuple[Ref, ...]:
        """Every stored range."""
        return tuple(ref for out in self.live_outs for ref in out.refs)

    def leaves(self, op: str) -> list[Expression]:
        """The leaves of one kind that the live-out values depend on, each once."""
        return self.epilogue.leaves(op, self.roots)

    @cached_property
    def ranges(self) -> tuple[tuple[Product, int], ...]:
        """Product and first column of each part, in the order of the parts."""
        order = {product.out: index for index, product in enumerate(self.products)}
        found = {(order[leaf.operand], leaf.offset or 0) for leaf in self.leaves(ACC)}
        return tuple((self.products[index], start) for index, start in sorted(found))

    @cached_property
    def has_windows(self) -> bool:
        """Whether the ranges, of one product, are not among equal parts that make up all of it."""
        ranges = self.ranges
        is_one = len({product.out for product, _ in ranges}) == 1
        return is_one and not all(is_part(product.n, start, self.columns) for product, start in ranges)

    @property
    def turned_in_vain(self) -> tuple[Product, ...]:
        """The products whose columns are numbered part by part, and of which it takes all as they lie."""
        return tuple(product for product, _ in self.ranges if product.turns > 1 and product.n == self.columns)

    @property
    def reads(self) -> list[Expression]:
        """The operands' ranges that the live-out values depend on."""
        return self.leaves(LOAD)


@dataclass(frozen=True)
class ProductlessMatch(Match):
    """The nodes of what has no product: a normalisation, or a rotation.

    Attributes:
        anchor: name of one of them, as the one that takes the mean of squares.
        passes: nodes behind a normalisation that read and write every element, each by itself.
    """

    anchor: str = field(default="", kw_only=True)
    passes: int = field(default=0, kw_only=True)

    @property
    def label(self) -> str:
        """Name of the anchor."""
        return self.anchor


def without_product(match: Match, nodes: Sequence[int], made: Iterable[str], anchor: str) -> ProductlessMatch:
    """A match of rows as one of some nodes that has no product.

    Args:
        match: of rows, as if they were a product's sums.
        nodes: indices of the nodes, ascending.
        made: names of what lives out of them, the furthest value last.
        anchor: name of one of them.
    """
    return ProductlessMatch(
        products=(), nodes=tuple(nodes), copied=match.copied, insertion_point=nodes[-1], folded=match.folded,
        passed=match.passed,
        constants=match.constants, columns=match.columns, live_outs=tuple(LiveOut(name, (), ()) for name in made),
        split=frozenset(), epilogue=EpilogueGraph(), shapes=match.shapes, told=match.told, anchor=anchor,
    )  # fmt: skip
