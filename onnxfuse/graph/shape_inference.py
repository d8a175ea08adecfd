"""Shapes in symbols: what ONNX's own shape inference forgets where a Reshape takes its sizes from shape arithmetic.

One rule an op gives the shapes of a node's outputs from those of its inputs and from known values. A rule that knows
less than ONNX's inference adds nothing; where it knows a dimension, its symbol says which other dimensions are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import symbolic
from onnxfuse.graph.constant_propagation import Array, integers
from onnxfuse.graph.einsum import einsum_labels
from onnxfuse.graph.operators import qualified_op
from onnxfuse.graph.symbolic import Size

Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Known:
    """A node, and the shapes and values of its inputs as far as they are known."""

    node: gs.Node
    shapes: Sequence[Shape | None]
    values: Sequence[Array | None]

    def shape(self, index: int) -> Shape | None:
        """The shape of an input."""
        return self.shapes[index] if index < len(self.shapes) else None

    def sizes(self, index: int) -> list[Size] | None:
        """An input's value as sizes."""
        value = self.values[index] if index < len(self.values) else None
        if value is None:
            return None
        return [entry if isinstance(entry, int | str) else None for entry in value.ravel().tolist()]

    def integers(self, index: int, attribute: str = "") -> list[int] | None:
        """Integers that are an attribute in old opsets and an input in new ones."""
        if attribute and attribute in self.node.attrs:
            return [int(entry) for entry in self.node.attrs[attribute]]
        return integers(self.values[index]) if index < len(self.values) else None


def output_shapes(known: Known) -> list[Shape | None]:
    """The shapes of a node's outputs; None for one that no rule tells."""
    rule = _RULES.get(qualified_op(known.node))
    shapes = list(rule(known)) if rule is not None else []
    return shapes + [None] * (len(known.node.outputs) - len(shapes))


def refined(inferred: Shape | None, derived: Shape | None) -> Shape | None:
    """A shape from both sources: numbers as they are, then the derived symbols, then those of ONNX's inference.

    How many windows a convolution has, an exporter may say in the arithmetic by which the model computes it elsewhere;
    and how many numbers a Range from 0 has, by the limit: a size is not negative, though the sum that it is might be.
    """
    if inferred is None or derived is None or len(inferred) != len(derived):
        return derived if inferred is None else inferred
    return tuple(
        old if isinstance(old, int) or new is None or _is_spelled_out(old, new) else new
        for old, new in zip(inferred, derived, strict=True)
    )


def _is_spelled_out(declared: Size, derived: Size) -> bool:
    is_counted = f"{derived}".startswith("(windows ") or derived == symbolic.function("range", 0, declared, 1)
    return is_counted and f"{declared}".startswith(("(+ ", "(/ ", "(- "))


def broadcast_shapes(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape that several broadcast to."""
    return reduce(_broadcast, shapes) if shapes else None


def _broadcast(first: Shape | None, second: Shape | None) -> Shape | None:
    if first is None or second is None:
        return None
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(symbolic.broadcast(a, b) for a, b in pairs)[::-1]


def _same(known: Known) -> list[Shape | None]:
    return [known.shape(0)]


def _elementwise(known: Known) -> list[Shape | None]:
    return [broadcast_shapes(known.shapes)]


def _matmul(known: Known) -> list[Shape | None]:
    """A vector is a row on the left and a column on the right, and has no such dimension in the result."""
    lhs, rhs = known.shape(0), known.shape(1)
    if not lhs or not rhs:
        return [None]
    batch = _broadcast(lhs[:-2], rhs[:-2])
    return [None if batch is None else (*batch, *lhs[-2:-1], *(rhs[-1:] if len(rhs) > 1 else ()))]


def _gemm(known: Known) -> list[Shape | None]:
    lhs, rhs, attrs = known.shape(0), known.shape(1), known.node.attrs
    if lhs is None or rhs is None or len(lhs) != 2 or len(rhs) != 2:
        return [None]
    return [(lhs[1 if attrs.get("transA") else 0], rhs[0 if attrs.get("transB") else 1])]


def _transpose(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    if shape is None:
        return [None]
    order = known.node.attrs.get("perm", range(len(shape) - 1, -1, -1))
    return [tuple(shape[axis] for axis in order)]


def _reshape(known: Known) -> list[Shape | None]:
    shape, target = known.shape(0), known.sizes(1)
    if target is None:
        return [None]
    keeps = not known.node.attrs.get("allowzero", 0)
    given: list[Size] = [
        (shape[index] if shape is not None and index < len(shape) else None) if size == 0 and keeps else size
        for index, size in enumerate(target)
    ]
    open_axes = [index for index, size in enumerate(given) if size is None or size == -1]
    if shape is not None and len(open_axes) == 1:
        rest = symbolic.multiply(size for index, size in enumerate(given) if index != open_axes[0])
        given[open_axes[0]] = symbolic.divide(symbolic.multiply(shape), rest)
    return [tuple(None if size == -1 else size for size in given)]


def _flatten(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    if shape is None:
        return [None]
    axis = known.node.attrs.get("axis", 1)
    axis += len(shape) if axis < 0 else 0  # the rank itself is an axis too
    return [(symbolic.multiply(shape[:axis]), symbolic.multiply(shape[axis:]))]


def _squeeze(known: Known) -> list[Shape | None]:
    shape, axes = known.shape(0), known.integers(1, "axes")
    if shape is None or axes is None:
        return [None]
    gone = {axis % len(shape) for axis in axes}
    return [tuple(size for index, size in enumerate(shape) if index not in gone)]


def _unsqueeze(known: Known) -> list[Shape | None]:
    shape, axes = known.shape(0), known.integers(1, "axes")
    if shape is None or axes is None:
        return [None]
    rank = len(shape) + len(axes)
    new, rest = {axis % rank for axis in axes}, iter(shape)
    return [tuple(1 if index in new else next(rest) for index in range(rank))]


def _expand(known: Known) -> list[Shape | None]:
    target = known.sizes(1)
    return [None if target is None else _broadcast(known.shape(0), tuple(target))]


def _concat(known: Known) -> list[Shape | None]:
    shapes = [shape for shape in known.shapes if shape is not None]
    if not shapes:
        return [None]
    axis, rank = known.node.attrs.get("axis", 0) % len(shapes[0]), len(shapes[0])
    dims: list[Size] = [next((shape[i] for shape in shapes if shape[i] is not None), None) for i in range(rank)]
    dims[axis] = reduce(symbolic.add, (shape[axis] for shape in shapes)) if len(shapes) == len(known.shapes) else None
    return [tuple(dims)]


def _split(known: Known) -> list[Shape | None]:
    shape, outputs = known.shape(0), len(known.node.outputs)
    if shape is None:
        return [None] * outputs
    axis, sizes = known.node.attrs.get("axis", 0) % len(shape), known.integers(1, "split")
    equal = symbolic.divide(shape[axis], outputs)
    lengths: Sequence[Size] = sizes if sizes is not None and len(sizes) == outputs else [equal] * outputs
    return [(*shape[:axis], length, *shape[axis + 1 :]) for length in lengths]


def _slice(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    starts, ends = known.sizes(1), known.sizes(2)
    axes = known.integers(3) if len(known.shapes) > 3 else list(range(len(starts or ())))
    if shape is None or not axes:
        return [None]
    steps: list[Size] | None = known.sizes(4) if len(known.shapes) > 4 else [1] * len(axes)
    nothing, dims = [None] * len(axes), list(shape)  # other dimensions stay, whatever is taken of these
    for axis, start, end, step in zip(axes, starts or nothing, ends or nothing, steps or nothing, strict=False):
        dims[axis % len(shape)] = _sliced(shape[axis % len(shape)], start, end, step)
    return [tuple(dims)]


def _sliced(size: Size, start: Size, end: Size, step: Size) -> Size:
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return len(range(size)[start:end:step])
    if start == 0 and step == 1 and _is_everything(size, end):
        return size
    last = size if _is_everything(size, end) else symbolic.from_the_end(size, end)
    if isinstance(start, int) and step == 1 and (length := symbolic.window(size, start, last)) is not None:
        return length
    if isinstance(size, str) and start == symbolic.negative(size) and step == 1 and _is_everything(size, end):
        return size
    if isinstance(size, int) and start == 0 and step == 1 and isinstance(end, str):
        return symbolic.at_most(end, size)
    count = symbolic.before_the_end(start)  # of a table's last rows, as of ALiBi's biases
    if isinstance(size, int) and count is not None and step == 1 and _is_everything(size, end):
        return symbolic.at_most(count, size)
    return symbolic.function("slice", size, start, end, step)


def _is_everything(size: Size, end: Size) -> bool:
    return end == size or (isinstance(end, int) and end >= 2**31 - 1)


def _gather(known: Known) -> list[Shape | None]:
    data, positions = known.shape(0), known.shape(1)
    if data is None or positions is None:
        return [None]
    axis = known.node.attrs.get("axis", 0) % len(data)
    return [(*data[:axis], *positions, *data[axis + 1 :])]


def _gather_nd(known: Known) -> list[Shape | None]:
    """Each of the last entries of the positions is an index into one dimension behind the batches."""
    data, positions, batches = known.shape(0), known.shape(1), known.node.attrs.get("batch_dims", 0)
    count = positions[-1] if positions else None
    if data is None or positions is None or not isinstance(count, int):
        return [None]
    return [(*positions[:-1], *data[batches + count :])]


def _grid_sample(known: Known) -> list[Shape | None]:
    data, grid = known.shape(0), known.shape(1)
    return [(*data[:2], *grid[1:-1]) if data and grid else None]


def _reduce(known: Known) -> list[Shape | None]:
    shape, axes = known.shape(0), known.integers(1, "axes")
    if shape is None or axes is None:
        return [None]
    gone = {axis % len(shape) for axis in axes}
    if known.node.attrs.get("keepdims", 1):
        return [tuple(1 if index in gone else size for index, size in enumerate(shape))]
    return [tuple(size for index, size in enumerate(shape) if index not in gone)]


def _constant_of_shape(known: Known) -> list[Shape | None]:
    sizes = known.sizes(0)
    return [None if sizes is None else tuple(sizes)]


def _range(known: Known) -> list[Shape | None]:
    values = [value for value in known.values if value is not None and value.size == 1]
    if len(values) < len(known.values):
        return [None]
    entries = (value.item() for value in values)
    start, limit, step = (int(entry) if isinstance(entry, float) and entry.is_integer() else entry for entry in entries)
    if isinstance(start, int) and isinstance(limit, int) and isinstance(step, int) and step:
        return [(len(range(start, limit, step)),)]
    if all(isinstance(entry, int | float) for entry in (start, limit, step)):
        return [(_counted(*(value.ravel()[0] for value in values)),)]
    count = symbolic.rest(limit, start) if step == 1 else None
    return [(count if symbolic.is_never_negative(count) else symbolic.function("range", start, limit, step),)]


def _counted(start: Any, limit: Any, step: Any) -> Size:
    """How many numbers there are, as ONNX Runtime counts: the difference in their own type, and its steps in fp64."""
    steps = float(limit - start) / float(step) if step else math.inf
    return max(math.ceil(steps), 0) if math.isfinite(steps) else None


def _indices(known: Known) -> list[Shape | None]:
    return [known.shape(1)]


def _tile(known: Known) -> list[Shape | None]:
    shape, repeats = known.shape(0), known.sizes(1)
    if shape is None or repeats is None:
        return [None]
    return [tuple(symbolic.multiply(pair) for pair in zip(shape, repeats, strict=True))]


def _pad(known: Known) -> list[Shape | None]:
    shape, pads = known.shape(0), known.node.attrs.get("pads") or known.sizes(1)
    if shape is None or pads is None:
        return [None]
    axes = known.integers(3) if known.shape(3) is not None else list(range(len(shape)))
    dims = list(shape)
    for place, axis in enumerate(axes or ()):
        dims[axis] = _padded(shape[axis], pads[place], pads[place + len(pads) // 2])
    return [None if axes is None else tuple(dims)]


def _padded(size: Size, before: Size, behind: Size) -> Size:
    if isinstance(before, int) and isinstance(behind, int):
        return None if size is None else symbolic.add(size, before + behind)
    return symbolic.function("pad", size, before, behind)


def _einsum(known: Known) -> list[Shape | None]:
    """Each label's size; equal labels are of equal sizes, or one of them is 1."""
    shapes = [shape for shape in known.shapes if shape is not None]
    if not shapes or len(shapes) < len(known.shapes):
        return [None]
    terms, out = einsum_labels(str(known.node.attrs["equation"]), [len(shape) for shape in shapes])
    sizes: dict[str, Size] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if len(term) != len(shape) or not (term or "a").isalpha():
            return [None]
        for label, size in zip(term, shape, strict=True):
            sizes[label] = symbolic.broadcast(sizes.get(label, 1), size)
    return [tuple(sizes[label] for label in out) if set(out) <= set(sizes) else None]


def _convolution(known: Known) -> list[Shape | None]:
    """Windows over the axes behind batch and channels; a pooling has no weight and keeps the channels."""
    shape, weight, attrs = known.shape(0), known.shape(1), known.node.attrs
    kernel: Sequence[int] = attrs.get("kernel_shape") or [size for size in (weight or ())[2:] if isinstance(size, int)]
    if shape is None or len(kernel) != len(shape) - 2:
        return [None]
    steps, ceil = attrs.get("strides", [1] * len(kernel)), attrs.get("ceil_mode", 0)
    padding = _paddings(attrs, kernel)
    sizes = [_windows(shape[2 + i], padding[i], steps[i], ceil) for i in range(len(kernel))]
    return [(shape[0], weight[0] if weight is not None else shape[1], *sizes)]


def _paddings(attrs: Mapping[str, Any], kernel: Sequence[int]) -> list[int]:
    """How many elements each axis is padded with, less those that a window has beside its first."""
    rank, way = len(kernel), attrs.get("auto_pad", "NOTSET")
    if way.startswith("SAME"):  # as many windows as there are elements, or every so many of them
        return [0] * rank
    pads = [0] * 2 * rank if way == "VALID" else attrs.get("pads", [0] * 2 * rank)
    spread = attrs.get("dilations", [1] * rank)
    return [pads[i] + pads[rank + i] - spread[i] * (kernel[i] - 1) for i in range(rank)]


def _transposed_convolution(known: Known) -> list[Shape | None]:
    """Windows put down a stride apart; the weight has the columns of one group."""
    shape, weight, attrs = known.shape(0), known.shape(1), known.node.attrs
    is_told = "output_shape" in attrs or attrs.get("auto_pad", "NOTSET") != "NOTSET"
    if shape is None or weight is None or is_told:
        return [None]
    rank = len(shape) - 2
    pads, steps = attrs.get("pads", [0] * 2 * rank), attrs.get("strides", [1] * rank)
    spread, added = attrs.get("dilations", [1] * rank), attrs.get("output_padding", [0] * rank)
    sizes: list[Size] = []
    for i in range(rank):
        kernel = weight[2 + i]
        if not isinstance(kernel, int):
            return [None]
        behind = spread[i] * (kernel - 1) + 1 - steps[i] + added[i] - pads[i] - pads[rank + i]
        sizes.append(symbolic.add(symbolic.multiply((shape[2 + i], steps[i])), behind))
    return [(shape[0], symbolic.multiply((weight[1], attrs.get("group", 1))), *sizes)]


def _whole_windows(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    return [None if shape is None else (*shape[:2], *[1] * (len(shape) - 2))]


def _windows(size: Size, padding: int, step: int, ceil: int) -> Size:
    if step == 1:
        return size if padding == 0 else symbolic.add(size, padding)
    if isinstance(size, int) and (not ceil or (size + padding - 1) % step == 0):  # else a last one may begin in the pad
        return (size + padding - 1) // step + 1
    return symbolic.function("windows", size, padding, step, ceil)


def _top_k(known: Known) -> list[Shape | None]:
    shape, count, axis = known.shape(0), known.integers(1, "k"), known.node.attrs.get("axis", -1)
    if shape is None or not -len(shape) <= axis < len(shape):
        return [None, None]
    taken = list(shape)
    taken[axis] = count[0] if count else None
    return [tuple(taken)] * 2


def _resize(known: Known) -> list[Shape | None]:
    shape, sizes = known.shape(0), known.sizes(3)
    if known.node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return [None]
    if sizes is not None:
        return [tuple(sizes)] if len(sizes) == len(shape or sizes) and "axes" not in known.node.attrs else [None]
    scales = known.values[2] if len(known.values) > 2 else None
    if shape is None or scales is None or scales.size != len(shape):
        return [None]
    return [tuple(_scaled(size, scale) for size, scale in zip(shape, scales.ravel().tolist(), strict=True))]


def _scaled(size: Size, scale: float) -> Size:
    if float(scale).is_integer():
        return symbolic.multiply((size, int(scale)))
    return int(size * scale) if isinstance(size, int) else symbolic.function("scale", size, scale)


Rule = Callable[[Known], Sequence[Shape | None]]
_KEEP_SHAPE = (
    "Abs", "BatchNormalization", "Cast", "CastLike", "Ceil", "Clip", "Cos", "CumSum", "DequantizeLinear", "Dropout",
    "Elu", "Erf", "Exp", "EyeLike",
    "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "IsNaN",
    "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not", "RMSNormalization",
    "QuantizeLinear", "Reciprocal", "Relu", "Round", "ScatterElements", "ScatterND", "Selu", "Sigmoid", "Sign",
    "SimplifiedLayerNormalization", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "SwiGLU", "Swish", "Tanh",
    "Trilu",
)  # fmt: skip
_BROADCAST = (
    "Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip
_REDUCE = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")


def _skip(known: Known) -> list[Shape | None]:
    """A normalisation that also returns the sum that it normalises."""
    return [known.shape(0), None, None, known.shape(0)][: len(known.node.outputs)]


def _fused_matmul(known: Known) -> list[Shape | None]:
    lhs, rhs, attrs = known.shape(0), known.shape(1), known.node.attrs
    if lhs is None or rhs is None or attrs.get("transBatchA") or attrs.get("transBatchB"):
        return [None]
    flags = (attrs.get("transA"), attrs.get("transB"))
    shapes = [(*s[:-2], s[-1], s[-2]) if flag and len(s) > 1 else s for s, flag in zip((lhs, rhs), flags, strict=True)]
    return _matmul(Known(known.node, shapes, known.values))


def _half_columns(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    return [(*shape[:-1], shape[-1] // 2 if isinstance(shape[-1], int) else None) if shape else None]


def _embedding(known: Known) -> list[Shape | None]:
    ids, words = known.shape(0), known.shape(2)
    return [(*ids, words[-1]) if ids and words else None]


def _attention(known: Known) -> list[Shape | None]:
    """`[..., hidden]`: the input's rows, and a third of the columns of the packed weight where nothing else is said."""
    shape, weight, sizes = known.shape(0), known.shape(1), known.node.attrs.get("qkv_hidden_sizes")
    if not shape or not weight:
        return [None]
    columns = int(sizes[2]) if sizes else symbolic.divide(weight[-1], 3)
    heads = known.node.attrs.get("num_heads", 0)
    head = columns // heads if isinstance(columns, int) and heads else None
    present = (2, shape[0], heads, None, head) if len(shape) == 3 and heads else None
    return [(*shape[:-1], columns), present][: len(known.node.outputs)]


def _heads(known: Known) -> list[Shape | None]:
    """`[b, s, hidden]`, or `[tokens, hidden]`: the query's rows and the value's columns.

    Packed with keys and values a query is `[..., heads, 3, size]`; keys packed with values are `[b, s, heads, 2,
    size]`, and values of a cache `[b, heads, s, size]`.
    """
    query, keys, value = known.shape(0), known.shape(1), known.shape(2)
    if query is None:
        return [None]
    if value is not None and len(value) in (2, 3):
        return [(*query[:-1], value[-1])]
    if value is not None and len(value) == 4:
        return [(*query[:-1], symbolic.multiply((value[1], value[3])))]
    if len(query) > 3:
        return [(*query[:-3], symbolic.multiply((query[-3], query[-1])))]
    return [query if keys is not None and len(keys) == 5 else None]


def _grouped_heads(known: Known) -> list[Shape | None]:
    """`[b, s, hidden]`: the query's shape, or where it is packed with keys and values its share of the columns."""
    query, past, attrs = known.shape(0), known.shape(3), known.node.attrs
    if query is None:
        return [None]
    heads, groups = int(attrs.get("num_heads", 0)), int(attrs.get("kv_num_heads", 0))
    columns, total = query[-1], heads + 2 * groups
    if known.shape(1) is None and not _is_given(known.node, 1):
        columns = columns // total * heads if isinstance(columns, int) and total else None
    size = past[-1] if past is not None else columns // heads if isinstance(columns, int) and heads else None
    present: Shape | None = (query[0], groups or None, None, size)
    return [(*query[:-1], columns), present, present][: len(known.node.outputs)]


def _is_given(node: gs.Node, index: int) -> bool:
    return index < len(node.inputs) and not node.inputs[index].is_empty()


def _rotated(known: Known) -> list[Shape | None]:
    return [known.shape(1), known.shape(3)][: len(known.node.outputs)]


def _with_sum(known: Known) -> list[Shape | None]:
    return [known.shape(0)] * len(known.node.outputs)


def _with_state(known: Known) -> list[Shape | None]:
    """A convolution of channels over time, as long as its input; the columns before it come again."""
    return [known.shape(0), known.shape(3)][: len(known.node.outputs)]


def _quantized_columns(known: Known) -> list[Shape | None]:
    shape = known.shape(0)
    return [(*shape[:-1], int(known.node.attrs["N"])) if shape else None]


def _gathered_blocks(known: Known) -> list[Shape | None]:
    """Of a matrix `[rows, width]` in blocks of its rows: `[ids ..., width]`, also where bytes hold several numbers."""
    data, ids, scales, attrs = known.shape(0), known.shape(1), known.shape(2), known.node.attrs
    if data is None or ids is None or scales is None or len(data) != len(scales):
        return [None]
    rows, blocked = (
        int(attrs.get(name, default)) % len(data) for name, default in (("gather_axis", 0), ("quantize_axis", 1))
    )
    numbers = [*data]
    numbers[blocked] = _numbers_in_blocks(data[blocked], scales[blocked], known.node)
    return [(*numbers[:rows], *ids, *numbers[rows + 1 :])]


def _numbers_in_blocks(elements: Size, blocks: Size, node: gs.Node) -> Size:
    """How many numbers as many elements hold that have so many blocks: as many, or of bytes more.

    Only of small tensors a rule sees whether they are bytes: None of others where there is one block for either.
    """
    if not isinstance(elements, int) or not isinstance(blocks, int):
        return None
    size, stored = int(node.attrs.get("block_size", 128)), node.inputs[0]
    counts = {elements, elements * 8 // int(node.attrs.get("bits", 4))}
    if isinstance(stored, gs.Constant):
        counts = {max(counts) if stored.dtype == np.uint8 else elements}
    fitting = [count for count in counts if -(-count // size) == blocks]
    return fitting[0] if len(fitting) == 1 else None


def _with_scale(known: Known) -> list[Shape | None]:
    """Integers, and the scale and the zero point of all of them."""
    return [known.shape(0), (), ()]


def _of_integers(rule: Rule) -> Rule:
    """What a rule says of two factors where each has its scale and its zero point behind it."""
    return lambda known: rule(Known(known.node, [known.shape(0), known.shape(3)], ()))


def _gate(known: Known) -> list[Shape | None]:
    """Of a gate and an up, the shape of one; of both in one tensor, half its columns."""
    return [known.shape(0)] if _is_given(known.node, 1) else _half_columns(known)


def _channels_last(known: Known) -> list[Shape | None]:
    """A convolution of `[b, h, w, c]` by a weight `[n, h, w, c]`."""
    shape, weight = known.shape(0), known.shape(1)
    if shape is None or weight is None or len(shape) != len(weight):
        return [None]
    moved = (shape[0], shape[-1], *shape[1:-1])
    (made,) = _convolution(Known(known.node, [moved, (weight[0], weight[-1], *weight[1:-1])], ()))
    return [None if made is None else (made[0], *made[2:], made[1])]


_MICROSOFT: dict[str, Rule] = {
    **dict.fromkeys(("BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "GroupNorm"), _same),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _same),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), _matmul),
    **dict.fromkeys(("MultiHeadAttention", "PackedMultiHeadAttention"), _heads),
    **dict.fromkeys(("Attention", "PackedAttention", "QAttention"), _attention),
    **dict.fromkeys(("EmbedLayerNormalization", "QEmbedLayerNormalization"), _embedding),
    **dict.fromkeys(("MatMulBnb4", "MatMulNBits"), _quantized_columns),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip),
    "BiasSplitGelu": _half_columns,
    "CausalConvWithState": _with_state,
    "DecoderMaskedMultiHeadAttention": _heads,
    "FusedConv": _convolution,
    "FusedGemm": _gemm,
    "FusedMatMul": _fused_matmul,
    "GatherBlockQuantized": _gathered_blocks,
    "GemmaRotaryEmbedding": _rotated,
    "GroupQueryAttention": _grouped_heads,
    "NhwcConv": _channels_last,
    **dict.fromkeys(("MoE", "QMoE", "QuickGelu", "RotaryEmbedding"), _same),
    "SkipGroupNorm": _with_sum,
    "SwiGLU": _gate,
}

_RULES: dict[str, Rule] = {
    **{f"com.microsoft::{op}": rule for op, rule in _MICROSOFT.items()},
    **dict.fromkeys(_KEEP_SHAPE, _same),
    **dict.fromkeys(_BROADCAST, _elementwise),
    **dict.fromkeys(_REDUCE, _reduce),
    "AveragePool": _convolution,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _convolution,
    "ConvInteger": _convolution,
    "ConvTranspose": _transposed_convolution,
    "DynamicQuantizeLinear": _with_scale,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _indices,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GlobalAveragePool": _whole_windows,
    "GlobalMaxPool": _whole_windows,
    "GridSample": _grid_sample,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MaxPool": _convolution,
    "Pad": _pad,
    "QLinearConv": _of_integers(_convolution),
    "QLinearMatMul": _of_integers(_matmul),
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Op -> shapes of its outputs; where there is no row, what ONNX's own inference tells has to do."""
