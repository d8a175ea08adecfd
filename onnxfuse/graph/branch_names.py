"""ONNX's inference of types, with names apart that branches and bodies share.

A name of a branch ends with it, and Optimum's merged decoders have most names in both branches of an If. The inference
keeps what it computes of shape arithmetic by name alone: the second branch was told the first one's numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
from onnx import GraphProto, ModelProto

from onnxfuse.graph.functions import rename, subgraphs, walk


def infer_shapes(model: ModelProto, *, check_type: bool = False, data_prop: bool = False) -> ModelProto:
    """What onnx.shape_inference.infer_shapes makes of a model whose names are apart.

    Raises:
        onnx.shape_inference.InferenceError: as that.
    """
    given, apart = _apart(model)
    inferred = onnx.shape_inference.infer_shapes(apart, check_type=check_type, data_prop=data_prop)
    if given:
        _rename_inside(inferred.graph, given)
    return inferred


def _apart(model: ModelProto) -> tuple[dict[str, str], ModelProto]:
    """What names were before, and the model with them; the model itself where no graph shares a name."""
    names = [_made(graph) for graph in (model.graph, *_graphs_inside(model.graph))]
    made = Counter(name for group in names for name in group)
    shared = {name for name, count in made.items() if count > 1}
    if not shared:
        return {}, model
    given: dict[str, str] = {}
    copy = ModelProto()
    copy.CopyFrom(model)
    for number, graph in enumerate(_graphs_inside(copy.graph)):
        fresh = {name: f"{name} of graph {number}" for name in sorted(_made(graph) & shared)}
        given |= {new: name for name, new in fresh.items()}
        _rename_inside(graph, fresh)
    return given, copy


def _graphs_inside(graph: GraphProto) -> Iterator[GraphProto]:
    """Branches and bodies at all depths, outer ones before those inside them."""
    return (inner for node in walk(graph.node) for _, inner in subgraphs(node))


def _made(graph: GraphProto) -> set[str]:
    """What a graph itself makes or declares."""
    outputs = (name for node in graph.node for name in node.output if name)
    return {*outputs, *(entry.name for entry in (*graph.input, *graph.initializer))}


def _rename_inside(graph: GraphProto, names: dict[str, str]) -> None:
    """Rename values of a graph and of those inside, in place."""
    for entry in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        entry.name = names.get(entry.name, entry.name)
    for node in walk(graph.node):
        rename(node, names)
