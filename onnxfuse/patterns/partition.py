"""Cut a match out of a growth: the piece that one kernel computes, and the values that leave it.

A value that is read outside the match, or is an output of the graph, leaves it: the one rule for intermediates. The
furthest value that can be closed gives the match; intermediates that leave as well become outputs of the kernel, which
costs a store that the model makes anyway, and saves what follows a launch and its reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import node_label
from onnxfuse.graph.operators import qualified_op
from onnxfuse.limits import MAX_OUTS
from onnxfuse.patterns.epilogue_graph import ACC
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.insertion_points import Places
from onnxfuse.patterns.match import Columns, Exit, Match, count_of
from onnxfuse.patterns.pointwise_table import pointwise_row
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.region_growth import COLUMN_OPS, Growth
from onnxfuse.patterns.view_ops import VIEWS
from onnxfuse.patterns.views import columns_dim

COPIES = frozenset({"Identity", "Dropout"})
REGROUPING = COPIES | {"Cast"}  # with these alone behind it, an intermediate is not worth an output

COMPUTING = frozenset({"com.microsoft::BiasSplitGelu"})  # changes the columns and computes, all in one
Region = int  # nodes of a growth, as bits by their position


@dataclass(frozen=True)
class _Value:
    """One value of a growth: who makes it, and who reads it."""

    name: str
    columns: Columns | None
    maker: gs.Node
    readers: Region
    outside: tuple[gs.Node, ...]
    escapes: bool


class Cut:
    """The matches that a growth allows, the largest first, and what is in the way of larger ones."""

    def __init__(self, growth: Growth, places: Places) -> None:
        self.growth = growth
        self.places = places
        self.refusals: list[tuple[Region, NotFusable]] = []
        self._positions = {id(node): position for position, node in enumerate(growth.nodes)}
        self._values = [[self._value(node, tensor) for tensor in node.outputs] for node in growth.nodes]
        self._by_name = {value.name: value for values in self._values for value in values}
        self._foldable = self._find_foldable()
        self._reshaped = self._those(lambda node: growth.graph.index(node) in growth.shapes)
        self._computed = self._those(self._is_computed)
        self._work = self._those(self._is_work)
        self._spared_by: dict[Region, frozenset[int]] = {}

    def matches(self) -> Iterator[Match]:
        """Every piece that ends at arithmetic or at a view that is worth it; the furthest first.

        A caller that takes one grows again.
        """
        for position in reversed(range(len(self.growth.nodes))):
            region = self.growth.needs[position]
            if not self._may_end(position, region):
                continue
            region = self._with_other_ranges(region, self._values[position][0])
            try:
                yield self._widened(region, self._match(region, position), position)
            except NotFusable as refusal:
                self.refuse(region, refusal)

    def _may_end(self, position: int, region: Region) -> bool:
        """Whether a node's value is read behind the region, and the region computes something or spares a Transpose."""
        value, is_computed = self._values[position][0], bool(self._computed >> position & 1)
        if value.columns is None or not (is_computed or self.growth.nodes[position].op in VIEWS):
            return False
        return (is_computed or bool(region & self._work)) and self._leaves(value, region)

    def _with_other_ranges(self, region: Region, root: _Value) -> Region:
        """Take in the other ranges of a value that could not leave whole: its columns are no dimension any more."""
        assert root.columns is not None
        for value in list(self._leaving(region)):
            columns = value.columns
            if columns is not None and columns.length != root.columns.length and columns_dim(columns.view) is None:
                for position in _bits(value.readers):
                    region |= self.growth.needs[position]
        return region

    def _those(self, holds: Callable[[gs.Node], bool]) -> Region:
        return sum(1 << position for position, node in enumerate(self.growth.nodes) if holds(node))

    def _is_work(self, node: gs.Node) -> bool:
        """Whether the runtime moves or computes data for a node that a kernel does for nothing."""
        return qualified_op(node) == "Transpose" or (self._is_computed(node) and node.op not in REGROUPING)

    def _is_computed(self, node: gs.Node) -> bool:
        """Whether a node does arithmetic beside a plain product."""
        if any(product.node is node and product.activation is not None for product in self.growth.products):
            return True
        return qualified_op(node) in COMPUTING or (pointwise_row(node) is not None and node.op not in COPIES)

    def refuse(self, region: Region, refusal: NotFusable) -> None:
        """Remember why a piece was not taken."""
        self.refusals.append((region, refusal))

    def reason(self, product: Product) -> NotFusable:
        """Why no piece with this product was taken: the largest one's reason, or the first thing in the way."""
        bit = 1 << self._positions[id(product.node)]
        found = [refusal for region, refusal in self.refusals if region & bit]
        found.sort(key=lambda refusal: refusal.reason == "needs_its_own_result")  # what smaller pieces do not need
        found += [stop.refusal for stop in self.growth.stops if stop.needs & bit]
        return _weightiest(found) or NotFusable("nothing_follows", product.label, "nothing pointwise reads the product")

    def region_of(self, match: Match) -> Region:
        """The match's nodes as bits."""
        return self._region(match.nodes)

    def _region(self, indices: Iterable[int]) -> Region:
        nodes = self.growth.graph.nodes
        return sum(1 << self._positions[id(nodes[index])] for index in indices)

    def _value(self, maker: gs.Node, tensor: gs.Tensor) -> _Value:
        inside = [reader for reader in tensor.outputs if id(reader) in self._positions]
        outside = tuple(reader for reader in tensor.outputs if id(reader) not in self._positions)
        readers = 0
        for reader in inside:
            readers |= 1 << self._positions[id(reader)]
        columns = self.growth.values[tensor.name]
        return _Value(tensor.name, columns, maker, readers, outside, self.growth.graph.is_escaping(tensor.name))

    def _widened(self, region: Region, match: Match, root: int) -> Match:
        """Take in what else reads the match's values, as long as that stores no more ranges."""
        for position in reversed(range(len(self.growth.nodes))):
            needs = self.growth.needs[position]
            wider = region | needs
            if wider == region or not needs & region or self._foldable >> position & 1:
                continue
            if not self._may_store_no_more(wider, region, match, position):
                continue
            try:
                candidate = self._match(wider, root)
            except NotFusable:
                continue
            if len(candidate.roots) <= len(match.roots):
                region, match = wider, candidate
        return match

    def _may_store_no_more(self, wider: Region, region: Region, match: Match, position: int) -> bool:
        """Whether a region that grows by a node, and what this needs, may lose as many exits as it gains.

        The node's own value is read behind it. So one of the match's exits has to have its last reader inside, unless
        shapes are computed otherwise and all is to be looked at again.
        """
        if self._spared(wider) != self._spared(region):
            return True
        gained = any(self._leaves(value, wider) for value in self._values[position])
        exits = (self._by_name[out.name] for out in match.exits[:-1])
        return not gained or any(not self._leaves(value, wider) for value in exits)

    def splits(self, match: Match) -> bool:
        """Whether a match takes columns apart."""
        return any(qualified_op(self.growth.graph.nodes[index]) in COLUMN_OPS for index in match.nodes)

    def apart(self, product: Product) -> Iterator[list[Match]]:
        """For each column range of a product by itself, the matches that compute it and no other, the largest first.

        Each stands for the nodes behind the range, and multiplies by the range's columns of the weight alone. What they
        all need, from the product to where it is taken apart, stays until nothing reads it: so there is nothing where
        somebody else does.
        """
        ranges = self._ranges_of(product)
        region = 0
        for own in ranges.values():
            region |= own
        shared = self._needed(region) & ~region
        if len(ranges) < 2 or self._is_read_beside(shared, region):
            return
        for own in ranges.values():
            yield list(self._range_matches(own, shared))

    def _ranges_of(self, product: Product) -> dict[tuple[int, int], Region]:
        """The nodes behind each range of a product, by first and last column; a range of a range is of the larger."""
        found: dict[tuple[int, int], Region] = {}
        for position, values in enumerate(self._values):
            span = self._span(values[0], product) if len(values) == 1 else None
            if span is not None:
                own = [known for known in found if known[0] <= span[0] and span[1] <= known[1]] or [span]
            else:  # arithmetic on the shape of one range is its own
                arithmetic = all(value.columns is None for value in values)
                own = [known for known in found if arithmetic and found[known] & self.growth.needs[position]]
            if span is not None or len(own) == 1:
                found[own[0]] = found.get(own[0], 0) | 1 << position
        return found

    def _span(self, value: _Value, product: Product) -> tuple[int, int] | None:
        """First and last column of a product that a value is one range of; None where it has all of them."""
        columns = value.columns
        if columns is None or isinstance(columns.length, str) or columns.length == product.n:
            return None
        leaves = self.growth.epilogue.leaves(ACC, (columns.ref,))
        if len(leaves) != 1 or leaves[0].operand != product.out:
            return None
        first = leaves[0].offset or 0
        return first, first + columns.length

    def _needed(self, region: Region) -> Region:
        needed = 0
        for position in _bits(region):
            needed |= self.growth.needs[position]
        return needed

    def _is_read_beside(self, shared: Region, region: Region) -> bool:
        """Whether anything but the ranges reads what they share."""
        values = (value for position in _bits(shared) for value in self._values[position])
        return any(value.escapes or value.outside or value.readers & ~(shared | region) for value in values)

    def _range_matches(self, own: Region, shared: Region) -> Iterator[Match]:
        """The matches of one range that nobody reads further in front than where they end."""
        first = (own & -own).bit_length() - 1
        for position in reversed(list(_bits(own))):
            region = self.growth.needs[position] & own
            if region >> first & 1 and self._may_end(position, region):
                try:
                    yield self._match(region, position, self.growth.needs[position] & shared)
                except NotFusable as refusal:
                    self.refuse(region, refusal)

    def joined(self, first: Match, second: Match) -> Match:
        """One match of two that share no node but those of `shared`; each keeps its exits.

        Raises:
            NotFusable: their columns differ in number, they have more outputs than a kernel, or no place in the model
                is right for both.
        """
        if first.columns != second.columns:
            raise NotFusable("columns_differ", second.label, f"has other columns than {first.label!r}")
        region = self.region_of(first) | self.region_of(second)
        makers = (self._by_name[name].maker for name in (first.out, second.out))
        shared = self._region({*first.shared, *second.shared})
        match = self._closed(region, max(self._positions[id(maker)] for maker in makers), shared)
        self._check_outputs(match, region)
        return self.places.placed(match)

    def _match(self, region: Region, root: int, shared: Region = 0) -> Match:
        """The match of a region whose furthest value is that of `root`.

        Raises:
            NotFusable: an intermediate leaves it that cannot become an output, or no place in the model is right.
        """
        match = self._closed(region, root, shared)
        if len(match.exits) > 1:
            self._check_outputs(match, region)
            self._check_worth(match, region)
        return self.places.placed(match)

    def _closed(self, region: Region, root: int, shared: Region = 0) -> Match:
        """A region and what leaves it, the value of `root` last; what it shares with others stays for these.

        Raises:
            NotFusable: something leaves it that is no range of the columns.
        """
        last = self._values[root][0]
        columns = last.columns
        assert columns is not None
        leaving = [value for value in self._leaving(region) if value is not last]
        furthest = Exit(last.name, (columns.ref,), columns.view)
        exits = (*(self._exit(value, columns.length, region) for value in leaving), furthest)
        growth = self.growth
        nodes = [growth.nodes[position] for position in _bits(region)]
        beside = [growth.nodes[position] for position in _bits(shared)]
        anchors = {id(node) for node in (*beside, *nodes)}
        products = tuple(product for product in growth.products if id(product.node) in anchors)
        return Match(
            products=products,
            nodes=tuple(sorted(map(growth.graph.index, nodes))),
            copied=tuple(sorted({*map(growth.graph.index, (*beside, *self._copied(products, [*beside, *nodes])))})),
            place=-1,
            folded=tuple(sorted({*self._spared(region), *self._indices(self._folded(region))})),
            constants=tuple(self._constants(region)),
            columns=columns.length,
            exits=exits,
            split=frozenset(span for node in nodes for span in self._split_span(node)),
            epilogue=growth.epilogue,
            operands=growth.operands,
            shapes=growth.shapes_of(products, [*beside, *nodes]),
            stop=self._stop_behind(region, shared),
            shared=tuple(sorted(map(growth.graph.index, beside))),
        )

    def _copied(self, products: tuple[Product, ...], nodes: list[gs.Node]) -> Iterator[gs.Node]:
        """The nodes behind a match's constant weights, and those that make its operands from masks."""
        for product in products:
            yield from product.copied
        for node in nodes:
            for tensor in node.inputs:
                yield from self.growth.masks.get(tensor.name, ())

    def _split_span(self, node: gs.Node) -> Iterator[tuple[str, int, int]]:
        """The columns of one product that a node takes apart."""
        value = self.growth.values.get(node.inputs[0].name) if qualified_op(node) in COLUMN_OPS else None
        leaves = [] if value is None else self.growth.epilogue.leaves(ACC, (value.ref,))
        if value is not None and isinstance(value.length, int) and len(leaves) == 1:
            yield leaves[0].operand, leaves[0].offset or 0, value.length

    def _find_foldable(self) -> Region:
        """Shape arithmetic that is a constant, and nodes that nothing needs: no readers of the product."""
        foldable = 0
        for position in reversed(range(len(self._values))):
            if all(self._is_foldable(value, foldable) for value in self._values[position]):
                foldable |= 1 << position
        return foldable

    def _is_foldable(self, value: _Value, foldable: Region) -> bool:
        if value.escapes:
            return False
        if not value.outside and not value.readers & ~foldable:
            return True
        graph = self.growth.graph
        return value.columns is None and is_complete(graph.known_value(graph.tensor(value.name)))

    def _folded(self, region: Region) -> Iterator[int]:
        return (position for position in _bits(self._foldable) if self.growth.needs[position] & region)

    def _constants(self, region: Region) -> Iterator[str]:
        for position in self._folded(region):
            for value in self._values[position]:
                if self._readers_behind(value, region):
                    yield value.name

    def _leaving(self, region: Region) -> Iterator[_Value]:
        for position in _bits(region & ~self._foldable):
            yield from (value for value in self._values[position] if self._leaves(value, region))

    def _leaves(self, value: _Value, region: Region) -> bool:
        """Whether somebody needs a value of a region whom its fusion leaves in the model."""
        if value.escapes:
            return True
        if not self._spared(region):
            return bool(value.outside or value.readers & ~region & ~self._foldable)
        return bool(self._readers_behind(value, region))

    def _readers_behind(self, value: _Value, region: Region) -> list[gs.Node]:
        """The readers of a value that a fusion of the region leaves in the model."""
        others = (self.growth.nodes[position] for position in _bits(value.readers & ~region & ~self._foldable))
        spared, index = self._spared(region), self.growth.graph.index
        return [reader for reader in (*value.outside, *others) if index(reader) not in spared]

    def _spared(self, region: Region) -> frozenset[int]:
        """The nodes that only make shapes which views of the region take from elsewhere."""
        views = region & self._reshaped
        if views not in self._spared_by:
            self._spared_by[views] = only_feeding(self.growth.graph, list(self._indices(_bits(views))))
        return self._spared_by[views]

    def _indices(self, positions: Iterable[int]) -> Iterator[int]:
        return (self.growth.graph.index(self.growth.nodes[position]) for position in positions)

    def _exit(self, value: _Value, width: int | str, region: Region) -> Exit:
        count = 0 if value.columns is None else count_of(value.columns.length, width)
        if value.columns is None or not count:
            raise self._leak(value, "and is not as wide as the result", region)
        starts = [0] if isinstance(width, str) else [index * width for index in range(count)]
        if len(starts) > 1 and columns_dim(value.columns.view) is None:
            raise self._leak(value, "and its columns are reshaped", region)
        refs = tuple(self.growth.epilogue.moved(value.columns.ref, start) for start in starts)
        return Exit(value.name, refs, value.columns.view)

    def _check_outputs(self, match: Match, region: Region) -> None:
        if len(match.roots) > MAX_OUTS:
            first = self._by_name[match.exits[0].name]
            count = f"{len(match.roots)} outputs, where a kernel has {MAX_OUTS} at most"
            raise self._leak(first, f"and the fusion would have {count}", region)

    def _check_worth(self, match: Match, region: Region) -> None:
        """An intermediate becomes an output when work behind it is saved.

        A Transpose that is saved pays for a store that somebody needs, not for one whose shape alone is read. A range
        beside others that nothing inside reads is stored instead of the value that it is taken from.

        A value that a reduction reads stays outside: it is the first step of a normalisation, which the runtime
        computes in one kernel if it finds it whole.
        """
        leaving = [self._by_name[out.name] for out in match.exits[:-1]]
        first = leaving[0]
        tensor = self.growth.graph.nodes[match.nodes[-1]].outputs[0]
        if any(reader.op.startswith("Reduce") for reader in tensor.outputs):
            raise self._leak(first, "and a reduction follows", region)
        intermediates = [value for value in leaving if value.readers & region]
        if not intermediates:
            return
        without = 0
        for value in intermediates:
            without |= self.growth.needs[self._positions[id(value.maker)]]
        gained = [self.growth.nodes[position] for position in _bits(region & ~without)]
        arithmetic = any(pointwise_row(node) is not None and node.op not in REGROUPING for node in gained)
        stored = any(value.escapes or self._reads_data(value, region) for value in leaving)
        transposes = stored and any(map(self._is_work, gained)) and all(len(out.refs) == 1 for out in match.exits)
        if not arithmetic and not transposes:
            raise self._leak(first, "and no arithmetic would be saved", region)

    def _reads_data(self, value: _Value, region: Region) -> bool:
        """Whether a reader outside of a region asks for more than a value's shape."""
        return any(reader.op != "Shape" for reader in self._readers_behind(value, region))

    def _leak(self, value: _Value, why: str, region: Region) -> NotFusable:
        readers = self._readers_behind(value, region)
        if not readers:
            return NotFusable("graph_output", node_label(value.maker), f"{value.name!r} is a graph output, {why}")
        reader = min(readers, key=lambda node: node.op == "Shape")  # who needs the data says more
        detail = f"{value.name!r} is also read by {node_label(reader)!r} ({reader.op}) outside the fusion, {why}"
        return NotFusable("several_readers", node_label(value.maker), detail)

    def _stop_behind(self, region: Region, shared: Region) -> NotFusable | None:
        """What ended the growth behind a region: a larger piece's refusal, or an op that is no epilogue.

        A larger piece than one that shares its product is in no match's way.
        """
        found = [refusal for larger, refusal in self.refusals if larger & region == region and not shared]
        found += [
            stop.refusal for stop in self.growth.stops if stop.needs & region and not stop.needs & ~(region | shared)
        ]
        return _weightiest(found)


def _weightiest(refusals: list[NotFusable]) -> NotFusable | None:
    """The first that is not about shape arithmetic, which is in nobody's way where the data stop elsewhere."""
    return min(refusals, key=lambda refusal: refusal.reason == "unknown_shape_arithmetic", default=None)


def _bits(region: Region) -> Iterator[int]:
    while region:
        low = region & -region
        yield low.bit_length() - 1
        region ^= low
