"""The widest legal access of every tensor, with the reason that limits it.

Facts of a row-major tensor over named axes, for accesses along one loop:

    contiguity   elements in a row that differ by that loop alone:   f16[m, (p n)] along n, n=137       ->  137
                 a loop that is walked in two levels counts a run:   f16[b, n1, m, n2] along n, n2=64   ->  64
    alignment    largest power of two that divides the address of every row and part, in elements:  137  ->  1
    constancy    whether the tensor lacks the loop: one value serves all of it

The width is the largest power of two that divides the contiguity, up to 16 bytes. Every stride and the offset of every
part are multiples of the contiguity, because nothing lies between the rows of an ONNX tensor: what fits a run is
aligned in all of them. lhs and rhs are read along their contiguous axis, a tile or output along n or, where m is its
contiguous axis, along m.

Behind the rows of a weight that is stored with zeros there, accesses may go on: its pitch alone counts.

Parts whose columns take turns, `f16[m, (n p)]`, have no neighbours along n: the kernels without a product move some
columns of all parts in one access.

Where the contiguous axis is a size that only the run knows, the width is `guarded`: the launch rule looks at the size,
and where it does not fit a kernel that takes this tensor for one of width 1 takes over. Pointers are guarded always:
where one does not fit, the plan's last kernel decides for each tensor by itself (compare nvFuser's vectorization of
epilogue inputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from onnxfuse.analysis.axis_mapping import Axes, AxisMapping, reads_rows, stepped
from onnxfuse.ir.fusion import PART_AXIS, Fusion, Pointwise, Tensor
from onnxfuse.limits import WIDEST_BYTES


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
class EpilogueWidths:
    """Widths of the operands and the outputs, in the order of the fields."""

    operands: tuple[Width, ...]
    outs: tuple[Width, ...]

    @property
    def factors(self) -> tuple[Width, ...]:
        """Of what is multiplied: nothing."""
        return ()

    @property
    def beside(self) -> tuple[Width, ...]:
        """Of what a factor has beside it: nothing."""
        return ()


@dataclass(frozen=True)
class Widths(EpilogueWidths):
    """The same of a whole fusion; one width for every part of rhs, and of what a quantized one has beside it."""

    lhs: Width
    rhs: Width
    scales: Width | None = None
    zero_points: Width | None = None

    @property
    def factors(self) -> tuple[Width, ...]:
        """Of lhs and of rhs."""
        return self.lhs, self.rhs

    @property
    def beside(self) -> tuple[Width, ...]:
        """Of the scales and the zero points of a quantized rhs."""
        return tuple(width for width in (self.scales, self.zero_points) if width is not None)


def analyse(fusion: Fusion, mapping: AxisMapping) -> Widths:
    """Widths of all tensors along their contiguous axis."""
    rhs = [widest(fusion, tensor, _contiguous_loop(fusion, tensor, mapping.k, mapping.n)) for tensor in fusion.rhs]
    stored = _of_stored(fusion)
    return Widths(
        lhs=widest(fusion, fusion.lhs, mapping.m if lhs_order(fusion, mapping) == "km" else mapping.k),
        rhs=stored[0] if stored else _narrowest(rhs),
        scales=stored[1] if stored else None,
        zero_points=stored[2] if len(stored) > 2 else None,
        **vars(analyse_epilogue(fusion, mapping)),
    )


def _of_stored(fusion: Fusion) -> list[Width]:
    """Widths along k of the integers, the scales and the zero points of a quantized rhs; of another one none."""
    loops: tuple[Axes, ...] = (("kb", "kq"), ("kb",), ("kz",))
    groups = zip(loops, fusion.stored_rhs if fusion.stored else (), strict=False)
    return [_narrowest([widest(fusion, each, loop) for each in tensors]) for loop, tensors in groups]


def _narrowest(widths: list[Width]) -> Width:
    return min(widths, key=lambda width: width.elements)


def analyse_epilogue(fusion: Pointwise, mapping: AxisMapping) -> EpilogueWidths:
    """Widths of the operands and the outputs along their contiguous axis."""
    operands = tuple(_along(fusion, operand, mapping) for operand in fusion.operands)
    return EpilogueWidths(operands, tuple(_along(fusion, out.tensor, mapping) for out in fusion.outs))


def _along(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping) -> Width:
    if not any(axis in tensor.axes for axis in mapping.n):  # a scalar or column: one element serves a row
        return widest(fusion, tensor, mapping.n)
    return widest(fusion, tensor, _contiguous_loop(fusion, tensor, mapping.m, mapping.n))


def is_transposed(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping) -> bool:
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
    own, inner = stepped(fusion, tensor.axes), stepped(fusion, loop)
    if not any(axis in tensor.axes for axis in loop) or (inner and not set(inner) & set(own)):
        return Width(1, f"does not vary along {' '.join(loop) or 'n'}")
    if not inner:
        return Width(1, f"one element along {' '.join(loop)}")
    if inner[-1] not in own:
        return Width(1, f"innermost axis {inner[-1]} is broadcast")
    if own[-1] != inner[-1]:
        return Width(1, f"{own[-1]}, not {inner[-1]}, is its contiguous axis")
    run = _run(own, inner)
    sizes = [fusion.size(axis) for axis in run]
    known = math.prod(size for size in sizes if size is not None)
    contiguity = padded_row(fusion, tensor) or math.gcd(known, *_window(fusion, tensor))
    if contiguity % limit == 0:
        return Width(limit, f"{WIDEST_BYTES} bytes")
    if None in sizes:
        return Width(limit, f"{WIDEST_BYTES} bytes where {' '.join(run)} is a multiple of {limit}", guarded=True)
    return Width(_power_of_two(contiguity), _shortness(fusion, tensor, run, contiguity))


def columns_in_turn(fusion: Pointwise, tensor: Tensor, loop: Axes) -> int:
    """Columns of each part that one access moves of parts that take turns along a loop; 0 where they do not."""
    own, inner = stepped(fusion, tensor.axes), stepped(fusion, loop)
    parts = fusion.size(PART_AXIS) if own[-1:] == (PART_AXIS,) else None
    if parts is None or tensor.wide is not None or not inner or own[-2:-1] != inner[-1:]:
        return 0
    run = fusion.size(inner[-1])
    known = run is not None and _power_of_two(parts) == parts
    return math.gcd(run or 1, WIDEST_BYTES // tensor.dtype.bytes // parts) if known else 0


def _window(fusion: Pointwise, tensor: Tensor) -> list[int]:
    """What every access to a window of the contiguous dimension is apart from the next: rows, and first columns."""
    if tensor.wide is None or tensor.wide[0] != len(tensor.dims) - 1:
        return []
    return [tensor.wide[1], *fusion.starts(tensor)]


def padded_row(fusion: Pointwise, tensor: Tensor) -> int:
    """Elements of a row of a weight [n, k] with the zeros behind it, which may be read as any k; 0 of other tensors."""
    if tensor.wide is None or tensor.wide[0] != len(tensor.dims) - 1:
        return 0
    stored = {axis for out in fusion.outs for axis in out.tensor.axes}
    return 0 if stored & {*tensor.dims[-1]} else tensor.wide[1]


def _contiguous_loop(fusion: Pointwise, tensor: Tensor, rows: Axes, columns: Axes) -> Axes:
    """The one of two loops whose innermost axis is the tensor's contiguous one; `columns` where neither's is."""
    axes, inner = stepped(fusion, tensor.axes), stepped(fusion, rows)
    return rows if axes and inner and axes[-1] == inner[-1] else columns


def _run(own: Axes, loop: Axes) -> Axes:
    """The innermost axes of a loop that are the tensor's innermost as well: one stride of 1 walks them."""
    pairs = zip(reversed(own), reversed(loop), strict=False)
    return tuple(axis for axis, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]


def _shortness(fusion: Pointwise, tensor: Tensor, run: Axes, contiguity: int) -> str:
    """What ends or misaligns wider accesses: where the next part, row, or nothing begins behind a run."""
    outer = stepped(fusion, tensor.axes[: tensor.axes.index(run[0])])
    if _window(fusion, tensor):
        return f"rows and first columns of its window are multiples of {contiguity} only"
    if not outer:
        return f"{contiguity} elements along {' '.join(run)} are {_oddness(contiguity)}"
    if outer[-1] == PART_AXIS:
        part = "half" if fusion.size(PART_AXIS) == 2 else f"of {fusion.size(PART_AXIS)} parts"
        return f"second {part} starts at byte {contiguity * tensor.dtype.bytes}"
    return f"row pitch {contiguity} is {_oddness(contiguity)}"


def _power_of_two(number: int) -> int:
    return number & -number


def _oddness(number: int) -> str:
    return "odd" if number % 2 else f"a multiple of {_power_of_two(number)} only"
