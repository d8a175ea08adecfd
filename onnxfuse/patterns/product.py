"""Anchors: a MatMul, Gemm, FusedMatMul or FusedGemm, `out[..., m, n] = sum over k of lhs[..., m, k] * rhs[k, n]`.

lhs is read as it lies: views that nothing but products reads, as those that merge the heads of an attention, become
part of the fusion where the kernels can walk the tensor before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import BY_ONNX, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph import Graph, Size, node_label
from onnxfuse.operators import qualified_op
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.pointwise import POINTWISE
from onnxfuse.patterns.views import (
    VIEWS,
    Dim,
    FallbackShape,
    Piece,
    View,
    axis_view,
    extent,
    fallback_shape,
    refined,
    viewed,
)

ANCHORS = frozenset({"MatMul", "Gemm", "com.microsoft::FusedMatMul", "com.microsoft::FusedGemm"})
QUANTIZED = frozenset(
    {
        *("MatMulInteger", "QLinearMatMul", "com.microsoft::DynamicQuantizeMatMul"),
        *("com.microsoft::MatMulIntegerToFloat", "com.microsoft::MatMulNBits"),
    }
)
UNSUPPORTED = {"Einsum": "an Einsum", "Conv": "a pointwise convolution"}
MAX_WEIGHT_NODES = 8
STAGE_DEPTH = 64  # columns of lhs that a kernel loads at once; where heads are narrower, merging them is left outside
MOST_GROUPS = 2  # neighbouring axes of lhs that one stride walks: k in two levels, the rows as a batch and an m


@dataclass(frozen=True)
class LhsView:
    """A node that only regroups lhs; `shape` replaces the shape that a Reshape reads, if the run computes that."""

    node: gs.Node
    shape: FallbackShape | None


Activation = Callable[[EpilogueGraph, Ref], Ref]


@dataclass(frozen=True)
class Product:
    """A matrix product as it lies in the model.

    Attributes:
        node: the MatMul or Gemm.
        lhs: name of the activation, `[..., m, k]` or what views make that of.
        rhs: name of the weight, `[k, n]` or `[n, k]`.
        rhs_order: `kn` or `nk`.
        lhs_view: dimensions of lhs, in pieces of its axes.
        row_view: the output's dimensions but the last, likewise.
        k_view: the contracted dimension.
        views: nodes between lhs and the product, the first one first, with what replaces each one's shape.
        rows: sizes of the output's dimensions but the last.
        k, n: sizes.
        bias: name of Gemm's third input, if it has one.
        alpha, beta: Gemm's factors.
        activation: what FusedGemm applies to its result.
        weight_nodes: what stands between the weight and the product: Identity and Transpose, which is the other order.
    """

    node: gs.Node
    dtype: DType
    lhs: str
    rhs: str
    rhs_order: str
    lhs_view: View
    row_view: View
    k_view: Dim
    views: tuple[LhsView, ...]
    rows: tuple[Size, ...]
    k: int
    n: int
    weight_nodes: tuple[gs.Node, ...] = ()
    bias: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: Activation | None = None

    @property
    def copied(self) -> tuple[gs.Node, ...]:
        """Nodes before the product that a fallback needs as well."""
        return (*(view.node for view in self.views), *self.weight_nodes)

    @property
    def label(self) -> str:
        """Name of the anchor."""
        return node_label(self.node)

    @property
    def out(self) -> str:
        """Name of the product's output."""
        return str(self.node.outputs[0].name)


def is_anchor(node: gs.Node) -> bool:
    """Whether a node is a product, so that it is fused or listed with a reason."""
    op = qualified_op(node)
    return op in ANCHORS or op in QUANTIZED or op == "Einsum" or (op == "Conv" and _is_pointwise(node))


def _is_pointwise(conv: gs.Node) -> bool:
    """Whether a convolution is a product of each position's channels with one matrix."""
    attrs = conv.attrs
    ones, pads = (*attrs.get("kernel_shape", [0]), *attrs.get("strides", [1])), attrs.get("pads", [0])
    padded = any(pads) or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    return set(ones) == {1} and not padded and attrs.get("group", 1) == 1


def _check_form(node: gs.Node) -> None:
    op = qualified_op(node)
    if op in UNSUPPORTED:
        raise NotFusable("unsupported_product", node_label(node), f"{UNSUPPORTED[op]}, which no kernel computes")
    if op in QUANTIZED:
        raise NotFusable("quantized", node_label(node), f"{op} of quantised tensors")


def _check_not_quantized(node: gs.Node, *tensors: gs.Tensor) -> None:
    for tensor in tensors:
        if tensor.inputs and tensor.inputs[0].op == "DequantizeLinear":
            raise NotFusable("quantized", node_label(node), f"{tensor.name!r} comes from a DequantizeLinear")


def without_views(product: Product) -> Product:
    """The same product with lhs as it lies behind its views."""
    own = axis_view((*product.rows, product.k), "x")
    name = str(product.node.inputs[0].name)
    return replace(product, lhs=name, lhs_view=own, row_view=own[:-1], k_view=own[-1], views=())


def read_product(graph: Graph, node: gs.Node) -> Product:
    """Understand an anchor.

    Raises:
        NotFusable: the product has a form or a type that no kernel computes.
    """
    _check_form(node)
    lhs, weight_nodes = node.inputs[0].name, _weight_nodes(node.inputs[1])
    weight = weight_nodes[-1].inputs[0] if weight_nodes else node.inputs[1]
    rhs = str(weight.name)
    _check_not_quantized(node, node.inputs[0], weight)
    if not graph.is_initializer(rhs) and not (weight.inputs and weight.inputs[0].op == "Constant"):
        raise NotFusable("weight_not_constant", node_label(node), f"the right-hand side {rhs!r} is not an initializer")
    dtype = _common_dtype(graph, node, lhs, rhs)
    lhs_shape, rhs_shape = graph.shape(lhs), graph.shape(rhs)
    if rhs_shape is None or len(rhs_shape) != 2 or not all(isinstance(size, int) and size > 0 for size in rhs_shape):
        raise NotFusable("weight_not_a_matrix", node_label(node), f"the weight {rhs!r} has shape {_text(rhs_shape)}")
    if lhs_shape is None or len(lhs_shape) < 2:
        raise NotFusable("unknown_rank", node_label(node), f"the input {lhs!r} has shape {_text(lhs_shape)}")
    if node.attrs.get("transA", 0):
        raise NotFusable("lhs_transposed", node_label(node), f"{node.op} with transA=1: k is not contiguous")
    if node.attrs.get("transBatchA", 0) or node.attrs.get("transBatchB", 0):
        raise NotFusable("batch_transposed", node_label(node), "FusedMatMul with its batch behind its rows")
    turns = sum(view.op == "Transpose" for view in weight_nodes) + bool(node.attrs.get("transB", 0))
    transposed = turns % 2 == 1
    first, second = (int(size) for size in rhs_shape if isinstance(size, int))
    k, n = (second, first) if transposed else (first, second)
    if isinstance(lhs_shape[-1], int) and lhs_shape[-1] != k:
        raise NotFusable("invalid_model", node_label(node), f"k is {lhs_shape[-1]} in {lhs!r} and {k} in {rhs!r}")
    has_bias = len(node.inputs) > 2 and not node.inputs[2].is_empty()
    source = _read_lhs(graph, node.inputs[0], lhs_shape, k)
    return Product(
        node, dtype, source.name, rhs, "nk" if transposed else "kn", source.view, source.seen[:-1], source.seen[-1],
        source.nodes, lhs_shape[:-1], k, n, weight_nodes,
        bias=str(node.inputs[2].name) if has_bias else None,
        alpha=float(node.attrs.get("alpha", 1.0)), beta=float(node.attrs.get("beta", 1.0)),
        activation=_activation(node),
    )  # fmt: skip


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


def _weight_nodes(tensor: gs.Tensor) -> tuple[gs.Node, ...]:
    """The views of a weight, from the product backwards."""
    nodes: list[gs.Node] = []
    while tensor.inputs and tensor.inputs[0].op in ("Identity", "Transpose") and len(nodes) < MAX_WEIGHT_NODES:
        nodes.append(tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    return tuple(nodes)


@dataclass(frozen=True)
class _Lhs:
    """A tensor, and how the product sees it through views."""

    name: str
    view: View
    seen: View
    nodes: tuple[LhsView, ...]


def _read_lhs(graph: Graph, tensor: gs.Tensor, shape: tuple[Size, ...], k: int) -> _Lhs:
    """The product's input through as many views as a kernel can walk."""
    chain = _views_before(graph, tensor)
    for first in range(len(chain)):
        try:
            found = _through(graph, chain[first:])
        except NotFusable:
            continue
        if extent(found.seen[-1]) == k and len(found.seen) == len(shape) and _is_walkable(found):
            return found
    own = axis_view((*shape[:-1], k), "x")
    return _Lhs(str(tensor.name), own, own, ())


def _views_before(graph: Graph, tensor: gs.Tensor) -> list[gs.Node]:
    """Views that feed only products through this tensor, and shape arithmetic; the first one first."""
    chain: list[gs.Node] = []
    while len(tensor.inputs) == 1 and _feeds_only(graph, tensor, chain[0] if chain else None):
        node = tensor.inputs[0]
        if qualified_op(node) not in VIEWS or graph.is_initializer(tensor.name):
            break
        chain.insert(0, node)
        tensor = node.inputs[0]
    return chain


def _feeds_only(graph: Graph, tensor: gs.Tensor, view: gs.Node | None) -> bool:
    """Whether nobody reads a value but one view or, as their lhs, products; what reads its shape dies with them."""
    readers = [reader for reader in tensor.outputs if reader.op != "Shape"]
    expected = (reader is view or (view is None and qualified_op(reader) in ANCHORS) for reader in readers)
    return all(expected) and not graph.is_escaping(tensor.name)


def _through(graph: Graph, chain: list[gs.Node]) -> _Lhs:
    name = str(chain[0].inputs[0].name)
    shape = graph.shape(name)
    if shape is None or graph.is_initializer(name):
        raise NotFusable("unknown_rank", "", f"the input {name!r} has shape {_text(shape)}")
    own = view = axis_view(shape, "x")
    nodes = []
    for node in chain:
        before, view = view, viewed(graph, node, view)
        nodes.append(LhsView(node, fallback_shape(graph, node, before, view, (name, own))))
    return _Lhs(name, own, view, tuple(nodes))


def _is_walkable(lhs: _Lhs) -> bool:
    """Whether its innermost axis is k's, in at most two groups of pieces, and its rows a batch and an m."""
    order = [piece for dim in refined(lhs.view, lhs.seen) for piece in dim if piece.size != 1]
    k = [piece for piece in lhs.seen[-1] if piece.size != 1]
    rows = [piece for dim in lhs.seen[:-1] for piece in dim if piece.size != 1]
    if not k or order[-1] != k[-1] or max(_groups(order, k), _groups(order, rows)) > MOST_GROUPS:
        return False
    return _groups(order, k) == 1 or _run(order, k) % STAGE_DEPTH == 0


def _run(order: list[Piece], pieces: list[Piece]) -> int:
    """Steps of the innermost group: the product of the pieces that end the tensor's own order."""
    run = 1
    for own, piece in zip(reversed(order), reversed(pieces), strict=False):
        if own != piece or isinstance(piece.size, str):
            break
        run *= piece.size
    return run


def _groups(order: list[Piece], pieces: list[Piece]) -> int:
    """How many runs of neighbours, in the tensor's own order, some pieces are."""
    return sum(
        index == 0 or order.index(piece) != order.index(pieces[index - 1]) + 1 for index, piece in enumerate(pieces)
    )


def _common_dtype(graph: Graph, node: gs.Node, lhs: str, rhs: str) -> DType:
    numbers = {graph.dtype(lhs), graph.dtype(rhs)}
    (number,) = numbers if len(numbers) == 1 else (None,)
    if number not in BY_ONNX:
        raise NotFusable("unsupported_dtype", node_label(node), f"ONNX element types {sorted(map(str, numbers))}")
    return BY_ONNX[number]


def _text(shape: tuple[Size, ...] | None) -> str:
    if shape is None:
        return "of unknown rank"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
