"""Which fusion owns a node, and where its fused node stands: the one place that keeps fusions apart and in order.

Every fused node stands where one of its nodes stood, after all that make its inputs and before all that read its
outputs. So the rewritten nodes have an order, and no set of fusions closes a cycle.

The order is the file's until a fusion reads what is made behind the first reader of its outputs. If that needs nothing
of the fusion, it moves in front of it with all that it needs, here and where the model is rewritten: it is the graph
that decides what is fused, and not which of its topological orders a file has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.functions import subgraphs
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.patterns.match import Match


class InsertionPoints:
    """The nodes that fusions have taken, where each will stand, and the order of all nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._order = list(range(len(graph.nodes)))  # a topological order
        self._ranks = list(self._order)  # by node, its place in the order
        self._points: dict[int, int] = {}
        self._matches: dict[int, Match] = {}  # by insertion point
        self._made_at: dict[str, int] = {}  # by value, the insertion point of the match that makes it
        self._told: dict[str, tuple[int, ...]] = {}  # by value, where shapes of others are told by its own
        self._reserved: frozenset[int] = frozenset()
        self._passed: set[int] = set()  # nodes that stay: a fusion does their work again, of what they read
        self._folded: set[int] = set()  # constants of the rewritten model: whoever reads them waits for nothing

    def is_taken(self, node: gs.Node) -> bool:
        """Whether a fusion owns the node, it is reserved for one, or it stays."""
        index = self.graph.index(node)
        return index in self._points or index in self._reserved or index in self._passed

    def is_free(self, node: gs.Node) -> bool:
        """Whether a fusion may still swallow the node."""
        return not self.is_taken(node)

    def is_passed(self, node: gs.Node) -> bool:
        """Whether a node stays whose work a fusion does again: others may do it as well, and none may swallow it."""
        return self.graph.index(node) in self._passed

    def reserve(self, nodes: Collection[int]) -> None:
        """Keep nodes for fusions that are looked for later, and those that were kept before no more."""
        self._reserved = frozenset(nodes)

    def take(self, match: Match) -> None:
        """Give a match its nodes, the views of its inputs, what it shares: no other fusion may swallow what they read.

        What is shared stays where it is, and so do the views that others read too.

        Raises:
            NotFusable: other matches were taken since it was placed, and no place is left for it.
        """
        match = self.placed(match)
        self._move(self._late(match, match.insertion_point), match.insertion_point)
        views = self._views(match)
        own = {*match.nodes, *match.folded}
        self._points.update({index: index for index in (*views, *match.shared)})
        self._points.update(dict.fromkeys(own, match.insertion_point))
        for index in reversed(views):
            if self._feeds_only(index, own):
                own.add(index)
                self._points[index] = match.insertion_point
        self._matches[match.insertion_point] = match
        self._made_at.update({out.name: match.insertion_point for out in match.live_outs})
        self._folded.update(match.folded)
        self._passed.update(match.passed)
        for index, shape in match.told.items():
            for name, _ in shape.bases:
                self._told[name] = (*self._told.get(name, ()), index)

    def have_room(self, matches: Collection[Match]) -> bool:
        """Whether there is a place for each of several matches that are placed, with the others in theirs."""
        if len(matches) < 2:
            return True
        trial = self._copy()
        try:
            for match in matches:
                trial.take(match)
        except NotFusable:
            return False
        return True

    def _copy(self) -> InsertionPoints:
        other = copy(self)
        other._order, other._ranks, other._points = self._order[:], self._ranks[:], dict(self._points)
        other._matches, other._made_at = dict(self._matches), dict(self._made_at)
        other._told, other._folded, other._passed = dict(self._told), set(self._folded), set(self._passed)
        return other

    def _feeds_only(self, index: int, own: Collection[int]) -> bool:
        """Whether all readers of a node are some others."""
        made = self.graph.nodes[index].outputs
        return all(
            not self.graph.is_escaping(tensor.name)
            and all(self.graph.index(reader) in own for reader in tensor.outputs)
            for tensor in made
        )

    def placed(self, match: Match) -> Match:
        """The match with the last point in front of what reads its values, if all that it reads can be made before.

        Raises:
            NotFusable: what it makes is needed for what it reads.
        """
        before = min(self._ranks_behind(match), default=len(self._order))
        points = [index for index in match.places if self._ranks[index] < before]
        if not points or not all(self._is_told_in_time(index, shape) for index, shape in match.told.items()):
            raise _needs_itself(match)
        point = max(points, key=lambda index: self._ranks[index])
        self._late(match, point)
        return replace(match, insertion_point=point)

    def _late(self, match: Match, point: int) -> set[int]:
        """What stands behind a point and has to be made before: where a match's inputs are made, and what that needs.

        Raises:
            NotFusable: some of it reads what the match makes, or has branches or loops, which stay where they are.
        """
        late: set[int] = set()
        readers = {*self._readers(match)}
        waiting = [*self._makers(match)]
        while waiting:
            index = waiting.pop()
            if index in late or self._ranks[index] <= self._ranks[point]:
                continue
            if index in readers or any(subgraphs(self.graph.scope.nodes[index])):
                raise _needs_itself(match)
            late.add(index)
            waiting += self._makers_of(index)
        return late

    def _move(self, late: Collection[int], point: int) -> None:
        """Put nodes in front of a point, in the order that they have."""
        first = self._ranks[point]
        last = max((self._ranks[index] for index in late), default=first)
        behind = self._order[first : last + 1]
        self._order[first : last + 1] = sorted(behind, key=lambda index: index not in late)
        for rank in range(first, last + 1):
            self._ranks[self._order[rank]] = rank

    def _point(self, node: gs.Node) -> int:
        """The node itself, or that at which its fusion stands."""
        index = self.graph.index(node)
        return self._points.get(index, index)

    def _makers_of(self, point: int) -> Iterator[int]:
        """Where the inputs are made of what stands at a point: a node, or a match with the views that only it reads."""
        nodes = [point]
        if point in self._matches:
            yield from self._makers(self._matches[point])
            nodes = [view for view in self._views(self._matches[point]) if self._points[view] == point]
        for index in nodes:
            for tensor in self.graph.nodes[index].inputs:
                yield from self._makers_of_value(tensor)

    def _views(self, match: Match) -> list[int]:
        """The views of a match's inputs, in the file's order."""
        return sorted(self.graph.index(view.node) for product in match.products for view in product.views)

    def _makers_of_value(self, tensor: gs.Tensor, inside: Collection[int] = ()) -> Iterator[int]:
        """Where a value is made, unless some nodes make it."""
        makers = (maker for maker in tensor.inputs if self.graph.index(maker) not in inside)
        yield from (self._made_at.get(tensor.name, self._point(maker)) for maker in makers)

    def _makers(self, match: Match) -> Iterator[int]:
        inside = self._folded.union(match.places)
        for index in match.places:
            for tensor in self.graph.nodes[index].inputs[: 1 if index in match.shapes else None]:
                yield from self._makers_of_value(tensor, inside)

    def _is_told_in_time(self, index: int, shape: ToldShape) -> bool:
        """Whether what tells a shape is made before it is read."""
        makers = (maker for name, _ in shape.bases for maker in self._makers_of_value(self.graph.tensor(name)))
        return all(self._ranks[maker] < self._ranks[index] for maker in makers)

    def _ranks_behind(self, match: Match) -> Iterator[int]:
        """The places in the order of what reads a match's values; what is read inside a subgraph, read at once."""
        yield from (self._ranks[index] for index in self._readers(match))
        for tensor in self._made(match):
            if self.graph.is_read_by_subgraphs(tensor.name):
                yield self._ranks[self.graph.index(tensor.inputs[0])] + 1

    def _readers(self, match: Match) -> Iterator[int]:
        inside = self._folded.union(match.nodes, match.folded)
        for tensor in self._made(match):
            yield from self._told.get(tensor.name, ())
            yield from (self._point(reader) for reader in tensor.outputs if self.graph.index(reader) not in inside)

    def _made(self, match: Match) -> Iterator[gs.Tensor]:
        """The values that live out of a match."""
        names = {out.name for out in match.live_outs}
        for index in (*match.shared, *match.nodes):
            yield from (tensor for tensor in self.graph.nodes[index].outputs if tensor.name in names)


def _needs_itself(match: Match) -> NotFusable:
    detail = "an operand is computed from a value of the fusion, or from its shape"
    return NotFusable("needs_its_own_result", match.label, detail)
