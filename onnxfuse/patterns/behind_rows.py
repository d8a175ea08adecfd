"""What follows normalised rows: what is done to each element, halves that turn, heads that move, operands of rows.

Rows grow as a product does whose sums they were (region_growth.py, partition.py), and a match of them is lowered as one
whose right-hand side is what is normalised. So q and k that are normalised before a rotary embedding, as those of Qwen3
and Flux, are one kernel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import NONLINEAR, PART_AXIS, Fusion, Tensor, acc_name
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.patterns.build_fusion import lower
from onnxfuse.patterns.classify import check_parts, pattern_of
from onnxfuse.patterns.fallback_shape import Base
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.normalisation_forms import LAST, Core
from onnxfuse.patterns.partition import Partition
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.profitability import ENDS, MOVING, is_arithmetic
from onnxfuse.patterns.region_growth import GrownRegion
from onnxfuse.patterns.views import COLUMNS, AxisKind, Piece, View, axis_view, extent

PATTERN = "normalisation"


def grown_behind(
    graph: Graph, core: Core, points: InsertionPoints, is_taken: Callable[[gs.Node], bool]
) -> Iterator[tuple[Match, Normalisation]]:
    """Matches of the last node of a normalisation and what is behind it, the largest first, and what they compute.

    Args:
        graph: the scope.
        core: the normalisation, whose types and columns a kernel has.
        points: who owns nodes, and where fused ones stand.
        is_taken: whether a node behind it stays there.
    """
    for grown in regions_of_rows(graph, _rows(graph, core), points, is_taken):
        partition = Partition(grown, points)
        for match in _matches(partition):
            if _ends_in_vain(graph, match):
                continue
            try:
                yield match, _lowered(graph, core, match)
            except NotFusable as refusal:
                partition.refuse(partition.region_of(match), refusal)


def _matches(partition: Partition) -> Iterator[Match]:
    """Those of a region, and last the normalisation by itself."""
    yield from partition.matches()
    with suppress(NotFusable):
        yield partition.bare(partition.grown.products[0])


def passes_behind(graph: Graph, core: Core, match: Match) -> int:
    """Nodes behind a normalisation that read and write every element, each by itself."""
    last = graph.index(core.nodes[-1])
    return sum(index != last and _is_pass(graph.nodes[index]) for index in match.nodes)


def _is_pass(node: gs.Node) -> bool:
    return node.op in MOVING or is_arithmetic(node)


def _ends_in_vain(graph: Graph, match: Match) -> bool:
    """Whether a view that moves nothing is the last node, and nothing is moved before it: it costs nothing behind."""
    nodes = [graph.nodes[index] for index in match.nodes]
    last = next(node for node in nodes if any(tensor.name == match.out for tensor in node.outputs))
    return last.op in ENDS and not any(node.op in MOVING for node in nodes)


def regions_of_rows(
    graph: Graph, rows: Product, points: InsertionPoints, is_taken: Callable[[gs.Node], bool]
) -> Iterator[GrownRegion]:
    """What grows, with columns that are numbered part by part where parts of them take turns, and as they lie."""
    grown = GrownRegion(graph, (rows,), is_taken, is_passed=points.is_passed)
    if grown.refused:
        return
    for turn in grown.turns.values():
        yield GrownRegion(graph, (rows.in_turns(*turn),), is_taken, is_passed=points.is_passed)
    yield grown


def _rows(graph: Graph, core: Core) -> Product:
    """The normalised rows, as a product makes its sums."""
    x, view = str(core.x.name), view_of_rows(graph.shape(core.x.name) or (), core.axis)
    columns, rows = view[core.axis], _beside(view, core.axis)
    made = tuple(view[axis] for axis in core.perm) or view
    return Product(
        core.nodes[-1], FLOATS_BY_ONNX[graph.dtype(core.normal.name) or 0], x, x, False, rows, view, made,
        _beside(made, LAST if core.perm else core.axis), columns, (), Base(x, view),
        alpha=core.scale, affine=core.affine,
    )  # fmt: skip


def _beside(view: View, axis: int) -> View:
    """All dimensions but one, from the end on."""
    return view[:axis] + view[len(view) + axis + 1 :]


def view_of_rows(shape: Sequence[int | str | None], axis: int = LAST) -> View:
    """The dimensions of a value, one of which is a row; those of size 1 have no axis, as others regroup them."""
    view = [() if extent(dim) == 1 else dim for dim in axis_view(tuple(shape), AxisKind.LHS)]
    view[axis] = (Piece(COLUMNS, shape[axis] or 1),)
    return tuple(view)


def _lowered(graph: Graph, core: Core, match: Match) -> Normalisation:
    """The fusion of a match.

    Raises:
        NotFusable: no kernel computes it.
    """
    if any(product.turns > 1 for product in match.turned_in_vain):
        raise NotFusable("not_equal_parts", match.label, "takes no parts apart")
    check_parts(match)
    fusion = lower(graph, match, pattern_of(match))
    x = fusion.rhs[0]
    check_rows(fusion, x)
    return _of_rows(fusion, x, core)


def check_rows(fusion: Fusion, x: Tensor) -> None:
    """All columns of a row are there, stay beside each other, and nothing repeats the row or reads it again.

    Raises:
        NotFusable: something of that is not so.
    """
    columns = columns_of(fusion, x)
    if len(fusion.parts) != (fusion.size(PART_AXIS) if PART_AXIS in x.axes else 1):
        raise NotFusable("not_equal_parts", fusion.anchor, "takes some columns of a row alone")
    if x.wide is not None:
        raise NotFusable("not_equal_parts", fusion.anchor, "takes a window of a row")
    if any(not {*out.tensor.axes} <= {*x.axes} for out in fusion.outs):
        raise NotFusable("broadcasts_the_product", fusion.anchor, "an operand repeats the rows")
    if any(_behind_columns(fusion, out.tensor, columns) != _behind_columns(fusion, x, columns) for out in fusion.outs):
        raise NotFusable("unknown_op", fusion.anchor, "moves columns in front of rows")
    if any(operand.name == x.name for operand in fusion.operands):
        raise NotFusable("views_differ", fusion.anchor, "reads one operand in two ways")


def _features(fusion: Fusion) -> tuple[str, ...]:
    """What a report counts: activations by their names, and what else is done to the elements of a row."""
    named = {step.op for step in fusion.steps} & NONLINEAR | {*fusion.features} & {"gate", "mask", "extra_output"}
    every = {axis for axis in fusion.rhs[0].axes if fusion.size(axis) != 1}
    for ops, of_columns, of_rows in ((("add", "sub"), "bias", "residual"), (("mul", "div"), "scale", "scale")):
        values = {value for step in fusion.steps if step.op in ops for value in step.inputs}
        read = (fusion.operands[load.operand] for value in values if (load := fusion.load(value)) is not None)
        named |= {of_rows if every <= {*operand.axes} else of_columns for operand in read}
    return tuple(sorted(named | ({"rotary"} if fusion.pattern == "rotary_gemm" else set())))


def columns_of(fusion: Fusion, x: Tensor) -> tuple[str, ...]:
    """The axes of x that are a row, of each part."""
    return tuple(axis for axis in x.axes if axis not in (PART_AXIS, *fusion.lhs.axes))


def _behind_columns(fusion: Fusion, tensor: Tensor, columns: Sequence[str]) -> list[str]:
    """The axes of rows that are contiguous in a tensor: a kernel that goes along rows would store them one by one."""
    behind = takewhile(lambda axis: axis not in (PART_AXIS, *columns), reversed(tensor.axes))
    return [axis for axis in behind if fusion.size(axis) != 1]


def _of_rows(fusion: Fusion, x: Tensor, core: Core) -> Normalisation:
    """The steps over normalised parts of x, which are the first loads: `acc1` is `op1`, normalised."""
    behind = epilogue_of(fusion, (x,), acc_name)
    return Normalisation(
        anchor=node_label(core.anchor),
        pattern=PATTERN,
        features=_features(fusion),
        axes=behind.axes,
        operands=behind.operands,
        loads=behind.loads,
        steps=behind.steps,
        outs=behind.outs,
        centred=core.centred,
        epsilon=core.epsilon,
        least=core.least,
        added=core.added,
        along=columns_of(fusion, x),
    )
