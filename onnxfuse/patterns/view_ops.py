"""The ONNX ops that only move elements: the view that each makes of its input's view, one table."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.data_propagation import CONTRADICTIONS
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.patterns.views import AxisKind, Dim, Piece, View, ViewAxis, extent, regroup


def _transpose(graph: Graph, node: gs.Node, view: View) -> View:
    order = node.attrs.get("perm", list(reversed(range(len(view)))))
    return tuple(view[index] for index in order)


def _reshape(graph: Graph, node: gs.Node, view: View) -> View:
    shape, target = graph.shape(node.outputs[0].name), graph.known_value(node.inputs[1])
    if shape is None:
        raise NotFusable("unknown_shape", "", "reshapes to a shape that is not known before the run")
    given = (None,) * len(shape) if target is None else target.ravel().tolist()
    is_open = [size in (None, -1) for size in given]
    one_open = is_open.count(True) == 1
    return regroup(view, [None if left and one_open else size for left, size in zip(is_open, shape, strict=True)])


def _squeeze(graph: Graph, node: gs.Node, view: View) -> View:
    axes = _axes(graph, node, len(view))
    if axes is None and not all(isinstance(extent(dim), int) for dim in view):
        raise NotFusable("unknown_shape", "", "squeezes every dimension that turns out to be of size 1")
    gone = [index for index, dim in enumerate(view) if extent(dim) == 1] if axes is None else axes
    if any(extent(view[index]) != 1 for index in gone):
        raise NotFusable("unknown_shape", "", "squeezes a dimension that is not provably of size 1")
    return tuple(dim for index, dim in enumerate(view) if index not in gone)


def _unsqueeze(graph: Graph, node: gs.Node, view: View) -> View:
    given = _axes(graph, node, None)
    if given is None:
        raise NotFusable("unknown_shape", "", "where it inserts dimensions is not known before the run")
    rank = len(view) + len(given)
    new = {axis % rank for axis in given}
    old = iter(view)
    return tuple(() if index in new else next(old) for index in range(rank))


def _flatten(graph: Graph, node: gs.Node, view: View) -> View:
    axis = node.attrs.get("axis", 1)
    axis += len(view) if axis < 0 else 0
    return regroup(view, [extent(piece for dim in dims for piece in dim) for dims in (view[:axis], view[axis:])])


def _axes(graph: Graph, node: gs.Node, rank: int | None) -> list[int] | None:
    """Axes are an attribute up to opset 12 and an input from 13 on."""
    axes = list(node.attrs["axes"]) if "axes" in node.attrs else None
    if axes is None and len(node.inputs) > 1 and not node.inputs[1].is_empty():
        axes = graph.known_integers(node.inputs[1])
        if axes is None:
            raise NotFusable("unknown_shape", "", "its axes are not known before the run")
    return axes if axes is None or rank is None else [axis % rank for axis in axes]


def _expand(graph: Graph, node: gs.Node, view: View) -> View:
    """Dimensions of size 1 become axes that the tensor itself does not have."""
    shape = graph.shape(node.outputs[0].name)
    if shape is None or None in shape:
        raise NotFusable("unknown_shape", "", "expands to a shape that is not known before the run")
    padded = ((),) * (len(shape) - len(view)) + view
    return tuple(
        _expanded(dim, size, _repeated_axis(graph, node, index))
        for index, (dim, size) in enumerate(zip(padded, shape, strict=True))
    )


def _tile(graph: Graph, node: gs.Node, view: View) -> View:
    """An Expand that counts repetitions."""
    repeats = graph.known_integers(node.inputs[1])
    if repeats is None or len(repeats) != len(view):
        raise NotFusable("unknown_shape", "", "how often it repeats is not known before the run")
    if any(count != 1 and extent(dim) != 1 for dim, count in zip(view, repeats, strict=True)):
        raise NotFusable("unknown_shape", "", "repeats a dimension that is not provably of size 1")
    return tuple(
        dim if count == 1 else (Piece(_repeated_axis(graph, node, index), count),)
        for index, (dim, count) in enumerate(zip(view, repeats, strict=True))
    )


def _repeated_axis(graph: Graph, node: gs.Node, index: int) -> ViewAxis:
    return ViewAxis(AxisKind.REPEATED, (graph.index(node), index))


def _expanded(dim: Dim, size: Size, axis: ViewAxis) -> Dim:
    if extent(dim) == size:
        return dim
    if extent(dim) != 1 or size is None:
        raise NotFusable("unknown_shape", "", "expands a dimension that is not provably of size 1")
    return (Piece(axis, size),)


VIEWS: dict[str, Callable[[Graph, gs.Node, View], View]] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
}
"""ONNX op -> the view of its output, given that of its first input; NotFusable says why there is none."""


INPUT_VIEWS = VIEWS | {"Expand": _expand, "Tile": _tile}
"""The same of nodes before a product, which may repeat what it reads."""

MOVES = frozenset(INPUT_VIEWS) | {"Concat", "Gather", "Identity", "Slice", "Split"}  # elements, and computes nothing


def viewed(graph: Graph, node: gs.Node, view: View) -> View:
    """The view after a node of the tables.

    Raises:
        NotFusable: what it does is not known before the run, is no view, or cannot be done to such a tensor.
    """
    try:
        return INPUT_VIEWS[node.op](graph, node, view)
    except CONTRADICTIONS:
        raise NotFusable("invalid_model", "", "its attributes do not go with the shape of its input") from None
