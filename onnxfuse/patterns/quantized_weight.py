"""The quantised weight of a product: whether its form is one that kernels read, and whether its shapes fit.

A MatMulNBits has it as kernels do. What a DequantizeLinear of blocks reads can be stored so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX, U8, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.graph.packed_data import ELEMENTS, Packing
from onnxfuse.graph.rows_in_turn import RowsInTurn
from onnxfuse.graph.transposed_data import Order
from onnxfuse.graph.value_types import element_text
from onnxfuse.ir.quantization import Quantization
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.patterns.operand_views import Source, is_stored, shape_text
from onnxfuse.patterns.views import AxisKind, axis_view

WEIGHT, SCALES, ZERO_POINTS, ORDER, BIAS = 1, 2, 3, 4, 5  # inputs of MatMulNBits
ACTIVATIONS = 0


@dataclass(frozen=True)
class QuantizedWeight:
    """What stands for a matrix [n, k] of floats.

    Attributes:
        form: how it is stored.
        n, k: its sizes.
        scales: name of the scales.
        zero_points: name of the zero points; None where they are implied.
        flat: of those two, the ones that have all columns in one dimension.
        orders: how the tensors are to be stored, where the model has them otherwise.
    """

    form: Quantization
    n: int
    k: int
    scales: str
    zero_points: str | None
    flat: frozenset[str]
    orders: tuple[tuple[str, Order], ...] = ()

    def part_by_part(self, weight: str, parts: int, run: int) -> QuantizedWeight:
        """The same of columns in turn, to be stored part by part."""
        if self.orders:
            return replace(self, orders=tuple(self._ordered_by_parts(parts, run)))
        form, k = self.form, self.k
        inner = {weight: (form.blocks(k), form.block_bytes), self.scales: (form.blocks(k),)}
        if self.zero_points is not None:
            inner[self.zero_points] = (form.zero_point_bytes(k),)
        dims = {name: (self.n * own[0],) if name in self.flat else (self.n, *own) for name, own in inner.items()}
        orders = tuple((name, RowsInTurn(parts, run, self.n, shape)) for name, shape in dims.items())
        return replace(self, orders=orders)

    def _ordered_by_parts(self, parts: int, run: int) -> Iterator[tuple[str, Order]]:
        """Those of integers that are stored otherwise anyway, and of their scales."""
        orders = dict(self.orders)
        few = (self.n, self.form.blocks(self.k))
        yield self.scales, RowsInTurn(parts, run, self.n, few, turned=self.scales in orders)
        for name, order in orders.items():
            if isinstance(order, Packing):
                yield name, replace(order, parts=parts, run=run)


def read_quantized(graph: Graph, node: gs.Node) -> QuantizedWeight:
    """The weight of a MatMulNBits.

    Raises:
        NotFusable: `quantized_form` for a form that no kernel reads, `invalid_model` where shapes do not fit.
    """
    n, k, bits, block = (_attribute(node, name, default) for name, default in _ATTRIBUTES)
    _check(node, (("quantized_form", holds, detail) for holds, detail in _of_form(graph, node, bits, block)))
    form = Quantization(bits, block, _given(node, ZERO_POINTS) is not None, _dtype(graph, node))
    zero_points = _name(_given(node, ZERO_POINTS))
    return QuantizedWeight(form, n, k, str(node.inputs[SCALES].name), zero_points, _flat(graph, node, form, n, k))


def _check(node: gs.Node, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Raises NotFusable for the first thing that is in the way."""
    for reason, holds, detail in rules:
        if holds:
            raise NotFusable(reason, node_label(node), detail)


def _flat(graph: Graph, node: gs.Node, form: Quantization, n: int, k: int) -> frozenset[str]:
    """The tensors beside the integers that have one dimension; invalid_model where any has other sizes."""
    shapes = {WEIGHT: (n, form.blocks(k), form.block_bytes), SCALES: (n, form.blocks(k)),
              ZERO_POINTS: (n, form.zero_point_bytes(k))}  # fmt: skip
    given = ((_given(node, place), shape) for place, shape in shapes.items())
    held = ((tensor, shape) for tensor, shape in given if tensor is not None)
    return frozenset(str(tensor.name) for tensor, shape in held if _is_flat(graph, node_label(node), tensor, shape))


_ATTRIBUTES = (("N", 0), ("K", 0), ("bits", 4), ("block_size", 0))


def _attribute(node: gs.Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    if not isinstance(value, int):
        raise NotFusable("invalid_model", node_label(node), f"its attribute {name} is no integer")
    return value


def _given(node: gs.Node, place: int) -> gs.Tensor | None:
    tensor = node.inputs[place] if place < len(node.inputs) else None
    return None if tensor is None or tensor.is_empty() else tensor


def bias_of(node: gs.Node) -> str | None:
    """Name of a MatMulNBits' bias."""
    return _name(_given(node, BIAS))


def _name(tensor: gs.Tensor | None) -> str | None:
    return None if tensor is None else str(tensor.name)


def _of_form(graph: Graph, node: gs.Node, bits: int, block: int) -> list[tuple[bool, str]]:
    """What kernels may not read: whether it is so, and in words."""
    zero_points = _given(node, ZERO_POINTS)
    typed = zero_points is not None and graph.dtype(zero_points.name) != U8.onnx
    return [
        (bits not in QUANTIZED_BITS, f"its weight has {bits} bits; kernels read {_either(QUANTIZED_BITS)}"),
        (block not in QUANTIZED_BLOCKS, f"its blocks have {block} elements; kernels read {_either(QUANTIZED_BLOCKS)}"),
        (_given(node, ORDER) is not None, "it has a g_idx: columns of k in another order"),
        (typed, "its zero points are numbers of the scales' type, not packed integers"),
        (bool(node.attrs.get("weight_prepacked", 0)), "its weight is packed for one provider (weight_prepacked)"),
        (_given(node, WEIGHT) is None or _given(node, SCALES) is None, "it has no weight or no scales"),
        (not _are_stored(graph, node, (WEIGHT, SCALES, ZERO_POINTS)), _COMPUTED),
    ]


_COMPUTED = "its weight is computed: kernels read it before the one in front of them has ended"


def _are_stored(graph: Graph, node: gs.Node, places: Iterable[int]) -> bool:
    tensors = (_given(node, place) for place in places)
    return all(is_stored(graph, tensor) for tensor in tensors if tensor is not None)


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _dtype(graph: Graph, node: gs.Node) -> DType:
    """The type of the activations and the scales."""
    numbers = {graph.dtype(node.inputs[place].name) for place in (ACTIVATIONS, SCALES)}
    (number,) = numbers if len(numbers) == 1 else (None,)
    if number not in FLOATS_BY_ONNX:
        detail = f"its activations and scales are {' and '.join(sorted(map(element_text, numbers)))}"
        raise NotFusable("unsupported_dtype", node_label(node), detail)
    weight = graph.dtype(node.inputs[WEIGHT].name)
    if weight != U8.onnx:
        raise NotFusable("invalid_model", node_label(node), f"its weight is {element_text(weight)}, not uint8")
    return FLOATS_BY_ONNX[number]


def _is_flat(graph: Graph, label: str, tensor: gs.Tensor, expected: tuple[int, ...]) -> bool:
    """Whether a tensor has one dimension for all; invalid_model for what has other sizes."""
    shape = graph.shape(tensor.name)
    flat = (math.prod(expected),)
    if shape is None or None in shape or any(isinstance(size, str) for size in shape):
        raise NotFusable("unknown_shape", label, f"{tensor.name!r} is of a size that only the run knows")
    if shape != expected and (shape != flat or len(expected) > 2):
        detail = f"{tensor.name!r} has the shape {shape_text(shape)}, and K, N, bits and block_size make it"
        raise NotFusable("invalid_model", label, f"{detail} {shape_text(expected)}")
    return shape != expected


# ---- DequantizeLinear of blocks


def dequantized_source(graph: Graph, tensor: gs.Tensor) -> tuple[Source, gs.Node] | None:
    """The integers that a matrix is made of by a DequantizeLinear of blocks, and that node; None for another matrix."""
    nodes = [maker for maker in tensor.inputs if maker.op == "Transpose"]
    makers = nodes[0].inputs[0].inputs if nodes else tensor.inputs
    if not makers or makers[0].op != "DequantizeLinear" or not makers[0].attrs.get("block_size", 0):
        return None
    maker = makers[0]
    n, k = _own_sizes(graph, maker)
    if bool(nodes) == _is_turned(maker):
        raise NotFusable("quantized_form", node_label(maker), "its blocks do not lie along the depth of the product")
    own = axis_view([n, k], AxisKind.RHS)
    return Source(str(maker.inputs[0].name), own, own[::-1], copied=(*nodes, maker)), maker


def _is_turned(maker: gs.Node) -> bool:
    """Whether blocks lie along the first of two dimensions."""
    return int(maker.attrs.get("axis", 1)) % 2 == 0


def _own_sizes(graph: Graph, maker: gs.Node) -> tuple[int, int]:
    """N and k of the integers."""
    shape = graph.shape(maker.inputs[0].name) or ()
    sizes = [size for size in (shape[::-1] if _is_turned(maker) else shape) if isinstance(size, int)]
    if len(sizes) != 2 or len(shape) != 2:
        detail = f"a weight of the shape {shape_text(shape)} in blocks"
        raise NotFusable("quantized_form", node_label(maker), detail)
    return sizes[0], sizes[1]


def read_dequantized(graph: Graph, maker: gs.Node) -> QuantizedWeight:
    """The weight that a DequantizeLinear of blocks makes, and how it is to be stored.

    Raises:
        NotFusable: `quantized_form` for a form that cannot be stored so in as many bytes, `invalid_model` where shapes
            do not fit.
    """
    n, k = _own_sizes(graph, maker)
    turned, block = _is_turned(maker), int(maker.attrs["block_size"])
    weight, scales, zero_points = (_name(_given(maker, place)) for place in range(3))
    element = graph.dtype(str(weight)) or 0
    dtype = FLOATS_BY_ONNX.get(graph.dtype(str(scales)) or 0)
    _check(maker, _of_blocks(graph, maker, (n, k, block)))
    if weight is None or scales is None or dtype is None:
        raise NotFusable("invalid_model", node_label(maker), "no weight or no scales")
    orders: list[tuple[str, Order]] = [(weight, Packing(element, n, k, block, turned))]
    orders += [(scales, (1, 0))] if turned else []
    orders += [(zero_points, Packing(element, n, k // block, 0, turned))] if zero_points else []
    form = Quantization(ELEMENTS[element][0], block, zero_points is not None, dtype)
    return QuantizedWeight(form, n, k, scales, zero_points, frozenset(), tuple(orders))


def _of_blocks(graph: Graph, maker: gs.Node, sizes: tuple[int, int, int]) -> list[tuple[str, bool, str]]:
    """What is in the way: the reason, whether it is so, and in words. Sizes are n, k and that of a block."""
    n, k, block = sizes
    given = [tensor for tensor in (_given(maker, place) for place in range(3)) if tensor is not None]
    element, form = graph.dtype(given[0].name) or 0, "quantized_form"
    bits, signed = ELEMENTS.get(element, (0, False))
    blocks = -(-k // block) if block > 0 else 0
    few = (blocks, n) if _is_turned(maker) else (n, blocks)
    uneven = len(given) > 2 and bool(blocks * bits % 8)
    return [
        (form, bits == 0, f"integers are {element_text(element)}; kernels read those of 4 or 8 bits"),
        (form, block not in QUANTIZED_BLOCKS, f"blocks of {block} elements; kernels read {_either(QUANTIZED_BLOCKS)}"),
        (form, k != blocks * block or uneven, "its last block is not full, or zero points of a column no whole bytes"),
        (form, not signed and len(given) < 3, "numbers without a sign and without zero points: zero is not implied"),
        (form, not _are_stored(graph, maker, (0, 1, 2)), _COMPUTED),
        (form, graph.dtype(given[1].name) not in FLOATS_BY_ONNX, "its scales are no numbers that kernels read"),
        ("invalid_model", any(graph.shape(tensor.name) != few for tensor in given[1:]),
         f"scales or zero points that are not {shape_text(few)}"),
    ]  # fmt: skip
