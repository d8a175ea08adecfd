"""What is known of a graph's values before any run: shapes with symbols, and the values of shape arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress

import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxfuse.graph.constant_propagation import Array, known_values, stored_value
from onnxfuse.graph.named_sizes import canonical
from onnxfuse.graph.shape_inference import Known, Shape, output_shapes, refined
from onnxfuse.graph.symbolic import Size

LARGEST = 2**63 - 1  # elements of a tensor
CONTRADICTIONS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What a rule raises for a node whose attributes do not go with its inputs: an axis that is not there, sizes that
do not multiply. Such a node cannot run, so nothing is known behind it, and nothing has to be."""


class Facts:
    """Shapes and known values by name, learnt node by node in graph order.

    Args:
        nodes: in an order in which every node follows those that it reads.
        inferred: what ONNX's own shape inference tells.
    """

    def __init__(self, nodes: Iterable[gs.Node], inferred: Mapping[str, Shape]) -> None:
        self._shapes: dict[str, Shape] = {name: _canonical(shape) for name, shape in inferred.items()}
        self._values: dict[str, Array] = {}
        for node in nodes:
            self._learn(node)

    def shape(self, name: str) -> Shape | None:
        """Dimensions: an int, a symbol, or None where nothing is known; None for an unknown rank."""
        return self._shapes.get(name)

    def value(self, tensor: gs.Tensor) -> Array | None:
        """The tensor's value, its entries symbols or None where only the run knows; None where nothing is known."""
        if isinstance(tensor, gs.Constant):
            return stored_value(tensor)
        return self._values.get(tensor.name)

    def _learn(self, node: gs.Node) -> None:
        read = [_counted(tensor) for tensor in node.inputs] if node.op == "Range" else node.inputs
        values = [None if tensor.is_empty() else self.value(tensor) for tensor in read]
        shapes = [None if tensor.is_empty() else self.shape(tensor.name) for tensor in node.inputs]
        with suppress(*CONTRADICTIONS):
            self._learn_shapes(node, output_shapes(Known(node, shapes, values)))
            for tensor, value in zip(node.outputs, known_values(node, values, shapes), strict=False):
                if value is not None:
                    self._learn_value(tensor, value)

    def _learn_value(self, tensor: gs.Tensor, value: Array) -> None:
        """A known value has as many entries as it has, though the rank that they are the sizes of was learnt late."""
        self._values[tensor.name] = value
        if len(self.shape(tensor.name) or ()) == value.ndim:
            self._shapes[tensor.name] = refined(self.shape(tensor.name), value.shape) or value.shape

    def _learn_shapes(self, node: gs.Node, derived: Iterable[Shape | None]) -> None:
        for tensor, shape in zip(node.outputs, derived, strict=True):
            known = refined(self.shape(tensor.name), shape)
            if known is not None:
                self._shapes[tensor.name] = _possible(known)


def _counted(bound: gs.Tensor) -> gs.Tensor:
    """The integer that a bound in floats is made of, as TorchScript counts positions; none below 2^24 is rounded."""
    widest = (TensorProto.FLOAT, TensorProto.DOUBLE)
    cast = next((node for node in bound.inputs if node.op == "Cast" and node.attrs.get("to") in widest), None)
    return bound if cast is None else cast.inputs[0]


def _canonical(shape: Shape) -> Shape:
    return _possible(tuple(_size(size) for size in shape))


def _possible(shape: Shape) -> Shape:
    """The same shape, or one that tells the rank alone: what a model declares may be true of no tensor."""
    sizes = [size for size in shape if isinstance(size, int)]
    false = any(size < 0 for size in sizes) or math.prod(size for size in sizes if size) > LARGEST
    return (None,) * len(shape) if false else shape


def _size(size: Size) -> Size:
    return canonical(size) if isinstance(size, str) else size
