"""Sums that ONNX Runtime's optimiser adds and normalises in one kernel, SkipLayerNormalization.

It does where nobody else reads the sum, as in BERT and other layers that normalise last. So a kernel that makes such a
sum saves no launch and no pass over it, but the reading of one tensor.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.graph.graph import Graph, Size

RANK = 3  # of the values that it does that for
OPTIMISED = "SkipLayerNormalization"


def is_added_and_normalised(graph: Graph, add: gs.Node) -> bool:
    """Whether an Add becomes a part of the runtime's kernel for the LayerNormalization that reads its sum."""
    if add.op != "Add" or graph.opened(add) or graph.is_escaping(add.outputs[0].name):
        return False
    shapes = [graph.shape(tensor.name) for tensor in add.inputs]
    return shapes[0] == shapes[1] and _is_known(shapes[0]) and _is_normalised(add.outputs[0])


def is_bias_of_it(graph: Graph, add: gs.Node) -> bool:
    """Whether an Add of a vector becomes a part of that kernel as well.

    Where every size is known the optimiser has made it a Gemm's by then.
    """
    readers = add.outputs[0].outputs
    if add.op != "Add" or len(readers) != 1 or not is_added_and_normalised(graph, readers[0]):
        return False
    shapes = {tensor.name: graph.shape(tensor.name) or () for tensor in add.inputs}
    has_vector = any(len(shape) == 1 and graph.is_initializer(name) for name, shape in shapes.items())
    return has_vector and not all(isinstance(size, int) for shape in shapes.values() for size in shape)


def _is_known(shape: tuple[Size, ...] | None) -> bool:
    return shape is not None and len(shape) == RANK and None not in shape


def _is_normalised(total: gs.Tensor) -> bool:
    """Whether a value is read by a normalisation alone: an op, or what exporters wrote before there was one."""
    if [reader.op for reader in total.outputs] == ["LayerNormalization"]:
        return total.outputs[0].inputs[0] is total
    means = [reader.outputs[0] for reader in total.outputs if reader.op == "ReduceMean"]
    centred = [reader for reader in total.outputs if reader.op != "ReduceMean"]
    return (
        len(means) == 1
        and bool(centred)
        and all(node.op == "Sub" and [*node.inputs] == [total, means[0]] for node in centred)
        and all(_is_deviation(node.outputs[0]) for node in centred)
    )


def _is_deviation(centred: gs.Tensor) -> bool:
    """Whether a value is squared for a variance or divided by its root."""
    return all(reader.op in ("Pow", "Mul", "Div", "Cast") for reader in centred.outputs)
