"""What a fallback body holds of values that are known before the run: a Constant, or the nodes that compute a number.

ONNX Runtime folds less than onnxfuse does: a scale that the model computes from Shape is none that it can put into a
MatMul. A body with a Constant in its place would let it, and then make other bits than the original. So of a floating-
point number that is computed a body has the model's own nodes, as far as what they read is at hand there; else it hides
the number, or the sizes that the nodes begin with, behind values that only the run knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.constant_propagation import Array, is_complete
from onnxfuse.graph.functions import subgraphs
from onnxfuse.graph.graph import Graph

MOST_NODES = 64  # that compute one number; a body with more holds the number itself
FIRST_SLICE_OF_INPUTS = 10  # operator set; before, the bounds of a Slice were attributes
_OF_SHAPES = ("Shape", "Size")
_HIDING = ("flat", "none", "typed", "one", "zero", "shown", "shape", "row")  # what the values on the way are called
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def known_nodes(graph: Graph, nodes: list[NodeProto], inputs: Collection[str]) -> list[NodeProto]:
    """The nodes of a body and, each before its first reader, what makes the known values that they read.

    Args:
        graph: the scope that the nodes are of.
        nodes: of the body, in order.
        inputs: the values that the body is given.
    """
    known = _KnownNodes(graph, inputs, [value for node in nodes for value in node.output])
    return [made for node in nodes for made in (*known.before(node), node)]


def constant(name: str, value: Array) -> NodeProto:
    """A Constant node."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def known_array(graph: Graph, name: str) -> Array:
    """A value that is known before the run, of the type that the model gives it."""
    value, dtype = graph.known_value(graph.tensor(name)), graph.dtype(name)
    assert value is not None, f"{name} is neither an input of the fusion nor known"
    return np.asarray(value.astype(helper.tensor_dtype_to_np_dtype(dtype or TensorProto.INT64)))


class _KnownNodes:
    """Grows with the values that are at hand in a body, node by node."""

    def __init__(self, graph: Graph, inputs: Collection[str], later: Collection[str]) -> None:
        self.graph = graph
        self.inputs = tuple(inputs)
        self.at_hand = set(inputs)
        self.later = frozenset(later)

    def before(self, node: NodeProto) -> Iterator[NodeProto]:
        """The nodes that make what a node reads and what is not at hand yet."""
        for name in node.input:
            if name and name not in self.at_hand:
                made = self._makers(name)
                self.at_hand.update(value for each in made for value in each.output)
                yield from made
        self.at_hand.update(node.output)

    def _makers(self, name: str) -> list[NodeProto]:
        if self.graph.dtype(name) not in _FLOATS:
            return [constant(name, known_array(self.graph, name))]
        made: dict[str, NodeProto] = {}
        if self._collect(name, made):
            return list({id(node): node for node in made.values()}.values())
        return self._hidden(name)

    def _hidden(self, name: str) -> list[NodeProto]:
        """A number as no optimiser sees it: behind no elements of an input that only the run knows."""
        value = known_array(self.graph, name)
        at_run_time = [each for each in self.inputs if not self.graph.is_initializer(each)]
        if not at_run_time or self.graph.opset < FIRST_SLICE_OF_INPUTS:
            return [constant(name, value)]
        flat, none, typed, one, zero, shown, shape, row = (f"{name}/{part}" for part in _HIDING)
        return [
            constant(one, np.array([-1])),
            helper.make_node("Reshape", [at_run_time[0], one], [flat]),
            constant(zero, np.array([0])),
            helper.make_node("Slice", [flat, zero, zero], [none]),
            helper.make_node("Cast", [none], [typed], to=self.graph.dtype(name)),
            constant(shown, value.ravel()),
            helper.make_node("Concat", [typed, shown], [row], axis=0),
            constant(shape, np.array(value.shape, np.int64)),
            helper.make_node("Reshape", [row, shape], [name]),
        ]

    def _collect(self, name: str, made: dict[str, NodeProto]) -> bool:
        """Add the nodes that compute a value, those that they read first; False where they need what is not at hand."""
        if not name or name in self.at_hand or name in made:
            return True
        tensor = self.graph.tensor(name)
        maker = tensor.inputs[0] if tensor.inputs else None
        if name in self.later or len(made) == MOST_NODES:
            return False
        if maker is None or self._is_stored(maker):
            return self._store(name, made)
        node = self.graph.scope.nodes[self.graph.index(maker)]
        before = dict(made)
        if not any(subgraphs(node)) and all(self._collect(each, made) for each in node.input):
            made.update(dict.fromkeys(node.output, node))
            return True
        made.clear()
        made.update(before)
        return self.graph.dtype(name) not in _FLOATS and self._store_hidden(name, made)

    def _is_stored(self, maker: gs.Node) -> bool:
        """Whether what a node makes is written as a number, and not computed again."""
        return maker.op == "Constant" or (maker.op in _OF_SHAPES and maker.inputs[0].name not in self.at_hand)

    def _store_hidden(self, name: str, made: dict[str, NodeProto]) -> bool:
        """Integers that shapes tell which are not at hand, under what the model's own nodes make of them."""
        if not is_complete(self.graph.known_value(self.graph.tensor(name))):
            return False
        made.update({node.output[0]: node for node in self._hidden(name)})
        return True

    def _store(self, name: str, made: dict[str, NodeProto]) -> bool:
        if not is_complete(self.graph.known_value(self.graph.tensor(name))):
            return False
        made[name] = constant(name, known_array(self.graph, name))
        return True
