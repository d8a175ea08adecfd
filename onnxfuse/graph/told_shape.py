"""The shape of a value that no kernel stores, told by the shapes of others, where somebody reads nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from onnxfuse.graph.known_nodes import constant


@dataclass(frozen=True)
class ToldShape:
    """What takes the place of a Shape.

    Attributes:
        bases: the values that tell it, each with its rank.
        entries: of the shape: a number, or a base's place and its dimension.
    """

    bases: tuple[tuple[str, int], ...]
    entries: tuple[int | tuple[int, int], ...]

    def nodes(self, made: str, new_name: Callable[[str], str]) -> list[NodeProto]:
        """The nodes that make it.

        Args:
            made: the value that the Shape made, int64 `[entries]`.
            new_name: makes a name that is not taken.
        """
        numbers = [entry for entry in self.entries if isinstance(entry, int)]
        firsts = np.cumsum([0, *(rank for _, rank in self.bases)]).tolist()
        known = [new_name(f"{made}/{part}") for part in (*range(len(self.bases)), "known")]
        nodes = [
            helper.make_node("Shape", [name], [shape]) for (name, _), shape in zip(self.bases, known, strict=False)
        ]
        if numbers:
            nodes.append(constant(known[-1], np.array(numbers, np.int64)))
        places, seen = [], firsts[-1]
        for entry in self.entries:
            places.append(seen if isinstance(entry, int) else firsts[entry[0]] + entry[1])
            seen += isinstance(entry, int)
        parts = [value for node in nodes for value in node.output]
        whole, chosen = (new_name(f"{made}/{part}") for part in ("whole", "chosen"))
        nodes += [
            helper.make_node("Concat", parts, [whole], axis=0),
            constant(chosen, np.array(places, np.int64)),
            helper.make_node("Gather", [whole, chosen], [made]),
        ]
        for node in nodes:
            node.name = new_name(node.output[0])
        return nodes
