"""GroupQueryAttention over a cache: what a kernel of one token of each sequence computes.

The lengths that the op reads on the host are those of a tensor's shape in every graph that GenAI's builder writes: a
node that reads that tensor knows them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BF16, F16, FED_BY_ONNX, FLOATS_BY_ONNX, I32, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, Size, node_label
from onnxfuse.graph.group_query import (
    COSINES,
    DOMAIN,
    EPSILON,
    KEY,
    KEY_NORM,
    LENGTHS,
    OP,
    PAST_KEY,
    PAST_VALUE,
    QUERY,
    QUERY_NORM,
    SINES,
    SINK,
    TOTAL,
    VALUE,
)
from onnxfuse.ir.cached_attention import ATTENDED, KEYS, VALUES, CachedAttention
from onnxfuse.ir.fusion import Axis, Dim, Load, Out, Tensor
from onnxfuse.patterns.epilogue_graph import EpilogueGraph
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import LiveOut, Match

PATTERN = "cached_attention"
MOST_HEADS = 8  # of the query for one of the keys: a side of mma.sync
MOST_COLUMNS = 256  # of a head
WIDTH = 8  # elements that are read at once
KNOWN = frozenset(
    {"num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved",
     "qk_norm_epsilon"}
)  # fmt: skip
DEFAULTS = {"smooth_softmax": (0, -1), "qk_output": (0,), "k_quant_type": (b"NONE", "NONE"),
            "v_quant_type": (b"NONE", "NONE"), "kv_cache_bit_width": (0,), "causal": (1,),
            "sliding_window_cache": (0,)}  # fmt: skip


@dataclass(frozen=True)
class CachedMatch(Match):
    """One op, and the nodes that tell how many keys there are, which others need as well.

    Attributes:
        anchor: the op's name.
    """

    anchor: str = field(default="", kw_only=True)

    @property
    def label(self) -> str:
        """The op's name."""
        return self.anchor


@dataclass(frozen=True)
class Counted:
    """What tells how many keys there are: the second dimension of a tensor, and the nodes that read it."""

    tensor: gs.Tensor
    nodes: tuple[gs.Node, ...]


def cached_attentions(graph: Graph, points: InsertionPoints) -> Iterator[tuple[Match, CachedAttention]]:
    """Every attention over a cache that a kernel computes."""
    for node in _attentions(graph, points):
        try:
            yield _placed(graph, points, node)
        except NotFusable:  # an op of the runtime's, which does it well
            continue


def unlike_a_kernel(graph: Graph, points: InsertionPoints) -> Iterator[tuple[gs.Node, NotFusable]]:
    """Every other, and why."""
    for node in _attentions(graph, points):
        try:
            _placed(graph, points, node)
        except NotFusable as refusal:
            yield node, refusal


def _attentions(graph: Graph, points: InsertionPoints) -> Iterator[gs.Node]:
    """The ops that no fusion has."""
    return (node for node in graph.nodes if node.op == OP and node.domain == DOMAIN and not points.is_taken(node))


def _placed(graph: Graph, points: InsertionPoints, node: gs.Node) -> tuple[Match, CachedAttention]:
    """The fusion of an op, and where it begins.

    Raises:
        NotFusable: as `_lowered`, or it has no place.
    """
    counted = _counted(graph, node)
    fusion = _lowered(graph, node, counted)
    return points.placed(_match(graph, node, counted, fusion)), fusion


def _refuse(node: gs.Node, detail: str) -> NotFusable:
    return NotFusable("no_attention_kernel", node_label(node), detail)


def _counted(graph: Graph, node: gs.Node) -> Counted:
    """Casts and a Gather of the Shape of a tensor of two dimensions."""
    nodes: list[gs.Node] = []
    value = node.inputs[TOTAL]
    for ops in (("Cast",), ("Gather",), ("Shape",)):
        maker = next((each for each in value.inputs if each.op in ops), None)
        if maker is None:
            raise _refuse(node, "the number of keys is no dimension of a tensor")
        nodes.insert(0, maker)
        value = maker.inputs[0]
    place = graph.known_value(nodes[1].inputs[1])
    is_second = place is not None and place.size == 1 and int(place.flat[0]) in (1, -1)
    if not is_second or len(graph.shape(value.name) or ()) != 2 or not _is_whole(nodes[0]):
        raise _refuse(node, "the number of keys is no second dimension of two")
    return Counted(value, tuple(nodes))


def _is_whole(shape: gs.Node) -> bool:
    """Whether a Shape is of all dimensions; ONNX Runtime's optimiser writes out where it starts."""
    return not shape.attrs.get("start", 0) and "end" not in shape.attrs


def _lowered(graph: Graph, node: gs.Node, counted: Counted) -> CachedAttention:
    """The fusion.

    Raises:
        NotFusable: its form, its types or its sizes are no kernel's.
    """
    heads, kv_heads = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    packed = not _reads(node, KEY)
    _check_form(graph, node)
    head = _head(graph, node, heads + 2 * kv_heads if packed else heads)
    if head is None or heads % kv_heads or heads // kv_heads > MOST_HEADS:
        raise _refuse(node, f"a kernel has up to {MOST_HEADS} heads for one of the keys, of known columns")
    if head % WIDTH or not WIDTH <= head <= MOST_COLUMNS:
        raise _refuse(node, f"a kernel has heads of up to {MOST_COLUMNS} columns, a multiple of {WIDTH}")
    rotary = _rotary(graph, node) if node.attrs.get("do_rotary", 0) else 0
    extra = _extra(graph, node, heads, head)
    operands = _operands(graph, node, counted, packed, bool(rotary), extra)
    normalised, sink = _reads(node, QUERY_NORM), _reads(node, SINK)
    return CachedAttention(
        anchor=node_label(node),
        pattern=PATTERN,
        features=tuple(name for name, has in (("norm", normalised), ("rotary", rotary), ("sink", sink)) if has),
        axes=_axes(graph, node, (heads, kv_heads, head), packed, rotary),
        operands=operands,
        loads=tuple(map(Load, range(len(operands)))),
        steps=(),
        outs=_outs(node, operands[0].dtype),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        rotary=rotary,
        interleaved=bool(node.attrs.get("rotary_interleaved", 0)),
        scale=float(node.attrs.get("scale", 0.0)) or head**-0.5,
        softcap=float(node.attrs.get("softcap", 0.0)),
        window=max(int(node.attrs.get("local_window_size", -1)), 0),
        epsilon=float(node.attrs.get("qk_norm_epsilon", EPSILON)) if normalised else 0.0,
        sink=sink,
        packed=packed,
        original=tuple(sorted((name, value) for name, value in node.attrs.items() if name in KNOWN)),
    )


def _check_form(graph: Graph, node: gs.Node) -> None:
    odd = [f"{n}={value}" for n, value in node.attrs.items() if n not in KNOWN and value not in DEFAULTS.get(n, ())]
    if odd:
        raise _refuse(node, f"no kernel has {', '.join(odd)}")
    known = {*range(SINES + 1), SINK, QUERY_NORM, KEY_NORM}
    if len(node.inputs) <= TOTAL or any(_reads(node, place) for place in range(len(node.inputs)) if place not in known):
        raise _refuse(node, "it reads more than a cache, lengths, a rotation, norms and a sink")
    if _reads(node, QUERY_NORM) != _reads(node, KEY_NORM):
        raise _refuse(node, "one of query and key has a norm alone")
    if len(node.outputs) != 3 or not all(node.inputs[place].name for place in (PAST_KEY, PAST_VALUE, LENGTHS)):
        raise _refuse(node, "it has no cache that comes out again, or puts out more")
    dtypes = {graph.dtype(node.inputs[place].name) for place in (QUERY, PAST_KEY, PAST_VALUE)}
    if len(dtypes) != 1 or not dtypes <= {F16.onnx, BF16.onnx}:
        raise _refuse(node, "its query and its cache are not of one type of 16 bits")
    if len(graph.shape(node.inputs[QUERY].name) or ()) != 3 or len(graph.shape(node.inputs[LENGTHS].name) or ()) > 2:
        raise _refuse(node, "its query is not [batch, tokens, columns]")


def _reads(node: gs.Node, place: int) -> bool:
    return place < len(node.inputs) and bool(node.inputs[place].name)


def _extra(graph: Graph, node: gs.Node, heads: int, head: int) -> tuple[Tensor, ...]:
    """What the norms of query and key multiply by, and the sink of each head."""
    dtype, found = graph.dtype(node.inputs[QUERY].name), []
    for place, axis, size in ((QUERY_NORM, "h", head), (KEY_NORM, "h", head), (SINK, "q", heads)):
        if not _reads(node, place):
            continue
        name = node.inputs[place].name
        if graph.shape(name) != (size,) or graph.dtype(name) != dtype:
            raise _refuse(node, f"{name} is not [{size}] of the query's type")
        found.append(Tensor(name, FLOATS_BY_ONNX[dtype or 0], ((axis,),)))
    return tuple(found)


def _head(graph: Graph, node: gs.Node, heads: int) -> int | None:
    """Columns of a head: those of the query, as GenAI's builder gives the cache's a name alone, or of the cache."""
    columns = (graph.shape(node.inputs[QUERY].name) or (None,))[-1]
    if isinstance(columns, int):
        return columns // heads if columns % heads == 0 else None
    cached = (graph.shape(node.inputs[PAST_KEY].name) or (None,))[-1]
    return cached if isinstance(cached, int) else None


def _rotary(graph: Graph, node: gs.Node) -> int:
    """Columns that are turned: cosines are of half of them."""
    columns = (graph.shape(node.inputs[COSINES].name) or (None,))[-1] if len(node.inputs) > SINES else None
    if not isinstance(columns, int):
        raise _refuse(node, "its cosines are of unknown columns")
    return 2 * columns


def _operands(
    graph: Graph, node: gs.Node, counted: Counted, packed: bool, turned: bool, extra: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """In the order of the fused node's inputs."""
    dtype = FLOATS_BY_ONNX[graph.dtype(node.inputs[QUERY].name) or 0]
    token = ((KEY, ("g", "h")), (VALUE, ("g", "h")))
    cache: tuple[Dim, ...] = (("b",), ("g",), ("c",), ("h",))
    lengths: tuple[Dim, ...] = (("b",), ())[: len(graph.shape(node.inputs[LENGTHS].name) or ())]

    def read(place: int, dims: tuple[Dim, ...], of: DType = dtype) -> Tensor:
        return Tensor(node.inputs[place].name, of, dims)

    return (
        read(QUERY, (("b",), ("s",), ("w" if packed else "q", "h"))),
        read(PAST_KEY, cache),
        read(PAST_VALUE, cache),
        *(() if packed else (read(place, (("b",), ("s",), dim)) for place, dim in token)),
        read(LENGTHS, lengths, I32),
        *((read(place, (("x",), ("r",))) for place in (COSINES, SINES)) if turned else ()),
        *extra,
        Tensor(counted.tensor.name, _integers(graph, counted.tensor), (("y",), ("t",))),
    )


def _integers(graph: Graph, tensor: gs.Tensor) -> DType:
    found = FED_BY_ONNX.get(graph.dtype(tensor.name) or 0)
    if found is None:
        raise NotFusable("no_attention_kernel", tensor.name, "what tells the number of keys is of an odd type")
    return found


def _axes(graph: Graph, node: gs.Node, counts: tuple[int, int, int], packed: bool, rotary: int) -> tuple[Axis, ...]:
    """Batch, tokens, heads, columns, room, positions, and keys of the longest sequence."""
    heads, kv_heads, head = counts

    def known(place: int, dim: int) -> int | None:
        size: Size | None = (graph.shape(node.inputs[place].name) or (None,) * 4)[dim]
        return size if isinstance(size, int) else None

    own = [Axis("b", known(QUERY, 0)), Axis("s", known(QUERY, 1)), Axis("q", heads), Axis("g", kv_heads)]
    own += [Axis("h", head), Axis("c", known(PAST_KEY, 2)), Axis("y", None), Axis("t", None)]
    own += [Axis("w", heads + 2 * kv_heads)] if packed else []
    return (*own, *((Axis("x", known(COSINES, 0)), Axis("r", rotary // 2)) if rotary else ()))


def _outs(node: gs.Node, dtype: DType) -> tuple[Out, ...]:
    result, keys, values = (tensor.name for tensor in node.outputs)
    cache: tuple[Dim, ...] = (("b",), ("g",), ("c",), ("h",))
    return (
        Out(Tensor(result, dtype, (("b",), ("s",), ("q", "h"))), ATTENDED),
        Out(Tensor(keys, dtype, cache), KEYS),
        Out(Tensor(values, dtype, cache), VALUES),
    )


def _match(graph: Graph, node: gs.Node, counted: Counted, fusion: CachedAttention) -> CachedMatch:
    return CachedMatch(
        products=(),
        nodes=(graph.index(node),),
        copied=tuple(sorted(map(graph.index, counted.nodes))),
        insertion_point=graph.index(node),
        folded=(),
        constants=(),
        columns=fusion.heads * fusion.head,
        live_outs=tuple(LiveOut(out.tensor.name, (), ()) for out in fusion.outs),
        split=frozenset(),
        epilogue=EpilogueGraph(),
        anchor=fusion.anchor,
    )
