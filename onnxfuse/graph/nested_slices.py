"""Slices of several axes that read another Slice, where there is one of some of them: `x[:, :, 1:][..., ::2]`.

Simplifiers (onnxsim) make one Slice of both, `x[:, :, 1:, ::2]`, though others read the first one, as rotary embeddings
behind a class token do (EVA-02): what turns is then no part of what stands beside it. The elements are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.constants import constant_tensors
from onnxfuse.graph.functions import subgraphs

Range = tuple[int, ...]
"""Axis, start, end and step of a Slice, as the model writes them."""
MOST_AXES = 16
_BOUNDS = ("axis", "start", "end", "step")


def nest_slices(graph: GraphProto) -> None:
    """Edit a graph whose nodes are in order, in place, and the branches and bodies in it."""
    for node in graph.node:
        for _, inner in subgraphs(node):
            nest_slices(inner)
    counts = Counter(node.input[0] for node in graph.node if _is_of_axes(node))
    slices = [node for node in graph.node if _is_of_axes(node) and counts[node.input[0]] > 1]
    known = _integers(graph) if slices else {}
    made = [each for node in _nested(slices, known) for each in node]
    for constant in reversed(made):
        graph.node.insert(0, constant)


def _is_of_axes(node: NodeProto) -> bool:
    return node.op_type == "Slice" and not node.domain and len(node.input) > 3


def _integers(graph: GraphProto) -> dict[str, list[int]]:
    """The short vectors of integers that no run changes."""
    known = constant_tensors(graph).items()
    return {name: numpy_helper.to_array(tensor).tolist() for name, tensor in known if _is_short(tensor)}


def _is_short(tensor: TensorProto) -> bool:
    is_here = tensor.data_location != TensorProto.EXTERNAL
    is_integer = tensor.data_type in (TensorProto.INT32, TensorProto.INT64)
    return is_here and is_integer and len(tensor.dims) == 1 and tensor.dims[0] <= MOST_AXES


def _ranges(node: NodeProto, known: Mapping[str, list[int]]) -> frozenset[Range]:
    """Those of all axes that a Slice names; none where the run alone knows them."""
    starts, ends, axes, *steps = (known.get(name) for name in node.input[1:5])
    if starts is None or ends is None or axes is None or None in steps:
        return frozenset()
    columns = (axes, starts, ends, steps[0] if steps and steps[0] is not None else [1] * len(axes))
    return frozenset(zip(*columns, strict=True)) if len({*map(len, columns)}) == 1 else frozenset()


def _nested(slices: Sequence[NodeProto], known: Mapping[str, list[int]]) -> Iterator[list[NodeProto]]:
    """What each Slice that reads another one now needs, the widest that stands before it."""
    before: dict[str, list[tuple[frozenset[Range], str]]] = {}
    for node in slices:
        own, data = _ranges(node, known), node.input[0]
        smaller = (each for each in before.get(data, ()) if each[0] < own)
        inner = max(smaller, key=lambda each: len(each[0]), default=None)
        if own:
            before.setdefault(data, []).append((own, node.output[0]))
        if inner is not None:
            yield _read(node, inner[1], sorted(own - inner[0]))


def _read(node: NodeProto, inner: str, ranges: Sequence[Range]) -> list[NodeProto]:
    """Make a Slice one of another value, of these ranges alone: what they are stored in."""
    names = [f"{node.output[0]}/of/{inner}/{bound}" for bound in _BOUNDS]
    axis, start, end, step = names
    del node.input[:]
    node.input.extend([inner, start, end, axis, step])
    columns = np.array(ranges, np.int64).T
    return [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.ascontiguousarray(column)))
        for name, column in zip(names, columns, strict=True)
    ]
