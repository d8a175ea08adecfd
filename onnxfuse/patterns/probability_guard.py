"""Nodes behind a softmax that leave every probability as it is, and of a row of NaN may make zeros.

`Where(IsNaN(p), 0, p)` is the short form; `nan_to_num` looks for infinities too, of which a softmax makes none. What
such nodes compute is computed here, for numbers on both sides of every constant that they compare with.

`Where(mask, 0, p)` behind the softmax of `Where(mask, lowest, s)`, DeBERTa's XSoftmax, does the same once the scores
under the mask are minus infinity: then the rows that are masked as a whole are those of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxfuse.dtypes import BF16, F16, F32, FLOATS_BY_ONNX
from onnxfuse.graph.graph import Graph, element_readers
from onnxfuse.graph.operators import qualified_op

MAX_NODES = 32
NUMBERS = (*FLOATS_BY_ONNX, TensorProto.DOUBLE)  # TorchScript asks double ones whether they are infinite
LOWEST = {F16.onnx: -65504.0, BF16.onnx: -(2 - 2**-7) * 2.0**127, F32.onnx: -(2 - 2**-23) * 2.0**127}
OPS: Mapping[str, Callable[..., Any]] = {
    "And": np.logical_and,
    "Cast": lambda value: value,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Identity": lambda value: value,
    "IsInf": np.isinf,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Where": np.where,
}


@dataclass(frozen=True)
class Guard:
    """Nodes that hand probabilities on.

    Attributes:
        nodes: all of them; nobody else reads what they make, but for the last value.
        value: that one.
        clears: whether rows of NaN become 0.
        is_alone: whether nobody else reads the probabilities.
        masks: whether rows of NaN are those that a mask takes as a whole, with minus infinity for its scores.
    """

    nodes: tuple[gs.Node, ...]
    value: gs.Tensor
    clears: bool
    is_alone: bool
    masks: bool = False


def guard_of(graph: Graph, probabilities: gs.Tensor) -> Guard | None:
    """The guard that reads probabilities; None where there is none."""
    nodes, constants = _nodes_of_itself(graph, probabilities)
    if all(node.op != "Where" for node in nodes):
        return None
    inner = {graph.index(node) for node in nodes}

    def is_read(value: gs.Tensor) -> bool:
        return graph.is_escaping(value.name) or bool({*map(graph.index, value.outputs)} - inner)

    read = [node.outputs[0] for node in nodes if is_read(node.outputs[0])]
    clears = _clears(nodes, constants, probabilities.name, read[0].name) if len(read) == 1 else None
    return None if clears is None else Guard(tuple(nodes), read[0], clears, not is_read(probabilities))


@dataclass(frozen=True)
class Filled:
    """A Where with a number.

    Attributes:
        casts: the nodes that hand its mask on.
        mask: what they are of, and which input the number is.
        number: that.
    """

    casts: tuple[gs.Node, ...]
    mask: tuple[str, int]
    number: float


def masked_again(graph: Graph, of: gs.Tensor, probabilities: gs.Tensor) -> Guard | None:
    """The Where that makes zeros of what a mask took before the softmax; None where there is none."""
    readers = element_readers(probabilities)
    if len(readers) != 1 or len(of.inputs) != 1 or graph.is_escaping(probabilities.name):
        return None
    scores, zeros = _filled(graph, of.inputs[0]), _filled(graph, readers[0])
    if scores is None or zeros is None or scores.mask != zeros.mask or zeros.number != 0:
        return None
    if scores.number > LOWEST.get(graph.dtype(of.name) or 0, -np.inf):
        return None
    own = tuple(cast for cast in zeros.casts if cast not in scores.casts)
    return Guard((*reversed(own), readers[0]), readers[0].outputs[0], clears=True, is_alone=True, masks=True)


def _filled(graph: Graph, node: gs.Node) -> Filled | None:
    """A Where with a number as one of its two values."""
    if qualified_op(node) != "Where":
        return None
    mask, *values = node.inputs
    casts: list[gs.Node] = []
    while len(mask.inputs) == 1 and _hands_a_mask_on(graph, mask.inputs[0]):
        casts.append(mask.inputs[0])
        mask = mask.inputs[0].inputs[0]
    for place, tensor in enumerate(values):
        known = graph.known_value(tensor)
        if known is not None and known.size == 1 and known.dtype != object:
            return Filled(tuple(casts), (str(mask.name), place), float(known.item()))
    return None


def _hands_a_mask_on(graph: Graph, node: gs.Node) -> bool:
    types = {graph.dtype(tensor.name) for tensor in (*node.inputs, *node.outputs)}
    return qualified_op(node) in ("Cast", "Identity") and types == {TensorProto.BOOL}


def _nodes_of_itself(graph: Graph, value: gs.Tensor) -> tuple[list[gs.Node], dict[str, float]]:
    """What is computed of one value and of constants alone, in an order to compute it in, and these."""
    known: dict[str, float] = {}
    nodes: list[gs.Node] = []
    made, queue = {value.name}, list(value.outputs)
    for node in queue:
        if len(nodes) == MAX_NODES or node.outputs[0].name in made or not _is_simple(graph, node):
            continue
        constants = dict(_constants(graph, node, made))
        if all(tensor.name in made or tensor.name in constants for tensor in node.inputs):
            nodes.append(node)
            known |= constants
            made.add(node.outputs[0].name)
            queue += node.outputs[0].outputs
    return nodes, known


def _is_simple(graph: Graph, node: gs.Node) -> bool:
    """Whether a node is one of the table's; of Casts those that leave numbers numbers and truth values such."""
    op = qualified_op(node)
    if op != "Cast":
        return op in OPS
    before, after = (graph.dtype(tensor.name) for tensor in (node.inputs[0], node.outputs[0]))
    return before == after == TensorProto.BOOL or (before in NUMBERS and after in NUMBERS)


def _constants(graph: Graph, node: gs.Node, made: set[str]) -> Iterator[tuple[str, float]]:
    for tensor in node.inputs:
        value = None if tensor.name in made else graph.known_value(tensor)
        if value is not None and value.size == 1 and graph.dtype(tensor.name) in NUMBERS:
            yield tensor.name, float(value.item())


def _clears(nodes: list[gs.Node], constants: Mapping[str, float], name: str, result: str) -> bool | None:
    """Whether NaN becomes 0 rather than staying NaN; None where it does neither, or another number changes."""
    numbers = np.unique([0.0, 1.0, *(number for number in constants.values() if 0 < number < 1)])
    numbers = np.array([*numbers, *(numbers[1:] + numbers[:-1]) / 2, np.nan])
    values: dict[str, Any] = {**constants, name: numbers}
    for node in nodes:
        values[node.outputs[0].name] = OPS[node.op](*(values[tensor.name] for tensor in node.inputs))
    *same, last = values[result]
    if not np.array_equal(same, numbers[:-1]) or not (np.isnan(last) or last == 0):
        return None
    return not np.isnan(last)
