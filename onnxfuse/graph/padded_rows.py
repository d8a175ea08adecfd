"""Weights whose rows are stored with zeros behind them, so that each begins on a rounder place, a cache line at best.

Rows of 2730 elements of 16 bits begin on multiples of 4 bytes; stored as rows of 2752 they begin on 128, and kernels
that read [n, k] by TMA or in whole vectors read them as they lie, run after run, where they had to copy them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from onnxfuse.graph.known_nodes import constant

_WORD = "padded"
_BLOCK = 256  # rows that are copied at once


@dataclass(frozen=True)
class PaddedRows:
    """How a weight is stored whose rows end in zeros.

    Attributes:
        perm: as numpy.transpose has it: dimension i of the stored tensor is dimension `perm[i]` of the model's.
        row: elements of a row, the last dimension, as the model has it.
        whole: the same as it is stored.
    """

    perm: tuple[int, ...]
    row: int
    whole: int

    def __str__(self) -> str:
        return f"{_WORD}:{self.row}:{self.whole}:{','.join(map(str, self.perm))}"

    def model_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the model has of a stored tensor's."""
        own = (*stored[:-1], self.row)
        return tuple(own[self.perm.index(place)] for place in range(len(own)))

    def stored_shape(self, model: tuple[int, ...]) -> tuple[int, ...]:
        """And the reverse."""
        return (*(model[place] for place in self.perm[:-1]), self.whole)


def padded_rows_of(text: str) -> PaddedRows | None:
    """The same back; None for what is none."""
    word, *fields = text.split(":")
    if word != _WORD:
        return None
    row, whole, perm = fields
    return PaddedRows(tuple(map(int, perm.split(","))), int(row), int(whole))


def with_padding(order: PaddedRows, stored: tuple[int, ...], data: bytes) -> Iterator[bytes]:
    """The model's bytes as they are stored, in pieces.

    Args:
        order: of the weight.
        stored: the shape that it is stored in.
        data: of the model's tensor.
    """
    shape = order.model_shape(stored)
    element = len(data) // max(int(np.prod(shape, dtype=np.int64)), 1)
    rows = np.frombuffer(data, f"u{element}").reshape(shape).transpose(order.perm)
    rows = rows.reshape(-1, order.row) if rows.ndim > 2 else rows
    for first in range(0, len(rows), _BLOCK):
        own = rows[first : first + _BLOCK]
        piece = np.zeros((len(own), order.whole), own.dtype)
        piece[:, : order.row] = own
        yield piece.tobytes()


def without_padding(order: PaddedRows, stored: str, name: str) -> list[NodeProto]:
    """Nodes that make the model's tensor of the stored one; operator set 10 and later."""
    bounds = {f"{name}/{part}": value for part, value in (("first", 0), ("end", order.row), ("last", -1))}
    turned = order.perm != tuple(range(len(order.perm)))
    cut = f"{name}/rows" if turned else name
    own = [order.perm.index(place) for place in range(len(order.perm))]
    return [
        *(constant(each, np.array([value])) for each, value in bounds.items()),
        helper.make_node("Slice", [stored, *bounds], [cut]),
        *([helper.make_node("Transpose", [cut], [name], perm=own)] if turned else []),
    ]
