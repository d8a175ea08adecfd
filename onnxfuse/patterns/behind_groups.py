"""What is behind a normalisation of groups and is done to each element by itself: an activation, an op or some nodes.

Its kernel ends in a straight line of steps, of which these nodes are the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.ir.fusion import MAX_STEPS, Step, load_name
from onnxfuse.ir.normalisation import NORMAL
from onnxfuse.patterns.epilogue_graph import ACC, EpilogueGraph, Expression, Ref
from onnxfuse.patterns.pointwise_table import CHANNELS, pointwise_row

MOST_BEHIND = 12  # pointwise nodes


class Tail:
    """The nodes behind a normalisation that its kernel takes in, with numbers alone beside what is normalised.

    It grows as long as nodes are pointwise, and ends where one value alone is read by others.

    Attributes:
        epilogue: what is done to an element, from the normalised one on.
        root: what the kernel makes, there.
        nodes: those that are taken in.
        made: what they make, or the normalisation.
    """

    def __init__(self, graph: Graph, x: gs.Tensor, normal: gs.Tensor, is_taken: Callable[[gs.Node], bool]) -> None:
        self.graph, self.x, self.normal, self.is_taken = graph, x, normal, is_taken
        self.epilogue = EpilogueGraph()
        self.root = self.epilogue.acc(normal.name)
        self.nodes: tuple[gs.Node, ...] = ()
        self.made = normal
        self._values: dict[str, Ref] = {}

    def grow(self) -> None:
        """Take in what is behind."""
        self._values = {self.normal.name: self.root}
        grown: list[gs.Node] = []
        tensors = [self.normal]
        while len(grown) < MOST_BEHIND:
            behind = (reader for tensor in tensors for reader in tensor.outputs if reader not in grown)
            node = next((each for each in behind if self._absorb(each)), None)
            if node is None:
                break
            grown.append(node)
            tensors.append(node.outputs[0])
            live = [each for each in tensors if self._is_read_outside(each, grown)]
            if len(live) == 1:
                self.nodes, self.made, self.root = tuple(grown), live[0], self._values[live[0].name]

    def steps(self, operands: Sequence[str]) -> tuple[tuple[Step, ...], str]:
        """A straight line over what is normalised and operands, and the name of what it makes.

        Args:
            operands: names of those beside what is normalised, in the order of the kernel's.
        """

        def name_of(leaf: Expression) -> str:
            return NORMAL if leaf.op == ACC else load_name(1 + operands.index(leaf.operand))

        steps, names = self.epilogue.straight_line((self.root,), name_of)
        return steps, str(names[self.root])

    def leaf(self, tensor: gs.Tensor) -> Ref | None:
        """What is no value of the tail: a number; None for what no kernel reads."""
        known = self.graph.known_value(tensor)
        if known is None or known.size != 1 or not is_known(self.graph, tensor):
            return None
        return self.epilogue.constant(float(known.flat[0]))

    def _absorb(self, node: gs.Node) -> bool:
        """Whether a node is one of the tail's, and what it makes a value."""
        lower = pointwise_row(node)
        made = node.outputs[0]
        is_alike = self.graph.shape(made.name) == self.graph.shape(self.x.name)
        if lower is None or node.op in CHANNELS or self.is_taken(node) or len(node.outputs) > 1 or not is_alike:
            return False
        refs = [self._ref(each) for each in node.inputs]
        if None in refs or self.graph.dtype(made.name) not in FLOATS_BY_ONNX:
            return False
        try:
            self._values[made.name] = lower(self.epilogue, [ref for ref in refs if ref is not None], node.attrs)
        except NotFusable:
            return False
        return self.epilogue.count_steps((self._values[made.name],)) <= MAX_STEPS

    def _ref(self, tensor: gs.Tensor) -> Ref | None:
        """A value of the tail, or what it reads beside; -1 for an input that is left out."""
        if not tensor.name:
            return -1
        return self._values[tensor.name] if tensor.name in self._values else self.leaf(tensor)

    def _is_read_outside(self, tensor: gs.Tensor, grown: Sequence[gs.Node]) -> bool:
        return self.graph.is_escaping(tensor.name) or any(reader not in grown for reader in tensor.outputs)


def is_known(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether every number of a tensor is known before the run."""
    known = graph.known_value(tensor)
    return known is not None and all(isinstance(number, (int, float, np.number)) for number in known.flat)
