"""A mask that the model stores, or a part of one that a run takes: beyond which keys it is empty, from its numbers.

Exporters that know the number of tokens fold a causal mask into a constant; older models keep one as large as their
longest input and slice it. What holds of every row of a stored mask holds of the rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, repeat

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph.constant_propagation import Array
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.graph.stored_numbers import stored_numbers

MAX_SLICES = 4  # of a mask, one behind the other
Range = tuple[Size, Size]  # the first, and what they stay below


@dataclass(frozen=True)
class StoredMask:
    """Numbers by rows and keys, of which a run takes some.

    Attributes:
        numbers: `[..., rows, keys]`, as the model has them.
        rows: those that a run takes.
        keys: the same of the last dimension.
    """

    numbers: Array
    rows: Range
    keys: Range

    def furthest(self, is_empty: Callable[[Array], Array], before: bool) -> int | None:
        """How far behind a row's own the last key is that some mask has; with `before` the first.

        None where no mask is empty beyond it.
        """
        numbers = self.numbers[..., ::-1, ::-1] if before else self.numbers
        if not is_empty(numbers[..., 0, -1]).all():  # the key that is furthest away; seldom is more to be read
            return None
        rows, keys = numbers.shape[-2:]
        there = np.any(~is_empty(numbers).reshape(-1, rows, keys), axis=0)
        distances = (keys - 1 - there[:, ::-1].argmax(axis=1) - np.arange(rows))[there.any(axis=1)]
        if not distances.size:
            return None
        return keys - rows - int(distances.max()) if before else int(distances.max())


def stored_mask(graph: Graph, tensor: gs.Tensor, slices: int = 0) -> StoredMask | None:
    """The mask that a tensor holds, if the model stores it."""
    numbers = stored_numbers(graph, tensor)
    if numbers is not None:
        is_mask = numbers.ndim > 1 and numbers.size
        return StoredMask(numbers, (0, numbers.shape[-2]), (0, numbers.shape[-1])) if is_mask else None
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if node is None or node.op != "Slice" or slices == MAX_SLICES:
        return None
    whole = stored_mask(graph, node.inputs[0], slices + 1)
    return None if whole is None else _sliced(graph, node, whole)


def _sliced(graph: Graph, node: gs.Node, whole: StoredMask) -> StoredMask | None:
    bounds = [_sizes(graph, tensor) for tensor in node.inputs[1:]]
    if None in bounds or len(bounds) < 2:
        return None
    starts, ends, axes, steps = (*(bound or () for bound in bounds), count(), repeat(1))[:4]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        part = _taken(whole, start, end, axis) if step == 1 and isinstance(axis, int) else None
        if part is None:
            return None
        whole = part
    return whole


def _taken(whole: StoredMask, start: Size, end: Size, axis: int) -> StoredMask | None:
    """A part along one of the last two dimensions, of which no part has been taken yet."""
    rank = whole.numbers.ndim
    size = whole.numbers.shape[axis]
    high = size if isinstance(end, int) and end >= size else end
    if (start, high) == (0, size):
        return whole
    own = {rank - 2: whole.rows, rank - 1: whole.keys}.get(axis % rank)
    bounds = [bound for bound in (start, high) if isinstance(bound, int)]
    if own != (0, size) or None in (start, high) or min(bounds, default=0) < 0:
        return None
    is_rows = axis % rank == rank - 2
    return replace(whole, rows=(start, high)) if is_rows else replace(whole, keys=(start, high))


def _sizes(graph: Graph, tensor: gs.Tensor) -> list[Size] | None:
    value = graph.known_value(tensor)
    if value is None:
        return None
    return [entry if isinstance(entry, int | str) else None for entry in value.ravel().tolist()]
