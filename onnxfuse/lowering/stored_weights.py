"""Sites that agree on how each weight is stored.

A weight has one order in the file. It is another one than the model's only where nobody reads it but fused nodes that
want it so: then it takes the other's place, and the file does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.transposed_data import Order
from onnxfuse.graph.weight_readers import readers, readers_of_outputs
from onnxfuse.lowering.plan_site import slower
from onnxfuse.lowering.site import Site


def settle(
    graphs: Sequence[Graph], sites: Sequence[Site]
) -> tuple[tuple[Site, ...], tuple[tuple[Site, NotFusable], ...]]:
    """The sites, those with a weight that others read as it was planned for it as it was.

    Returns:
        The sites, and those that no kernel computes then, with the reason.
    """
    refused: list[tuple[Site, NotFusable]] = []
    while disputed := _disputed(graphs, sites):
        settled: list[Site] = []
        for site in sites:
            try:
                settled.append(_as_stored(site) if disputed & site.implementation.transposed.keys() else site)
            except NotFusable as refusal:
                refused.append((site, refusal))
        sites = settled
    return tuple(sites), tuple(refused)


def _as_stored(site: Site) -> Site:
    if isinstance(site.as_stored, NotFusable):
        raise site.as_stored
    assert site.as_stored is not None, "a site of transposed weights knows itself without"
    if site.as_stored.is_left_alone:
        raise slower(site.as_stored, site.fusion.anchor)
    return site.as_stored


def _disputed(graphs: Sequence[Graph], sites: Sequence[Site]) -> set[str]:
    """Weights that some sites want in another order than somebody else."""
    wanted = {name for site in sites for name in site.implementation.transposed}
    if not wanted:
        return set()
    orders: dict[str, set[Order | None]] = {name: set() for name in wanted}
    for site in sites:
        for name in {tensor.name for tensor in site.implementation.fusion.inputs} & wanted:
            orders[name].add(site.implementation.transposed.get(name))
    found = {name for name, perms in orders.items() if len(perms) > 1}
    takers = _Takers(sites)
    return found | {name for graph, index, name in readers(graphs, wanted) if not takers.take(graph, index, name)}


class _Takers:
    """Which nodes go with the sites that want a weight in another order."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.replaced: set[tuple[int, int, str]] = set()
        self.copied: set[tuple[int, int, str]] = set()
        self.made: dict[int, set[str]] = {}  # by scope
        for site in sites:
            self.made.setdefault(id(site.graph), set()).update(out.name for out in site.match.live_outs)
            for name in site.implementation.transposed:
                self.replaced |= {(id(site.graph), index, name) for index in site.implementation.replaced}
                self.copied |= {(id(site.graph), index, name) for index in site.match.copied}

    def take(self, graph: Graph, index: int, name: str) -> bool:
        """Whether a node is not needed any more; one that several fusions need goes when all its readers do."""
        if (id(graph), index, name) in self.replaced:
            return True
        made = self.made.get(id(graph), set())
        after = readers_of_outputs(graph, index, made) if (id(graph), index, name) in self.copied else None
        return after is not None and all(self.take(graph, reader, name) for reader in after)
