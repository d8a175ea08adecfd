"""Which columns the outputs of a Split, a SplitToSequence and a Slice hold, in every opset's spelling."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph


def split_sizes(graph: Graph, node: gs.Node, length: int) -> list[int]:
    """Columns of each output of a Split: an attribute up to opset 12, an input from 13 on; without them, equal parts.

    Raises:
        NotFusable: the sizes are not known before the run.
    """
    if "split" in node.attrs:
        return list(node.attrs["split"])
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        sizes = graph.known_integers(node.inputs[1])
        if sizes is None or len(sizes) != len(node.outputs):
            raise NotFusable("bounds_not_constant", "", "the sizes of the split are not known before the run")
        return sizes
    chunk = -(-length // len(node.outputs))
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def sequence_sizes(graph: Graph, node: gs.Node, length: int) -> list[int]:
    """Columns of each element of a SplitToSequence: one size for all, or a size each; without them, single columns.

    Raises:
        NotFusable: the sizes are not known before the run, or the split dimension would vanish.
    """
    if len(node.inputs) < 2 or node.inputs[1].is_empty():
        raise NotFusable("not_equal_parts", "", "splits into single columns")
    sizes = graph.known_integers(node.inputs[1])
    if sizes is None or any(size <= 0 for size in sizes):
        raise NotFusable("bounds_not_constant", "", "the sizes of the split are not known before the run")
    if graph.shape(node.inputs[1].name) != ():
        return sizes
    return [min(sizes[0], length - start) for start in range(0, length, sizes[0])]


def slice_bounds(graph: Graph, node: gs.Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """Starts, ends, axes and steps of a Slice: attributes up to opset 9 and inputs from 10 on.

    Raises:
        NotFusable: one of them is not known before the run.
    """
    if "starts" in node.attrs:
        starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
        return starts, ends, list(node.attrs.get("axes", range(len(starts)))), [1] * len(starts)
    given = _read_bounds(graph, node)
    starts = given[0] or []
    return starts, given[1] or [], given[2] or list(range(len(starts))), given[3] or [1] * len(starts)


def _read_bounds(graph: Graph, node: gs.Node) -> list[list[int] | None]:
    """The four inputs behind the first; None for one that is left out."""
    given = [None if tensor.is_empty() else tensor for tensor in node.inputs[1:5]]
    given += [None] * (4 - len(given))
    bounds = [None if tensor is None else graph.known_integers(tensor) for tensor in given]
    if any(tensor is not None and bound is None for tensor, bound in zip(given, bounds, strict=True)):
        raise NotFusable("bounds_not_constant", "", "the bounds of the slice are not known before the run")
    return bounds
