"""How a quantized rhs is stored: integers of few bits, and a scale for each block of k.

As com.microsoft::MatMulNBits has it, with `blocks = ceil(k / block)`:

    weight         uint8 [n, blocks, block * bits / 8]      k runs fastest; of 4 bits the low half of a byte comes first
    scales         [n, blocks]
    zero points    uint8 [n, ceil(blocks * bits / 8)]       packed the same way; without them each is 2^(bits - 1)

    w[n, k] = (weight[n, k] - zero_point[n, k / block]) * scale[n, k / block]

Where k does not fill the last block, what the rest of it holds is never read as a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.dtypes import DType


@dataclass(frozen=True)
class Quantization:
    """The stored form of a quantized rhs.

    Attributes:
        bits: of one element; 4 or 8.
        block: elements of k that share a scale; 16, 32, 64, 128 or 256.
        zero_points: whether each block has a zero point beside its scale; else it is 2^(bits - 1).
        scale: type of the scales, that of the activations.
    """

    bits: int
    block: int
    zero_points: bool
    scale: DType

    @property
    def implied_zero(self) -> int:
        """The zero point of a form without zero points."""
        return 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's integers."""
        return self.block * self.bits // 8

    def blocks(self, k: int) -> int:
        """Blocks of one column of a weight of depth k."""
        return -(-k // self.block)

    def zero_point_bytes(self, k: int) -> int:
        """Bytes of one column's zero points, packed."""
        return -(-self.blocks(k) * self.bits // 8)

    def column_bytes(self, k: int) -> int:
        """All that is stored of one column of a weight of depth k, in bytes."""
        own = self.blocks(k) * (self.block_bytes + self.scale.bytes)
        return own + (self.zero_point_bytes(k) if self.zero_points else 0)

    def __str__(self) -> str:
        return f"i{self.bits} blocks of {self.block}{' with zero points' if self.zero_points else ''}"
