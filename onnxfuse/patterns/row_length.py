"""Rows over their own length: by a ReduceL2, alone as CLIP has it or bounded and expanded as torch's `normalize` does.

A length that is bounded from below is the root of a mean of squares that is.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.normalisation_forms import Core, columns_of, is_of_rows, number, of_rows, reader

LENGTH = "ReduceL2"
LARGEST_BOUND = 2.0**63  # whose square fp32 has


def of_length(graph: Graph, node: gs.Node) -> Core | None:
    """Rows that are divided by their own length."""
    count = columns_of(graph, node) if node.op == LENGTH and is_of_rows(graph, node) else None
    clip = reader(node, "Clip")
    bound = 0.0 if clip is None else _bound(graph, clip)
    if count is None or bound is None:
        return None
    expand = reader(clip or node, "Expand")
    nodes = [each for each in (node, clip, expand) if each is not None]
    last = reader(nodes[-1], "Div")
    if last is None or last.inputs[1] is not nodes[-1].outputs[0] or not _is_of_its_rows(graph, expand, last.inputs[0]):
        return None
    core = of_rows(graph, node, (*nodes, last), last.inputs[0], 0.0, count)
    return core and replace(core, least=bound**2 / count)


def _bound(graph: Graph, clip: gs.Node) -> float | None:
    """The least that a length becomes, if that is known and there is no greatest."""
    least = number(graph, clip.inputs[1]) if len(clip.inputs) > 1 else clip.attrs.get("min")
    has_greatest = "max" in clip.attrs or any(tensor.name for tensor in clip.inputs[2:])
    return None if has_greatest or least is None or least > LARGEST_BOUND else max(least, 0.0)


def _is_of_its_rows(graph: Graph, expand: gs.Node | None, rows: gs.Tensor) -> bool:
    """Whether lengths are repeated along the rows that they are of, if at all."""
    shape = graph.shape(rows.name)
    known = shape is not None and None not in shape
    return expand is None or (known and graph.shape(expand.outputs[0].name) == shape)
