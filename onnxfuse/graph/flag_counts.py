"""Is any of many flags set? Exporters count in 64 bits, which ONNX Runtime's CUDA provider hands to a slow reduction.

`torch.isinf(x).any()`, which T5 in fp16 asks behind every sublayer, becomes a Cast of flags to integers, a ReduceSum or
ReduceMax of them, and a comparison with zero or a Cast to bool. Where a model is written that has any fusion, such a
count is a sum in fp32: ones add up to zero where there are none, and only there, so each flag has the bits it had. Of
1.5 million flags the integers' sum takes 1.6 ms on an H200.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.constants import constant_tensors
from onnxfuse.graph.functions import reads
from onnxfuse.graph.unread import drop, drop_unread

_FLAGS = frozenset(("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or"))
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_TYPE = "to"


def count_in_fp32(graph: GraphProto) -> None:
    """Edit the counts of the main graph in place that are compared with zero and nothing else."""
    found = list(_counts(graph))
    if not found:  # a model of any size would be copied for nothing
        return
    compared, integers = set[str](), set[str]()
    for cast, count, tests in found:
        compared.update(name for node in tests for name in node.input[1:])
        integers.update((*cast.output, *count.output))
        _edit(cast, count, tests)
    drop(graph.value_info, integers)
    drop_unread(graph, compared)


def _counts(graph: GraphProto) -> Iterator[tuple[NodeProto, NodeProto, list[NodeProto]]]:
    """What makes integers of flags and nothing else reads, what counts them, and what asks for zero alone."""
    sums = list(filter(_is_sum_or_so, graph.node))
    if not sums:
        return
    makers = {name: node for node in graph.node for name in node.output}
    uses, readers = Counter(value.name for value in graph.output), defaultdict[str, list[NodeProto]](list)
    for node in graph.node:
        uses.update(reads(node))
        for name in node.input:
            readers[name].append(node)
    zeros = _zeros(graph)
    for count in sums:
        tests = [node for node in readers[count.output[0]] if _is_test(node, zeros)]
        cast = makers.get(count.input[0])
        flags = makers.get(cast.input[0]) if cast is not None and _casts(cast, _INTEGERS) else None
        alone = uses[count.input[0]] == 1 and uses[count.output[0]] == len(tests) > 0
        if cast is not None and flags is not None and alone and flags.op_type in _FLAGS:
            yield cast, count, tests


def _zeros(graph: GraphProto) -> frozenset[str]:
    """Zeros that no run changes, without a dimension: compared with one, a count keeps its own."""
    return frozenset(name for name, tensor in constant_tensors(graph).items() if _is_zero(tensor))


def _is_zero(tensor: TensorProto) -> bool:
    if tensor.dims or tensor.data_type not in _INTEGERS or tensor.external_data:
        return False
    return not numpy_helper.to_array(tensor).any()


def _is_sum_or_so(node: NodeProto) -> bool:
    """A ReduceSum, or what is one of the same axes if it is called so."""
    with_axes = any(each.name == "axes" for each in node.attribute)
    return node.op_type == "ReduceSum" or (node.op_type == "ReduceMax" and not with_axes)


def _casts(node: NodeProto, types: Sequence[int]) -> bool:
    return node.op_type == "Cast" and any(each.name == _TYPE and each.i in types for each in node.attribute)


def _is_test(node: NodeProto, zeros: frozenset[str]) -> bool:
    """Whether a node asks a count for no more than whether it is zero."""
    return _casts(node, (TensorProto.BOOL,)) or (node.op_type == "Greater" and node.input[1] in zeros)


def _edit(cast: NodeProto, count: NodeProto, tests: Sequence[NodeProto]) -> None:
    _become_cast(cast, TensorProto.FLOAT)
    count.op_type = "ReduceSum"
    for node in tests:
        del node.input[1:]
        _become_cast(node, TensorProto.BOOL)


def _become_cast(node: NodeProto, to: int) -> None:
    node.op_type = "Cast"
    del node.attribute[:]
    node.attribute.append(helper.make_attribute(_TYPE, to))
