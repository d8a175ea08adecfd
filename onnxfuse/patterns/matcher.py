"""The fusions of a model: products of one input grow together, and what has grown is partitioned into matches.

Matches of one input that share no node, as q, k and v, become one where the caller says that this pays.

Products are taken from the last one backwards. So where two of them meet in one node, a residual add for example, the
later one absorbs it and reads the earlier one's result, which is there by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.ir.cached_attention import CachedAttention
from onnxfuse.ir.fusion import Fusion, Pointwise
from onnxfuse.limits import MAX_PARTS
from onnxfuse.patterns.attention import Attentions, Candidate, OtherScores, candidates
from onnxfuse.patterns.build_fusion import lower
from onnxfuse.patterns.cached_attention import cached_attentions, unlike_a_kernel
from onnxfuse.patterns.classify import check_parts, pattern_of
from onnxfuse.patterns.group_normalisation import group_normalisations, reserved_views
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.match_checks import check_opened, check_reads
from onnxfuse.patterns.normalisation import normalisations, reserved
from onnxfuse.patterns.operand_views import no_view
from onnxfuse.patterns.partition import Partition
from onnxfuse.patterns.product import Product, is_anchor, read_product
from onnxfuse.patterns.region_growth import GrownRegion
from onnxfuse.patterns.rotation import reserved_rotations, rotations
from onnxfuse.patterns.siblings import siblings

OLDEST_OPSET = 9  # broadcasting and Slice are spelled differently before

SiteT = TypeVar("SiteT")
AnyFusion = Pointwise | CachedAttention
MakeSite = Callable[[Match, AnyFusion], SiteT]
IsProfitable = Callable[[SiteT, Sequence[SiteT]], bool]
Group = tuple[Product, ...]
Refused = tuple[gs.Node, NotFusable]


@dataclass(frozen=True)
class Sites(Generic[SiteT]):
    """What became of every product of a model, in graph order.

    Attributes:
        fused: what `make_site` made of each fusion.
        skipped: each product that is left alone, and why; and each softmax that is no attention, where its product is
            something else or left alone for a reason of its own; and each attention over a cache that no kernel
            computes.
    """

    fused: tuple[SiteT, ...]
    skipped: tuple[Refused, ...]


@dataclass(frozen=True)
class Apart:
    """A softmax whose products stay apart, the one that makes its scores, and why."""

    softmax: gs.Node
    product: gs.Node
    refusal: NotFusable


@dataclass(frozen=True)
class Found(Generic[SiteT]):
    """A match, and what the caller made of it."""

    match: Match
    site: SiteT


def match_sites(
    graph: Graph,
    make_site: MakeSite[SiteT],
    is_profitable: IsProfitable[SiteT] | None = None,
    rounds: bool = False,
    attention: bool = False,
    normalisation: bool = False,
) -> Sites[SiteT]:
    """Find every fusion of a model; they share no node.

    Args:
        graph: the model.
        make_site: raises NotFusable for a fusion that no kernel computes; a smaller one is tried then.
        is_profitable: whether the first argument, one fusion, is better than the second, fusions of products of the
            same input, or than its own nodes if there are none; without it none become one.
        rounds: whether a fusion rounds every intermediate to the type in which the model stores it.
        attention: whether two products and the softmax between them become one fusion, and the op that does that over a
            cache.
        normalisation: whether what normalises rows does, without a product.
    """
    search = Search(graph, InsertionPoints(graph), make_site, is_profitable, rounds)
    kept = frozenset[int]()
    if normalisation and not rounds:
        kept = reserved(graph) | reserved_views(graph) | reserved_rotations(graph, search.points)
    search.points.reserve(kept)
    found, apart = search.match_attentions() if attention else ([], [])
    products, skipped = _products(graph, search.points)
    for group in siblings(graph, products):
        matched, refused = search.match_group(group)
        found += matched
        skipped += refused
    found += search.match_normalisations(kept) if normalisation else []
    found += search.match_cached() if attention and not rounds else []
    skipped += unlike_a_kernel(graph, search.points) if attention else ()
    skipped = _with_apart(graph, skipped, apart)
    found.sort(key=lambda each: (_place(graph, each.match), each.match.insertion_point))
    skipped.sort(key=lambda entry: graph.index(entry[0]))
    return Sites(tuple(each.site for each in found), tuple(skipped))


def _place(graph: Graph, match: Match) -> int:
    """Where it begins: at its first product."""
    return graph.index(match.products[0].node) if match.products else match.nodes[0]


def _with_apart(graph: Graph, skipped: list[Refused], apart: list[Apart]) -> list[Refused]:
    """The products that are left alone, and each softmax that is no attention, why that is once."""
    refusals = {graph.index(each.product): each.refusal for each in apart}
    told = [(node, _weightier(refusal, refusals.get(graph.index(node)))) for node, refusal in skipped]
    texts = {str(refusal) for _, refusal in told}
    return told + [(each.softmax, each.refusal) for each in apart if str(each.refusal) not in texts]


def _weightier(refusal: NotFusable, of_attention: NotFusable | None) -> NotFusable:
    """Why a product is left alone: that a softmax follows says less than why no attention was made of it."""
    is_vague = refusal.reason in ("unknown_op", "nothing_follows")
    return of_attention if of_attention is not None and is_vague else refusal


def _products(graph: Graph, points: InsertionPoints) -> tuple[list[Product], list[Refused]]:
    """The products of a model that no attention has, and those that no kernel computes."""
    products: list[Product] = []
    refused: list[Refused] = []
    for node in graph.nodes:
        if not is_anchor(graph, node) or points.is_taken(node):
            continue
        try:
            _check_scope(graph, node)
            _check_runs(graph, node)
            products.append(read_product(graph, node))
        except NotFusable as refusal:
            refused.append((node, refusal))
    return products, refused


def _check_scope(graph: Graph, node: gs.Node) -> None:
    """Nothing is fused where nothing is known."""
    if graph.scope.fault:
        raise NotFusable("function_differs", node_label(node), f"inside a function: {graph.scope.fault}")
    if graph.opset < OLDEST_OPSET:
        detail = f"operator set {graph.opset} spells broadcasting otherwise than those from {OLDEST_OPSET} on"
        raise NotFusable("opset_too_old", node_label(node), detail)


def _check_runs(graph: Graph, node: gs.Node) -> None:
    """What no run changes needs no kernel."""
    if graph.is_folded(node.outputs[0].name):
        detail = "computed from stored tensors alone: ONNX Runtime does that once, as it loads the model"
        raise NotFusable("constant", node_label(node), detail)


def match_site(graph: Graph, node: gs.Node) -> tuple[Match, Fusion]:
    """The fusion with one anchor.

    Raises:
        NotFusable: with the reason and the node at fault.
    """
    sites = match_sites(graph, _with_product)
    refusal = next((refusal for anchor, refusal in sites.skipped if anchor is node), None)
    if refusal is not None:
        raise refusal
    return next(site for site in sites.fused if graph.index(node) in (*site[0].shared, *site[0].nodes))


def _with_product(match: Match, fusion: AnyFusion) -> tuple[Match, Fusion]:
    assert isinstance(fusion, Fusion), "what has no product was not asked for"
    return match, fusion


@dataclass(frozen=True)
class Search(Generic[SiteT]):
    """Finds the fusions of one group of products after another.

    Attributes:
        graph: the model.
        points: who owns its nodes.
        make_site, is_profitable, rounds: as `match_sites` has them.
    """

    graph: Graph
    points: InsertionPoints
    make_site: MakeSite[SiteT]
    is_profitable: IsProfitable[SiteT] | None
    rounds: bool

    def match_attentions(self) -> tuple[list[Found[SiteT]], list[Apart]]:
        """Every attention that a kernel computes, and the others."""
        found: list[Found[SiteT]] = []
        apart: list[Apart] = []
        attentions = Attentions(self.graph, self.points, self.rounds)
        for candidate in candidates(self.graph):
            made = self._attention_of(attentions, candidate)
            if isinstance(made, Apart):
                apart.append(made)
            else:
                found.append(made)
        return found, apart

    def _attention_of(self, attentions: Attentions, candidate: Candidate) -> Found[SiteT] | Apart:
        """The attention of the nearest product that is one's; else why there is none with the nearest of scores."""
        refused: list[Apart] = []
        for product in candidate.products:
            try:
                return self._made_attention(attentions, candidate, product)
            except NotFusable as refusal:
                refused.append(Apart(candidate.softmax.first, product, refusal))
        return min(refused, key=lambda apart: isinstance(apart.refusal, OtherScores))

    def _made_attention(self, attentions: Attentions, candidate: Candidate, product: gs.Node) -> Found[SiteT]:
        """The one that reaches furthest behind the second product of those that a kernel computes."""
        _check_scope(self.graph, product)
        _check_runs(self.graph, product)
        refusals = []
        for match, fusion in attentions.matches(candidate, product):
            try:
                check_reads(self.graph, match, fusion)
                made = Found(match, self.make_site(match, fusion))
            except NotFusable as refusal:
                refusals.append(refusal)
                if refusal.reason != "no_attention_kernel":
                    break
            else:
                self.points.take(match)
                return made
        raise min(refusals, key=lambda refusal: refusal.reason == "no_attention_kernel")

    def match_normalisations(self, kept: frozenset[int]) -> list[Found[SiteT]]:
        """Every normalisation that a kernel computes faster than ONNX Runtime; the others have no product to report.

        Args:
            kept: the nodes of all of them: none takes what another one begins with.
        """
        self.points.reserve(())
        found = self._made_of(normalisations(self.graph, self.points, self.rounds, kept))
        if self.rounds:
            return found
        found += self._made_of(group_normalisations(self.graph, self.points))
        return [*found, *self._made_of(rotations(self.graph, self.points))]

    def match_cached(self) -> list[Found[SiteT]]:
        """Every attention over a cache that a kernel computes for one token."""
        return self._made_of(cached_attentions(self.graph, self.points))

    def _made_of(self, matches: Iterable[tuple[Match, AnyFusion]]) -> list[Found[SiteT]]:
        """Those of the matches that a kernel computes; the others have no product to report."""
        found: list[Found[SiteT]] = []
        if self.graph.scope.fault or self.graph.opset < OLDEST_OPSET:
            return found
        for match, fusion in matches:
            try:
                found.append(Found(match, self.make_site(match, fusion)))
            except NotFusable:
                continue
            self.points.take(match)
        return found

    def match_group(self, group: Group) -> tuple[list[Found[SiteT]], list[Refused]]:
        """Partition what a group grows into until no match is left: the matches, and the products that have none."""
        found: list[Found[SiteT]] = []
        group, refused = self._readable(group)
        in_order = {product.out: product for product in group}
        kept: dict[str, NotFusable] = {}  # by output, why a product is not numbered part by part
        while group:
            points = self.points
            grown = GrownRegion(self.graph, group, points.is_taken, self.rounds, is_passed=points.is_passed)
            if grown.refused:
                refused += [(product.node, refusal) for product, refusal in grown.refused]
                group = _without(group, [product for product, _ in grown.refused])
                continue
            in_turns = _in_turns(group, grown, kept)
            if in_turns is not None:
                group = in_turns
                continue
            partition = Partition(grown, self.points)
            chosen = self._choose(partition, group)
            in_vain = _turned_in_vain(group, chosen)
            if in_vain:
                kept |= {product.out: partition.reason(product) for product in in_vain}
                group = tuple(in_order[product.out] if product.out in kept else product for product in group)
            elif chosen:
                for each in chosen:
                    self.points.take(each.match)
                found += chosen
                group = _without(group, chosen[0].match.products)
            elif partition.refusals and any(product.reads_through_views for product in group):
                group, unreadable = self._read_again(group, no_view)
                refused += unreadable
            else:
                reasons = (kept.get(product.out) or partition.reason(product) for product in group)
                return found, refused + [(product.node, why) for product, why in zip(group, reasons, strict=True)]
        return found, refused

    def _readable(self, group: Group) -> tuple[Group, list[Refused]]:
        """The products whose factors no other fusion owns; views behind those that one does are read through."""
        refused: list[Refused] = []
        if any(map(self._is_owned, group)):
            group, refused = self._read_again(group, self.points.is_free)
        owned = [product for product in group if self._is_owned(product)]
        detail = "its factors belong to another fusion"
        refused += [(product.node, NotFusable("taken", product.label, detail)) for product in owned]
        return _without(group, owned), refused

    def _is_owned(self, product: Product) -> bool:
        return any(self.points.is_taken(view.node) for view in product.views)

    def _read_again(self, group: Group, through: Callable[[gs.Node], bool]) -> tuple[Group, list[Refused]]:
        """The same products, their inputs read through these views alone; and those that cannot be."""
        products: list[Product] = []
        refused: list[Refused] = []
        for product in group:
            try:
                products.append(read_product(self.graph, product.node, through))
            except NotFusable as refusal:
                refused.append((product.node, refusal))
        return tuple(products), refused

    def _choose(self, partition: Partition, group: Group) -> list[Found[SiteT]]:
        """The largest match, with others beside it where that pays, or a match for each column range of a product."""
        largest = self._largest(partition, group)
        found = self._by_range(partition, group, largest)
        first = largest or (self._bare(partition, group) if len(group) > 1 else None)
        if found or first is None:
            return found
        joint = self._with_siblings(partition, group, first)
        return [] if largest is None and joint is first else [joint]

    def _largest(self, partition: Partition, products: Group) -> Found[SiteT] | None:
        """The first match of some products, from the largest on, that a kernel computes."""
        matches = (match for match in partition.matches() if all(product in products for product in match.products))
        return self._first(partition, matches)

    def _bare(self, partition: Partition, products: Group) -> Found[SiteT] | None:
        """A product by itself, behind which nothing is a kernel's: one computes it beside others of its input."""
        for product in products if self.is_profitable is not None else ():
            if product.is_weight:
                try:
                    return self._made(partition.bare(product))
                except NotFusable:
                    continue
        return None

    def _by_range(self, partition: Partition, group: Group, largest: Found[SiteT] | None) -> list[Found[SiteT]]:
        """A match for every column range of one product, where no match takes its columns apart; none, or all of them.

        One that stores several of them as one value is none, but where it puts them together anew. Ranges of equal
        width become one match where that pays.
        """
        if largest is not None and _keeps_together(partition, largest.match):
            return []
        products = group if largest is None else largest.match.products
        for product, meeting in itertools.product(products, (True, False)):
            found = [self._first(partition, matches) for matches in partition.matches_by_range(product, meeting)]
            known = [each for each in found if each is not None]
            if known and len(known) == len(found) and not _read_each_other(known):
                paired = self._with_neighbours(partition, known)
                has_room = self.points.have_room([each.match for each in paired])
                if has_room and self._leave_nothing(known, paired):
                    return paired
        return []

    def _leave_nothing(self, ranges: Sequence[Found[SiteT]], paired: Sequence[Found[SiteT]]) -> bool:
        """Whether no range leaves the product to the model where one is the product's own value: some are, not all.

        Args:
            ranges: a match for each.
            paired: the same, neighbours as one.
        """
        have_nodes = [bool(each.match.nodes) for each in ranges]
        if all(have_nodes):
            return True
        if self.is_profitable is None or not any(have_nodes):
            return False
        return all(self.is_profitable(each.site, ()) for each in paired)

    def _first(self, partition: Partition, matches: Iterable[Match]) -> Found[SiteT] | None:
        """The first match that a kernel computes."""
        for match in matches:
            try:
                return self._made(match)
            except NotFusable as refusal:
                partition.refuse(partition.region_of(match), refusal)
        return None

    def _made(self, match: Match) -> Found[SiteT]:
        check_parts(match)
        check_opened(self.graph, match.nodes)
        fusion = lower(self.graph, match, pattern_of(match))
        check_reads(self.graph, match, fusion)
        return Found(match, self.make_site(match, fusion))

    def _with_neighbours(self, partition: Partition, found: Sequence[Found[SiteT]]) -> list[Found[SiteT]]:
        """Matches of neighbouring ranges as one where that pays: k and v beside a wider q."""
        if self.is_profitable is None:
            return list(found)
        paired: list[Found[SiteT]] = []
        for each in found:
            joint = self._joint(partition, paired[-1].match, each.match) if paired else None
            if joint is not None and self.is_profitable(joint.site, [paired[-1].site, each.site]):
                paired[-1] = joint
            else:
                paired.append(each)
        return paired

    def _with_siblings(self, partition: Partition, group: Group, found: Found[SiteT]) -> Found[SiteT]:
        """A match of one column range, or one of it and others like it of the same group, as many as pay.

        A gate stays by itself: its tile is full, and a report counts it.
        """
        if self.is_profitable is None or len(found.match.ranges) > 1:
            return found
        alone, rest = [found.site], group
        while len(found.match.ranges) < MAX_PARTS:
            rest = _without(rest, found.match.products)
            other = (self._largest(partition, rest) or self._bare(partition, rest)) if rest else None
            if other is None:
                break
            joint = self._joint(partition, found.match, other.match)
            if joint is None:
                rest = _without(rest, other.match.products)
            elif self.is_profitable(joint.site, [*alone, other.site]):
                found, alone = joint, [*alone, other.site]
            else:
                break
        return found

    def _joint(self, partition: Partition, first: Match, second: Match) -> Found[SiteT] | None:
        """Two matches as one, where a kernel computes it."""
        if len(second.ranges) > 1:
            return None
        try:
            return self._made(partition.joined(first, second))
        except NotFusable:
            return None


def _in_turns(group: Group, grown: GrownRegion, kept: Collection[str]) -> Group | None:
    """The products, those numbered part by part of which growth found parts whose columns take turns; else None.

    Args:
        group: the products.
        grown: what grew from them.
        kept: the outputs of products that are not to be numbered so.
    """
    turns = {out: turn for out, turn in grown.turns.items() if out not in kept}
    made = tuple(
        product.in_turns(*turns.get(product.out, (1, 1))) if product.turns == 1 else product for product in group
    )
    return made if any(product.turns != own.turns for product, own in zip(made, group, strict=True)) else None


def _without(group: Group, products: Sequence[Product]) -> Group:
    return tuple(product for product in group if product not in products)


def _turned_in_vain(group: Group, chosen: Sequence[Found[SiteT]]) -> list[Product]:
    """The products that are numbered part by part where nothing takes their parts apart, or nothing is fused at all.

    What needs no parts may still be fused; or more of it, with columns as they lie.
    """
    turned = [product for product in group if product.turns > 1]
    matches = [each.match for each in chosen]
    return [each for match in matches for each in match.turned_in_vain] if matches else turned


def _keeps_together(partition: Partition, match: Match) -> bool:
    """Whether a match takes columns apart and stores no several ranges as one value but those that it puts together."""
    is_one = not match.stores_several or partition.puts_columns_together(match)
    return is_one and partition.takes_columns_apart(match)


def _read_each_other(found: Sequence[Found[SiteT]]) -> bool:
    """Whether one match reads what another makes: no place may be right for both."""
    made = {out.name for each in found for out in each.match.live_outs}
    return any(each.match.operands[leaf.operand].name in made for each in found for leaf in each.match.reads)
