"""Masks that an `And` with as many ones makes as large as scores, and changes no element of: Keras' softmax does so.

`ones_like(scores) & mask` has tokens x tokens elements of each head, and so has all that is made of it on the way to
the scores. Where it meets these, or what is at least as large, broadcasting makes the mask as large as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxfuse.graph.constants import constant_tensors
from onnxfuse.graph.functions import reads
from onnxfuse.graph.unread import drop_unread

SHAPE_OPS = frozenset(("Cast", "Identity"))  # between a Shape and an Expand
ELEMENTWISE = frozenset(("Add", "And", "Cast", "Div", "Identity", "Max", "Min", "Mul", "Not", "Or", "Sub", "Where"))
MOST_STEPS = 8
Makers = Mapping[str, NodeProto]


def leave_out_ones(graph: GraphProto) -> None:
    """Edit a graph whose nodes are in order, in place; branches and bodies stay."""
    ands = [node for node in graph.node if node.op_type == "And" and not node.domain and len(node.input) == 2]
    if not ands:
        return
    makers = {name: node for node in graph.node for name in node.output}
    stored = constant_tensors(graph)
    left = {node.output[0]: mask for node in ands if (mask := _mask(graph, node, makers, stored)) is not None}
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = _last(name, left)
    if left:
        drop_unread(graph, left)


def _last(name: str, left: Mapping[str, str]) -> str:
    """What stands for a value in the end: a mask may itself be one with ones."""
    while name in left:
        name = left[name]
    return name


def _mask(graph: GraphProto, node: NodeProto, makers: Makers, stored: Mapping[str, TensorProto]) -> str | None:
    """The mask that an `And` makes as large as another value, if nobody needs it so; None where it is another one."""
    for ones, mask in (node.input, reversed(node.input)):
        large = _of_ones(ones, makers, stored)
        if large is not None and _is_made_large(graph, node.output[0], large):
            return str(mask)
    return None


def _of_ones(name: str, makers: Makers, stored: Mapping[str, TensorProto]) -> str | None:
    """The value of whose shape there are ones alone; None where a value is none of ones."""
    expand = makers.get(name)
    if expand is None or expand.op_type != "Expand" or not _is_true(stored.get(expand.input[0])):
        return None
    maker = makers.get(expand.input[1])
    for _ in range(MOST_STEPS):
        if maker is None or maker.op_type not in SHAPE_OPS:
            break
        maker = makers.get(maker.input[0])
    return str(maker.input[0]) if maker is not None and maker.op_type == "Shape" and not maker.attribute else None


def _is_true(tensor: TensorProto | None) -> bool:
    is_scalar = tensor is not None and tensor.data_type == TensorProto.BOOL and not tensor.dims
    return tensor is not None and is_scalar and bool(numpy_helper.to_array(tensor))


def _is_made_large(graph: GraphProto, name: str, large: str) -> bool:
    """Whether all that is made of a value elementwise meets what is as large as another, before anything else reads it.

    What is made of that other one elementwise is as large, or larger in the same way.
    """
    small, as_large = {name}, {large}
    for node in graph.node:
        read = {*node.input}
        is_elementwise = node.op_type in ELEMENTWISE and not node.domain
        if is_elementwise and read & as_large:
            as_large.update(node.output)
        elif is_elementwise and read & small:
            small.update(node.output)
        elif not small.isdisjoint(reads(node)):
            return False
    return small.isdisjoint(value.name for value in graph.output)
