"""Which column ranges of a product the nodes of what has grown stand for, where nothing reads more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import onnx_graphsurgeon as gs

from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.epilogue_graph import ACC
from onnxfuse.patterns.liveness import GrownValue, Liveness
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.region_growth import COLUMN_OPS, GrownRegion

Span = tuple[int, int]  # first column of a product, and the first one after it


def regions_of_ranges(live: Liveness, product: Product) -> dict[Span, Region]:
    """The nodes after each range of a product; a range of a range is of the larger."""
    found: dict[Span, Region] = {}
    for position, values in enumerate(live.values):
        span = _span(live.grown, values[0], product) if len(values) == 1 else None
        if span is not None:
            own = [known for known in found if known[0] <= span[0] and span[1] <= known[1]] or [span]
        else:  # arithmetic on the shape of one range is its own
            arithmetic = all(value.columns is None for value in values)
            own = [known for known in found if arithmetic and found[known] & live.grown.needs[position]]
        if span is not None or len(own) == 1:
            found[own[0]] = found.get(own[0], Region()) | Region.of((position,))
    return found


def _span(grown: GrownRegion, value: GrownValue, product: Product) -> Span | None:
    """The columns of a product that a value is one range of; None where it has all of them."""
    columns = value.columns
    if columns is None or isinstance(columns.length, str) or columns.length == product.n:
        return None
    leaves = grown.epilogue.leaves(ACC, (columns.ref,))
    if len(leaves) != 1 or leaves[0].operand != product.out:
        return None
    first = leaves[0].offset or 0
    return first, first + columns.length


def taken_ranges(
    live: Liveness, product: Product, ranges: Mapping[Span, Region], is_taken: Callable[[gs.Node], bool]
) -> dict[Span, GrownValue]:
    """The ranges of a product that another fusion reads, each with the value that it reads.

    A range of one of `ranges`, of which the nodes after each are given, is none by itself.
    """
    found: dict[Span, GrownValue] = {}
    for value in (value for values in live.values for value in values if any(map(is_taken, value.outside))):
        span = _span(live.grown, value, product)
        if span is not None and all(span == known for known, own in ranges.items() if value.maker in own):
            found.setdefault(span, value)
    return found


def is_read_beside(live: Liveness, shared: Region, ranges: Region, bare: Collection[GrownValue]) -> bool:
    """Whether anything but the ranges reads what they share, and is none of the ranges as the product makes them."""
    values = (value for position in shared for value in live.values[position] if value not in bare)
    return any(value.escapes or value.outside or not value.readers <= shared | ranges for value in values)


def split_span(grown: GrownRegion, node: gs.Node) -> Iterator[tuple[str, int, int]]:
    """The columns of one product that a node takes apart: its output, the first column and their number."""
    value = grown.values.get(node.inputs[0].name) if qualified_op(node) in COLUMN_OPS else None
    leaves = [] if value is None else grown.epilogue.leaves(ACC, (value.ref,))
    if value is not None and isinstance(value.length, int) and len(leaves) == 1:
        yield leaves[0].operand, leaves[0].offset or 0, value.length
