"""What nodes take apart: the columns of a value as those of its ranges, each a value of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph import symbolic
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph
from onnxfuse.limits import MAX_PARTS
from onnxfuse.patterns.epilogue_graph import EpilogueGraph
from onnxfuse.patterns.match import Columns, count_of
from onnxfuse.patterns.split_bounds import sequence_sizes, slice_bounds, split_sizes
from onnxfuse.patterns.views import (
    COLUMNS,
    Dim,
    Piece,
    View,
    columns_dim,
    extent,
    is_column,
    joined,
    with_columns,
)

LARGEST_INDEX = 2**31 - 1  # from here on a Slice's end means the end of the axis, whatever its size


class InTurn(NotFusable):
    """A part whose columns take turns with those of others; it is a range where columns are numbered part by part.

    Attributes:
        parts: how many there are.
        run: columns that a turn has.
    """

    def __init__(self, detail: str, parts: int, run: int = 1) -> None:
        super().__init__("strided_slice", "", detail)
        self.parts = parts
        self.run = run


class NoColumns(NotFusable):
    """A Slice of none, as of what passes by where all columns of a head turn."""

    def __init__(self) -> None:
        super().__init__("empty_slice", "", "slices no column")


@dataclass(frozen=True)
class Whole:
    """The columns of a value along one of its dimensions.

    Attributes:
        epilogue: that the value is an expression of.
        value: whose columns they are.
        index: the dimension.
        step: columns that a step along it passes.
        turns: where a step along it is to the next part, of parts whose columns take turns: their number, else 1.
        of_each: columns along the dimension, where it is one of several in a row of all, as a head is; else 0.
    """

    epilogue: EpilogueGraph
    value: Columns
    index: int
    step: int
    turns: int = 1
    of_each: int = 0

    @property
    def length(self) -> int:
        """Steps along the dimension.

        Raises:
            NotFusable: only the run knows them.
        """
        if isinstance(self.value.length, str):
            raise NotFusable("bounds_not_constant", "", "takes columns apart whose number only the run knows")
        if self.of_each:
            return self.of_each
        return self.turns if self.turns > 1 else self.value.length // self.step

    def range(self, start: int, stop: int) -> Columns:
        """Some of them.

        Raises:
            NotFusable: they do not lie side by side.
        """
        if self.turns > 1:
            detail = "takes columns that do not lie side by side"
            raise InTurn(detail, self.turns) if stop - start == 1 else NotFusable("strided_slice", "", detail)
        if self.of_each:
            return self._part(start, stop)
        view = with_columns(self.value.view, self.index, stop - start, self.step)
        ref = self.epilogue.moved(self.value.ref, start * self.step)
        return Columns(ref, (stop - start) * self.step, view)

    def _part(self, start: int, stop: int) -> Columns:
        """One of few equal parts of the dimension, whose columns take turns with those of the others.

        Halves of heads turn together (Su et al., 2021); a query, a key and a value of each head lie so in GPT-NeoX.

        Raises:
            NotFusable: it is none, or an InTurn where columns are not numbered so.
        """
        detail = "takes columns that do not lie side by side"
        run, whole = stop - start, self.value.length
        parts = count_of(self.of_each, run) if run else 0
        if not 1 < parts <= MAX_PARTS or start % run or isinstance(whole, str):
            raise NotFusable("strided_slice", "", detail)
        width = whole // parts
        if self.value.view[self.index] != (Piece(COLUMNS, parts, width), Piece(COLUMNS, run)):
            raise InTurn(detail, parts, run)
        view = with_columns(self.value.view, self.index, run, 1)
        return Columns(self.epilogue.moved(self.value.ref, start // run * width), width, view)

    def ranges(self, sizes: list[int]) -> list[Columns]:
        """All of them, in ranges of some sizes.

        Raises:
            NotFusable: the sizes are those of more or fewer columns.
        """
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        if starts[-1] != self.length:
            raise NotFusable("invalid_model", "", f"splits {self.length} columns into {starts[-1]}")
        return [self.range(start, stop) for start, stop in pairwise(starts)]


def whole(epilogue: EpilogueGraph, value: Columns, axis: int, verb: str) -> Whole:
    """The columns that a node takes apart; a step along its axis is one, or all those of an outer axis of them.

    Raises:
        NotFusable: the axis does not count the value's columns, or they do not lie side by side.
    """
    axis %= len(value.view)
    if value.rest:
        raise NotFusable("strided_slice", "", f"{verb} columns that were put together")
    if any(is_column(piece) and piece.axis != COLUMNS for dim in value.view for piece in dim):
        raise NotFusable("not_the_last_axis", "", f"{verb} columns of several axes, as an image's are")
    if axis == columns_dim(value.view):
        return Whole(epilogue, value, axis, 1)
    dim = value.view[axis]
    if not dim or not all(map(is_column, dim)):
        raise NotFusable("not_the_last_axis", "", f"{verb} along an axis that is not the product's columns")
    if len(dim) == 1 and symbolic.multiply((dim[0].size, dim[0].step)) == value.length:
        return Whole(epilogue, value, axis, dim[0].step)
    if len(dim) == 1 and _counts_turns(value, dim[0]):
        return Whole(epilogue, value, axis, 1, int(dim[0].size))
    if len(dim) == 1 and _counts_parts(value, dim[0]):
        raise InTurn(f"{verb} equal parts of each head", int(dim[0].size), dim[0].step)
    if not _is_head(value, dim):
        raise NotFusable("strided_slice", "", f"{verb} along an axis whose columns do not lie side by side")
    return Whole(epilogue, value, axis, 1, of_each=int(extent(dim)))


def _counts_parts(value: Columns, piece: Piece) -> bool:
    """Whether a dimension counts few parts of each of several ranges, `[heads, 2, half]`; no product of one head."""
    if isinstance(value.length, str) or isinstance(piece.size, str) or not 1 < piece.size <= MAX_PARTS:
        return False
    return piece.step > 1 and value.length != piece.size * piece.step


def _is_head(value: Columns, dim: Dim) -> bool:
    """Whether a dimension has some of the columns, as they lie; or those of few parts that take turns."""
    if isinstance(value.length, str) or dim[-1].step != 1 or int(extent(dim)) >= value.length:
        return False
    if len(dim) == 1:
        return True
    parts = count_of(value.length, dim[0].step)
    return len(dim) == 2 and dim[0].size == parts and 1 < parts <= MAX_PARTS


def concatenated(values: Sequence[Columns], axis: int) -> Columns:
    """Equal ranges of one product's columns as one value with all of its columns.

    Raises:
        NotFusable: they are no such ranges, or lie otherwise than what takes them apart would have them.
    """
    first, *others = values
    axis %= len(first.view)
    dim, width = first.view[axis], first.length
    alike = all((each.length, each.view, each.rest) == (width, first.view, ()) for each in values)
    if isinstance(width, str) or width == 1 or not alike or not others or not all(map(is_column, dim)):
        raise NotFusable("unknown_op", "", "puts values together that are no equal ranges of a product's columns")
    together = joined((Piece(COLUMNS, len(values), width), *dim))
    view = (*first.view[:axis], together, *first.view[axis + 1 :])
    return Columns(first.ref, width * len(values), view, tuple(each.ref for each in others))


def _counts_turns(value: Columns, piece: Piece) -> bool:
    """Whether a dimension `p` of `[..., n, p]` counts few parts, and another one the columns of each."""
    if isinstance(value.length, str) or isinstance(piece.size, str) or not 1 < piece.size <= MAX_PARTS:
        return False
    others = [each for dim in value.view for each in dim if is_column(each) and each is not piece]
    return piece.step == 1 and others == [Piece(COLUMNS, value.length // piece.size, piece.size)]


def split(graph: Graph, epilogue: EpilogueGraph, node: gs.Node, value: Columns) -> list[Columns]:
    """The outputs of a Split."""
    found = whole(epilogue, value, node.attrs.get("axis", 0), "splits")
    return found.ranges(split_sizes(graph, node, found.length))


def split_to_sequence(graph: Graph, epilogue: EpilogueGraph, node: gs.Node, value: Columns) -> list[Columns]:
    """The elements of what a SplitToSequence makes."""
    found = whole(epilogue, value, node.attrs.get("axis", 0), "splits")
    return found.ranges(sequence_sizes(graph, node, found.length))


def _slice(graph: Graph, epilogue: EpilogueGraph, node: gs.Node, value: Columns) -> list[Columns]:
    bounds = zip(*slice_bounds(graph, node), strict=True)
    sliced = [entry for entry in bounds if not _takes_all(value.view, *entry)]
    if not sliced:
        return [value]
    if len(sliced) != 1:
        raise NotFusable("not_the_last_axis", "", "slices along several axes")
    ((start, end, axis, step),) = sliced
    size = extent(value.view[axis % len(value.view)])
    if isinstance(size, int) and not range(size)[start:end:step]:
        raise NoColumns
    if step != 1:
        return [_every(epilogue, value, axis % len(value.view), slice(start, end, step))]
    found = whole(epilogue, value, axis, "slices")
    start, stop, _ = slice(start, end).indices(found.length)
    return [found.range(start, stop)]


def _every(epilogue: EpilogueGraph, value: Columns, axis: int, taken: slice) -> Columns:
    """Every second column, or every third, of all or of each head: one of as many parts."""
    detail, parts, length, dim = f"slices with step {taken.step}", taken.step, value.length, value.view[axis]
    size = extent(dim)
    if isinstance(length, str) or isinstance(size, str) or not 1 < parts <= MAX_PARTS or size % parts or size == parts:
        raise NotFusable("strided_slice", "", detail)
    columns, width, own = range(size)[taken], length // parts, size // parts
    if len(columns) == own and dim == (Piece(COLUMNS, size),) and not value.rest:
        raise InTurn(detail, parts)
    if len(columns) != own or dim != (Piece(COLUMNS, own), Piece(COLUMNS, parts, width)) or value.rest:
        raise NotFusable("strided_slice", "", detail)
    return Columns(epilogue.moved(value.ref, columns[0] * width), width, with_columns(value.view, axis, own, 1))


def _takes_all(view: View, start: int, end: int, axis: int, step: int) -> bool:
    """Whether a Slice changes nothing along an axis, as exporters write `x[:, :, :n]`."""
    size = extent(view[axis % len(view)])
    if isinstance(size, int):
        return slice(start, end, step).indices(size) == (0, size, 1)
    return (start, step) == (0, 1) and end >= LARGEST_INDEX


def _gather(graph: Graph, epilogue: EpilogueGraph, node: gs.Node, value: Columns) -> list[Columns]:
    """Steps along an axis of columns that follow each other; one, as indexing takes q, k and v out of one tensor.

    All that an axis of size 1 has, as a recurrence takes each of its tokens where there is but one, moves nothing.
    """
    axis = node.attrs.get("axis", 0) % len(value.view)
    position = graph.known_value(node.inputs[1])
    if extent(value.view[axis]) == 1 and position is not None and position.ndim < 2 and position.size == 1:
        kept = value.view[axis : axis + position.ndim]
        return [replace(value, view=(*value.view[:axis], *kept, *value.view[axis + 1 :]))]
    found = whole(epilogue, value, axis, "gathers")
    if position is None or not is_complete(position):
        raise NotFusable("bounds_not_constant", "", "which columns it gathers is not known before the run")
    steps = [int(step) % found.length for step in position.ravel()]
    if position.ndim > 1 or not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        raise NotFusable("strided_slice", "", "gathers columns that do not follow each other")
    taken = found.range(steps[0], steps[0] + len(steps))
    if position.ndim == 0:
        taken = replace(taken, view=(*taken.view[: found.index], *taken.view[found.index + 1 :]))
    return [taken]


TAKES_APART: dict[str, Callable[[Graph, EpilogueGraph, gs.Node, Columns], list[Columns]]] = {
    "Split": split,
    "Slice": _slice,
    "Gather": _gather,
}
"""Op -> its outputs, given its first input; NotFusable where they are no ranges of its columns."""
