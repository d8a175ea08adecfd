"""Tensors whose rows are parts in turn, `[(n p), ...]`, stored part by part, `[(p n), ...]`: of a quantised weight.

Its integers, scales and zero points have a row for each column of the product. Where the columns of parts take turns,
as gpt-oss's gate and up, their rows are put side by side, and kernels read them as they read any other parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from onnxfuse.graph.known_nodes import constant

_WORD = "rows"


@dataclass(frozen=True)
class RowsInTurn:
    """How a tensor is stored that the model has with the rows of parts in turn.

    Attributes:
        parts: how many take turns.
        rows: of all parts.
        dims: of the tensor, in either order; one of a single dimension has its rows one behind the other.
    """

    parts: int
    rows: int
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(map(str, (_WORD, self.parts, self.rows, *self.dims)))


def rows_in_turn_of(text: str) -> RowsInTurn | None:
    """The same back; None for what is none."""
    word, *numbers = text.split()
    if word != _WORD:
        return None
    parts, rows, *dims = map(int, numbers)
    return RowsInTurn(parts, rows, tuple(dims))


def part_by_part(order: RowsInTurn, data: bytes) -> bytes:
    """The model's bytes as they are stored."""
    rows = np.frombuffer(data, np.uint8).reshape(order.rows // order.parts, order.parts, -1)
    return bytes(rows.transpose(1, 0, 2).tobytes())


def taking_turns(order: RowsInTurn, stored: str, name: str) -> list[NodeProto]:
    """Nodes that make the model's tensor of the stored one."""
    split, beside, whole, turned = (f"{name}/{index}" for index in range(4))
    return [
        constant(split, np.array([order.parts, order.rows // order.parts, -1])),
        helper.make_node("Reshape", [stored, split], [beside]),
        helper.make_node("Transpose", [beside], [turned], perm=[1, 0, 2]),
        constant(whole, np.array(order.dims)),
        helper.make_node("Reshape", [turned, whole], [name]),
    ]
