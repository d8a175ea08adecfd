"""One launch of a kernel with a quantized rhs: packed integers, scales and zero points in host memory.

Each is a buffer of exactly its own bytes, so that the emulator refuses a read of any other; what the numbers mean is
computed in float64, one by one, from the integers before they were packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxfuse.dtypes import F32, U8, DType
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.helpers.kernel_problem import FP32, NUMPY, Bounded, Buffer, Problem, Size, TiledSpec, make_problem

PIECE_BYTES = 16  # of the widest access


def quantized(spec: TiledSpec, form: Quantization, size: Size) -> TiledSpec:
    """The spec with an rhs of a form and a size, and the accesses that its depth allows."""
    k = size.k
    blocks = form.blocks(k)
    zeros = _width(form.zero_point_bytes(k), PIECE_BYTES) if form.zero_points else 1
    return replace(
        spec,
        rhs_order="nk",
        quantization=form,
        rhs_width=_width(blocks * form.block_bytes, PIECE_BYTES),
        scales_width=_width(blocks, PIECE_BYTES // form.scale.bytes),
        zero_points_width=zeros,
        depth=k,
        columns=size.n,
    )


def math_of(form: Quantization, exact: bool = False) -> str:
    """The arithmetic of activations of a form, as `KernelSpec.math` names it."""
    return form.scale.name if form.scale != F32 else "3xtf32" if exact else "tf32"


def _width(extent: int, most: int) -> int:
    return int(np.gcd(extent, most))


@dataclass
class Packed(Buffer):
    """Packed integers, with what they stand for."""

    numbers: np.ndarray = field(kw_only=True)  # float64 [1, k, n]
    steps: np.ndarray = field(kw_only=True)  # the scales of each

    @property
    def values(self) -> np.ndarray:
        """The numbers."""
        return self.numbers


@dataclass
class QuantizedProblem(Problem):
    """A problem whose parts have scales, and zero points if the form has them.

    Attributes:
        excess: the largest number that a kernel multiplies where it stands for an integer, if that is not the integer
            less its zero point: what is too much is taken from the sums of a block.
        blocks: of a persistent grid; 0 for one a tile.
        rounding: of the factors, relative to a product.
    """

    scales: list[Buffer] = field(kw_only=True)
    zero_points: list[Buffer] = field(kw_only=True)
    excess: float = field(default=0.0, kw_only=True)
    blocks: int = field(default=0, kw_only=True)
    rounding: float = field(default=0.0, kw_only=True)

    @property
    def grid(self) -> tuple[int, int, int]:
        """As many blocks as wanted."""
        whole = super().grid
        return (self.blocks or whole[0], *whole[1:])

    @property
    def buffers(self) -> list[Buffer]:
        """Those of every problem, and what each part has beside its integers."""
        return [*super().buffers, *self.scales, *self.zero_points]

    @property
    def weights(self) -> list[Buffer]:
        """Integers and what is beside them."""
        return [*self.rhs, *self.scales, *self.zero_points]

    @property
    def rhs_always_ready(self) -> bool:
        """The kernel for few rows reads it ahead: it is launched early where it is ready."""
        return True

    def product(self, rhs: Buffer) -> Bounded:
        """A block's sum is rounded once more when it is scaled and added, and beside it what unpacking leaves in it."""
        form = self.spec.quantization
        assert form is not None
        assert isinstance(rhs, Packed)
        lhs = np.abs(self.lhs.values.astype(np.float64))
        magnitude = lhs @ (np.abs(rhs.values) * (self.size.k + form.blocks(self.size.k) + 1))
        left = lhs @ (np.abs(rhs.steps) * self.excess * 2 * (form.block + 2))
        inputs = lhs @ np.abs(rhs.values) * self.rounding
        return Bounded(self.lhs.values.astype(np.float64) @ rhs.values, (magnitude + left) * FP32 + inputs)

    def arguments(self, addresses: Sequence[int]) -> np.ndarray:
        """With pointers and pitches of scales and zero points."""
        count = len(super().buffers)
        arguments = self._arguments(super().buffers, addresses[:count])
        for part in range(self.spec.parts):
            scales, zeros = addresses[count + part], 0
            pitches = [self.scales[part].strides[2], 0]
            if self.zero_points:
                zeros = addresses[count + self.spec.parts + part]
                pitches[1] = self.zero_points[part].strides[2]
            arguments["scales"][0, part] = (scales, zeros, *pitches)
        return arguments


def make_quantized_problem(spec: TiledSpec, size: Size, excess: float = 0.0, seed: int = 0) -> QuantizedProblem:
    """Random tensors: every integer and zero point that the form has, scales of both signs."""
    form = spec.quantization
    assert form is not None
    assert size.batch == 1
    rng = np.random.default_rng([seed, size.n, size.k])
    plain = make_problem(replace(spec, quantization=None, rhs_width=1), size, seed)
    parts = [_part(rng, spec, form, size) for _ in range(spec.parts)]
    return QuantizedProblem(
        spec,
        size,
        plain.lhs,
        [part[0] for part in parts],
        plain.loads,
        plain.outs,
        scales=[part[1] for part in parts],
        zero_points=[part[2] for part in parts] if form.zero_points else [],
        excess=excess,
    )


def _part(rng: np.random.Generator, spec: KernelSpec, form: Quantization, size: Size) -> tuple[Packed, Buffer, Buffer]:
    blocks, n, k = form.blocks(size.k), size.n, size.k
    integers = rng.integers(0, 1 << form.bits, (n, blocks * form.block), np.uint8)
    zeros = rng.integers(0, 1 << form.bits, (n, blocks), np.uint8)
    if not form.zero_points:
        zeros[...] = form.implied_zero
    spread = rng.choice([-1.0, 1.0], (n, blocks)) * rng.uniform(0.5, 2.0, (n, blocks)) / (1 << form.bits) / k**0.5
    scales = (4 * spread).astype(NUMPY[form.scale])
    by_element = [np.repeat(each.astype(np.float64), form.block, axis=1) for each in (zeros, scales)]
    numbers, steps = (each[:, :k].T[None] for each in ((integers - by_element[0]) * by_element[1], by_element[1]))
    packed = pack(integers, form.bits)
    return (
        Packed(packed.ravel(), 0, (1, k, n), (0, 1, packed.shape[1]), numbers=numbers, steps=steps),
        _beside(scales, form.scale),
        _beside(pack(zeros, form.bits), U8),
    )


def pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of integers in bytes, the low half of each first; a row that ends in half a byte is filled with ones."""
    if bits == 8:
        return integers.copy()
    even = np.pad(integers, ((0, 0), (0, integers.shape[1] % 2)), constant_values=15)
    return (even[:, 0::2] | even[:, 1::2] << 4).astype(np.uint8)


def _beside(rows: np.ndarray, dtype: DType) -> Buffer:
    n, length = rows.shape
    return Buffer(np.ascontiguousarray(rows).ravel(), 0, (1, length, n), (0, 1, length))
