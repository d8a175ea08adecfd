"""A shape that the shapes of others tell: of a value that no kernel stores, or of what is expanded for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_nodes import constant


@dataclass(frozen=True)
class ToldSize:
    """A size in dimensions of a base: `dimension * times / by`.

    Attributes:
        base: its place among the bases.
        dimension: of it.
    """

    base: int
    dimension: int
    times: int = 1
    by: int = 1


@dataclass(frozen=True)
class ToldShape:
    """A shape and the values that tell it.

    Attributes:
        bases: those, each with its rank.
        entries: its sizes.
    """

    bases: tuple[tuple[str, int], ...]
    entries: tuple[int | ToldSize, ...]

    def nodes(self, made: str, new_name: Callable[[str], str]) -> list[NodeProto]:
        """The nodes that make it.

        Args:
            made: what they make, int64 `[entries]`.
            new_name: makes a name that is not taken.
        """
        if not self.bases:
            return [constant(made, np.array(self.entries, np.int64))]
        nodes: list[NodeProto] = []

        def value(part: str) -> str:
            return new_name(f"{made}/{part}")

        def fixed(part: str, numbers: list[int]) -> str:
            nodes.append(constant(value(part), np.array(numbers, np.int64)))
            return str(nodes[-1].output[0])

        def node(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(op, inputs, [output], **attributes))
            return output

        numbers = [entry for entry in self.entries if isinstance(entry, int)]
        known = [node("Shape", [name], value(f"shape{index}")) for index, (name, _) in enumerate(self.bases)]
        known += [fixed("numbers", numbers)] if numbers else []
        whole = node("Concat", known, value("whole"), axis=0)
        steps = [(op, factors) for op, factors in self._factors() if set(factors) != {1}]
        values = [*(value("of") for _ in steps), made]
        out = node("Gather", [whole, fixed("places", list(self._places()))], values.pop(0))
        for op, factors in steps:
            out = node(op, [out, fixed(op.lower(), factors)], values.pop(0))
        for each in nodes:
            each.name = new_name(each.output[0])
        return nodes

    def _places(self) -> Iterator[int]:
        """Where each size stands in the bases' shapes and the numbers behind them."""
        firsts = np.cumsum([0, *(rank for _, rank in self.bases)]).tolist()
        number = firsts[-1]
        for entry in self.entries:
            if isinstance(entry, ToldSize):
                yield firsts[entry.base] + entry.dimension
            else:
                yield number
                number += 1

    def _factors(self) -> tuple[tuple[str, list[int]], ...]:
        sizes = [entry if isinstance(entry, ToldSize) else ToldSize(0, 0) for entry in self.entries]
        return ("Mul", [size.times for size in sizes]), ("Div", [size.by for size in sizes])


def is_tiled(graph: Graph, name: str, shape: ToldShape) -> bool:
    """Whether a Tile expands a value, and no Expand.

    ONNX Runtime's CPU provider has an Expand of 16 bits, beside which others round what they did not, and no Tile.
    But a Tile adds no dimensions.
    """
    own = graph.shape(name)
    return graph.dtype(name) == TensorProto.FLOAT16 and own is not None and len(own) == len(shape.entries)


def expansion(graph: Graph, name: str, shape: ToldShape, inputs: tuple[str, str], made: str) -> NodeProto:
    """The node that expands a value of the scope, by the names that it and the shape have there."""
    return helper.make_node("Tile" if is_tiled(graph, name, shape) else "Expand", list(inputs), [made], name=made)
