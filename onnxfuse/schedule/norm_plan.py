"""The plan of the kernel that normalises rows, and how long it and ONNX Runtime's own take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from onnxfuse.analysis.axis_mapping import AxisMapping, static_size, stepped
from onnxfuse.analysis.vector_width import analyse_epilogue
from onnxfuse.device import DeviceSpec
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import from_memory
from onnxfuse.schedule.in_turns import with_turns
from onnxfuse.schedule.kernel_family import SAMPLED
from onnxfuse.schedule.norm import NORM
from onnxfuse.schedule.norm_tile import MOST_ELEMENTS, WARP, NormSpec, NormTile, across_tile, norm_tile
from onnxfuse.schedule.pointwise_plan import accesses, narrow
from onnxfuse.schedule.pointwise_tile import span_of
from onnxfuse.schedule.variant import NormPlan, NormVariant

# Of a multiprocessor, where rows of 16 bits take turns: 64 registers each, none spilled. The compiler takes 80 by
# itself, and 8,192 rows of 24 heads of 64 pairs 83.8 us instead of 68.2; of 32 bits 99.0, and 104.2 with such a bound.
THREADS_AT_ONCE = 1024
# Spans of a thread, and elements of a multiprocessor up to which rows have such tiles: where they are few what takes
# time is that of one row, where they are many memory.
TIERS = ((1, 1 << 13), (2, 1 << 15), (4, None))


def make_norm_plan(fusion: Normalisation, mapping: AxisMapping, device: DeviceSpec) -> NormPlan:
    """Choose the kernels of a normalisation for one architecture: one if rows are known, and one for any address."""
    widths = analyse_epilogue(fusion, mapping)
    loads, outs = accesses(fusion, mapping, widths)
    columns, rows = static_size(fusion, mapping.n) or 1, static_size(fusion, mapping.m)
    values = tuple(out.value for out in fusion.outs)
    spec = NormSpec(
        loads, outs, fusion.steps, values,
        centred=fusion.centred, epsilon=fusion.epsilon, least=fusion.least, added=fusion.added,
        batched=bool(mapping.batch), parts=fusion.parts,
    )  # fmt: skip
    if _lies_across(fusion, mapping):
        ways = dict.fromkeys((spec, narrow(spec)))
        tiles = (across_tile(span_of(way.loads, way.outs), columns) for way in ways)
        return NormPlan(device, tuple(_variant(*each, 0, MAX_M) for each in zip(ways, tiles, strict=True)), widths)
    span = span_of(loads, outs)
    tiers: Iterable[tuple[int, int]] = _tiers(columns * fusion.parts * _batches(fusion, mapping), device)
    if loads[0].turn and norm_tile(span, columns, 1).row_threads <= WARP:
        # With two spans a thread takes 128 registers: 8,192 rows of 24 heads of 64 pairs 98.8 us instead of 82.8.
        tiers = [(1, MAX_M)]
    variants = [
        _variant(spec, _crowded(spec, tile), first, last) for tile, first, last in _ranges(span, columns, rows, tiers)
    ]
    if any(way.width > 1 for way in (*loads, *outs)):
        variants.append(_variant(narrow(spec), norm_tile(1, columns, MOST_ELEMENTS), 0, MAX_M))
    return NormPlan(device, tuple(variants), with_turns(fusion, mapping, widths))


def _lies_across(fusion: Normalisation, mapping: AxisMapping) -> bool:
    """Whether neighbours in memory are of different rows."""
    axes = stepped(fusion, fusion.operands[0].axes)
    return bool(axes) and axes[-1] not in mapping.n


def _crowded(spec: NormSpec, tile: NormTile) -> NormTile:
    """The tile with as many blocks at once as hide the latency of memory, where registers are enough for them."""
    is_crowded = spec.loads[0].turn and spec.loads[0].dtype.bytes == 2 and tile.spans == 1
    return replace(tile, residents=THREADS_AT_ONCE // tile.threads) if is_crowded else tile


def _ranges(
    span: int, columns: int, rows: int | None, tiers: Iterable[tuple[int, int]]
) -> list[tuple[NormTile, int, int]]:
    """The tiles, each with the rows that have it; one if their number is known."""
    tiles = {norm_tile(span, columns, spans): last for spans, last in tiers}
    firsts = (0, *(last + 1 for last in tiles.values()))
    ranges = [(tile, first, last) for first, (tile, last) in zip(firsts, tiles.items(), strict=False)]
    if rows is None:
        return ranges
    return [(tile, 0, MAX_M) for tile, first, last in ranges if first <= rows <= last]


def _tiers(elements: int, device: DeviceSpec) -> Iterator[tuple[int, int]]:
    """Spans of a thread, and the last number of rows that has them, of so many elements in all batches."""
    for spans, most in TIERS:
        yield spans, MAX_M if most is None else most * device.multiprocessors // elements


def _batches(fusion: Normalisation, mapping: AxisMapping) -> int:
    """How many there are; 1 where only the run knows."""
    return static_size(fusion, mapping.batch) or 1


def _variant(spec: NormSpec, tile: NormTile, min_m: int, max_m: int) -> NormVariant:
    return NormVariant(NORM, spec, tile, min_m, max_m)


def rows_of(fusion: Normalisation, mapping: AxisMapping) -> Sequence[int]:
    """How many there are, or may be."""
    rows = static_size(fusion, mapping.m)
    return SAMPLED if rows is None else (rows,)


def own_time(fusion: Normalisation, mapping: AxisMapping, rows: int, device: DeviceSpec) -> float:
    """Microseconds of the kernel: every element once from memory and once into it."""
    tiles = [each.dtype.bytes for each in fusion.operands if mapping.kind(each) == "tile"]
    moved = sum(tiles) + sum(each.dtype.bytes for each in fusion.outputs)
    moving = from_memory(_elements(fusion, mapping, rows) * moved, device)
    return calibration(device).norm_launch + float(moving)


def stock_time(
    fusion: Normalisation, mapping: AxisMapping, rows: int, device: DeviceSpec, passes: int = 0
) -> float | None:
    """The same of ONNX Runtime's kernel, which computes; None where nothing was measured of its kernels.

    Args:
        fusion: what is computed.
        mapping: its loops.
        rows: how many there are.
        device: the chip.
        passes: nodes behind the normalisation, each of which reads and writes every element.
    """
    known, elements = calibration(device), _elements(fusion, mapping, rows)
    alone = known.normalising_alone["launch"] + known.normalising_alone["element"] * elements
    moving = from_memory(2 * fusion.outs[0].tensor.dtype.bytes * elements, device)
    return alone + passes * (known.launch + float(moving)) if known.library_products else None


def _elements(fusion: Normalisation, mapping: AxisMapping, rows: int) -> int:
    return rows * _batches(fusion, mapping) * fusion.parts * (static_size(fusion, mapping.n) or 1)
