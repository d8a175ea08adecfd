"""Which column ranges of a product the nodes of what has grown stand for, where nothing reads more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.epilogue_graph import ACC
from onnxfuse.patterns.liveness import GrownValue, Liveness
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.region_growth import COLUMN_OPS, GrownRegion

Span = tuple[int, int]  # first column of a product, and the first one after it


def regions_of_ranges(live: Liveness, product: Product, meeting: bool = False) -> dict[Span, Region]:
    """The nodes after each range of a product; a range of a range is of the larger.

    Args:
        live: what has grown.
        product: the ranges are of its columns.
        meeting: whether ranges that meet, as a value and its gate beside q, k and v, are one from the first column of
            them to the last; else what reads several of them is none's.
    """
    found: dict[Span, Region] = {}
    for position, values in enumerate(live.values):
        span = _span_of_all(live.grown, values, product, meeting)
        if span is not None:
            own = [known for known in found if known[0] <= span[0] and span[1] <= known[1]] or [span]
        else:  # arithmetic on the shape of one range is its own
            arithmetic = all(value.columns is None for value in values)
            own = [known for known in found if arithmetic and found[known] & live.grown.needs[position]]
        if span is not None or len(own) == 1:
            inner = [found.pop(known) for known in _within(own[0], [*found])]
            found[own[0]] = Region.union([*inner, Region.of((position,))])
    return found


def _within(span: Span, others: Collection[Span]) -> list[Span]:
    """Those of some ranges that another one has all columns of, itself too."""
    return [other for other in others if span[0] <= other[0] and other[1] <= span[1]]


def _span_of_all(grown: GrownRegion, values: Sequence[GrownValue], product: Product, meeting: bool) -> Span | None:
    """The columns of a product that a node's values are made of, each of one range or of several that meet."""
    if len(values) > 1 and not meeting:
        return None
    spans = [_span(grown, value, product, meeting) for value in values]
    known = [span for span in spans if span is not None]
    if not known or len(known) < len(spans):
        return None
    whole = min(first for first, _ in known), max(end for _, end in known)
    return None if whole == (0, product.n) else whole


def _span(grown: GrownRegion, value: GrownValue, product: Product, meeting: bool = False) -> Span | None:
    """The columns of a product that a value is one range of; None where it has all of them."""
    columns = value.columns
    if columns is None or isinstance(columns.length, str) or columns.length == product.n:
        return None
    leaves = grown.epilogue.leaves(ACC, (columns.ref,))
    firsts = [leaf.offset or 0 for leaf in leaves if leaf.operand == product.out]
    if not firsts or len(firsts) != len(leaves) or (len(firsts) > 1 and not meeting):
        return None
    return min(firsts), max(firsts) + columns.length


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


def value_of_range(live: Liveness, product: Product, span: Span, shared: Region) -> GrownValue | None:
    """What one node makes of a range of a product's columns, in front of the nodes that are the range's alone."""
    values = (value for position in shared for value in live.values[position])
    return next((value for value in values if _span(live.grown, value, product) == span), None)


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
