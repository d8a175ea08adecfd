"""Normalisations of rows: an op, or the nodes that exporters write for one, with what is behind it (behind_rows.py).

They are looked for when all products have their nodes. What ONNX Runtime's ops were taken apart for (opened_ops.py) is
one where a product has the sums; else the op stays whole, which adds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.skip_norms import is_added_and_normalised
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.limits import MOST_ACROSS, MOST_NORMALISED
from onnxfuse.patterns.behind_rows import grown_behind, passes_behind
from onnxfuse.patterns.deviation import MOST_ADDED, of_deviation
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.fast_variance import of_fast_variance
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import Match, ProductlessMatch, without_product
from onnxfuse.patterns.match_checks import check_reads
from onnxfuse.patterns.normalisation_forms import LAST, VIEWS, Core, before_transpose, of_nodes, of_op
from onnxfuse.patterns.row_length import of_length
from onnxfuse.patterns.scaled_normalisation import of_scaled

SPELLED_OUT = (of_nodes, of_scaled, of_fast_variance, of_length, of_deviation)


def normalisations(
    graph: Graph, points: InsertionPoints, rounds: bool, kept: Collection[int]
) -> Iterator[tuple[Match, Normalisation]]:
    """Every normalisation of a scope whose nodes no fusion has.

    Args:
        graph: the scope.
        points: who owns its nodes.
        rounds: whether fusions round every intermediate as the model does; then only an op by itself is one.
        kept: nodes of other normalisations, which none takes in.
    """
    is_taken = partial(_is_of_others, graph, points, kept)
    for node in graph.nodes:
        core = of_op(graph, node) or (None if rounds else _spelled_out(graph, node))
        if core is None or graph.is_folded(core.normal.name) or not _is_left_to_a_kernel(graph, points, core):
            continue
        takes, ways = (_always, [core]) if rounds else (is_taken, _ways(graph, core, points))
        for match, lowered in chain.from_iterable(_matches(graph, way, points, takes) for way in ways):
            if any(map(points.is_taken, core.nodes)):
                break
            try:
                check_reads(graph, match, lowered)
                yield points.placed(match), lowered
            except NotFusable:  # its parameters are computed of what it makes
                continue


def _ways(graph: Graph, core: Core, points: InsertionPoints) -> list[Core]:
    """With a Transpose before it, which a kernel does for nothing where another one behind it brings rows back."""
    turned = before_transpose(graph, core)
    return [core] if turned is None or points.is_taken(turned.nodes[0]) else [turned, core]


def _always(node: gs.Node) -> bool:
    """Nothing behind an op by itself is taken in."""
    return True


def _is_of_others(graph: Graph, points: InsertionPoints, kept: Collection[int], node: gs.Node) -> bool:
    """Whether another fusion has a node, another normalisation begins with it, or an op that adds and normalises."""
    index = graph.index(node)
    taken = points.is_taken(node) or index in kept
    return taken or index in graph.opened_sums or is_added_and_normalised(graph, node)


def _matches(
    graph: Graph, core: Core, points: InsertionPoints, is_taken: Callable[[gs.Node], bool]
) -> Iterator[tuple[ProductlessMatch, Normalisation]]:
    """What of a normalisation and the nodes behind it one kernel may compute, the largest first."""
    if not _is_normalised(graph, core):
        return
    shapes = _shapes(graph, core)
    for match, lowered in grown_behind(graph, core, points, is_taken):
        nodes = sorted({*map(graph.index, core.nodes), *match.nodes})
        own = replace(
            without_product(match, nodes, [out.name for out in match.live_outs], lowered.anchor),
            folded=tuple(sorted({*match.folded, *only_feeding(graph, shapes)})),
            shapes=shapes | match.shapes,
            passes=_passes(graph, core, match),
        )
        yield own, lowered


def _passes(graph: Graph, core: Core, match: Match) -> int:
    """Nodes that go over all elements beside one that normalises; the runtime has no such op of another axis."""
    return passes_behind(graph, core, match) + (len(core.nodes) - 1 if core.axis != LAST else 0)


def _is_normalised(graph: Graph, core: Core) -> bool:
    """Whether a kernel has the types of its rows and the registers for their columns; they stay rows."""
    shape, made = (graph.shape(tensor.name) or () for tensor in (core.x, core.normal))
    floats = all(graph.dtype(tensor.name) in FLOATS_BY_ONNX for tensor in (core.x, core.normal))
    columns = shape[core.axis] if len(shape) >= -core.axis else None
    if len(made) != len(shape) or not isinstance(columns, int) or not core.epsilon < MOST_ADDED:
        return False
    return floats and 1 < columns <= (MOST_NORMALISED if core.axis == LAST else MOST_ACROSS)


def _spelled_out(graph: Graph, node: gs.Node) -> Core | None:
    core = next((core for form in SPELLED_OUT if (core := form(graph, node)) is not None), None)
    return None if core is None else _narrowed(graph, core)


def _narrowed(graph: Graph, core: Core) -> Core:
    """The same with the cast behind it, where the nodes compute in a type that is no kernel's."""
    readers = core.normal.outputs
    if graph.dtype(core.normal.name) in FLOATS_BY_ONNX or [reader.op for reader in readers] != ["Cast"]:
        return core
    return replace(core, nodes=(*core.nodes, *readers), normal=readers[0].outputs[0])


def reserved(graph: Graph) -> frozenset[int]:
    """The nodes of normalisations that are spelled out: a product that took a cast of them would leave the others."""
    cores = filter(None, (_spelled_out(graph, node) for node in graph.nodes))
    found = (core for core in cores if _is_normalised(graph, core))
    return frozenset(graph.index(node) for core in found for node in core.nodes)


def _is_left_to_a_kernel(graph: Graph, points: InsertionPoints, core: Core) -> bool:
    """Whether it is no part of an op of ONNX Runtime that adds and normalises."""
    return _is_of_taken_sums(graph, points, core.anchor) and not _is_added_by_the_runtime(graph, points, core.x)


def _is_of_taken_sums(graph: Graph, points: InsertionPoints, node: gs.Node) -> bool:
    """Whether a node is a model's own, or what is left of an op whose sums a product's kernel makes."""
    sums = graph.sums_before([graph.index(node)])
    return not sums or any(points.is_taken(graph.nodes[index]) for index in sums)


def _is_added_by_the_runtime(graph: Graph, points: InsertionPoints, x: gs.Tensor) -> bool:
    """Whether what is normalised is a sum that no product's kernel makes, and ONNX Runtime adds as it normalises."""
    return any(is_added_and_normalised(graph, add) and not points.is_taken(add) for add in x.inputs)


def _shapes(graph: Graph, core: Core) -> dict[int, FallbackShape]:
    """The shapes of the views among its nodes, where the model computes them."""
    views = (node for node in core.nodes if node.op in VIEWS and graph.known_integers(node.inputs[1]) is None)
    return {graph.index(view): _shape_of(graph, view) for view in views}


def _shape_of(graph: Graph, view: gs.Node) -> FallbackShape:
    """That of a view which keeps the dimensions that it reads, and may have a last one that is known."""
    keeps = 0 if view.op == "Reshape" else 1
    before, after = (graph.shape(tensor.name) or () for tensor in (view.inputs[0], view.outputs[0]))
    keeping = [place < len(before) and before[place] == size for place, size in enumerate(after)]
    entries = (keeps if kept or not isinstance(size, int) else size for size, kept in zip(after, keeping, strict=True))
    return FallbackShape(tuple(entries), (None,) * len(after))
