"""The values of small tensors that the model fixes, also through shape arithmetic: what a Slice bound or a scalar is.

`Shape(t)` is known entry by entry: a dimension that only the run knows is a symbol or `None`, and arithmetic carries
both on. So `Div(Add(Gather(Shape(t), -1), 1), 2)` is known as soon as the last dimension of `t` is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph import symbolic
from onnxfuse.graph.symbolic import Size

Array = np.ndarray[Any, np.dtype[Any]]
Values = Sequence[Array | None]  # of a node's inputs
Shapes = Sequence[tuple[Size, ...] | None]
BOOL = 9  # onnx.TensorProto.BOOL
BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
MAX_ENTRIES = 64  # what a shape or a bound has at most; larger tensors are data


def stored_value(constant: gs.Constant) -> Array | None:
    """What a constant holds; bfloat16 as float32, of which onnx-graphsurgeon would warn on standard output.

    None of one that a file holds: onnx-graphsurgeon looks for it where it runs, not beside the model.
    """
    if constant.data_location == TensorProto.EXTERNAL:
        return None
    with G_LOGGER.suppress(G_LOGGER.ERROR):
        return np.asarray(constant.values)


def known_values(node: gs.Node, values: Values, shapes: Shapes) -> list[Array | None]:
    """The values of a node's outputs from what is known of its inputs; entries are None where only the run knows."""
    if node.domain not in (None, "", "ai.onnx"):
        return []
    if node.op == "Split":
        return _split(node, values)
    evaluate = _EVALUATE.get(node.op)
    value = evaluate(node, values, shapes) if evaluate is not None and len(node.outputs) == 1 else None
    return [value] if value is not None and value.size <= MAX_ENTRIES else []


def integers(value: Array | None) -> list[int] | None:
    """A fully known integer tensor, flattened."""
    if value is None or not all(isinstance(entry, int | bool) for entry in value.ravel().tolist()):
        return None
    return [int(entry) for entry in value.ravel()]


def is_complete(value: Array | None) -> bool:
    """Whether every entry is a number."""
    return value is not None and not any(entry is None or isinstance(entry, str) for entry in value.ravel().tolist())


def _constant(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if name in node.attrs:
            value = node.attrs[name]
            return stored_value(value) if isinstance(value, gs.Tensor) else np.asarray(value)
    return None


def _shape(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    sizes = shapes[0]
    if sizes is None:
        return None
    return _objects(sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))])


def _objects(entries: Sequence[object]) -> Array:
    out = np.empty(len(entries), dtype=object)
    out[:] = entries
    return out


def _gather(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    data, positions = values[:2]
    indices = integers(positions)
    if data is None or data.ndim != 1 or positions is None or indices is None:
        return None
    if any(not -data.size <= index < data.size for index in indices):
        return None
    return np.asarray(data[np.reshape(indices, positions.shape).astype(np.int64)], dtype=data.dtype)


def _slice(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    data, bounds = values[0], [integers(value) for value in values[1:]]
    if data is None or len(bounds) < 2 or None in bounds:
        return None
    starts, ends, axes, steps = (*(bound or [] for bound in bounds), None, None)[:4]
    places: list[slice] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts or (), ends or (), axes or count(), steps or repeat(1), strict=False):
        places[axis] = slice(start, end, step)
    return data[tuple(places)]


def _elementwise(apply: Callable[[Any, Any], Any]) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    def evaluate(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
        if values[0] is None or values[1] is None or max(values[0].size, values[1].size) > MAX_ENTRIES:
            return None
        if _are_floats(values[0], values[1]):  # each step is rounded, as a run rounds it
            with np.errstate(all="ignore"):
                return np.asarray(_FLOAT_STEPS[node.op](values[0], values[1])) if node.op in _FLOAT_STEPS else None
        return _pairwise(values, lambda a, b: None if a is None or b is None else _of_64_bits(apply(a, b)))

    return evaluate


def _pairwise(values: Values, apply: Callable[[Any, Any], Any]) -> Array:
    lhs, rhs = np.broadcast_arrays(*(value.astype(object) for value in values if value is not None))
    return _objects([apply(a, b) for a, b in zip(lhs.flat, rhs.flat, strict=True)]).reshape(lhs.shape)


def _are_floats(*values: Array) -> bool:
    return all(value.dtype in (np.float16, np.float32) for value in values)


_FLOAT_STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}
FLOAT_OPS = frozenset({*_FLOAT_STEPS, "Sqrt"})  # ops whose results are rounded


def _square_root(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    """Of a width of heads, by which an exporter scales the scores of attention."""
    value = values[0]
    if value is None or not _are_floats(value):
        return None
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(value))


def _rounded(apply: Callable[[Array], Array]) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    """Of floats to whole numbers, as in what is to be padded so that strides divide an image."""

    def evaluate(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
        value = values[0]
        return None if value is None or not _are_floats(value) else np.asarray(apply(value))

    return evaluate


def _clip(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    given = [value for value, tensor in zip(values, node.inputs, strict=True) if not tensor.is_empty()]
    known = [value for value in given if value is not None and value.dtype != object]
    if len(known) < len(given) or node.attrs:  # the limits were attributes once
        return None
    least, most = (*values[1:], None, None)[:2]
    return known[0] if least is None and most is None else np.asarray(np.clip(known[0], least, most))


def _negative(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value = values[0]
    if value is None or value.size > MAX_ENTRIES:
        return None
    entries = value.astype(object).ravel()
    return _objects(
        [symbolic.negative(entry) if isinstance(entry, str) else None if entry is None else -entry for entry in entries]
    ).reshape(value.shape)


def _of_64_bits(entry: Any) -> Any:
    """What a run would wrap around has no known value."""
    return None if isinstance(entry, int) and not -(2**63) <= entry < 2**63 else entry


def _sum(a: Any, b: Any) -> Any:
    return symbolic.add(a, b) if isinstance(a, str) or isinstance(b, str) else a + b


def _difference(a: Any, b: Any) -> Any:
    return symbolic.subtract(a, b) if isinstance(a, str) or isinstance(b, str) else a - b


def _product(a: Any, b: Any) -> Any:
    return symbolic.multiply((a, b)) if isinstance(a, str) or isinstance(b, str) else a * b


def _extreme(apply: Callable[[Any, Any], Any]) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    """The larger or the smaller of several sizes; of those that only the run knows, one that they all are."""

    def either(a: Any, b: Any) -> Any:
        return apply(a, b) if isinstance(a, int) and isinstance(b, int) else a if a == b else None

    step = _elementwise(either)

    def evaluate(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
        return functools.reduce(lambda found, value: step(node, (found, value), shapes), values)

    return evaluate


def _folded(apply: Callable[[Any, Any], Any], first: int) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    """Of a vector of sizes to one, as an exporter merges axes whose sizes only the run knows."""

    def evaluate(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
        value, axes = values[0], node.attrs.get("axes")
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            axes = integers(values[1]) or ()  # of no axes, or none that are known
        if value is None or value.ndim != 1 or axes not in ([0], [-1], None) or node.attrs.get("noop_with_empty_axes"):
            return None
        entry = _fold(apply, value.astype(object).tolist(), first)
        return _objects([entry]).reshape((1,) if node.attrs.get("keepdims", 1) else ())

    return evaluate


def _fold(apply: Callable[[Any, Any], Any], entries: Sequence[Any], first: int) -> Any:
    if not all(isinstance(entry, int | str) for entry in entries):
        return None
    return _of_64_bits(functools.reduce(apply, entries, first))


def _size(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    """How many elements a tensor has."""
    return None if shapes[0] is None else _objects([_fold(_product, shapes[0], 1)]).reshape(())


def _quotient(a: Any, b: Any) -> Any:
    """ONNX integer division truncates toward zero; a division by zero has no known value."""
    if isinstance(a, str) or isinstance(b, str):
        is_of_sizes = isinstance(a, int | str) and isinstance(b, int | str)
        return symbolic.quotient(a, b) if is_of_sizes else symbolic.function("/", a, b)
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a / b


def _remainder(a: Any, b: Any) -> Any:
    """How much a window lacks, by which an exporter pads an image; with the sign of the divisor."""
    return a % b if isinstance(a, int) and isinstance(b, int) and b else None


def _modulo(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    return None if node.attrs.get("fmod", 0) else _elementwise(_remainder)(node, values, shapes)


def _equality(a: Any, b: Any) -> bool | None:
    """Whether two entries are equal, as far as it is known of sizes that only the run knows."""
    if not isinstance(a, str) and not isinstance(b, str):
        return bool(a == b)
    if a == b:
        return True
    return False if symbolic.is_less(a, b) or symbolic.is_less(b, a) else None


def _comparison(
    numbers: Callable[[Any, Any], bool], sizes: Callable[[Size, Size], bool | None]
) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    """Of numbers, and of sizes of which only the run knows one or both."""

    def compare(a: Any, b: Any) -> bool | None:
        return sizes(a, b) if isinstance(a, str) or isinstance(b, str) else bool(numbers(a, b))

    return _elementwise(compare)


def _opposite(value: Any) -> bool | None:
    return None if value is None else not value


def _junction(decisive: bool) -> Callable[[gs.Node, Values, Shapes], Array | None]:
    """Of two conditions, of which one may decide alone."""

    def either(a: Any, b: Any) -> bool | None:
        known = [bool(value) for value in (a, b) if value is not None]
        return decisive if decisive in known else not decisive if len(known) == 2 else None

    def evaluate(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
        open_entry = _objects([None])
        given = [
            open_entry.reshape(shape) if value is None and shape in ((), (1,)) else value
            for value, shape in zip(values, shapes, strict=True)
        ]
        are_small = all(value is not None and value.size <= MAX_ENTRIES for value in given)
        return _pairwise(given, either) if are_small else None

    return evaluate


def _not(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value = values[0]
    if value is None or value.size > MAX_ENTRIES:
        return None
    return _objects([_opposite(entry) for entry in value.astype(object).ravel()]).reshape(value.shape)


def _where(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    known = [value.astype(object) for value in values if value is not None and value.size <= MAX_ENTRIES]
    if len(known) != 3:
        return None
    condition, yes, no = np.broadcast_arrays(*known)
    triples = zip(condition.flat, yes.flat, no.flat, strict=True)
    return _objects([None if c is None else a if c else b for c, a, b in triples]).reshape(condition.shape)


def _constant_of_shape(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    sizes = integers(values[0])
    if sizes is None or len(sizes) != 1 or sizes[0] > MAX_ENTRIES:
        return None
    filled = node.attrs.get("value")
    value = np.zeros(1) if filled is None else stored_value(filled)
    return None if value is None else np.full(sizes, value.item())


def _one_hot(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    """One row, as TorchScript says which axis is repeated."""
    places, depth, pair = integers(values[0]), integers(values[1]), values[2]
    if places is None or depth is None or pair is None or (len(places), len(depth), pair.size) != (1, 1, 2):
        return None
    if not 0 < depth[0] <= MAX_ENTRIES or node.attrs.get("axis", -1) != -1:
        return None
    off, on = pair.ravel().tolist()
    entries = [off] * depth[0]
    if -depth[0] <= places[0] < depth[0]:
        entries[places[0]] = on
    return _objects(entries)[None]


def _same(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    return values[0]


def _cast(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value, to = values[0], int(node.attrs.get("to", 0))
    if value is None or value.dtype != object:
        return None if value is None else _cast_plain(value, to)
    if to == BOOL and all(isinstance(entry, bool | None) for entry in value.ravel()):
        return value
    if to in (6, 7):
        whole = [int(each) if isinstance(each, float | np.floating) else each for each in value.ravel()]
        return _objects(whole).reshape(value.shape)
    known = integers(value)
    return None if known is None else _cast_plain(np.reshape(known, value.shape), to)


def _cast_plain(value: Array, to: int) -> Array | None:
    dtypes = {1: np.float32, 6: np.int32, 7: np.int64, 10: np.float16, 11: np.float64}
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN has no integer; a run would not warn either
        if to == BFLOAT16:
            return value.astype(helper.tensor_dtype_to_np_dtype(to)).astype(np.float32)
        return value.astype(dtypes[to]) if to in dtypes else None


def _flatten_to_vector(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value = values[0]
    return value.reshape(1) if value is not None and value.size == 1 else None


def _squeeze(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value = values[0]
    return value.reshape(()) if value is not None and value.size == 1 else None


def _reshape(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    value, target = values[0], integers(values[1])
    if value is None or target is None:
        return None
    keeps = not node.attrs.get("allowzero", 0)
    return value.reshape([value.shape[axis] if size == 0 and keeps else size for axis, size in enumerate(target)])


def _expand(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    """Of a number, as an exporter writes the bias of a convolution that has none."""
    value, target = values[0], integers(values[1])
    if value is None or target is None or math.prod(target) > MAX_ENTRIES or value.size > MAX_ENTRIES:
        return None
    return np.broadcast_to(value, np.broadcast_shapes(value.shape, tuple(target)))


def _transpose(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    return None if values[0] is None else np.transpose(values[0], node.attrs.get("perm"))


def _split(node: gs.Node, values: Values) -> list[Array | None]:
    """A shape in single sizes, as ONNX Runtime's optimiser takes it apart."""
    data = values[0]
    given = node.attrs.get("split") or (integers(values[1]) if len(values) > 1 else None)
    if data is None or data.ndim != 1 or data.size > MAX_ENTRIES or (len(values) > 1 and given is None):
        return []
    chunk = -(-data.size // len(node.outputs))
    return list(np.split(data, np.cumsum(given or [chunk] * len(node.outputs))[:-1]))


def _concat(node: gs.Node, values: Values, shapes: Shapes) -> Array | None:
    known = [value for value in values if value is not None and value.ndim == 1]
    return np.concatenate([value.astype(object) for value in known]) if len(known) == len(values) else None


_EVALUATE: dict[str, Callable[[gs.Node, Values, Shapes], Array | None]] = {
    "Constant": _constant,
    "Shape": _shape,
    "Gather": _gather,
    "Slice": _slice,
    "Add": _elementwise(_sum),
    "Sub": _elementwise(_difference),
    "Mul": _elementwise(_product),
    "Div": _elementwise(_quotient),
    "Mod": _modulo,
    "Max": _extreme(max),
    "Min": _extreme(min),
    "ReduceProd": _folded(_product, 1),
    "ReduceSum": _folded(_sum, 0),
    "Size": _size,
    "Identity": _same,
    "Neg": _negative,
    "Sqrt": _square_root,
    "Ceil": _rounded(np.ceil),
    "Floor": _rounded(np.floor),
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast,
    "Equal": _elementwise(_equality),
    "Less": _comparison(operator.lt, symbolic.is_less),
    "LessOrEqual": _comparison(operator.le, lambda a, b: _opposite(symbolic.is_less(b, a))),
    "Greater": _comparison(operator.gt, lambda a, b: symbolic.is_less(b, a)),
    "GreaterOrEqual": _comparison(operator.ge, lambda a, b: _opposite(symbolic.is_less(a, b))),
    "And": _junction(False),
    "Or": _junction(True),
    "Not": _not,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
    "OneHot": _one_hot,
    "Unsqueeze": _flatten_to_vector,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Expand": _expand,
    "Transpose": _transpose,
    "Concat": _concat,
}
