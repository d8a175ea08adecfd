"""Tensors whose rows are parts in turn, `[(n p), ...]`, stored part by part, `[(p n), ...]`.

The integers, scales and zero points of a quantised weight have a row for each column of the product. Where the columns
of parts take turns, as gpt-oss's gate and up, their rows are put side by side, and kernels read them as they read any
other parts. So it is with any weight where a turn is of several columns, `(n1 p n2)`, as the halves of heads that
rotary embeddings turn.
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
        run: rows that each turn has.
        rows: of all parts.
        dims: of the tensor as it is stored; one of a single dimension has its rows one behind the other.
        turned: whether rows are columns in the model, `[k, n]`.
    """

    parts: int
    run: int
    rows: int
    dims: tuple[int, ...]
    turned: bool = False

    @property
    def turns(self) -> int:
        """Of each part."""
        return self.rows // self.parts // self.run

    def __str__(self) -> str:
        return " ".join(map(str, (_WORD, int(self.turned), self.parts, self.run, self.rows, *self.dims)))


def rows_in_turn_of(text: str) -> RowsInTurn | None:
    """The same back; None for what is none."""
    word, *numbers = text.split()
    if word != _WORD:
        return None
    turned, parts, run, rows, *dims = map(int, numbers)
    return RowsInTurn(parts, run, rows, tuple(dims), bool(turned))


def part_by_part(order: RowsInTurn, data: bytes) -> bytes:
    """The model's bytes as they are stored."""
    rows = np.frombuffer(data, np.uint8)
    if order.turned:
        n, k = order.dims
        rows = rows.reshape(k, n, -1).transpose(1, 0, 2)
    return bytes(rows.reshape(order.turns, order.parts, -1).transpose(1, 0, 2).tobytes())


def taking_turns(order: RowsInTurn, stored: str, name: str) -> list[NodeProto]:
    """Nodes that make the model's tensor of the stored one."""
    split, beside, whole, turns, rows = (f"{name}/{index}" for index in range(5))
    in_turn = rows if order.turned else name
    return [
        constant(split, np.array([order.parts, order.turns, -1])),
        helper.make_node("Reshape", [stored, split], [beside]),
        helper.make_node("Transpose", [beside], [turns], perm=[1, 0, 2]),
        constant(whole, np.array(order.dims)),
        helper.make_node("Reshape", [turns, whole], [in_turn]),
        *([helper.make_node("Transpose", [rows], [name], perm=[1, 0])] if order.turned else []),
    ]
