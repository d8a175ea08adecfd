"""Beyond which key a mask is empty: masks that are causal or a window, read from the nodes that build them.

What is recognised, of a mask whose last two dimensions are the rows and the keys of the scores:

- comparisons (`LessOrEqual`, `Less`, `Greater`, `GreaterOrEqual`) of two aranges, one along the keys and one along the
  rows: `Range` by ones or the numbers themselves, with numbers added, moved by views; and of the distance of two such,
  `Abs(Sub)`, and a number;
- `Trilu` of one number (the upper part), or of anything as a condition (the lower part);
- numbers or conditions that the model stores, whole or as a Slice takes a part (stored_mask.py);
- `And`, `Or`, `Not` of such and other conditions, `Where` of them and a low number, sums of masks, casts, and views
  that leave rows and keys as they are.

Beyond the diagonal, and before the window if there is one, a score has to be LOW or less, at any length. Anything else,
and anything doubtful, is no diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import symbolic
from onnxfuse.graph.constant_propagation import Array, is_complete
from onnxfuse.graph.graph import Graph, Size
from onnxfuse.graph.operators import qualified_op
from onnxfuse.ir.attention import Attention, Diagonal
from onnxfuse.ir.fusion import Value, load_name
from onnxfuse.patterns.stored_mask import StoredMask, stored_mask

LOW = -1e4  # exp(x + LOW) is 0 beside any score that is none
LEAST = -1e3  # what a scale behind the mask may leave of it
FLOATS = "fV"  # kinds of NumPy's types; bfloat16 is none of NumPy's own
MAX_DEPTH = 32  # nodes one behind the other that are looked at
KEEPS_ROWS_AND_KEYS = ("Cast", "Identity", "Expand", "Unsqueeze", "Reshape", "Squeeze")
MOVES = (*KEEPS_ROWS_AND_KEYS, "Flatten")
# Op -> what the last element along the keys is that it holds for, beside equality; and whether the keys come first.
COMPARISONS = {"LessOrEqual": (0, True), "Less": (-1, True), "GreaterOrEqual": (0, False), "Greater": (-1, False)}


@dataclass(frozen=True)
class Edge:
    """Keys after `row + offset`, or after `row + offset + keys - rows`."""

    offset: int
    from_end: bool = False

    def moved(self, by: int) -> Edge:
        """The same some keys further."""
        return Edge(self.offset + by, self.from_end)


@dataclass(frozen=True)
class Arange:
    """`start`, `start + 1`, ... below `limit`, along one of the last two dimensions."""

    along_keys: bool
    start: Size
    limit: Size


def diagonal_of(graph: Graph, attention: Attention) -> Diagonal | None:
    """Behind which keys the scores of an attention are low, whatever it is run with; None where none is known."""
    last = _Scores(graph, attention, _Masks(graph)).low(attention.score)
    if last is None or last.fill * attention.scale > LEAST:
        return None
    first = _Scores(graph, attention, _Masks(graph, before=True)).low(attention.score)
    if first is None or first.from_end != last.from_end:
        return last
    return replace(last, first=first.offset, fill=max(first.fill, last.fill))


@dataclass(frozen=True)
class _Scores:
    graph: Graph
    attention: Attention
    masks: _Masks

    def low(self, value: Value) -> Diagonal | None:
        """Behind which keys a value of the scores' steps is low."""
        tensor = self._mask(value)
        if tensor is not None:
            return self.masks.low(tensor)
        step = next((step for step in self.attention.steps if step.result == value), None)
        if step is not None and step.op == "add":
            return self.low(step.inputs[0]) or self.low(step.inputs[1])
        return self._chosen(*step.inputs) if step is not None and step.op == "where" else None

    def _chosen(self, condition: Value, first: Value, second: Value) -> Diagonal | None:
        mask = self._mask(condition)
        return None if mask is None else self.masks.chosen(mask, _number(first), _number(second))

    def _mask(self, value: Value) -> gs.Tensor | None:
        """The load of a whole mask, by rows and keys."""
        names = [load_name(index) for index in range(len(self.attention.loads))]
        if value not in names:
            return None
        operand = self.attention.operands[self.attention.loads[names.index(value)].operand]
        return self.graph.tensor(operand.name) if operand.dims[-2:] == self.attention.scores[-2:] else None


def _number(value: Value) -> float | None:
    return value if isinstance(value, float) else None


@dataclass(frozen=True)
class _Masks:
    """Reads masks behind a diagonal: keys after `row + offset`; or `before` one: keys less than `row + offset`."""

    graph: Graph
    before: bool = False

    def low(self, tensor: gs.Tensor, depth: int = 0) -> Diagonal | None:
        """Behind which keys a mask that is added is low."""
        stored = stored_mask(self.graph, tensor)
        if stored is not None:
            return self._stored_low(stored)
        node = self._maker(tensor, depth)
        if node is None:
            return None
        op = qualified_op(node)
        if op == "Where":
            fills = (self._fill(node.inputs[1]), self._fill(node.inputs[2]))
            return self.chosen(node.inputs[0], *fills, depth=depth + 1)
        if op == "Add":
            return self.low(node.inputs[0], depth + 1) or self.low(node.inputs[1], depth + 1)
        if op == "Trilu":
            fill, edge = self._fill(node.inputs[0]), self._trilu(node, upper=not self.before)
            return None if edge is None else _diagonal(edge.moved(1 if self.before else -1), fill)
        return self.low(node.inputs[0], depth + 1) if self._keeps(node) else None

    def chosen(
        self, condition: gs.Tensor, first: float | None, second: float | None, depth: int = 0
    ) -> Diagonal | None:
        """The same of a choice, given what either side is where that is a number."""
        for fill, held in ((second, False), (first, True)):
            edge = self.constantly(condition, held, depth) if fill is not None and fill <= LOW else None
            if edge is not None:
                return _diagonal(edge, fill)
        return None

    def constantly(self, tensor: gs.Tensor, held: bool, depth: int = 0) -> Edge | None:
        """Behind which keys a condition has one value."""
        stored = stored_mask(self.graph, tensor)
        if stored is not None:
            return self._edge(stored, lambda values: values == held) if stored.numbers.dtype == bool else None
        node = self._maker(tensor, depth)
        if node is None:
            return None
        op = qualified_op(node)
        if op == "Not":
            return self.constantly(node.inputs[0], not held, depth + 1)
        if op in ("And", "Or"):
            return self._either(node, held, depth) if held == (op == "Or") else None
        if op in COMPARISONS:
            return self._compared(node, held)
        if op == "Trilu":
            return None if held else self._trilu(node, upper=self.before)
        return self.constantly(node.inputs[0], held, depth + 1) if self._keeps(node) else None

    def _stored_low(self, mask: StoredMask) -> Diagonal | None:
        edge = None if mask.numbers.dtype == bool else self._edge(mask, _is_low)
        return None if edge is None else _diagonal(edge, float(mask.numbers[_is_low(mask.numbers)].max()))

    def _edge(self, mask: StoredMask, is_empty: Callable[[Array], Array]) -> Edge | None:
        """Behind which keys a stored mask is empty."""
        furthest = mask.furthest(is_empty, self.before)
        edge = _between(Arange(False, *mask.rows), Arange(True, *mask.keys))
        is_square = mask.numbers.shape[-2] == mask.numbers.shape[-1]
        if furthest is None or edge is None or (edge.from_end and not is_square):
            return None
        return edge.moved(furthest)

    def _either(self, node: gs.Node, held: bool, depth: int) -> Edge | None:
        edges = (self.constantly(each, held, depth + 1) for each in node.inputs)
        return next((edge for edge in edges if edge is not None), None)

    def _compared(self, node: gs.Node, held: bool) -> Edge | None:
        """Of `keys <= rows`: behind which keys it does not hold, and before which it does; and of its like."""
        slack, is_below = COMPARISONS[node.op]
        distance = self._distance(node.inputs[0]), self._integer(node.inputs[1])
        if distance[0] is not None and isinstance(distance[1], int):
            outwards = distance[1] + slack if is_below else distance[1] - 1 - slack
            return distance[0].moved(-outwards if self.before else outwards) if held != is_below else None
        first, second = (self._arange(each) for each in node.inputs[:2])
        if first is None or second is None or first.along_keys == second.along_keys:
            return None
        edge = _between(*((second, first) if first.along_keys else (first, second)))
        bounds_above = is_below == first.along_keys  # keys <= rows, or rows >= keys
        if edge is None or held != (bounds_above == self.before):
            return None
        return edge.moved(_last_of(slack, self.before) if bounds_above else -_last_of(slack, not self.before))

    def _distance(self, tensor: gs.Tensor) -> Edge | None:
        """Of `abs(rows - keys)`, the key that equals a row."""
        node = self._maker(tensor, 0)
        apart = self._maker(node.inputs[0], 0) if node is not None and node.op == "Abs" else None
        if apart is None or apart.op != "Sub":
            return None
        first, second = (self._arange(each) for each in apart.inputs)
        if first is None or second is None or first.along_keys == second.along_keys:
            return None
        return _between(*((second, first) if first.along_keys else (first, second)))

    def _arange(self, tensor: gs.Tensor) -> Arange | None:
        """Consecutive numbers along the last dimension, or the one before it, and nothing along others."""
        shape = self.graph.shape(tensor.name)
        wide = [index for index, size in enumerate(reversed(shape or ())) if size != 1]
        if len(wide) != 1 or wide[0] > 1:
            return None
        limits = self._consecutive(tensor)
        return None if limits is None else Arange(wide[0] == 0, *limits)

    def _consecutive(self, tensor: gs.Tensor, depth: int = 0) -> tuple[Size, Size] | None:
        """The first of consecutive numbers, and what they stay below."""
        value = self._known(tensor)
        if value is not None:
            return _counted_out(value.ravel())
        node = self._maker(tensor, depth)
        if node is None:
            return None
        if node.op == "Range":
            return self._counted(node)
        if node.op in ("Add", "Sub"):
            return self._added(node, depth)
        moves = (qualified_op(node) in MOVES or self._takes_everything(node)) and self._is_integer(node)
        return self._consecutive(node.inputs[0], depth + 1) if moves else None

    def _counted(self, node: gs.Node) -> tuple[Size, Size] | None:
        start, limit, step = (self._integer(each) for each in node.inputs)
        return (start, limit) if step == 1 and start is not None and limit is not None else None

    def _added(self, node: gs.Node, depth: int) -> tuple[Size, Size] | None:
        """Consecutive numbers and one, or without one."""
        for numbers, other in (node.inputs, reversed(node.inputs)) if node.op == "Add" else (node.inputs,):
            by = self._integer(other)
            by = symbolic.negative(by) if by is not None and node.op == "Sub" else by
            found = self._consecutive(numbers, depth + 1) if by is not None else None
            if found is not None:
                start, limit = (symbolic.add(each, by) for each in found)
                return start, limit
        return None

    def _is_integer(self, node: gs.Node) -> bool:
        """No Cast on the way rounds, or counts modulo something."""
        return self.graph.dtype(node.outputs[0].name) in (6, 7)  # int32, int64

    def _integer(self, tensor: gs.Tensor) -> Size:
        value = self.graph.known_value(tensor)
        single = None if value is None or value.size != 1 else value.ravel()[0]
        return single if isinstance(single, str) else int(single) if isinstance(single, int | np.integer) else None

    def _trilu(self, node: gs.Node, upper: bool) -> Edge | None:
        """The diagonal that a part begins at, or ends at."""
        k = self._integer(node.inputs[1]) if len(node.inputs) > 1 and not node.inputs[1].is_empty() else 0
        if bool(node.attrs.get("upper", 1)) != upper or not isinstance(k, int):
            return None
        return Edge(k)

    def _fill(self, tensor: gs.Tensor) -> float | None:
        """The number that all elements are."""
        value = self._known(tensor)
        if value is None and tensor.inputs and tensor.inputs[0].op in ("Expand", "ConstantOfShape"):
            node = tensor.inputs[0]
            filled = node.attrs.get("value") if node.op == "ConstantOfShape" else None
            value = self._known(node.inputs[0]) if node.op == "Expand" else getattr(filled, "values", None)
        if value is None or not value.size or value.dtype.kind not in FLOATS:
            return None
        return float(value.ravel()[0]) if bool((value == value.ravel()[0]).all()) else None

    def _known(self, tensor: gs.Tensor) -> np.ndarray | None:
        value = self.graph.known_value(tensor)
        return value if value is not None and is_complete(value) and value.dtype != object else None

    def _maker(self, tensor: gs.Tensor, depth: int) -> gs.Node | None:
        return tensor.inputs[0] if depth < MAX_DEPTH and len(tensor.inputs) == 1 else None

    def _takes_everything(self, node: gs.Node) -> bool:
        """Whether a Slice changes nothing: it takes as many elements as there are, from the first one on."""
        if node.op != "Slice" or len(node.inputs) < 3:
            return False
        before, after = (self.graph.shape(each.name) for each in (node.inputs[0], node.outputs[0]))
        starts, *steps = (self.graph.known_integers(each) for each in (node.inputs[1], *node.inputs[4:5]))
        is_same = before == after and before is not None and None not in before
        return is_same and not any(starts or [1]) and all({*(step or ())} == {1} for step in steps)

    def _keeps(self, node: gs.Node) -> bool:
        """Whether a view leaves the last two dimensions as they are."""
        if self._takes_everything(node):
            return True
        if qualified_op(node) not in KEEPS_ROWS_AND_KEYS:  # a Constant has no inputs
            return False
        before, after = (self.graph.shape(each.name) for each in (node.inputs[0], node.outputs[0]))
        if before is None or after is None or len(before) < 2:
            return False
        return before[-2:] == after[-2:] and None not in before[-2:]


def _is_low(numbers: Array) -> Array:
    return np.asarray(numbers <= LOW)


def _counted_out(numbers: np.ndarray) -> tuple[Size, Size] | None:
    steps = numbers.dtype.kind in "iu" and bool(numbers.size) and bool((np.diff(numbers) == 1).all())
    return (int(numbers[0]), int(numbers[-1]) + 1) if steps else None


def _last_of(slack: int, is_behind: bool) -> int:
    """From the equal key to the last that a bound lets through, or to the one behind it."""
    return slack + 1 if is_behind else slack


def _between(rows: Arange, keys: Arange) -> Edge | None:
    """The key that equals a row: rows and keys begin at the same number, or end there."""
    if isinstance(rows.start, int) and isinstance(keys.start, int):
        return Edge(rows.start - keys.start)
    if rows.start == keys.start:
        return Edge(0)
    return Edge(0, from_end=True) if rows.limit == keys.limit else None


def _diagonal(edge: Edge, fill: float | None) -> Diagonal | None:
    return None if fill is None or not fill <= LOW else Diagonal(edge.offset, edge.from_end, fill)
