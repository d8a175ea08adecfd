"""Integers that a DequantizeLinear of blocks reads, stored as MatMulNBits has them: `uint8 [n, blocks, bytes]`.

    uint4, uint8 [n, k]    the same bytes
    int4, int8             each number's highest bit is flipped: -8 becomes 0, 7 becomes 15
    [k, n]                 columns one behind the other
    parts in turn          part by part, as rows_in_turn.py stores other weights

No byte more is needed; a fallback body turns them back into what the model had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxfuse.graph.known_nodes import constant

ELEMENTS: dict[int, tuple[int, bool]] = {
    TensorProto.UINT4: (4, False), TensorProto.INT4: (4, True),
    TensorProto.UINT8: (8, False), TensorProto.INT8: (8, True),
}  # fmt: skip
"""ONNX element type -> bits, and whether there are numbers below 0."""
_WORD = "packed"


@dataclass(frozen=True)
class Packing:
    """How integers are stored that the model has as `[n, k]` or, turned, `[k, n]`.

    Attributes:
        element: the ONNX element type that they have in the model.
        n: columns of the product.
        k: numbers of one column.
        block: of them, that are one block; 0 for zero points, whose columns are not split.
        turned: the model has n innermost.
        parts: whose columns take turns in the model.
        run: columns that each turn has.
    """

    element: int
    n: int
    k: int
    block: int
    turned: bool
    parts: int = 1
    run: int = 1

    @property
    def bits(self) -> int:
        """Of one number."""
        return ELEMENTS[self.element][0]

    @property
    def flip(self) -> int:
        """What makes a number of the model's one without a sign: 8, 128 or 0."""
        return ELEMENTS[self.element][1] << (self.bits - 1)

    @property
    def dims(self) -> list[int]:
        """Of the stored bytes."""
        row = self.k * self.bits // 8
        return [self.n, self.k // self.block, self.block * self.bits // 8] if self.block else [self.n, row]

    @property
    def own_dims(self) -> tuple[int, int]:
        """Of the model's numbers."""
        return (self.k, self.n) if self.turned else (self.n, self.k)

    @property
    def split(self) -> list[int]:
        """The stored numbers, part by part: of each part its turns, and of each turn its numbers."""
        return [self.parts, self.n // self.parts // self.run, self.run * self.k]

    def __str__(self) -> str:
        own = (self.element, self.n, self.k, self.block, int(self.turned), self.parts, self.run)
        return " ".join(map(str, (_WORD, *own)))


def packing_of(text: str) -> Packing | None:
    """The same back; None for what is none."""
    word, *numbers = text.split()
    if word != _WORD:
        return None
    element, n, k, block, turned, parts, run = map(int, numbers)
    return Packing(element, n, k, block, bool(turned), parts, run)


def packed(packing: Packing, data: bytes) -> bytes:
    """The model's bytes as they are stored."""
    numbers = np.frombuffer(data, np.uint8)
    if packing.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], -1).reshape(-1)
    numbers = numbers[: packing.n * packing.k].reshape(packing.own_dims)
    numbers = (numbers.T if packing.turned else numbers) ^ np.uint8(packing.flip)
    parts, turns, row = packing.split
    numbers = numbers.reshape(turns, parts, row).transpose(1, 0, 2).reshape(packing.n, packing.k)
    if packing.bits == 8:
        return bytes(numbers.tobytes())
    return bytes((numbers[:, ::2] | numbers[:, 1::2] << 4).tobytes())


class _Emitter:
    """Writes nodes out; every result has a name behind that of the tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[NodeProto] = []

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        made = f"{self.name}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [made], **attributes))
        return made

    def number(self, value: object, dtype: type) -> str:
        made = f"{self.name}/{len(self.nodes)}"
        self.nodes.append(constant(made, np.array(value, dtype)))
        return made


def unpacking(packing: Packing, stored: str, name: str) -> list[NodeProto]:
    """Nodes that make the model's tensor of the stored one; all casts are of numbers that the types hold."""
    e = _Emitter(name)
    numbers = _halves(e, stored) if packing.bits == 4 else stored
    if packing.parts > 1:
        numbers = e("Transpose", e("Reshape", numbers, e.number(packing.split, np.int64)), perm=[1, 0, 2])
    numbers = e("Reshape", numbers, e.number([packing.n, packing.k], np.int64))
    if packing.turned:
        numbers = e("Transpose", numbers, perm=[1, 0])
    if packing.flip:
        numbers = e("Sub", e("Cast", numbers, to=TensorProto.INT32), e.number(packing.flip, np.int32))
    return [*e.nodes, helper.make_node("Cast", [numbers], [name], to=packing.element)]


def _halves(e: _Emitter, stored: str) -> str:
    """Numbers of 4 bits, the low half of each byte first."""
    four, column = e.number(4, np.uint8), e.number([-1, 1], np.int64)
    low = e("BitShift", e("BitShift", stored, four, direction="LEFT"), four, direction="RIGHT")
    high = e("BitShift", stored, four, direction="RIGHT")
    return e("Concat", e("Reshape", low, column), e("Reshape", high, column), axis=1)
