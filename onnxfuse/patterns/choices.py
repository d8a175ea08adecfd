"""A choice between two functions of a value by where that is, as activations are written by hand: `Where(x > 0, f, g)`.

A kernel keeps x in fp32, and the model may round it: a value near the threshold may lie on either side. So both
functions have to be one number there, which is looked at by numbers: everything else that they read is drawn. Then it
makes no difference either which of them is taken at the threshold itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.epilogue_graph import CONSTANT, EpilogueGraph, Expression, Ref

Values = NDArray[np.float64]

LARGER = {"Greater": 0, "GreaterOrEqual": 0, "Less": 1, "LessOrEqual": 1}  # which input, by op
DRAWN = 64  # numbers for everything but x, half of them 0: masks are read as such
APART = 1e-5  # of the larger of 1 and the number: less than 16 bits tell apart


def _where(condition: Values, x: Values, y: Values) -> Values:
    return np.where(condition != 0, x, y)


# What an expression is worth; an op that is not here is in no function that is looked at.
VALUES: Mapping[str, Callable[..., Values]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "exp": np.exp,
    "log": np.log, "reciprocal": np.reciprocal, "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, slope: np.where(x < 0, slope * x, x),
    "elu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(x), x),
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "greater": lambda x, y: np.greater(x, y).astype(np.float64),
    "where": _where,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}  # fmt: skip


def is_chosen_by(graph: Graph, comparison: gs.Node) -> bool:
    """Whether a comparison says nothing but which of two values a Where takes."""
    result = comparison.outputs[0]
    readers = result.outputs
    chosen = all(qualified_op(each) == "Where" and each.inputs[0] is result for each in readers)
    alone = all(result is not tensor for each in readers for tensor in each.inputs[1:])
    return bool(readers) and chosen and alone and not graph.is_escaping(result.name)


def comparison_before(where: gs.Node) -> gs.Node | None:
    """What a Where chooses by, if that is a comparison."""
    makers = where.inputs[0].inputs if qualified_op(where) == "Where" else []
    return makers[0] if len(makers) == 1 and qualified_op(makers[0]) in LARGER else None


def compared_and_chosen(comparison: gs.Node, where: gs.Node) -> list[gs.Tensor]:
    """What a choice reads: what has to be larger, than what, and what is taken then and else."""
    larger = LARGER[qualified_op(comparison)]
    return [comparison.inputs[larger], comparison.inputs[1 - larger], *where.inputs[1:]]


def choice(epilogue: EpilogueGraph, inputs: list[Ref], attributes: Mapping[str, Any]) -> Ref:
    """The expression of what `compared_and_chosen` says.

    Raises:
        NotFusable: what it takes is not one number at the threshold, or nothing is one.
    """
    larger, smaller, *functions = inputs
    x, threshold = (larger, smaller) if epilogue.expressions[smaller].op == CONSTANT else (smaller, larger)
    if not _is_continuous(epilogue, x, threshold, functions):
        raise NotFusable("unknown_op", "", "chooses by a comparison, and its values differ at the threshold")
    return epilogue.apply("where", epilogue.apply("greater", larger, smaller), *functions)


def _is_continuous(epilogue: EpilogueGraph, x: Ref, threshold: Ref, functions: list[Ref]) -> bool:
    """Whether two functions are one number where x is at a threshold, a constant."""
    expressions = epilogue.expressions
    if expressions[threshold].op != CONSTANT or expressions[x].op == CONSTANT:
        return False
    rng = np.random.default_rng(0)
    known = {x: np.full(DRAWN, _number(expressions[threshold]))}
    for ref in epilogue.reachable(functions):
        expression = expressions[ref]
        if ref in known:
            continue
        if expression.op == CONSTANT:
            known[ref] = np.full(DRAWN, _number(expression))
        elif not expression.inputs:
            known[ref] = rng.standard_normal(DRAWN) * rng.integers(0, 2, DRAWN)
        elif expression.op not in VALUES:
            return False
        else:
            with np.errstate(all="ignore"):
                known[ref] = VALUES[expression.op](*(known[each] for each in expression.inputs))
    first, second = (known[each] for each in functions)
    return bool(np.all(np.abs(first - second) <= APART * np.maximum(1, np.abs(first))))


def _number(expression: Expression) -> float:
    return float.fromhex(expression.hexadecimal)
