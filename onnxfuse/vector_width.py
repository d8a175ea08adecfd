"""The widest legal access of every tensor, with the reason that limits it.

Facts of a row-major tensor over named axes, for accesses along one loop:

    contiguity   elements in a row that differ by that loop alone:   f16[m, (p n)] along n, n=137       ->  137
                 a loop that is walked in two levels counts a run:   f16[b, n1, m, n2] along n, n2=64   ->  64
    alignment    largest power of two that divides the address of every row and part, in elements:  137  ->  1
    constancy    whether the tensor lacks the loop: one value serves all of it

The width is the largest power of two that divides contiguity and every stride, up to 16 bytes. lhs and rhs are read
along their contiguous axis, a tile or output along n or, where m is its contiguous axis, along m.

A size that only the run knows divides by 1, but a stride that is a multiple of it still keeps its known factors. Where
the contiguous axis itself is such a size, the width is `guarded`: the launch rule looks at the size, and where it does
not fit a kernel that reaches this tensor element by element takes over. Pointers are guarded always (compare nvFuser's
vectorization of epilogue inputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxfuse.axes import Axes, AxisMapping, reads_rows, stepped
from onnxfuse.fusion import Fusion, Pointwise, Tensor

WIDEST_BYTES = 16  # ld.global.v4, cp.async 16


@dataclass(frozen=True)
class Width:
    """The widest legal access of one tensor, in elements, and what limits it in words.

    Attributes:
        guarded: legal only where a size that the run knows is a multiple of it.
    """

    elements: int
    reason: str
    guarded: bool = False


@dataclass(frozen=True)
class Widths:
    """Widths of all tensors of a fusion, in the order of its fields."""

    lhs: Width
    rhs: Width
    operands: tuple[Width, ...]
    outs: tuple[Width, ...]


def analyse(fusion: Fusion, mapping: AxisMapping) -> Widths:
    """Widths of all tensors along their contiguous axis."""
    rhs = [widest(fusion, tensor, _contiguous_loop(fusion, tensor, mapping.k, mapping.n)) for tensor in fusion.rhs]
    return Widths(
        lhs=widest(fusion, fusion.lhs, mapping.m if lhs_order(fusion, mapping) == "km" else mapping.k),
        rhs=min(rhs, key=lambda width: width.elements),
        operands=operand_widths(fusion, mapping),
        outs=out_widths(fusion, mapping),
    )


def operand_widths(fusion: Pointwise, mapping: AxisMapping) -> tuple[Width, ...]:
    """Widths of the operands along their contiguous axis."""
    return tuple(_along(fusion, operand, mapping) for operand in fusion.operands)


def out_widths(fusion: Pointwise, mapping: AxisMapping) -> tuple[Width, ...]:
    """Widths of the outputs along their contiguous axis."""
    return tuple(_along(fusion, out.tensor, mapping) for out in fusion.outs)


def _along(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping) -> Width:
    return widest(fusion, tensor, _contiguous_loop(fusion, tensor, mapping.m, mapping.n))


def is_turned(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping) -> bool:
    """Whether m is the contiguous axis of a tile."""
    columns = any(axis in tensor.axes for axis in mapping.n)
    return columns and _contiguous_loop(fusion, tensor, mapping.m, mapping.n) == mapping.m


def lhs_order(fusion: Fusion, mapping: AxisMapping) -> str:
    """`mk` where lhs is read along k, `km` where along m: k may be of size 1, and m then contiguous as well."""
    return "km" if reads_rows(fusion, mapping) else "mk"


def rhs_order(fusion: Fusion, mapping: AxisMapping) -> str:
    """`kn` where rhs is read along n, `nk` where along k; a k of size 1 is never stepped along, whatever the layout."""
    return "nk" if _contiguous_loop(fusion, fusion.rhs[0], mapping.k, mapping.n) == mapping.k else "kn"


def widest(fusion: Pointwise, tensor: Tensor, loop: Axes) -> Width:
    """The widest legal access of a tensor along one loop."""
    limit = WIDEST_BYTES // tensor.dtype.bytes
    name = " ".join(loop)
    if not any(axis in tensor.axes for axis in loop):
        return Width(1, f"does not vary along {name}")
    run = _run(fusion, tensor, loop)
    if not run:
        return Width(1, f"{name} is not its contiguous axis")
    guarded = any(fusion.size(axis) is None for axis in run)
    contiguity = math.prod(fusion.size(axis) or limit for axis in run)
    width, reason = limit, f"{WIDEST_BYTES} bytes"
    if guarded:
        reason = f"{WIDEST_BYTES} bytes where {' '.join(run)} is a multiple of {limit}"
    if _power_of_two(contiguity) < width:
        width, reason = _power_of_two(contiguity), f"{_oddness(contiguity)} elements along {' '.join(run)}"
    for axis, stride in _strides(fusion, tensor, run, limit):
        if fusion.size(axis) != 1 and _power_of_two(stride) < width:
            width, reason = _power_of_two(stride), f"{_pitch_name(axis)} {stride} is {_oddness_of(stride)}"
    return Width(width, reason, guarded and width > 1)


def _contiguous_loop(fusion: Pointwise, tensor: Tensor, rows: Axes, columns: Axes) -> Axes:
    """The one of two loops whose innermost axis is the tensor's contiguous one; `columns` where neither's is."""
    axes, inner = stepped(fusion, tensor.axes), stepped(fusion, rows)
    return rows if axes and inner and axes[-1] == inner[-1] else columns


def _run(fusion: Pointwise, tensor: Tensor, loop: Axes) -> Axes:
    """The innermost axes of a loop that are the tensor's innermost as well: one stride of 1 walks them."""
    run: Axes = ()
    own, inner = stepped(fusion, tensor.axes), stepped(fusion, loop)
    for axis, expected in zip(reversed(own), reversed(inner), strict=False):
        if axis != expected:
            break
        run = (axis, *run)
    if not inner:  # a loop of size 1
        return loop[-1:] if tensor.axes and tensor.axes[-1] == loop[-1] else ()
    return run


def _strides(fusion: Pointwise, tensor: Tensor, run: Axes, assumed: int) -> list[tuple[str, int]]:
    """The axes outside of a run with the known factors of their strides, outermost first."""
    strides, stride = [], 1
    for axis in reversed(tensor.axes):
        strides.append((axis, stride))
        stride *= fusion.size(axis) or (assumed if axis in run else 1)
    return [(axis, stride) for axis, stride in reversed(strides) if axis not in run]


def _power_of_two(number: int) -> int:
    return number & -number


def _oddness_of(number: int) -> str:
    return "odd" if number % 2 else f"a multiple of {_power_of_two(number)} only"


def _oddness(number: int) -> str:
    return f"{number}, {_oddness_of(number)},"


def _pitch_name(axis: str) -> str:
    return "part pitch" if axis == "p" else "row pitch"
