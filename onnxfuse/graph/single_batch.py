"""A batch that has a name and is one.

Exported with a batch of one, torch.export keeps its name in the input and in masks, and elsewhere writes `view(1, -1,
heads, head)`. With two sequences such a model stops where the merged rows meet a table of positions or the residual
stream; of one token each, it takes them for one sequence. So only one makes sense, and with it products and attentions
have sizes that can be proved. The written model keeps the name; a fused node refuses any other number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_graphsurgeon as gs

from onnxfuse.graph import symbolic
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.named_sizes import canonical
from onnxfuse.graph.symbolic import Size

_ELEMENTWISE = frozenset(("Add", "Mul", "Sub", "Div"))


def batches_of_one(graph: Graph) -> frozenset[str]:
    """Names of inputs' first dimensions that are one in every run that makes sense."""
    shapes = [value.type.tensor_type.shape.dim for value in graph.model.proto.graph.input]
    names = {dims[0].dim_param for dims in shapes if len(dims) > 1 and dims[0].dim_param}
    views = [node for node in graph.nodes if node.op == "Reshape"]
    found = {batch for node in views for batch in _left_out(graph, node)}
    merged = {pair for node in views for pair in _merged(graph, node)}
    meeting = {pair for node in graph.nodes if merged and node.op in _ELEMENTWISE for pair in _meeting(graph, node)}
    found |= {batch for batch, rows in merged if (symbolic.multiply((batch, rows)), rows) in meeting}
    return frozenset(name for name in names if canonical(name) in found)


def _left_out(graph: Graph, view: gs.Node) -> Iterator[str]:
    """What is in front of numbers, and has no room in as many that are numbers all."""
    before, after = graph.shape(view.inputs[0].name), graph.shape(view.outputs[0].name)
    first, *rest = before or (None,)
    numbers = [[size for size in sizes if isinstance(size, int)] for sizes in (rest, after or ())]
    whole = [len(own) == len(sizes) for own, sizes in zip(numbers, (rest, after or ()), strict=True)]
    if isinstance(first, str) and after and all(whole) and 0 < math.prod(numbers[0]) == math.prod(numbers[1]):
        yield first


def _merged(graph: Graph, view: gs.Node) -> Iterator[tuple[str, str]]:
    """The batch and the rows that `view(1, -1, ..)` makes one dimension of, behind a one."""
    before, target = graph.shape(view.inputs[0].name), graph.known_integers(view.inputs[1])
    first, rows, *rest = before if before is not None and len(before) > 1 else (None, None)
    is_one = target is not None and target[:2] == [1, -1] and math.prod(target[2:]) > 0
    known = [size for size in rest if isinstance(size, int)]
    is_whole = is_one and len(known) == len(rest) and math.prod(known) == math.prod((target or [])[2:])
    if isinstance(first, str) and isinstance(rows, str) and is_whole:
        yield first, rows


def _meeting(graph: Graph, node: gs.Node) -> Iterator[tuple[Size, Size]]:
    """Sizes that meet along a dimension and are not the same, in either order."""
    first, second = (graph.shape(tensor.name) or () for tensor in node.inputs[:2])
    for pair in zip(reversed(first), reversed(second), strict=False):
        if pair[0] != pair[1]:
            yield pair
            yield pair[::-1]
