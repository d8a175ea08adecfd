"""Which fusion owns a node, and where its fused node stands: the one place that keeps fusions apart and in order.

Every fused node stands where one of its nodes stood, after all that make its inputs and before all that read its
outputs. So the rewritten nodes are in order, and no set of fusions closes a cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.patterns.match import Match


class InsertionPoints:
    """The nodes that fusions have taken, and where each will stand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._points: dict[int, int] = {}
        self._told: dict[str, list[int]] = {}  # by value, where shapes of others are told by its own
        self._reserved: frozenset[int] = frozenset()
        self._folded: set[int] = set()  # constants of the rewritten model: whoever reads them waits for nothing

    def is_taken(self, node: gs.Node) -> bool:
        """Whether a fusion owns the node, or it is reserved for one."""
        index = self.graph.index(node)
        return index in self._points or index in self._reserved

    def reserve(self, nodes: Collection[int]) -> None:
        """Keep nodes for fusions that are looked for later, and those that were kept before no more."""
        self._reserved = frozenset(nodes)

    def take(self, match: Match) -> None:
        """Give a match its nodes, the views of its inputs, what it shares: no other fusion may swallow what they read.

        What is shared stays where it is, and so do the views that others read too.
        """
        views = sorted(self.graph.index(view.node) for product in match.products for view in product.views)
        own = {*match.nodes, *match.folded}
        self._points.update({index: index for index in (*views, *match.shared)})
        self._points.update(dict.fromkeys(own, match.insertion_point))
        for index in reversed(views):
            if self._feeds_only(index, own):
                own.add(index)
                self._points[index] = match.insertion_point
        self._folded.update(match.folded)
        for index, shape in match.told.items():
            for name, _ in shape.bases:
                self._told.setdefault(name, []).append(index)

    def _feeds_only(self, index: int, own: Collection[int]) -> bool:
        """Whether all readers of a node are some others."""
        made = self.graph.nodes[index].outputs
        return all(
            not self.graph.is_escaping(tensor.name)
            and all(self.graph.index(reader) in own for reader in tensor.outputs)
            for tensor in made
        )

    def placed(self, match: Match) -> Match:
        """The match with the last point that is right for it.

        Raises:
            NotFusable: what it makes is needed for what it reads.
        """
        after, before = max(self._makers(match), default=-1), min(self._readers(match), default=len(self.graph.nodes))
        points = [index for index in match.nodes if after < index < before]
        if not points or not all(self._is_told_in_time(index, shape) for index, shape in match.told.items()):
            detail = "an operand is computed from a value of the fusion, or from its shape"
            raise NotFusable("needs_its_own_result", match.label, detail)
        return replace(match, insertion_point=points[-1])

    def _point(self, node: gs.Node) -> int:
        index = self.graph.index(node)
        return self._points.get(index, index)

    def _makers(self, match: Match) -> Iterator[int]:
        inside = self._folded.union(match.nodes)
        for index in match.nodes:
            for tensor in self.graph.nodes[index].inputs[: 1 if index in match.shapes else None]:
                yield from (self._point(maker) for maker in tensor.inputs if self.graph.index(maker) not in inside)

    def _is_told_in_time(self, index: int, shape: ToldShape) -> bool:
        """Whether what tells a shape is made before it is read."""
        makers = (maker for name, _ in shape.bases for maker in self.graph.tensor(name).inputs)
        return all(self._point(maker) < index for maker in makers)

    def _readers(self, match: Match) -> Iterator[int]:
        inside = self._folded.union(match.nodes, match.folded)
        names = {out.name for out in match.live_outs}
        for index in match.nodes:
            for tensor in self.graph.nodes[index].outputs:
                if tensor.name in names:
                    yield from self._told.get(tensor.name, ())
                    yield from self._readers_of(tensor, inside)

    def _readers_of(self, tensor: gs.Tensor, inside: set[int]) -> Iterator[int]:
        yield from (self._point(reader) for reader in tensor.outputs if self.graph.index(reader) not in inside)
        if self.graph.is_read_by_subgraphs(tensor.name):
            yield self.graph.index(tensor.inputs[0]) + 1
