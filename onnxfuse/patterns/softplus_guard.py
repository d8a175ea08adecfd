"""What exporters write beside a softplus for numbers at which it is another one, and a kernel's needs no choice.

Torch's have its input above a threshold, `Where(u > 20, x, y)`: there both are one number of fp32. Behind `u = b x`
stands `y = Softplus(u) / b`. JAX' `logaddexp` has `Where(d != d, x + c, y)`, d the difference of the two: where that is
no number, y is none.
"""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.normalisation_forms import maker, number, other

HANDS_ON = ("Abs", "Add", "Exp", "Log", "Neg")  # that some input is no number
MOST_STEPS = 16
LEAST = 15.0  # threshold; softplus(u) - u < exp(-u) is less than half a unit in the last place of u from there on


def threshold_of(graph: Graph, condition: gs.Node) -> gs.Node | None:
    """The Where that alone reads a comparison, if all that this chooses by is where a softplus is its input."""
    if qualified_op(condition) not in ("Greater", "Equal", "Not") or graph.is_escaping(condition.outputs[0].name):
        return None
    readers = condition.outputs[0].outputs
    if len(readers) == 1 and qualified_op(condition) == "Equal" and qualified_op(readers[0]) == "Not":
        return threshold_of(graph, readers[0])
    is_chosen = len(readers) == 1 and qualified_op(readers[0]) == "Where" and softplus_of(graph, readers[0]) is not None
    return readers[0] if is_chosen else None


def softplus_of(graph: Graph, where: gs.Node) -> gs.Tensor | None:
    """The softplus that a Where makes wherever it takes what that is of; None where it chooses anything else."""
    if qualified_op(where) != "Where":
        return None
    condition, x, softplus = where.inputs
    if _is_nan_of_a_nan(graph, condition, softplus):
        return softplus
    greater, divided = maker(condition, "Greater"), maker(softplus, "Div")
    inner = maker(softplus if divided is None else divided.inputs[0], "Softplus")
    if greater is None or inner is None or greater.inputs[0] is not inner.inputs[0]:
        return None
    least = number(graph, greater.inputs[1])
    is_far = least is not None and least >= LEAST
    return softplus if is_far and _is_scaled_back(graph, inner.inputs[0], x, divided) else None


def _is_nan_of_a_nan(graph: Graph, condition: gs.Tensor, value: gs.Tensor) -> bool:
    """Whether a condition is that a difference of x is no number, where a value that is made of it is none either.

    What is taken then is x and a number more, which is none as well: the difference is that of a finite number.
    """
    inverted = maker(condition, "Not")
    equal = maker(inverted.inputs[0], "Equal") if inverted is not None else None
    if equal is None or equal.inputs[0] is not equal.inputs[1]:
        return False
    difference, where = maker(equal.inputs[0], "Sub"), condition.outputs[0]
    added = maker(where.inputs[1], "Add")
    if difference is None or added is None or added.inputs[0] is not difference.inputs[0]:
        return False
    numbers = [number(graph, each.inputs[1]) for each in (difference, added)]
    are_finite = all(each is not None and math.isfinite(each) for each in numbers)
    return are_finite and _is_made_of(value, difference.outputs[0])


def _is_made_of(value: gs.Tensor, of: gs.Tensor) -> bool:
    """Whether a value is sums and functions of one value that hand on what is no number."""
    queue = [value]
    for tensor in queue:
        if tensor is of:
            return True
        node = maker(tensor, *HANDS_ON) if len(queue) <= MOST_STEPS else None
        queue += node.inputs if node is not None else []
    return False


def _is_scaled_back(graph: Graph, u: gs.Tensor, x: gs.Tensor, divided: gs.Node | None) -> bool:
    """Whether what a softplus is of is x, or x times what the softplus is divided by."""
    if divided is None:
        return u is x
    scaled, by = maker(u, "Mul"), number(graph, divided.inputs[1])
    is_of_x = scaled is not None and any(each is x for each in scaled.inputs)
    return scaled is not None and is_of_x and by is not None and number(graph, other(scaled, x)) == by
