"""The widest legal access of every tensor, with the reason that limits it.

Facts of a row-major tensor over named axes, for accesses along one axis:

    contiguity   elements in a row that differ by that axis alone:   f16[m, (p n)] along n, n=137  ->  137
    alignment    largest power of two that divides the address of every row and part, in elements:  137  ->  1
    constancy    whether the tensor lacks the axis: one value serves all of it

The width is the largest power of two that divides contiguity and every stride, up to 16 bytes. A size that only the run
knows divides by 1, but a stride that is a multiple of it still keeps its known factors. Pointers are taken as 16-byte
aligned here; the kernel's launch rule checks that at run time (compare nvFuser's vectorization of epilogue inputs).
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.axes import AxisMapping
from onnxfuse.fusion import Fusion, Pointwise, Tensor

WIDEST_BYTES = 16  # ld.global.v4, cp.async 16


@dataclass(frozen=True)
class Width:
    """The widest legal access of one tensor, in elements, and what limits it in words."""

    elements: int
    reason: str


@dataclass(frozen=True)
class Widths:
    """Widths of all tensors of a fusion, in the order of its fields."""

    lhs: Width
    rhs: Width
    operands: tuple[Width, ...]
    outs: tuple[Width, ...]


def analyse(fusion: Fusion, mapping: AxisMapping) -> Widths:
    """Widths of lhs along k, rhs along its contiguous axis, operands and outputs along n."""
    rhs = [widest(fusion, tensor, tensor.axes[-1]) for tensor in fusion.rhs]
    return Widths(
        lhs=widest(fusion, fusion.lhs, mapping.k[-1]),
        rhs=min(rhs, key=lambda width: width.elements),
        operands=operand_widths(fusion, mapping),
        outs=out_widths(fusion, mapping),
    )


def operand_widths(fusion: Pointwise, mapping: AxisMapping) -> tuple[Width, ...]:
    """Widths of the operands along n."""
    return tuple(widest(fusion, operand, mapping.n[-1]) for operand in fusion.operands)


def out_widths(fusion: Pointwise, mapping: AxisMapping) -> tuple[Width, ...]:
    """Widths of the outputs along n."""
    return tuple(widest(fusion, out.tensor, mapping.n[-1]) for out in fusion.outs)


def widest(fusion: Pointwise, tensor: Tensor, along: str) -> Width:
    """The widest legal access of a tensor along one axis."""
    limit = WIDEST_BYTES // tensor.dtype.bytes
    if along not in tensor.axes:
        return Width(1, f"does not vary along {along}")
    if tensor.axes[-1] != along:
        return Width(1, f"{along} is not its contiguous axis")
    contiguity = fusion.size(along) or 1
    width, reason = limit, f"{WIDEST_BYTES} bytes"
    if _power_of_two(contiguity) < width:
        width, reason = _power_of_two(contiguity), f"{_oddness(contiguity)} elements along {along}"
    for axis, stride in _strides(fusion, tensor)[:-1]:
        if fusion.size(axis) != 1 and _power_of_two(stride) < width:
            width, reason = _power_of_two(stride), f"{_pitch_name(axis)} {stride} is {_oddness_of(stride)}"
    return Width(width, reason)


def _strides(fusion: Pointwise, tensor: Tensor) -> list[tuple[str, int]]:
    """Each axis with the known factor of its stride, outermost first."""
    strides, stride = [], 1
    for axis in reversed(tensor.axes):
        strides.append((axis, stride))
        stride *= fusion.size(axis) or 1
    return strides[::-1]


def _power_of_two(number: int) -> int:
    return number & -number


def _oddness_of(number: int) -> str:
    return "odd" if number % 2 else f"a multiple of {_power_of_two(number)} only"


def _oddness(number: int) -> str:
    return f"{number}, {_oddness_of(number)},"


def _pitch_name(axis: str) -> str:
    return "part pitch" if axis == "p" else "row pitch"
