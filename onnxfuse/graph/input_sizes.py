"""Sizes of a model's inputs that its own operators fix, so that a run with guessed ones is one that the model accepts.

Heads and their width are attributes and widths of the attention operators that read the cache; a mask is as long as
past and present together, where the graph says so: by what it adds, or by what an attention operator needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import onnx_graphsurgeon as gs

from onnxfuse.errors import ModelError
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.load import Model
from onnxfuse.graph.named_sizes import canonical
from onnxfuse.graph.shared_batch import shared_batches
from onnxfuse.graph.single_batch import batches_of_one
from onnxfuse.graph.symbolic import Size
from onnxfuse.known_inputs import NOTHING, InputSizes

_SUM = re.compile(r"\(\+ ([\w.:/-]+) ([\w.:/-]+)\)")
_MULTIPLE = re.compile(r"([1-9]\d{0,3})\*([A-Za-z_]\w*)")
_TERM = re.compile(r"[A-Za-z_][\w.:/-]*|\d+")
_POINTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Min", "Max"})


@dataclass(frozen=True)
class Attention:
    """Where an operator keeps what tells sizes: positions of inputs, and the attribute with the number of heads."""

    past: tuple[int, ...]
    heads: str
    masks: tuple[int, ...] = ()
    total: int | None = None
    lengths: int | None = None


_ATTENTION = {
    ("com.microsoft", "GroupQueryAttention"): Attention((3, 4), "kv_num_heads", (10,), total=6, lengths=5),
    ("com.microsoft", "MultiHeadAttention"): Attention((6, 7), "num_heads", (5,)),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): Attention((5, 6), "num_heads", (4,)),
    ("com.microsoft", "Attention"): Attention((4,), "num_heads", (5,)),
    ("", "Attention"): Attention((4, 5), "kv_num_heads", (3,)),
}


def input_sizes(model: Model) -> InputSizes:
    """Read what a model's operators say of its inputs' sizes; nothing where it cannot be analysed."""
    try:
        graph = Graph(model)
    except ModelError:
        return NOTHING
    symbols = {dim.dim_param for value in model.proto.graph.input for dim in value.type.tensor_type.shape.dim}
    known = {canonical(symbol): symbol for symbol in symbols if symbol}
    inputs = {value.name for value in model.proto.graph.input}
    fixed = dict.fromkeys(batches_of_one(graph), 1)
    sums = {symbol: terms for symbol in symbols if (terms := _terms(symbol))}
    sums |= {symbol: (first,) for symbol, first in shared_batches(graph).items()}
    values: dict[str, tuple[tuple[str, ...], int]] = {}
    one_of: set[tuple[str, str]] = set()
    widest = max(map(_window, graph.nodes), default=0)
    # A window's cache does not hold all keys: how many there are, the other caches say, where there are any.
    for node in sorted(graph.nodes, key=lambda node: _window(node) > 0):
        for total, parts in _equal_sizes(graph, node):
            if total in known and known[total] not in sums:
                sums[known[total]] = parts
        operator = _ATTENTION.get((node.domain or "", node.op))
        if operator is not None:
            fixed |= {known[symbol]: size for symbol, size in _heads(graph, node, operator, widest) if symbol in known}
            values |= {name: found for name, found in _lengths(graph, node, operator) if name in inputs}
        if node.op == "GroupQueryAttention":
            rows = [
                known[size] for size in (_shape(graph, node, 0) or ())[:2] if isinstance(size, str) and size in known
            ]
            one_of |= {(rows[0], rows[1])} if len(rows) == 2 else set()
    return InputSizes(fixed, sums, values, frozenset(one_of), _multiples(symbols))


def _multiples(symbols: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Dimensions that torch calls `8*height`, as of an image whose height has to be a multiple of 8."""
    found = ((symbol, _MULTIPLE.fullmatch(symbol)) for symbol in symbols)
    return {symbol: (int(match[1]), match[2]) for symbol, match in found if match is not None}


def _name(node: gs.Node, index: int | None) -> str:
    """The name of an input; empty where there is none."""
    return str(node.inputs[index].name) if index is not None and index < len(node.inputs) else ""


def _shape(graph: Graph, node: gs.Node, index: int | None) -> tuple[Size, ...] | None:
    name = _name(node, index)
    return graph.shape(name) if name else None


def _equal_sizes(graph: Graph, node: gs.Node) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A symbol and a sum that must be equal, as the node reads both in one place."""
    for pair in _read_together(graph, node):
        for size, other in (pair, pair[::-1]):
            found = _SUM.fullmatch(other) if isinstance(other, str) and isinstance(size, str) else None
            if found is not None and isinstance(size, str):
                yield size, found.groups()


def _read_together(graph: Graph, node: gs.Node) -> Iterator[tuple[Size, Size]]:
    """Pairs of sizes that a node reads in one place; of broadcasting either may be 1."""
    operator = _ATTENTION.get((node.domain or "", node.op))
    if node.op in _POINTWISE and not node.domain:
        shapes = [shape for index in range(len(node.inputs)) if (shape := _shape(graph, node, index)) is not None]
        for one, other in combinations(shapes, 2):
            yield from zip(one[::-1], other[::-1], strict=False)
    elif operator is not None:
        total = _past_and_present(graph, node, operator)
        masks = (_shape(graph, node, index) for index in operator.masks)
        value = graph.known_value(node.inputs[operator.total]) if _name(node, operator.total) else None
        ends: list[Size] = [mask[-1] for mask in masks if mask]
        ends += [] if value is None else [each for each in value.ravel().tolist() if isinstance(each, int | str)]
        yield from ((end, total) for end in ends)


def _past_and_present(graph: Graph, node: gs.Node, operator: Attention) -> Size:
    """How many keys there are with those of the past, as a size; None where a part is not known."""
    past, query = _shape(graph, node, operator.past[0]), _shape(graph, node, 0)
    if past is None or query is None or len(past) < 4 or len(query) < 3:
        return None
    parts = sorted((str(past[-2]), str(query[-2])), key=lambda part: (part.isdecimal(), part))
    return None if "None" in parts else f"(+ {parts[0]} {parts[1]})"


def _heads(graph: Graph, node: gs.Node, operator: Attention, widest: int) -> Iterator[tuple[Size, int]]:
    """The symbols of a cache `[..., heads, length, width]`, and the sizes that the operator accepts of them.

    Other caches are as long as the widest window, where positions go on: what a window has no token for is not written.
    """
    heads, cosines = node.attrs.get(operator.heads), _cosines(graph, node)
    has_room = not cosines or not isinstance(cosines[0], int) or 2 * widest <= cosines[0]
    window = _window(node) or (widest if has_room else 0)
    width = _head_width(graph, node)
    for index in operator.past:
        past = _shape(graph, node, index)
        if past is not None and len(past) >= 4:
            yield from ((past[-3], int(heads)),) if heads else ()
            yield from ((past[-1], width),) if width else ()
            yield from ((past[-2], window),) if window else ()


def _window(node: gs.Node) -> int:
    """Tokens that a cache has room for at least, where it is one of a sliding window; else 0."""
    return int(node.attrs.get("local_window_size", 0)) if node.attrs.get("sliding_window_cache", 0) else 0


def _packed_heads(graph: Graph, node: gs.Node) -> tuple[tuple[Size, ...] | None, int]:
    """The shape whose last axis holds heads side by side, and how many of them; 0 where they are not said."""
    heads = int(node.attrs.get("num_heads") or node.attrs.get("q_num_heads") or 0)
    if node.op == "Attention" and node.domain == "com.microsoft":
        return _shape(graph, node, 1), 3 * heads
    if node.op == "GroupQueryAttention" and not _name(node, 1):
        heads += 2 * int(node.attrs.get("kv_num_heads", 0))
    return _shape(graph, node, 0), heads


def _head_width(graph: Graph, node: gs.Node) -> int | None:
    """The width of a head: of the cosines that turn it, or a share of the query's or the weight's columns."""
    query, parts = _packed_heads(graph, node)
    if query is not None and len(query) in (2, 3) and isinstance(query[-1], int) and parts:
        return query[-1] // parts
    if query is not None and len(query) in (4, 5) and isinstance(query[-1], int):
        return query[-1]
    cosines = _cosines(graph, node)
    return 2 * cosines[-1] if cosines and isinstance(cosines[-1], int) else None


def _cosines(graph: Graph, node: gs.Node) -> tuple[Size, ...] | None:
    """The shape `[positions, half a head]` of what turns heads."""
    return _shape(graph, node, 7) if node.op == "GroupQueryAttention" else None


def _lengths(graph: Graph, node: gs.Node, operator: Attention) -> Iterator[tuple[str, tuple[tuple[str, ...], int]]]:
    """Inputs of the model that are themselves the number of keys, or its last index."""
    found = _SUM.fullmatch(str(_past_and_present(graph, node, operator)))
    if found is not None:
        yield _name(node, operator.total), (found.groups(), 0)
        yield _name(node, operator.lengths), (found.groups(), -1)


def _terms(symbol: str) -> tuple[str, ...]:
    """What a symbol that is a sum adds up: exporters call a dimension `past_sequence_length + 1`; else nothing."""
    terms = tuple(term.strip() for term in symbol.split("+"))
    return terms if len(terms) > 1 and all(_TERM.fullmatch(term) for term in terms) else ()
