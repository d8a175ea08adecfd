"""What torch's exporter writes for a softplus: above a threshold its input stands for it, `Where(u > 20, x, y)`.

There both are one number of fp32, of which no kernel needs to choose. Behind `u = b x` stands `y = Softplus(u) / b`.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.normalisation_forms import maker, number, other

LEAST = 15.0  # threshold; softplus(u) - u < exp(-u) is less than half a unit in the last place of u from there on


def threshold_of(graph: Graph, greater: gs.Node) -> gs.Node | None:
    """The Where that alone reads a comparison, if all that this chooses by is where a softplus is its input."""
    if qualified_op(greater) != "Greater" or graph.is_escaping(greater.outputs[0].name):
        return None
    readers = greater.outputs[0].outputs
    is_chosen = len(readers) == 1 and qualified_op(readers[0]) == "Where" and softplus_of(graph, readers[0]) is not None
    return readers[0] if is_chosen else None


def softplus_of(graph: Graph, where: gs.Node) -> gs.Tensor | None:
    """The softplus that a Where makes wherever it takes what that is of; None where it chooses anything else."""
    if qualified_op(where) != "Where":
        return None
    condition, x, softplus = where.inputs
    greater, divided = maker(condition, "Greater"), maker(softplus, "Div")
    inner = maker(softplus if divided is None else divided.inputs[0], "Softplus")
    if greater is None or inner is None or greater.inputs[0] is not inner.inputs[0]:
        return None
    least = number(graph, greater.inputs[1])
    is_far = least is not None and least >= LEAST
    return softplus if is_far and _is_scaled_back(graph, inner.inputs[0], x, divided) else None


def _is_scaled_back(graph: Graph, u: gs.Tensor, x: gs.Tensor, divided: gs.Node | None) -> bool:
    """Whether what a softplus is of is x, or x times what the softplus is divided by."""
    if divided is None:
        return u is x
    scaled, by = maker(u, "Mul"), number(graph, divided.inputs[1])
    is_of_x = scaled is not None and any(each is x for each in scaled.inputs)
    return scaled is not None and is_of_x and by is not None and number(graph, other(scaled, x)) == by
