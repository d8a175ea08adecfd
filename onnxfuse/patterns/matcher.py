"""The fusions of a model: products of one input grow together, are cut into matches, and own their nodes.

Matches of one input that share no node, as q, k and v, become one where the caller says that this pays.

Products are taken from the last one backwards. So where two of them meet in one node, a residual add for example, the
later one absorbs it and reads the earlier one's result, which is there by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.ir.fusion import Fusion
from onnxfuse.limits import MAX_PARTS
from onnxfuse.patterns.build_fusion import lower
from onnxfuse.patterns.classify import check_parts, pattern_of
from onnxfuse.patterns.insertion_points import Places
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.partition import Partition
from onnxfuse.patterns.product import Product, is_anchor, read_product
from onnxfuse.patterns.region_growth import GrownRegion

OLDEST_OPSET = 9  # broadcasting and Slice are spelled differently before
MAX_SIBLINGS = 8  # products of one input that grow together; those that meet in a value are in one group
MAX_REACHED = 64  # nodes behind a product that are looked at for that

Site = TypeVar("Site")
Accept = Callable[[Match, Fusion], Site]
Pays = Callable[[Site, Sequence[Site]], bool]


@dataclass(frozen=True)
class Sites(Generic[Site]):
    """What became of every product of a model, in graph order.

    Attributes:
        fused: what `accept` made of each fusion.
        skipped: each product that is left alone, and why.
    """

    fused: tuple[Site, ...]
    skipped: tuple[tuple[gs.Node, NotFusable], ...]


def match_sites(
    graph: Graph, accept: Accept[Site], pays: Pays[Site] | None = None, rounds: bool = False
) -> Sites[Site]:
    """Find every fusion of a model; they share no node.

    Args:
        graph: the model.
        accept: raises NotFusable for a fusion that no kernel computes; a smaller one is tried then.
        pays: whether the first argument, one fusion, is better than the second, fusions of products of the same input;
            without it none become one.
        rounds: whether a fusion rounds every intermediate to the type in which the model stores it.
    """
    products: list[Product] = []
    skipped: list[tuple[gs.Node, NotFusable]] = []
    for node in graph.nodes:
        if not is_anchor(graph, node):
            continue
        try:
            _check_scope(graph, node)
            products.append(read_product(graph, node))
        except NotFusable as refusal:
            skipped.append((node, refusal))
    places = Places(graph)
    fused: dict[tuple[int, int], Site] = {}
    for group in _siblings(graph, products):
        skipped += _match_group(graph, group, places, accept, pays, fused, rounds)
    skipped.sort(key=lambda entry: graph.index(entry[0]))
    return Sites(tuple(fused[index] for index in sorted(fused)), tuple(skipped))


def _check_scope(graph: Graph, node: gs.Node) -> None:
    """Nothing is fused where nothing is known."""
    if graph.scope.fault:
        raise NotFusable("function_differs", node_label(node), f"inside a function: {graph.scope.fault}")
    if graph.opset < OLDEST_OPSET:
        detail = f"operator set {graph.opset} spells broadcasting otherwise than those from {OLDEST_OPSET} on"
        raise NotFusable("opset_too_old", node_label(node), detail)


def match_site(graph: Graph, node: gs.Node) -> tuple[Match, Fusion]:
    """The fusion with one anchor.

    Raises:
        NotFusable: with the reason and the node at fault.
    """
    sites = match_sites(graph, lambda match, fusion: (match, fusion))
    refusal = next((refusal for anchor, refusal in sites.skipped if anchor is node), None)
    if refusal is not None:
        raise refusal
    return next(site for site in sites.fused if graph.index(node) in (*site[0].shared, *site[0].nodes))


def _siblings(graph: Graph, products: list[Product]) -> list[tuple[Product, ...]]:
    """Products that a kernel could compute together, the group with the last product first."""
    groups: dict[object, list[Product]] = {}
    for product in products:
        alone = None if product.is_weight else product.out
        key = (alone, product.lhs, product.dtype, product.k, _order(product), product.row_view)
        groups.setdefault(key, []).append(product)
    chunks = [chunk for group in groups.values() for chunk in _chunks(graph, group)]
    return sorted(chunks, key=lambda group: graph.index(group[-1].node), reverse=True)


def _chunks(graph: Graph, group: list[Product]) -> list[tuple[Product, ...]]:
    """Products of one input in groups that are small enough; those that meet stay together where there is room."""
    if len(group) <= MAX_SIBLINGS:
        return [tuple(group)]
    chunks: list[list[Product]] = [[]]
    for meeting in _meeting(graph, group):
        if len(chunks[-1]) + len(meeting) > MAX_SIBLINGS:
            chunks.append([])
        for product in meeting:
            if len(chunks[-1]) == MAX_SIBLINGS:
                chunks.append([])
            chunks[-1].append(product)
    return [tuple(sorted(chunk, key=lambda product: graph.index(product.node))) for chunk in chunks if chunk]


def _meeting(graph: Graph, group: list[Product]) -> list[list[Product]]:
    """The products that meet in some node before the next product, in the order of their first ones."""
    earlier = list(range(len(group)))  # for each product the first that it meets, or one on the way there
    by_node: dict[int, int] = {}

    def first(number: int) -> int:
        while earlier[number] != number:
            number = earlier[number]
        return number

    for number, product in enumerate(group):
        for node in _reached(graph, product):
            pair = first(by_node.setdefault(node, number)), first(number)
            earlier[max(pair)] = min(pair)
    sets: dict[int, list[Product]] = {}
    for number, product in enumerate(group):
        sets.setdefault(first(number), []).append(product)
    return list(sets.values())


def _reached(graph: Graph, product: Product) -> set[int]:
    """Nodes that read a product's result, through others, up to the next products."""
    found: set[int] = set()
    stack = list(product.node.outputs)
    while stack and len(found) < MAX_REACHED:
        readers = [node for node in stack.pop().outputs if not is_anchor(graph, node)]
        stack += [out for node in readers if graph.index(node) not in found for out in node.outputs]
        found.update(map(graph.index, readers))
    return found


def _order(product: Product) -> bool:
    """Whether the columns are the weight's last dimension."""
    return bool(product.rhs_view[-1]) and product.rhs_view[-1][-1] not in product.k


def _match_group(
    graph: Graph,
    group: tuple[Product, ...],
    places: Places,
    accept: Accept[Site],
    pays: Pays[Site] | None,
    fused: dict[tuple[int, int], Site],
    rounds: bool,
) -> list[tuple[gs.Node, NotFusable]]:
    """Cut matches out of what a group grows into until none is left; `fused` takes them, by first anchor and place."""
    refused: list[tuple[gs.Node, NotFusable]] = []
    if any(places.is_taken(view.node) for product in group for view in product.views):
        group = _without_views(graph, group, refused)
    for product in group:
        if any(places.is_taken(view.node) for view in product.views):
            refused.append((product.node, NotFusable("taken", product.label, "its factors belong to another fusion")))
    group = tuple(product for product in group if all(product.node is not node for node, _ in refused))
    while group:
        grown = GrownRegion(graph, group, places.is_taken, rounds)
        if grown.refused:
            refused += [(product.node, refusal) for product, refusal in grown.refused]
            group = tuple(product for product in group if all(product is not other for other, _ in grown.refused))
            continue
        partition = Partition(grown, places)
        taken = _largest(graph, partition, group, accept)
        found = _apart(graph, partition, group, taken, accept, pays)
        if not found and taken is not None:
            found = [_joined(graph, partition, group, taken, accept, pays)]
        if found:
            for match, site in found:
                places.take(match)
                fused[graph.index(match.products[0].node), match.place] = site
            group = tuple(product for product in group if product not in found[0][0].products)
        elif partition.refusals and any(product.reads_through_views for product in group):
            group = _without_views(graph, group, refused)
        else:
            return refused + [(product.node, partition.reason(product)) for product in group]
    return refused


def _without_views(
    graph: Graph, group: tuple[Product, ...], refused: list[tuple[gs.Node, NotFusable]]
) -> tuple[Product, ...]:
    """The same products, their inputs read as they lie behind the views; `refused` takes those that cannot be."""
    products: list[Product] = []
    for product in group:
        try:
            products.append(read_product(graph, product.node, through_views=False))
        except NotFusable as refusal:
            refused.append((product.node, refusal))
    return tuple(products)


def _largest(
    graph: Graph, partition: Partition, products: Sequence[Product], accept: Accept[Site]
) -> tuple[Match, Site] | None:
    """The first match of some products, from the largest on, that a kernel computes."""
    matches = (match for match in partition.matches() if all(product in products for product in match.products))
    return _first(graph, partition, matches, accept)


def _apart(
    graph: Graph,
    partition: Partition,
    group: Sequence[Product],
    taken: tuple[Match, Site] | None,
    accept: Accept[Site],
    pays: Pays[Site] | None,
) -> list[tuple[Match, Site]]:
    """A match for every column range of one product, where no match takes its columns apart; none, or all of them.

    Ranges of equal width become one match where that pays.
    """
    if taken is not None and partition.takes_columns_apart(taken[0]):
        return []
    for product in group if taken is None else taken[0].products:
        found = [_first(graph, partition, matches, accept) for matches in partition.matches_by_range(product)]
        known = [entry for entry in found if entry is not None]
        if known and len(known) == len(found) and not _read_each_other(known):
            return _paired(graph, partition, known, accept, pays)
    return []


def _first(
    graph: Graph, partition: Partition, matches: Iterable[Match], accept: Accept[Site]
) -> tuple[Match, Site] | None:
    """The first match that a kernel computes."""
    for match in matches:
        try:
            return match, _accepted(graph, match, accept)
        except NotFusable as refusal:
            partition.refuse(partition.region_of(match), refusal)
    return None


def _read_each_other(found: Sequence[tuple[Match, Site]]) -> bool:
    """Whether one match reads what another makes: no place may be right for both."""
    made = {out.name for match, _ in found for out in match.exits}
    return any(leaf.operand in made for match, _ in found for leaf in match.reads)


def _paired(
    graph: Graph,
    partition: Partition,
    found: Sequence[tuple[Match, Site]],
    accept: Accept[Site],
    pays: Pays[Site] | None,
) -> list[tuple[Match, Site]]:
    """Matches of neighbouring ranges as one where that pays: k and v beside a wider q."""
    paired: list[tuple[Match, Site]] = []
    for entry in found:
        joint = _joint(graph, partition, paired[-1][0], entry[0], accept) if paired and pays is not None else None
        if joint is not None and pays is not None and pays(joint[1], [paired[-1][1], entry[1]]):
            paired[-1] = joint
        else:
            paired.append(entry)
    return paired


def _accepted(graph: Graph, match: Match, accept: Accept[Site]) -> Site:
    check_parts(match)
    fusion = lower(graph, match, pattern_of(match))
    _check_reads(graph, match, fusion)
    return accept(match, fusion)


def _joined(
    graph: Graph,
    partition: Partition,
    group: Sequence[Product],
    taken: tuple[Match, Site],
    accept: Accept[Site],
    pays: Pays[Site] | None,
) -> tuple[Match, Site]:
    """A match of one column range, or one of it and others like it of the same group, as many as pay.

    A gate stays by itself: its tile is full, and a report counts it.
    """
    match, site = taken
    if pays is None or len(match.ranges) > 1:
        return taken
    alone, rest = [site], list(group)
    while len(match.ranges) < MAX_PARTS:
        rest = [product for product in rest if product not in match.products]
        other = _largest(graph, partition, rest, accept) if rest else None
        if other is None:
            break
        joint = _joint(graph, partition, match, other[0], accept)
        if joint is None:
            rest = [product for product in rest if product not in other[0].products]
        elif pays(joint[1], [*alone, other[1]]):
            (match, site), alone = joint, [*alone, other[1]]
        else:
            break
    return match, site


def _joint(
    graph: Graph, partition: Partition, first: Match, second: Match, accept: Accept[Site]
) -> tuple[Match, Site] | None:
    """Two matches as one, where a kernel computes it."""
    if len(second.ranges) > 1:
        return None
    try:
        joint = partition.joined(first, second)
        return joint, _accepted(graph, joint, accept)
    except NotFusable:
        return None


def _check_reads(graph: Graph, match: Match, fusion: Fusion) -> None:
    """What the nodes read is an input of the kernel, or known: an operand that changes nothing may be neither."""
    indices = (*match.copied, *match.nodes)
    nodes = [graph.nodes[index] for index in indices]
    inside = {tensor.name for node in nodes for tensor in node.outputs} | {tensor.name for tensor in fusion.inputs}
    for index, node in zip(indices, nodes, strict=True):
        for tensor in node.inputs[: 1 if index in match.shapes else None]:  # such a Reshape gets a shape of its own
            if tensor.name and tensor.name not in inside and not is_complete(graph.known_value(tensor)):
                detail = f"{tensor.name!r} does not change the result, and only the run knows it"
                raise NotFusable("operand_without_effect", node_label(node), detail)
