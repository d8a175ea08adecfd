"""Anchors: whatever computes `out[..., m, n] = sum over k of lhs[..., m, k] * rhs[..., k, n]`.

MatMul, Gemm, FusedMatMul, FusedGemm and MatMulNBits do; either side may be a constant, and either may have the batch
dimensions of the output, all of them or some. An Einsum of two inputs, a product spelled out as Unsqueeze, Mul and
ReduceSum, and a pointwise convolution have their dimensions in another order. A convolution's weight `[m, k]` is the
lhs, so that what the kernel reads and writes is contiguous along n, the positions of an image; only where its channels
are split are they the columns, because parts are columns. The integers of a MatMulNBits stand for a weight `[n, k]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxfuse.dtypes import FLOATS_BY_ONNX, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.einsum import einsum_labels
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.graph.operators import CONVOLUTIONS, NBITS, PRODUCTS, qualified_op
from onnxfuse.graph.value_types import element_text
from onnxfuse.patterns.contraction import Contraction, Labels, contract, is_addressable
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.fallback_shape import Base
from onnxfuse.patterns.operand_views import InputView, Source, any_view, is_stored, sources, spelled_factors
from onnxfuse.patterns.pointwise_table import POINTWISE
from onnxfuse.patterns.quantized_weight import (
    QuantizedWeight,
    bias_of,
    dequantized_source,
    read_dequantized,
    read_quantized,
)
from onnxfuse.patterns.views import COLUMNS, AxisKind, Dim, Piece, View, axis_view, extent, in_turn

QUANTIZED = frozenset(
    {
        *("MatMulInteger", "QLinearMatMul", "com.microsoft::DynamicQuantizeMatMul"),
        *("com.microsoft::MatMulBnb4", "com.microsoft::MatMulIntegerToFloat", "com.microsoft::QGemm"),
    }
)

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
BATCHES = "abcdefghij"  # labels of batch dimensions
DIMENSIONS = "abcdefgh"  # labels of dimensions in order
Activation = Callable[[EpilogueGraph, Ref], Ref]


@dataclass(frozen=True)
class Product:
    """A matrix product as it lies in the model.

    Attributes:
        node: the MatMul or Gemm.
        lhs: name of the left-hand side; `rhs` likewise.
        is_weight: rhs is a constant matrix, stored or made of what is (integers that ops of their own dequantise):
            products with the same lhs may be parts of one fusion.
        lhs_view: dimensions of lhs, in pieces of its axes; `rhs_view` likewise, in pieces of those and of columns.
        out_view: the output's dimensions.
        row_view: those of them that are not columns.
        columns: the pieces of the others.
        k: the contracted pieces.
        base: the input whose dimensions a fallback may take for shapes.
        views: nodes between both inputs and the product, with what replaces each one's shape.
        stored_nodes: nodes between a constant and the product, which others may need as well.
        bias: name of Gemm's third input or that of MatMulNBits, if it has one.
        biased: the output's last dimensions, those that the bias has.
        alpha, beta: Gemm's factors.
        activation: what FusedGemm applies to its result.
        quantized: what else makes the matrix that `rhs` stands for, if it is quantised.
        turns: parts whose columns take turns, and are numbered part by part; 1 where all lie in their order.
        run: of how many columns such a turn is.
        affine: what scales the columns and is added to them, where no product is made but rows are normalised.
        output: which of the node's it is, where no product is made but rows turn.
    """

    node: gs.Node
    dtype: DType
    lhs: str
    rhs: str
    is_weight: bool
    lhs_view: View
    rhs_view: View
    out_view: View
    row_view: View
    columns: Dim
    k: Dim
    base: Base
    views: tuple[InputView, ...] = ()
    stored_nodes: tuple[gs.Node, ...] = ()
    bias: str | None = None
    biased: View = ()
    alpha: float = 1.0
    beta: float = 1.0
    activation: Activation | None = None
    quantized: QuantizedWeight | None = None
    turns: int = 1
    run: int = 1
    affine: tuple[tuple[str, gs.Tensor], ...] = ()
    output: int = 0

    @property
    def copied(self) -> tuple[gs.Node, ...]:
        """Nodes before the product that a fallback needs as well."""
        return (*(view.node for view in self.views), *self.stored_nodes)

    @property
    def factors(self) -> tuple[tuple[str, gs.Tensor], ...]:
        """What the result is multiplied or divided by, or gets added: numbers of an input, or what rows have."""
        numbers = ((view.node.op.lower(), view.factor) for view in self.views if view.factor is not None)
        return (*numbers, *self.affine)

    @property
    def label(self) -> str:
        """Name of the anchor."""
        return node_label(self.node)

    @property
    def out(self) -> str:
        """Name of the product's output."""
        return str(self.node.outputs[self.output].name)

    @property
    def reads_through_views(self) -> bool:
        """Whether it could also be read without some of its views; the Mul of one that is spelled out is its own."""
        return any(view.node.op != "Mul" for view in self.views)

    @property
    def is_biased_gemm(self) -> bool:
        """Whether it adds a bias as the Add behind a MatMul does."""
        return self.node.op == "Gemm" and self.bias is not None and self.beta != 0.0

    @property
    def is_biased_convolution(self) -> bool:
        """Whether it is one of channels first, which the runtime's library turns round, and has a bias."""
        return self.node.op == "Conv" and self.bias is not None

    @property
    def is_spelled_out(self) -> bool:
        """Whether the model computes it without an op for products."""
        return bool(self.node.op == "ReduceSum")

    @property
    def matrix(self) -> tuple[str, QuantizedWeight | None]:
        """What products of the same right-hand side have in common."""
        return self.rhs, self.quantized

    @cached_property
    def n(self) -> int | str:
        """Number of columns; a symbol where only the run knows it."""
        return extent(self.columns)

    def in_turns(self, parts: int, run: int = 1) -> Product:
        """The same with columns that are numbered part by part; itself where they cannot be.

        Args:
            parts: whose columns take turns.
            run: of how many columns a turn is.
        """
        n = self.n
        if parts == 1 or isinstance(n, str) or n % (parts * run) or self.columns != (Piece(COLUMNS, n),):
            return self
        views = (_in_turns(view, n, parts, run) for view in (self.rhs_view, self.out_view, self.biased))
        rhs_view, out_view, biased = views
        turned = replace(self, out_view=out_view, biased=biased, turns=parts, run=run)
        if self.quantized is None:
            return replace(turned, rhs_view=rhs_view)
        return replace(turned, quantized=self.quantized.part_by_part(self.rhs, parts, run))


def _in_turns(view: View, n: int, parts: int, run: int) -> View:
    dim = (Piece(COLUMNS, n),)
    return tuple(in_turn(n, parts, run) if own == dim else own for own in view)


def is_anchor(graph: Graph, node: gs.Node) -> bool:
    """Whether a node is a product, so that it is fused or listed with a reason."""
    op = qualified_op(node)
    if op == "ReduceSum":  # of integers it takes some of them, as torch's exporters write a gather without the op
        return spelled_factors(node) is not None and graph.dtype(node.outputs[0].name) not in _INTEGERS
    if op == "Einsum" and len(node.inputs) < 2:
        return False  # it moves or sums what one tensor holds
    return (op in PRODUCTS and (op not in CONVOLUTIONS or _is_pointwise(graph, node))) or op in QUANTIZED


def _is_pointwise(graph: Graph, conv: gs.Node) -> bool:
    """Whether a convolution is a product of each position's channels with one matrix."""
    attrs = conv.attrs
    shape = graph.shape(conv.inputs[1].name) or (0, 0, 0)
    kernel = attrs.get("kernel_shape") or (shape[2:] if conv.op == "Conv" else shape[1:-1])
    # What auto_pad stands for is nothing where kernel and strides are 1.
    padded = attrs.get("auto_pad", "NOTSET") == "NOTSET" and any(attrs.get("pads", [0]))
    return {*kernel, *attrs.get("strides", [1])} == {1} and not padded and attrs.get("group", 1) == 1


def _check_supported(node: gs.Node) -> None:
    op = qualified_op(node)
    if op in QUANTIZED:
        raise NotFusable("quantized", node_label(node), f"{op} of quantised tensors")
    if op == "Einsum" and len(node.inputs) != 2:
        raise NotFusable("unsupported_product", node_label(node), f"an Einsum of {len(node.inputs)} inputs")
    if node.attrs.get("transBatchA", 0) or node.attrs.get("transBatchB", 0):
        raise NotFusable("batch_transposed", node_label(node), "FusedMatMul with its batch behind its rows")


def _check_not_quantized(graph: Graph, node: gs.Node, *inputs: Source) -> None:
    for tensor in (*_inputs(node)[: len(inputs)], *(graph.tensor(source.name) for source in inputs)):
        if tensor.inputs and tensor.inputs[0].op == "DequantizeLinear":
            raise NotFusable("quantized", node_label(node), f"{tensor.name!r} comes from a DequantizeLinear")


def read_product(
    graph: Graph,
    node: gs.Node,
    through: Callable[[gs.Node], bool] = any_view,
    accepts: Callable[[Contraction], bool] = is_addressable,
    computed: Collection[str] = (),
    turned: bool | None = None,
) -> Product:
    """Understand an anchor.

    Args:
        graph: that the node is of.
        node: the anchor.
        through: which views before the inputs to read them through where a kernel can.
        accepts: whether it can.
        computed: which of COMPUTED_VIEWS to look through as well, before the first input Casts alone: a Mul there may
            belong to what makes it.
        turned: whether the second input is the lhs; by default that of which the rows are.

    Raises:
        NotFusable: the product has a form or a type that no kernel computes.
    """
    try:
        _check_supported(node)
        turned = _is_turned(graph, node) if turned is None else turned
        return _read(graph, node, _Reading(through, accepts, computed, turned))
    except NotFusable as refusal:
        raise NotFusable(refusal.reason, refusal.node or node_label(node), refusal.detail) from None


class _Reading(NamedTuple):
    """How the inputs of an anchor are read: what `read_product` was asked for."""

    through: Callable[[gs.Node], bool]
    accepts: Callable[[Contraction], bool]
    computed: Collection[str]
    turned: bool


def _read(graph: Graph, node: gs.Node, reading: _Reading) -> Product:
    quantized = _quantized(graph, node)
    dtype = _common_dtype(graph, node) if quantized is None else quantized.form.scale
    lhs, rhs, found = _addressable(graph, node, reading)
    _check_not_quantized(graph, node, lhs, *([rhs] if quantized is None else []))
    factors = spelled_factors(node)
    spelled = () if factors is None else (InputView(factors, None),)
    if factors is not None and graph.is_escaping(node.inputs[0].name):
        raise NotFusable("graph_output", node_label(node), f"{node.inputs[0].name!r} is an output of the graph")
    is_constant = _is_constant(graph, rhs)
    if not is_constant and extent(found.k) == 1:
        raise NotFusable("outer_product", node_label(node), "k is 1, so that there is nothing to sum")
    is_weight = is_constant or graph.is_fixed(rhs.name)
    return Product(
        node, dtype, lhs.name, rhs.name, is_weight, found.lhs, found.rhs, found.out, found.rows,
        found.columns or (Piece(COLUMNS, 1),), found.k, _base(graph, lhs, rhs, found),
        (*lhs.views, *rhs.views, *spelled), (*lhs.copied, *rhs.copied),
        bias=_bias(node), biased=found.out[1:2] if node.op == "Conv" else found.out,
        alpha=float(node.attrs.get("alpha", 1.0)), beta=float(node.attrs.get("beta", 1.0)),
        activation=_activation(node), quantized=quantized,
    )  # fmt: skip


def _bias(node: gs.Node) -> str | None:
    if qualified_op(node) == NBITS:
        return bias_of(node)
    has_bias = len(node.inputs) > 2 and not node.inputs[2].is_empty()
    return str(node.inputs[2].name) if has_bias else None


def _addressable(graph: Graph, node: gs.Node, reading: _Reading) -> tuple[Source, Source, Contraction]:
    """Both inputs through as many views as a kernel can address, and the axes that they share."""
    inputs = _inputs(node)
    left, right = inputs[::-1] if reading.turned else inputs
    rights = list(_rights(graph, node, right, reading.through, reading.computed))
    lefts = list(sources(graph, left, AxisKind.LHS, reading.through, {"Cast"} & {*reading.computed}))
    pairs = [(lhs, rhs) for lhs in lefts for rhs in rights]
    for lhs, rhs in pairs[:-1]:
        try:
            found = contract(lhs, rhs, _labels(graph, node, lhs.seen, rhs.seen, reading.turned))
        except NotFusable:
            continue
        if reading.accepts(found):
            return lhs, rhs, found
    lhs, rhs = pairs[-1]
    return lhs, rhs, contract(lhs, rhs, _labels(graph, node, lhs.seen, rhs.seen, reading.turned))


def _labels(graph: Graph, node: gs.Node, lhs: View, rhs: View, turned: bool) -> Labels:
    """The dimensions of lhs and rhs, which is the first input where they are turned."""
    named = LABELS_BY_OP.get(node.op, _matrices)(graph, node, *((rhs, lhs) if turned else (lhs, rhs)))
    return replace(named, lhs=named.rhs, rhs=named.lhs) if turned else named


def _is_turned(graph: Graph, node: gs.Node) -> bool:
    """Whether the second input of an anchor is its lhs."""
    return not _splits_channels(node) if node.op == "Conv" else _has_columns_first(graph, node)


def _rights(
    graph: Graph,
    node: gs.Node,
    tensor: gs.Tensor,
    through: Callable[[gs.Node], bool],
    computed: Collection[str],
) -> Iterable[Source]:
    """The ways to read rhs; integers are read as they lie."""
    if qualified_op(node) == NBITS:
        weight = read_quantized(graph, node)
        own = axis_view([weight.n, weight.k], AxisKind.RHS)
        return [Source(str(tensor.name), own, own)]
    may_be_integers = qualified_op(node) == "MatMul" and tensor is node.inputs[1]
    integers = dequantized_source(graph, tensor) if may_be_integers else None
    return [integers[0]] if integers else sources(graph, tensor, AxisKind.RHS, through, computed)


def _quantized(graph: Graph, node: gs.Node) -> QuantizedWeight | None:
    """The second input's integers, if it is made of them."""
    if qualified_op(node) == NBITS:
        return read_quantized(graph, node)
    integers = dequantized_source(graph, node.inputs[1]) if qualified_op(node) == "MatMul" else None
    if integers is None:
        return None
    weight = read_dequantized(graph, integers[1])
    if weight.form.scale != _common_dtype(graph, node):
        raise NotFusable("quantized_form", node_label(node), "its scales are of another type than its activations")
    return weight


def _inputs(node: gs.Node) -> list[gs.Tensor]:
    """What an anchor multiplies."""
    factors = spelled_factors(node)
    return list((factors or node).inputs[:2])


def _matrices(graph: Graph, node: gs.Node, lhs: View, rhs: View) -> Labels:
    """The dimensions of a MatMul or Gemm: a batch of matrices each, or a vector."""
    lhs_rank, rhs_rank = len(lhs), len(rhs)
    if not lhs_rank or not rhs_rank:
        raise NotFusable("unsupported_product", node_label(node), "an input without dimensions is no matrix")
    first = "k" if lhs_rank == 1 else "km" if node.attrs.get("transA", 0) else "mk"
    is_turned = node.attrs.get("transB", 0) or qualified_op(node) == NBITS
    second = "k" if rhs_rank == 1 else "nk" if is_turned else "kn"
    batches = max(lhs_rank - len(first), rhs_rank - len(second))
    batch = BATCHES[:batches]
    if batches > len(batch):
        raise NotFusable("rank_too_high", node_label(node), f"the product has {batches} batch dimensions")
    left, right = batch[batches - lhs_rank + len(first) :] + first, batch[batches - rhs_rank + len(second) :] + second
    return Labels(left, right, batch + first.replace("k", "") + second.replace("k", ""))


def _image(graph: Graph, node: gs.Node, image: View, weight: View) -> Labels:
    """The dimensions of a pointwise convolution; the weight has one of size 1 for each of an image."""
    positions = _positions(node, image, weight)
    return Labels("bk" + positions, "ck" + positions.upper(), "bc" + positions)


def _channels_last(graph: Graph, node: gs.Node, image: View, weight: View) -> Labels:
    """The same with the channels behind the positions, in the weight as well."""
    positions = _positions(node, image, weight)
    return Labels("b" + positions + "k", "c" + positions.upper() + "k", "b" + positions + "c")


def _positions(node: gs.Node, image: View, weight: View) -> str:
    """The labels of an image's positions."""
    positions, rank = "hwd"[: len(image) - 2], len(weight)
    if len(image) != rank or len(positions) != rank - 2:
        raise NotFusable("unknown_rank", node_label(node), f"an input of rank {len(image)}, a weight of rank {rank}")
    return positions


def _splits_channels(conv: gs.Node) -> bool:
    """Whether somebody takes ranges of what a convolution makes: of its channels, one may hope."""
    return any(reader.op in ("Split", "Slice", "SplitToSequence") for reader in conv.outputs[0].outputs)


def _einsum(graph: Graph, node: gs.Node, first: View, second: View) -> Labels:
    """The dimensions of an Einsum, which sums over dimensions of both inputs."""
    (lhs, rhs), out = einsum_labels(str(node.attrs.get("equation", "")), (len(first), len(second)))
    summed = (set(lhs) | set(rhs)) - set(out)
    known = all(term.isalpha() and len(set(term)) == len(term) for term in (lhs, rhs, out))
    ranks = (len(lhs), len(rhs)) == (len(first), len(second))
    if not known or not ranks or not summed or summed - (set(lhs) & set(rhs)) or set(out) - set(lhs + rhs):
        detail = f"the Einsum {node.attrs.get('equation')!r} is no matrix product"
        raise NotFusable("unsupported_product", node_label(node), detail)
    return Labels(lhs, rhs, out, broadcasts=True)


def _has_columns_first(graph: Graph, node: gs.Node) -> bool:
    """Whether the columns of an Einsum are its first input's: Keras multiplies keys by the query, `aecd,abcd->acbe`.

    A stored matrix stays where it is: it is a weight as rhs alone.
    """
    shapes = [graph.shape(tensor.name) for tensor in node.inputs]
    if node.op != "Einsum" or None in shapes or any(is_stored(graph, tensor) for tensor in node.inputs):
        return False
    (first, second), out = einsum_labels(str(node.attrs.get("equation", "")), [len(shape or ()) for shape in shapes])
    return out[-1:] in set(first) - set(second)


def _spelled_out(graph: Graph, node: gs.Node, lhs: View, rhs: View) -> Labels:
    """The dimensions of Unsqueeze, Mul, ReduceSum; one of size 1 is no dimension of an input."""
    rank = max(len(lhs), len(rhs))
    given = list(node.attrs["axes"]) if "axes" in node.attrs else None
    if given is None and len(node.inputs) > 1:
        given = graph.known_integers(node.inputs[1])
    if not given or rank > len(DIMENSIONS):
        raise NotFusable("unsupported_product", node_label(node), "which dimensions the ReduceSum sums is not known")
    summed = {axis % rank for axis in given}
    left, right = _own_labels(lhs, rank, "ABCDEFGH"), _own_labels(rhs, rank, "01234567")
    if any(DIMENSIONS[axis] not in left or DIMENSIONS[axis] not in right for axis in summed):
        raise NotFusable("unsupported_product", node_label(node), "sums a dimension that only one input has")
    out = (DIMENSIONS[axis] if axis not in summed else "?" for axis in range(rank))
    keeps = node.attrs.get("keepdims", 1)
    return Labels(left, right, "".join(label for label in out if label != "?" or keeps), broadcasts=True)


def _own_labels(view: View, rank: int, ones: str) -> str:
    """The last of some dimensions; those of size 1 have names that nothing else has."""
    axes = range(rank - len(view), rank)
    return "".join(ones[axis] if extent(dim) == 1 else DIMENSIONS[axis] for axis, dim in zip(axes, view, strict=True))


LABELS_BY_OP: dict[str, Callable[[Graph, gs.Node, View, View], Labels]] = {
    "Conv": _image,
    "Einsum": _einsum,
    "NhwcConv": _channels_last,
    "ReduceSum": _spelled_out,
}
"""Op -> the labels of its dimensions, given those of both inputs in its own order; others multiply matrices."""


def _is_constant(graph: Graph, source: Source) -> bool:
    """Whether every run multiplies with the same matrix, which lies as it is stored; its type may be another one."""
    tensor = graph.tensor(source.name)
    while tensor.inputs and qualified_op(tensor.inputs[0]) == "Cast":
        tensor = tensor.inputs[0].inputs[0]
    return not source.views and is_stored(graph, tensor)


def _base(graph: Graph, lhs: Source, rhs: Source, found: Contraction) -> Base:
    """The input that only the run knows."""
    if _is_constant(graph, lhs):
        return Base(rhs.name, found.rhs, 1)
    return Base(lhs.name, found.lhs, 0)


def _activation(node: gs.Node) -> Activation | None:
    """FusedGemm's activation: the name of an ONNX op, and its attributes with a prefix."""
    name = node.attrs.get("activation")
    if not name:
        return None
    lower = POINTWISE.get(name)
    if lower is None:
        raise NotFusable("unknown_op", node_label(node), f"the activation {name} is not in the pointwise table")
    prefix = "activation_"
    attributes = {key.removeprefix(prefix): value for key, value in node.attrs.items() if key.startswith(prefix)}
    return lambda graph, ref: lower(graph, [ref], attributes)


def _common_dtype(graph: Graph, node: gs.Node) -> DType:
    numbers = {graph.dtype(tensor.name) for tensor in _inputs(node)}
    (number,) = numbers if len(numbers) == 1 else (None,)
    if number not in FLOATS_BY_ONNX:
        raise NotFusable(
            "unsupported_dtype", node_label(node), "its inputs are " + " and ".join(sorted(map(element_text, numbers)))
        )
    return FLOATS_BY_ONNX[number]
