"""Operators that ONNX Runtime's CPU provider lacks in double, written out in operators that it has.

`float64_model.py` says which, and what it does with those that cannot be written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import erfc, exp
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

_END = 2**63 - 1

# Op -> the operator set since which it reads lists of integers, and the attributes that they are before.
_LISTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Pad": (11, ("pads",)),
    "ReduceSum": (13, ("axes",)),
    "Slice": (10, ("starts", "ends", "axes")),
    "Unsqueeze": (13, ("axes",)),
}


class Emitter:
    """Writes nodes out; a call adds one node and gives the name of its result. Numbers become double constants.

    With `tf32` the factors of a product are rounded to that. Before operator set 13 lists may be attributes.
    """

    def __init__(
        self, fresh: Iterator[str], dims: dict[str, tuple[int, ...]], tf32: bool = False, opset: int = 13
    ) -> None:
        self.fresh = fresh
        self.dims = dims
        self.opset = opset
        self.tf32 = tf32
        self.nodes: list[NodeProto] = []

    def __call__(self, op: str, *inputs: str | float | Sequence[int], **attributes: Any) -> str:
        """Add a node of one result; its name."""
        since, lists = _LISTS.get(op, (0, ()))
        if self.opset < since:
            attributes |= dict(zip(lists, inputs[1:], strict=True))
            inputs = inputs[:1]
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        result = next(self.fresh)
        self.nodes.append(helper.make_node(op, names, [result], **attributes))
        return result

    def constant(self, value: float | Sequence[int]) -> str:
        """A scalar in double, or a list of int64."""
        array = np.array(value, np.float64 if isinstance(value, int | float) else np.int64)
        return self("Constant", value=numpy_helper.from_array(array))


WriteOut = Callable[[Emitter, NodeProto], bool]
"""Emits nodes in place of one, the last of which makes its result; False where it cannot."""


def round_to_tf32(e: Emitter, x: str) -> str:
    """Emit the nearest number of 11 significant bits, TF32's precision: Veltkamp's splitting of a double.

    Of what float32 holds, halfway values go to the even neighbour.
    """
    spread = e("Mul", x, 2.0**42 + 1)
    return e("Sub", spread, e("Sub", spread, x))


@cache
def erfc_polynomial() -> tuple[float, ...]:
    """Coefficients, highest power first, of exp(z*z) * erfc(z) over s = (z - 2.5) / (z + 2.5) for z in [0, 6].

    erf(z) = 1 - exp(-z*z) * polynomial(s) is then exact to 5e-15, and beyond 6 the double nearest to erf is 1.
    """

    def scaled(s: np.ndarray) -> np.ndarray:
        return np.array([erfc(z) * exp(z * z) for z in 2.5 * (1 + s) / (1 - s)])

    fitted = Chebyshev.interpolate(scaled, 18, domain=[-1, 3.5 / 8.5])
    powers = fitted.convert(kind=Polynomial, domain=[-1, 1], window=[-1, 1])
    return tuple(float(coefficient) for coefficient in powers.coef[::-1])


def _erf(e: Emitter, x: str) -> str:
    z = e("Min", e("Abs", x), 6.0)
    s = e("Div", e("Sub", z, 2.5), e("Add", z, 2.5))
    first, *rest = erfc_polynomial()
    value = e.constant(first)
    for coefficient in rest:
        value = e("Add", e("Mul", value, s), coefficient)
    return e("Mul", e("Sign", x), e("Sub", 1.0, e("Mul", e("Exp", e("Neg", e("Mul", z, z))), value)))


def _gelu(e: Emitter, node: NodeProto) -> bool:
    x = node.input[0]
    if attribute_of(node, "approximate", b"none") == b"tanh":
        cubic = e("Add", x, e("Mul", 0.044715, e("Mul", x, e("Mul", x, x))))
        inner = e("Tanh", e("Mul", (2 / np.pi) ** 0.5, cubic))
    else:
        inner = _erf(e, e("Mul", x, 0.5**0.5))
    e("Mul", e("Mul", 0.5, x), e("Add", 1.0, inner))
    return True


def _softplus(e: Emitter, x: str) -> str:
    return e("Add", e("Max", x, 0.0), e("Log", e("Add", 1.0, e("Exp", e("Neg", e("Abs", x))))))


def _hard_sigmoid(e: Emitter, x: str, alpha: float, beta: float) -> str:
    return e("Max", 0.0, e("Min", 1.0, e("Add", e("Mul", alpha, x), beta)))


def _signs(e: Emitter, x: str, negative: Callable[[str], str]) -> str:
    """max(x, 0) + negative(min(x, 0))."""
    return e("Add", e("Max", x, 0.0), negative(e("Min", x, 0.0)))


def _exp_minus_1(e: Emitter, x: str, alpha: float) -> str:
    return e("Mul", alpha, e("Sub", e("Exp", x), 1.0))


def _always(write: Callable[[Emitter, NodeProto], str]) -> WriteOut:
    def write_out(e: Emitter, node: NodeProto) -> bool:
        return bool(write(e, node))

    return write_out


def _selu(e: Emitter, node: NodeProto) -> str:
    alpha, gamma = _number(node, "alpha", 1.67326319217681884765625), _number(node, "gamma", 1.05070102214813232421875)
    return e("Mul", gamma, _signs(e, node.input[0], lambda low: _exp_minus_1(e, low, alpha)))


def _swish(e: Emitter, node: NodeProto) -> str:
    x = node.input[0]
    return e("Mul", x, e("Sigmoid", e("Mul", _number(node, "alpha", 1.0), x)))


def _normalised(e: Emitter, x: str, groups: str, epsilon: float) -> str:
    """`[n, c, ...]` -> `[n, g, rest]`, each row of `rest` with mean 0 and variance 1."""
    rows = e("Reshape", x, e("Concat", [0], groups, [-1], axis=0))
    count = e("Cast", e("Slice", e("Shape", rows), [2], [3], [0]), to=TensorProto.DOUBLE)
    centred = e("Sub", rows, e("Div", e("ReduceSum", rows, [2]), count))
    variance = e("Div", e("ReduceSum", e("Mul", centred, centred), [2]), count)
    return e("Div", centred, e("Sqrt", e("Add", variance, epsilon)))


def _grouped(e: Emitter, node: NodeProto, groups: str) -> str:
    x, scale, bias = node.input
    rows = _normalised(e, x, groups, _number(node, "epsilon", 1e-5))
    # One scale a channel, or in GroupNormalization before opset 21 one a group: the rows follow the scale.
    rows = e("Reshape", rows, e("Concat", [0], e("Shape", scale), [-1], axis=0))
    scaled = e("Add", e("Mul", rows, e("Unsqueeze", scale, [1])), e("Unsqueeze", bias, [1]))
    return e("Reshape", scaled, e("Shape", x))


def _rms_normalization(e: Emitter, node: NodeProto) -> bool:
    axis = attribute_of(node, "axis", -1)
    if axis >= 0:
        return False
    x, scale = node.input
    axes = list(range(axis, 0))
    count = e("Cast", e("ReduceProd", e("Slice", e("Shape", x), [axis], [_END], [0])), to=TensorProto.DOUBLE)
    mean = e("Div", e("ReduceSum", e("Mul", x, x), axes), count)
    e("Mul", e("Div", x, e("Sqrt", e("Add", mean, _number(node, "epsilon", 1e-5)))), scale)
    return True


def _resize(e: Emitter, node: NodeProto) -> bool:
    """Nearest moves values without changing them, so the value and what float32 lost of it can be moved one by one."""
    crops = attribute_of(node, "coordinate_transformation_mode", b"half_pixel") == b"tf_crop_and_resize"
    if crops or attribute_of(node, "mode", b"nearest") != b"nearest":
        return False
    x, *rest = node.input
    # roi and scales are float32 by definition; sizes are integers and stay.
    rest = [e("Cast", name, to=TensorProto.FLOAT) if name and index < 2 else name for index, name in enumerate(rest)]
    attributes = {name: helper.get_attribute_value(a) for name, a in attributes_of(node).items()}
    high = e("Cast", x, to=TensorProto.FLOAT)
    low = e("Cast", e("Sub", x, e("Cast", high, to=TensorProto.DOUBLE)), to=TensorProto.FLOAT)
    halves = [e("Cast", e("Resize", half, *rest, **attributes), to=TensorProto.DOUBLE) for half in (high, low)]
    e("Add", *halves)
    return True


def _conv(e: Emitter, node: NodeProto) -> bool:
    """One matrix product for each position of the filter, summed."""
    x, weight, *bias = node.input
    kernel = list(attribute_of(node, "kernel_shape", ()) or e.dims.get(weight, ())[2:])
    if not kernel or attribute_of(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return False
    rank = len(kernel)
    pads = list(attribute_of(node, "pads", [0] * 2 * rank))
    strides = list(attribute_of(node, "strides", [1] * rank))
    steps = [strides] if max(strides) > 1 else []
    if steps and e.opset < _LISTS["Slice"][0]:  # a Slice takes no steps there
        return False
    dilations = list(attribute_of(node, "dilations", [1] * rank))
    groups, axes = [int(attribute_of(node, "group", 1))], list(range(2, rank + 2))
    padded = e("Pad", x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]) if any(pads) else x
    depth = e("Slice", e("Shape", weight), [1], [2], [0])
    rows, columns = e("Concat", groups, [-1], depth, axis=0), e("Concat", [0], groups, depth, [-1], axis=0)
    total, window = "", ""
    for place in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilations, strict=True)]
        ends = [d * (p + 1 - k) or _END for p, d, k in zip(place, dilations, kernel, strict=True)]
        window = e("Slice", padded, starts, ends, axes, *steps)
        tap = e("Slice", weight, list(place), [p + 1 for p in place], axes)
        product = e("MatMul", e("Reshape", tap, rows), e("Reshape", window, columns))
        total = e("Add", total, product) if total else product
    sizes = [e("Slice", e("Shape", tensor), [low], [high], [0]) for tensor, low, high in (
        (x, 0, 1), (weight, 0, 1), (window, 2, _END))]  # fmt: skip
    out = e("Reshape", total, e("Concat", *sizes, axis=0))
    if bias and bias[0]:
        e("Add", out, e("Unsqueeze", bias[0], [axis - 1 for axis in axes]))
    return True


def _numbers(e: Emitter, packed: str, bits: int, shape: Sequence[int]) -> str:
    """Integers of a few bits in bytes, as doubles of a shape; of 4 bits the low half of a byte comes first."""
    if bits == 8:
        return e("Reshape", e("Cast", packed, to=TensorProto.DOUBLE), shape)
    four = e("Constant", value=numpy_helper.from_array(np.array(4, np.uint8)))
    high = e("BitShift", packed, four, direction="RIGHT")
    low = e("BitShift", e("BitShift", packed, four, direction="LEFT"), four, direction="RIGHT")
    pair = [e("Reshape", e("Cast", half, to=TensorProto.DOUBLE), [-1, 1]) for half in (low, high)]
    return e("Reshape", e("Concat", *pair, axis=1), shape)


def _zeros(e: Emitter, packed: str, bits: int, shape: Sequence[int]) -> str | float:
    """The zero point of each block of a weight [n, blocks, block]; without zero points the middle of the range."""
    if not packed:
        return float(1 << (bits - 1))
    columns = _numbers(e, packed, bits, [shape[0], -1])
    return e("Reshape", e("Slice", columns, [0], [shape[1]], [1]), [*shape[:2], 1])


def _matmul_nbits(e: Emitter, node: NodeProto) -> bool:
    """(integer - zero point) * scale for each block of k, then a product."""
    x, weight, scales, zero_points, order, bias = [*node.input, "", "", ""][:6]
    n, k, block = (attribute_of(node, name, 0) for name in ("N", "K", "block_size"))
    bits = attribute_of(node, "bits", 4)
    if order or bits not in (4, 8) or block < 1 or attribute_of(node, "weight_prepacked", 0):
        return False
    shape = [n, -(-k // block), block]
    scale = e("Reshape", scales, [*shape[:2], 1])
    stored = e("Mul", e("Sub", _numbers(e, weight, bits, shape), _zeros(e, zero_points, bits, shape)), scale)
    matrix = e("Slice", e("Reshape", stored, [n, -1]), [0], [k], [1])
    factors = [x, e("Transpose", matrix, perm=[1, 0])]
    product = e("MatMul", *(round_to_tf32(e, factor) if e.tf32 else factor for factor in factors))
    return bool(e("Add", product, bias) if bias else product)


def _dequantize_blocks(e: Emitter, node: NodeProto) -> bool:
    """(integer - zero point) * scale, both repeated over blocks along an axis."""
    x, scales, *zero_points = node.input
    block, shape = attribute_of(node, "block_size", 0), e.dims.get(x)
    if not block or shape is None:
        return False
    axis = attribute_of(node, "axis", 1) % len(shape)
    numbers = e("Cast", x, to=TensorProto.DOUBLE)
    if zero_points and zero_points[0]:
        zeros = e("Cast", zero_points[0], to=TensorProto.DOUBLE)
        numbers = e("Sub", numbers, _repeated(e, zeros, shape, axis, block))
    e("Mul", numbers, _repeated(e, scales, shape, axis, block))
    return True


def _repeated(e: Emitter, value: str, shape: Sequence[int], axis: int, block: int) -> str:
    """One number a block along an axis -> one an element."""
    before, blocks, rest = shape[:axis], -(-shape[axis] // block), shape[axis + 1 :]
    row = e("Reshape", value, [*before, blocks, 1, *rest])
    wide = e("Reshape", e("Expand", row, [*before, blocks, block, *rest]), [*before, -1, *rest])
    return e("Slice", wide, [0], [shape[axis]], [axis])


WRITTEN_OUT: dict[str, WriteOut] = {
    "com.microsoft::MatMulNBits": _matmul_nbits,
    "Conv": _conv,
    "DequantizeLinear": _dequantize_blocks,
    "Elu": _always(lambda e, n: _signs(e, n.input[0], lambda low: _exp_minus_1(e, low, _number(n, "alpha", 1.0)))),
    "Erf": _always(lambda e, n: _erf(e, n.input[0])),
    "Gelu": _gelu,
    "GroupNormalization": _always(lambda e, n: _grouped(e, n, e.constant([attribute_of(n, "num_groups", 1)]))),
    "HardSigmoid": _always(
        lambda e, n: _hard_sigmoid(e, n.input[0], _number(n, "alpha", 0.2), _number(n, "beta", 0.5))
    ),
    "HardSwish": _always(lambda e, n: e("Mul", n.input[0], _hard_sigmoid(e, n.input[0], 1 / 6, 0.5))),
    "InstanceNormalization": _always(lambda e, n: _grouped(e, n, e("Shape", n.input[1]))),
    "LeakyRelu": _always(lambda e, n: _signs(e, n.input[0], lambda low: e("Mul", _number(n, "alpha", 0.01), low))),
    "Mish": _always(lambda e, n: e("Mul", n.input[0], e("Tanh", _softplus(e, n.input[0])))),
    "PRelu": _always(lambda e, n: _signs(e, n.input[0], lambda low: e("Mul", n.input[1], low))),
    "RMSNormalization": _rms_normalization,
    "Resize": _resize,
    "Selu": _always(_selu),
    "Softplus": _always(lambda e, n: _softplus(e, n.input[0])),
    "Softsign": _always(lambda e, n: e("Div", n.input[0], e("Add", 1.0, e("Abs", n.input[0])))),
    "Swish": _always(_swish),
}
"""ONNX op -> how it is written out."""


def attributes_of(node: NodeProto) -> dict[str, AttributeProto]:
    """A node's attributes by name."""
    return {attribute.name: attribute for attribute in node.attribute}


def attribute_of(node: NodeProto, name: str, default: Any) -> Any:
    """The value of a node's attribute."""
    attribute = attributes_of(node).get(name)
    return default if attribute is None else helper.get_attribute_value(attribute)


def _number(node: NodeProto, name: str, default: float) -> float:
    """A float attribute; ONNX stores defaults as float32 too, so 0.01 means the float32 nearest to it."""
    return float(np.float32(attribute_of(node, name, default)))
