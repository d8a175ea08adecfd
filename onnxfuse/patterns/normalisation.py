"""Normalisations of rows: an op, or the nodes that exporters write for one, with the parameters of columns behind it.

An activation behind these is its kernel's too (behind_normalisation.py).

They are looked for when all products have their nodes. What ONNX Runtime's ops were taken apart for (opened_ops.py) is
one where a product has the sums; else the op stays whole, which adds as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.fallback_body import FallbackShape
from onnxfuse.graph.graph import Graph, Size, node_label
from onnxfuse.graph.skip_norms import is_added_and_normalised
from onnxfuse.ir.fusion import NONLINEAR, Axis, Load, Out, Step, Tensor
from onnxfuse.ir.normalisation import COLUMNS, Normalisation
from onnxfuse.limits import MOST_NORMALISED
from onnxfuse.patterns.behind_normalisation import Tail
from onnxfuse.patterns.behind_rows import grown_behind, passes_behind
from onnxfuse.patterns.deviation import of_deviation
from onnxfuse.patterns.epilogue_graph import EpilogueGraph
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.fast_variance import of_fast_variance
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import LiveOut, Match
from onnxfuse.patterns.match_checks import check_reads
from onnxfuse.patterns.normalisation_forms import VIEWS, Core, number, of_nodes, of_op, other
from onnxfuse.patterns.row_length import of_length
from onnxfuse.patterns.scaled_normalisation import of_scaled

PATTERN = "normalisation"
MOST_BEHIND = 6  # nodes behind a normalised row: casts, a scale, a bias
AFFINE = {"Mul": "mul", "Add": "add"}
SPELLED_OUT = (of_nodes, of_scaled, of_fast_variance, of_length, of_deviation)
BATCH, ROWS = "b", "m"


@dataclass(frozen=True)
class NormalisationMatch(Match):
    """The nodes of one normalisation, which has no product.

    Attributes:
        anchor: name of its node, or of that which takes the mean of squares.
        passes: nodes behind it that read and write every element, each by itself.
    """

    anchor: str = field(default="", kw_only=True)
    passes: int = field(default=0, kw_only=True)

    @property
    def label(self) -> str:
        """Name of its node."""
        return self.anchor


def normalisations(graph: Graph, points: InsertionPoints, rounds: bool) -> Iterator[tuple[Match, Normalisation]]:
    """Every normalisation of a scope whose nodes no fusion has.

    Args:
        graph: the scope.
        points: who owns its nodes.
        rounds: whether fusions round every intermediate as the model does; then only an op by itself is one.
    """
    for node in graph.nodes:
        core = of_op(graph, node) or (None if rounds else _spelled_out(graph, node))
        if core is None or graph.is_folded(core.normal.name) or not _is_left_to_a_kernel(graph, points, core):
            continue
        for match, lowered in _ways(graph, core, points, rounds):
            if any(map(points.is_taken, core.nodes)):
                break
            try:
                check_reads(graph, match, lowered)
                yield points.placed(match), lowered
            except NotFusable:  # its parameters are computed of what it makes
                continue


def _ways(
    graph: Graph, core: Core, points: InsertionPoints, rounds: bool
) -> Iterator[tuple[NormalisationMatch, Normalisation]]:
    """What of a normalisation and the nodes behind it one kernel may compute, the largest first."""
    whole = core if rounds else _with_parameters(graph, core, points)
    tail = _tail(graph, whole, points.is_taken)
    if not rounds:
        tail.grow()
        yield from _grown(graph, core, points, len(whole.nodes) + len(tail.nodes))
    lowered = _lowered(graph, whole, tail)
    if lowered is not None:
        yield _match(graph, whole, tail, lowered), lowered


def _grown(
    graph: Graph, core: Core, points: InsertionPoints, least: int
) -> Iterator[tuple[NormalisationMatch, Normalisation]]:
    """Those that have more nodes than element by element can be computed."""
    if not _is_normalised(graph, core):
        return
    for match, lowered in grown_behind(graph, core, points):
        nodes = sorted({*map(graph.index, core.nodes), *match.nodes})
        if len(nodes) <= least:
            break
        shapes = _shapes(graph, core)
        own = NormalisationMatch(
            products=(),
            nodes=tuple(nodes),
            copied=match.copied,
            insertion_point=nodes[-1],
            folded=tuple(sorted({*match.folded, *only_feeding(graph, shapes)})),
            constants=match.constants,
            columns=match.columns,
            live_outs=tuple(LiveOut(out.name, (), ()) for out in match.live_outs),
            split=frozenset(),
            epilogue=EpilogueGraph(),
            shapes=shapes | match.shapes,
            told=match.told,
            anchor=lowered.anchor,
            passes=passes_behind(graph, core, match),
        )
        yield own, lowered


def _is_normalised(graph: Graph, core: Core) -> bool:
    """Whether a kernel has the types of its rows and the registers for their columns."""
    shape = graph.shape(core.x.name)
    floats = all(graph.dtype(tensor.name) in FLOATS_BY_ONNX for tensor in (core.x, core.normal))
    if not shape or not isinstance(shape[-1], int) or not math.isfinite(core.epsilon):
        return False
    return floats and 1 < shape[-1] <= MOST_NORMALISED


def _spelled_out(graph: Graph, node: gs.Node) -> Core | None:
    return next((core for form in SPELLED_OUT if (core := form(graph, node)) is not None), None)


def reserved(graph: Graph) -> frozenset[int]:
    """The nodes of normalisations that are spelled out: a product that took a cast of them would leave the others."""
    cores = filter(None, (_spelled_out(graph, node) for node in graph.nodes))
    found = (core for core in cores if _lowered(graph, core, _tail(graph, core, lambda node: True)))
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


def _with_parameters(graph: Graph, core: Core, points: InsertionPoints) -> Core:
    """The same with the casts behind it, and what scales it and is added to it by columns."""
    for _ in range(MOST_BEHIND):
        node = _reader_alone(graph, core.normal)
        own = None if node is None or points.is_taken(node) else _taken_in(graph, core, node)
        if node is None or own is None:
            break
        core = replace(core, nodes=(*core.nodes, node), normal=node.outputs[0], affine=(*core.affine, *own))
    return core


def _reader_alone(graph: Graph, value: gs.Tensor) -> gs.Node | None:
    """The only reader of a value."""
    return value.outputs[0] if len(value.outputs) == 1 and not graph.is_escaping(value.name) else None


def _taken_in(graph: Graph, core: Core, node: gs.Node) -> tuple[tuple[str, gs.Tensor], ...] | None:
    """What a node does to each element, nothing for a cast; None where a kernel does not take it in."""
    if node.op == "Cast":
        return () if graph.dtype(node.outputs[0].name) in FLOATS_BY_ONNX else None
    if node.op not in AFFINE or (parameter := other(node, core.normal)) is core.normal:
        return None
    affine = (*core.affine, (AFFINE[node.op], parameter))
    return affine[-1:] if _batch_rank(graph, core.x, [each for _, each in affine]) is not None else None


def _batch_rank(graph: Graph, x: gs.Tensor, parameters: Iterable[gs.Tensor]) -> int | None:
    """How many outer axes of x the parameters have, none or all of which each has; None where no kernel reads them so.

    Beside those they have columns, as of an image its scale and its shift behind a norm of its tokens (Peebles and Xie,
    2023), and make nothing longer of what they are multiplied with.
    """
    ranks = {_outer_rank(graph, x, parameter) for parameter in parameters}
    return None if None in ranks or len(ranks - {0}) > 1 else max((rank for rank in ranks if rank), default=0)


def _outer_rank(graph: Graph, x: gs.Tensor, parameter: gs.Tensor) -> int | None:
    """The same of one parameter."""
    shape, (*rows, columns) = graph.shape(parameter.name), graph.shape(x.name) or (1,)
    if shape is None or graph.dtype(parameter.name) not in FLOATS_BY_ONNX or len(shape) > len(rows) + 1:
        return None
    *outer, width = [1] * (len(rows) + 1 - len(shape)) + list(shape)
    rank = max((place + 1 for place, size in enumerate(outer) if size != 1), default=0)
    is_read = width in (1, columns) and outer[:rank] == rows[:rank]
    is_whole = rank > 0 and all(size == 1 for size in rows[rank:])  # then every row has its own
    return rank if is_read and not is_whole else None


def _tail(graph: Graph, core: Core, is_taken: Callable[[gs.Node], bool]) -> Tail:
    """What is done to a normalised element, so far by the nodes of the normalisation; known numbers are no operands."""
    tail = Tail(graph, core.x, core.normal, is_taken)
    if core.scale != 1:
        tail.root = tail.epilogue.apply("mul", tail.root, tail.epilogue.constant(core.scale))
    for op, parameter in core.affine:
        value = number(graph, parameter)
        ref = tail.epilogue.load(parameter.name) if value is None else tail.epilogue.constant(value)
        tail.root = tail.epilogue.apply(op, tail.root, ref)
    return tail


def _lowered(graph: Graph, core: Core, tail: Tail) -> Normalisation | None:
    """The fusion; None where its types or sizes are no kernel's."""
    shape, out = graph.shape(core.x.name) or (), tail.made.name
    dtypes = [FLOATS_BY_ONNX.get(graph.dtype(name) or 0) for name in (core.x.name, out)]
    if not _is_normalised(graph, core) or None in dtypes:
        return None
    outer = _batch_rank(graph, core.x, [parameter for _, parameter in core.affine])
    if outer is None or len(graph.shape(out) or ()) != len(shape):
        return None
    axes = _axes(shape, outer)
    dims = tuple((axis.name,) for axis in axes)
    x, made = (Tensor(name, _known(dtype), dims) for name, dtype in zip((core.x.name, out), dtypes, strict=True))
    read = (parameter for _, parameter in core.affine if number(graph, parameter) is None)
    operands = {parameter.name: _parameter(graph, parameter, dims) for parameter in read}
    steps, value = tail.steps([*operands])
    return Normalisation(
        anchor=node_label(core.anchor),
        pattern=PATTERN,
        features=_features(core, steps),
        axes=axes,
        operands=(x, *operands.values()),
        loads=tuple(map(Load, range(1 + len(operands)))),
        steps=steps,
        outs=(Out(made, value),),
        centred=core.centred,
        epsilon=core.epsilon,
        least=core.least,
        added=core.added,
    )


def _features(core: Core, steps: Sequence[Step]) -> tuple[str, ...]:
    """What a report counts: how rows are scaled and shifted, and activations."""
    ops = {*(op for op, _ in core.affine), *(["mul"] if core.scale != 1 else [])}
    named = {{"add": "bias", "mul": "scale"}[op] for op in ops}
    return tuple(sorted(named | ({step.op for step in steps} & NONLINEAR)))


def _known(dtype: DType | None) -> DType:
    assert dtype is not None, "a float"
    return dtype


def _axes(shape: Sequence[Size], outer: int) -> tuple[Axis, ...]:
    """One for each dimension, of which so many outer ones are the batch: `b m0 m1 n`."""
    sizes = [size if isinstance(size, int) else None for size in shape]
    names = [*_names(BATCH, outer), *_names(ROWS, len(shape) - 1 - outer), COLUMNS]
    return tuple(map(Axis, names, sizes))


def _names(loop: str, count: int) -> list[str]:
    return [loop] if count == 1 else [f"{loop}{place}" for place in range(count)]


def _parameter(graph: Graph, parameter: gs.Tensor, dims: Sequence[tuple[str]]) -> Tensor:
    shape = graph.shape(parameter.name) or ()
    own = tuple(() if size == 1 else axis for size, axis in zip(shape, dims[len(dims) - len(shape) :], strict=True))
    return Tensor(parameter.name, _known(FLOATS_BY_ONNX.get(graph.dtype(parameter.name) or 0)), own)


def _match(graph: Graph, core: Core, tail: Tail, lowered: Normalisation) -> NormalisationMatch:
    """Its nodes; what lives out of it is one value."""
    shapes, nodes = _shapes(graph, core), sorted(map(graph.index, (*core.nodes, *tail.nodes)))
    return NormalisationMatch(
        products=(),
        nodes=tuple(nodes),
        copied=(),
        insertion_point=nodes[-1],
        folded=tuple(sorted(only_feeding(graph, shapes))),
        constants=(),
        columns=lowered.size(COLUMNS) or 0,
        live_outs=(LiveOut(tail.made.name, (), ()),),
        split=frozenset(),
        epilogue=EpilogueGraph(),
        shapes=shapes,
        anchor=lowered.anchor,
    )


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
