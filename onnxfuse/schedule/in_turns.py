"""Which loads and outputs of a kernel without a product are parts that take turns, and are moved together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.analysis.vector_width import EpilogueWidths, Width, columns_in_turn
from onnxfuse.ir.fusion import PART_AXIS, Pointwise, Tensor
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.schedule.kernel_spec import Access, Turn


def loads_in_turn(fusion: Pointwise, mapping: AxisMapping, loads: Sequence[Access]) -> list[Access]:
    """The same loads; of an operand whose parts take turns the first one leads, and reads all."""
    beside = fusion.parts if isinstance(fusion, Normalisation) else 0  # what is normalised is read by itself, in order
    in_order = all(load.part == index for index, load in enumerate(fusion.loads[:beside]))
    leaders: dict[tuple[int, bool], int] = {}
    found = []
    for index, (load, way) in enumerate(zip(fusion.loads, loads, strict=True)):
        leader = leaders.setdefault((load.operand, index < beside), index)
        part = load.part if in_order or index >= beside else None
        found.append(_in_turn(fusion, mapping, fusion.operands[load.operand], way, leader, part))
    return found


def outs_in_turn(fusion: Pointwise, mapping: AxisMapping, outs: Sequence[Access]) -> list[Access]:
    """The same outputs; the first part leads where all parts of its tensor stand one after the other."""
    found = list(outs)
    parts = _parts(fusion)
    for first, out in enumerate(fusion.outs):
        turns = fusion.outs[first : first + parts]
        if [(each.tensor, each.part) for each in turns] == [(out.tensor, part) for part in range(parts)]:
            for index, each in enumerate(turns, first):
                found[index] = _in_turn(fusion, mapping, each.tensor, found[index], first, each.part)
    return found


def with_turns(fusion: Pointwise, mapping: AxisMapping, widths: EpilogueWidths) -> EpilogueWidths:
    """Widths that say so where parts take turns."""

    def told(tensor: Tensor, width: Width) -> Width:
        columns = columns_in_turn(fusion, tensor, mapping.n)
        turns = f"{_parts(fusion)} parts take turns: {columns} columns of each in one access"
        return replace(width, reason=turns) if columns else width

    operands = zip(fusion.operands, widths.operands, strict=True)
    outs = zip(fusion.outs, widths.outs, strict=True)
    return replace(
        widths,
        operands=tuple(told(operand, width) for operand, width in operands),
        outs=tuple(told(out.tensor, width) for out, width in outs),
    )


def _parts(fusion: Pointwise) -> int:
    known = any(axis.name == PART_AXIS for axis in fusion.axes)
    return (fusion.size(PART_AXIS) or 1) if known else 1


def _in_turn(
    fusion: Pointwise, mapping: AxisMapping, tensor: Tensor, way: Access, leader: int, part: int | None
) -> Access:
    columns = columns_in_turn(fusion, tensor, mapping.n) if part is not None else 0
    return replace(way, turn=Turn(leader, part, _parts(fusion), columns)) if columns and part is not None else way
