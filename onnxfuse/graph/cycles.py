"""The last guard of a rewrite: fused nodes that would wait for each other.

Insertion points are there so that none do. What they may still miss would be a model that no runtime loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from onnxfuse.graph.fallback_body import Replacement
from onnxfuse.graph.functions import reads
from onnxfuse.graph.graph import Graph

Made = tuple[object, Iterable[str], Iterable[str]]
"""What stands in the rewritten model: what it is called here, what it reads, what it makes."""


def place_in_a_cycle(replacements: Sequence[Replacement]) -> int | None:
    """The place of a replacement that waits for itself, of several one without which none does; None for none."""
    waiting = _places_in_a_cycle(replacements)
    alone = (place for place in waiting if not _places_in_a_cycle([*replacements[:place], *replacements[place + 1 :]]))
    return next(alone, waiting[0] if waiting else None)


def _places_in_a_cycle(replacements: Sequence[Replacement]) -> list[int]:
    if not replacements:
        return []
    standing = [*_kept(replacements[0].graph, replacements), *_told(replacements), *_fused(replacements)]
    makers = {name: key for key, _, outputs in standing for name in outputs if name}
    needs = {key: {makers[name] for name in inputs if name in makers} for key, inputs, _ in standing}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        places = sorted({key for key in error.args[1] if isinstance(key, int)})
        assert places, "the model itself has a cycle"
        return places
    return []


def _kept(graph: Graph, replacements: Sequence[Replacement]) -> Iterator[Made]:
    gone = {index for each in replacements for index in (*each.nodes, *each.folded, *each.told)}
    gone -= {index for each in replacements for index in each.retained}
    for index, node in enumerate(graph.scope.nodes):
        if index not in gone:
            yield f"node {index}", reads(node), node.output


def _told(replacements: Sequence[Replacement]) -> Iterator[Made]:
    for each in replacements:
        for index, shape in each.told.items():
            yield f"shape {index}", [name for name, _ in shape.bases], each.graph.scope.nodes[index].output


def _fused(replacements: Sequence[Replacement]) -> Iterator[Made]:
    """Last, for what a node that stays for others makes as well is theirs."""
    for place, each in enumerate(replacements):
        bases = (name for shape in each.expanded.values() for name, _ in shape.bases)
        yield place, (*each.inputs, *bases), each.outputs
