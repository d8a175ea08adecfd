"""Partition what has grown into matches: each a region that one kernel computes, and the values that live out of it.

The furthest value that can be closed gives the match; intermediates that live out as well become outputs of the kernel,
which costs a store that the model makes anyway, and saves what follows a launch and its reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.operators import qualified_op
from onnxfuse.limits import MAX_OUTS
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.liveness import GrownValue, Liveness
from onnxfuse.patterns.match import LiveOut, Match, count_of
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.product_ranges import is_read_beside, regions_of_ranges, split_span, taken_ranges, value_of_range
from onnxfuse.patterns.profitability import Profitability
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.region_growth import COLUMN_OPS, GrownRegion
from onnxfuse.patterns.views import columns_dim

NOTHING = Region()


class Partition:
    """The matches that a grown region allows, the largest first, and what is in the way of larger ones."""

    def __init__(self, grown: GrownRegion, points: InsertionPoints) -> None:
        self.grown = grown
        self.points = points
        self.live = Liveness(grown)
        self.worth = Profitability(self.live)
        self.refusals: list[tuple[Region, NotFusable]] = []

    def matches(self) -> Iterator[Match]:
        """Every match that ends at arithmetic or at a view that is worth it; the furthest first.

        A caller that takes one grows again.
        """
        for position in reversed(range(len(self.grown.nodes))):
            region = self.grown.needs[position]
            if not self.worth.may_end(position, region):
                continue
            region = self._with_other_ranges(region, self.live.values[position][0])
            try:
                yield self._widened(region, self.match(region, position), position)
            except NotFusable as refusal:
                self.refuse(region, refusal)

    def _with_other_ranges(self, region: Region, root: GrownValue) -> Region:
        """Take in the other ranges of a value that cannot live out whole, or need not.

        It cannot where its columns are no dimension any more.
        """
        assert root.columns is not None
        readers = [region]
        for value in self.live.live_out(region):
            columns = value.columns
            if columns is None or columns.length == root.columns.length:
                continue
            if columns_dim(columns.view) is None or self.worth.is_read_as_ranges(value.name):
                readers.append(self.grown.needed_by(value.readers))
        return Region.union(readers)

    def refuse(self, region: Region, refusal: NotFusable) -> None:
        """Remember why a region was not taken."""
        self.refusals.append((region, refusal))

    def reason(self, product: Product) -> NotFusable:
        """Why no match with this product was taken: the largest one's reason, or the first thing in the way."""
        position = self.live.position(product.node)
        found = [refusal for region, refusal in self.refusals if position in region]
        found.sort(key=lambda refusal: refusal.reason == "needs_its_own_result")  # what smaller ones do not need
        found += [stop.refusal for stop in self.grown.stops if position in stop.needs]
        return _weightiest(found) or NotFusable("nothing_follows", product.label, "nothing pointwise reads the product")

    def region_of(self, match: Match) -> Region:
        """The match's nodes."""
        return self.live.region(match.nodes)

    def _widened(self, region: Region, match: Match, root: int) -> Match:
        """Take in what else reads the match's values, as long as that stores no more ranges."""
        for position in reversed(range(len(self.grown.nodes))):
            needs = self.grown.needs[position]
            if needs <= region or not needs & region or position in self.live.foldable:
                continue
            wider = region | needs
            if not self._may_store_no_more(wider, region, match, position):
                continue
            try:
                candidate = self.match(wider, root)
            except NotFusable:
                continue
            if len(candidate.roots) <= len(match.roots):
                region, match = wider, candidate
        return match

    def _may_store_no_more(self, wider: Region, region: Region, match: Match, position: int) -> bool:
        """Whether a region that grows by a node, and what this needs, may lose as many live-out values as it gains.

        The node's own value is read outside of it. So one of the match's own has to have its last reader inside,
        unless shapes are computed otherwise and all is to be looked at again.
        """
        if self.live.spared(wider) != self.live.spared(region):
            return True
        gained = any(self.live.is_live_out(value, wider) for value in self.live.values[position])
        others = (self.live.value(out.name) for out in match.live_outs[:-1])
        return not gained or any(not self.live.is_live_out(value, wider) for value in others)

    def takes_columns_apart(self, match: Match) -> bool:
        """Whether a match has a Split or its like."""
        return any(qualified_op(self.grown.graph.nodes[index]) in COLUMN_OPS for index in match.nodes)

    def puts_columns_together(self, match: Match) -> bool:
        """Whether a match has a Concat of ranges of columns."""
        nodes = (self.grown.graph.nodes[index] for index in match.nodes)
        return any(value is not None and value.rest for node in nodes for value in self.grown.values_of(node))

    def matches_by_range(self, product: Product, meeting: bool) -> Iterator[list[Match]]:
        """For each column range of a product by itself, the matches that compute it and no other, the largest first.

        Of a range that another fusion reads as the product makes it, or behind which data is moved and nothing
        computed, the last match is that range alone.

        Each stands for the nodes after the range, and multiplies by the range's columns of the weight alone. What they
        all need, from the product to where it is taken apart, stays until nothing reads it: so there is nothing where
        somebody else does.

        Args:
            product: the ranges are of its columns.
            meeting: whether ranges that meet count as one, if any do; else there is nothing.
        """
        ranges = regions_of_ranges(self.live, product)
        if meeting:
            apart, ranges = ranges, regions_of_ranges(self.live, product, meeting)
            if apart.keys() == ranges.keys():
                return
        taken = taken_ranges(self.live, product, ranges, self.points.is_taken)
        bare = [value for span, value in taken.items() if span not in ranges]
        region = Region.union(ranges.values())
        shared = self.grown.needed_by([*region, *(value.maker for value in bare)]) - region
        spans = sorted({*ranges, *taken})
        if len(spans) > 1 and not is_read_beside(self.live, shared, region, bare):
            for span in spans:
                behind = ranges.get(span, NOTHING)
                own = self._matches_of_range(behind, shared, meeting)
                moved = value_of_range(self.live, product, span, shared) if self.worth.moves_alone(behind) else None
                yield [*own, *self._bare_range(taken.get(span) or moved)]

    def _matches_of_range(self, own: Region, shared: Region, meeting: bool) -> Iterator[Match]:
        """The matches of one range that nobody reads further in front than where they end.

        Of ranges that meet they have all that begins with one.
        """
        first = Region.of(self._entries(own)[: None if meeting else 1])
        for position in reversed(list(own)):
            needs = self.grown.needs[position]
            region = needs & own
            if first <= region and self.worth.may_end(position, region):
                try:
                    yield self.match(region, position, needs & shared)
                except NotFusable as refusal:
                    self.refuse(region, refusal)

    def _entries(self, own: Region) -> list[int]:
        """Those of some nodes that read nothing of the others, in their order."""
        return [position for position in own if self.grown.needs[position] & own == Region.of((position,))]

    def _bare_range(self, value: GrownValue | None) -> Iterator[Match]:
        """A range with nothing behind it, if it has a place: whatever makes its value stays for the other ranges."""
        if value is not None:
            with suppress(NotFusable):
                yield self.points.placed(self.closed(NOTHING, value, self.grown.needs[value.maker]))

    def bare(self, product: Product) -> Match:
        """A product with nothing behind it.

        Raises:
            NotFusable: as `match`.
        """
        position = self.live.position(product.node)
        return self.match(self.grown.needs[position], position)

    def joined(self, first: Match, second: Match) -> Match:
        """One match of two that share no node but those of `shared`; each keeps its live-out values.

        Raises:
            NotFusable: their columns differ in number, a kernel has fewer outputs, or no place is right for both.
        """
        if first.columns != second.columns:
            raise NotFusable("columns_differ", second.label, f"has other columns than {first.label!r}")
        region = self.region_of(first) | self.region_of(second)
        values = [self.live.value(out.name) for match in (first, second) for out in match.live_outs]
        furthest = max((self.live.value(match.out) for match in (first, second)), key=lambda value: value.maker)
        bare = [value for value in values if value.maker not in region]
        match = self.closed(region, furthest, self.live.region({*first.shared, *second.shared}), bare)
        self._check_outputs(match, region)
        return self.points.placed(match)

    def match(self, region: Region, root: int, shared: Region = NOTHING) -> Match:
        """The match of a region whose furthest value is that of `root`.

        Raises:
            NotFusable: an intermediate lives out of it that cannot become an output, or no place in the model is right.
        """
        match = self.closed(region, self.live.values[root][0], shared)
        if len(match.live_outs) > 1:
            self._check_outputs(match, region)
            self.worth.check(match, region)
        return self.points.placed(match)

    def closed(
        self, region: Region, furthest: GrownValue, shared: Region = NOTHING, bare: Iterable[GrownValue] = ()
    ) -> Match:
        """A region and what lives out of it, the furthest value last; what it shares with others stays for these.

        Args:
            region: the nodes.
            furthest: a value of theirs, or of what they share where there are none.
            shared: what other matches need as well.
            bare: values of `shared` that the match makes too.

        Raises:
            NotFusable: something lives out of it that is no range of the columns.
        """
        grown, index = self.grown, self.grown.graph.index
        columns = furthest.columns
        assert columns is not None
        own = [grown.nodes[position] for position in region]
        beside = [grown.nodes[position] for position in shared]
        every = [*beside, *own]
        anchors = {id(node) for node in every}
        products = tuple(product for product in grown.products if id(product.node) in anchors)
        passed = tuple(sorted(map(index, self._passed(every))))
        return Match(
            products=products,
            nodes=tuple(sorted(map(index, own))),
            copied=tuple(sorted({*map(index, (*beside, *self._copied(products, every))), *passed})),
            insertion_point=-1,
            folded=self.live.folded(region),
            constants=self.live.constants(region),
            columns=columns.width,
            live_outs=(
                *self._live_outs(region, furthest, columns.width, bare),
                LiveOut(furthest.name, columns.refs, columns.view),
            ),
            split=frozenset(span for node in own for span in split_span(grown, node)),
            epilogue=grown.epilogue,
            operands=grown.arguments.operands,
            shapes=grown.shapes_of(products, every),
            told=self.live.told(region),
            stop=self._stop_after(region, shared),
            shared=tuple(sorted(map(index, beside))),
            passed=passed,
        )

    def _copied(self, products: tuple[Product, ...], nodes: list[gs.Node]) -> Iterator[gs.Node]:
        """The nodes after a match's constant weights, and those that make its operands from masks."""
        for product in products:
            yield from product.copied
        for node in nodes:
            for tensor in node.inputs:
                yield from self.grown.arguments.masks.get(tensor.name, ())

    def _passed(self, nodes: list[gs.Node]) -> list[gs.Node]:
        """Those that make operands of nodes of what the kernel reads, each once."""
        made = self.grown.arguments.passed
        found = (maker for node in nodes for tensor in node.inputs for maker in made.get(tensor.name, ()))
        return list({id(maker): maker for maker in found}.values())

    def _live_outs(
        self, region: Region, furthest: GrownValue, width: int | str, bare: Iterable[GrownValue]
    ) -> Iterator[LiveOut]:
        """What lives out of a region, and what a match makes with it, beside the furthest value."""
        for value in (*bare, *self.live.live_out(region)):
            if value is not furthest:
                yield self._live_out(value, width, region)

    def _live_out(self, value: GrownValue, width: int | str, region: Region) -> LiveOut:
        count = 0 if value.columns is None else count_of(value.columns.length, width)
        if value.columns is None or not count or (value.columns.rest and value.columns.width != width):
            raise self.live.refusal(value, "and is not as wide as the result", region)
        if value.columns.width == width:
            return LiveOut(value.name, value.columns.refs, value.columns.view)
        starts = [0] if isinstance(width, str) else [index * width for index in range(count)]
        if len(starts) > 1 and columns_dim(value.columns.view) is None:
            raise self.live.refusal(value, "and its columns are reshaped", region)
        refs = tuple(self.grown.epilogue.moved(value.columns.ref, start) for start in starts)
        return LiveOut(value.name, refs, value.columns.view)

    def _check_outputs(self, match: Match, region: Region) -> None:
        if len(match.roots) > MAX_OUTS:
            first = self.live.value(match.live_outs[0].name)
            count = f"{len(match.roots)} outputs, where a kernel has {MAX_OUTS} at most"
            raise self.live.refusal(first, f"and the fusion would have {count}", region)

    def _stop_after(self, region: Region, shared: Region) -> NotFusable | None:
        """What ended the growth after a region: a larger one's refusal, or an op that is no epilogue.

        A larger region than one that shares its product is in no match's way.
        """
        found = [refusal for larger, refusal in self.refusals if region <= larger and not shared]
        near = [stop for stop in self.grown.stops if stop.needs & region and stop.needs <= region | shared]
        return _weightiest([*found, *(stop.refusal for stop in near)])


def _weightiest(refusals: list[NotFusable]) -> NotFusable | None:
    """The first that is not about shape arithmetic, which is in nobody's way where the data stop elsewhere."""
    return min(refusals, key=lambda refusal: refusal.reason == "unknown_shape_arithmetic", default=None)
