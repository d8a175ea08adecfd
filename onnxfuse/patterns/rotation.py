"""Rotary embeddings by themselves: one kernel that turns halves or pairs of a value's columns, whatever made it.

Behind a product of q alone a rotary embedding (Su et al., 2021) is steps of that kernel, and so it is behind normalised
rows. Where q, k and v are one product, or some columns of a head pass by, what turns is a value like any other, which
the model's nodes read and write seven times. Rows of it grow as normalised ones do (behind_rows.py); a Transpose that
makes it, of rows alone, is the kernel's as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import Pointwise
from onnxfuse.ir.simplify import simplify
from onnxfuse.patterns.behind_rows import check_rows, regions_of_rows, view_of_rows
from onnxfuse.patterns.build_fusion import lower
from onnxfuse.patterns.classify import check_parts, pattern_of
from onnxfuse.patterns.column_ranges import TAKES_APART
from onnxfuse.patterns.fallback_shape import Base
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import Match, ProductlessMatch, without_product
from onnxfuse.patterns.match_checks import check_reads
from onnxfuse.patterns.operand_views import SCALES, is_stored
from onnxfuse.patterns.partition import Partition
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.views import View

PATTERN, BEHIND_A_PRODUCT = "rotation", "rotary_gemm"
MEETS = ("Add", "Sub")  # of multiplied parts: those of a pair, or of both rows of its matrix
ADJUSTS = ("Add", "Sub", *SCALES)  # with what the model stores
MOVED = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def rotations(graph: Graph, points: InsertionPoints) -> Iterator[tuple[Match, Pointwise]]:
    """Every rotary embedding of a scope whose nodes no fusion has."""
    for x in _turned(graph):
        for match, lowered in _matches(graph, points, x):
            if any(points.is_taken(graph.nodes[index]) for index in match.nodes):
                break
            try:
                check_reads(graph, match, lowered)
                yield points.placed(match), lowered
            except NotFusable:
                continue


def reserved_rotations(graph: Graph, points: InsertionPoints) -> frozenset[int]:
    """The nodes that turn a range of another value: a product that took the first of them would leave the others.

    Not what moves and scales it behind that: an attention reads its query and its keys through it.
    """
    found: set[int] = set()
    for x in _turned(graph):
        first = next(_matches(graph, points, x), None) if _is_range(graph, x) else None
        found.update(() if first is None else _before_moves(graph, first[0].nodes))
    return frozenset(found)


def _before_moves(graph: Graph, nodes: Sequence[int]) -> Sequence[int]:
    """The nodes up to where a Transpose or a number is the first of what only moves or scales the last one's result."""
    moves = list(takewhile(lambda index: _moves_or_scales(graph, graph.nodes[index]), reversed(nodes)))
    first = next((index for index in reversed(moves) if graph.nodes[index].op in (*SCALES, "Transpose")), None)
    return nodes if first is None else nodes[: nodes.index(first)]


def _moves_or_scales(graph: Graph, node: gs.Node) -> bool:
    numbers = [tensor for tensor in node.inputs if graph.shape(tensor.name) in ((), (1,))]
    return node.op in MOVED or (node.op in SCALES and len(numbers) == 1)


def _is_range(graph: Graph, x: gs.Tensor) -> bool:
    """Whether views, casts and what adjusts it alone are between a value and what takes it out of another one.

    A number, a bias or a scale of columns that the model stores is a step of the product's kernel, and no rotation is
    lost by it. What is added besides may be a product, whose kernel turns the sum.
    """
    while x.inputs and x.inputs[0].op in (*MOVED, *ADJUSTS):
        maker = x.inputs[0]
        made = [tensor for tensor in maker.inputs if not is_stored(graph, tensor)]
        if maker.op in ADJUSTS and len(made) != 1:
            return False
        x = made[0] if maker.op in ADJUSTS else maker.inputs[0]
    return bool(x.inputs) and x.inputs[0].op in TAKES_APART


def _turned(graph: Graph) -> list[gs.Tensor]:
    """The values whose parts a node negates, or multiplies and subtracts or adds."""
    found: dict[str, gs.Tensor] = {}
    for node in graph.nodes:
        negated = node.inputs if node.op == "Neg" else ()
        factors = [tensor for each in node.inputs for tensor in _made(each, "Mul")] if node.op in MEETS else ()
        for part in (*negated, *factors):
            part = next(iter(_made(part, "Squeeze")), part)
            wholes = [_before_slices_of_all(graph, each) for each in _made(part, *TAKES_APART)[:1]]
            wholes = [*(each for whole in wholes for each in _made(whole, "Reshape")[:1]), *wholes]
            wholes = [each for whole in wholes for each in (*_before_casts(whole), whole)]
            found |= {each.name: each for each in wholes if len(each.inputs) == 1}
    return list(found.values())


def _before_slices_of_all(graph: Graph, x: gs.Tensor) -> gs.Tensor:
    """The value itself, of which a Slice takes all columns where none pass by."""
    made = _made(x, "Slice")
    whole = graph.shape(made[0].name) if made else None
    return _before_slices_of_all(graph, made[0]) if whole is not None and whole == graph.shape(x.name) else x


def _before_casts(x: gs.Tensor) -> Iterator[gs.Tensor]:
    """What a value is cast from, where a cosine multiplies the one and a sine parts of the other."""
    for before in _made(x, "Cast", "Identity")[:1]:
        yield before
        yield from _before_casts(before)


def _made(tensor: gs.Tensor, *ops: str) -> list[gs.Tensor]:
    """What the node reads that makes a tensor, if it is one of some ops."""
    return list(tensor.inputs[0].inputs) if tensor.inputs and tensor.inputs[0].op in ops else []


def _rows(graph: Graph, x: gs.Tensor) -> Iterator[Product]:
    """A value as a product makes its sums: before the Transpose that makes it, if that moves rows, and as it is."""
    maker, shape = x.inputs[0], graph.shape(x.name) or ()
    if graph.dtype(x.name) not in FLOATS_BY_ONNX or not shape or not isinstance(shape[-1], int) or shape[-1] < 2:
        return
    perm = list(maker.attrs.get("perm", ())) if maker.op == "Transpose" else []
    if perm and perm[-1] == len(shape) - 1:
        before = tuple(size for _, size in sorted(zip(perm, shape, strict=True)))
        view = view_of_rows(before)
        yield _product(graph, maker, maker.inputs[0], view, tuple(view[axis] for axis in perm))
    view = view_of_rows(shape)
    yield _product(graph, maker, x, view, view)


def _product(graph: Graph, maker: gs.Node, x: gs.Tensor, view: View, out: View) -> Product:
    dtype, name = FLOATS_BY_ONNX[graph.dtype(x.name) or 0], str(x.name)
    rows, columns = view[:-1], view[-1]
    output = next((index for index, made in enumerate(maker.outputs) if made is x), 0)
    return Product(
        maker, dtype, name, name, False, rows, view, out, out[:-1], columns, (), Base(name, view), output=output
    )  # fmt: skip


def _matches(graph: Graph, points: InsertionPoints, x: gs.Tensor) -> Iterator[tuple[ProductlessMatch, Pointwise]]:
    """What of the nodes behind a value one kernel turns, the largest first."""
    for rows in _rows(graph, x):
        for grown in regions_of_rows(graph, rows, points, points.is_taken):
            partition = Partition(grown, points)
            for match in partition.matches():
                try:
                    yield _of_rows(graph, rows, match)
                except NotFusable as refusal:
                    partition.refuse(partition.region_of(match), refusal)


def _of_rows(graph: Graph, rows: Product, match: Match) -> tuple[ProductlessMatch, Pointwise]:
    """The match of nodes that turn a value, without what makes it, and what they compute.

    Raises:
        NotFusable: they do something else, or no kernel computes it.
    """
    is_read = rows.rhs == rows.out
    nodes = tuple(index for index in match.nodes if not (is_read and index == graph.index(rows.node)))
    if not is_read and any(out.name == rows.out for out in match.live_outs):
        raise NotFusable("several_readers", match.label, f"others read {rows.out!r} as well")
    check_parts(match)
    if pattern_of(match) != BEHIND_A_PRODUCT:
        raise NotFusable("unknown_op", match.label, "turns nothing")
    anchor = node_label(graph.nodes[nodes[-1]])
    fusion = replace(simplify(lower(graph, match, PATTERN)), anchor=anchor, features=())
    x = fusion.rhs[0]
    check_rows(fusion, x)
    turning = epilogue_of(fusion, (x,))
    if turning.unresolved:
        raise NotFusable("unknown_shape", anchor, "only the run knows how rows lie in several axes")
    made = [out.name for out in match.live_outs if out.name != rows.out]
    return without_product(match, nodes, made, anchor), turning
