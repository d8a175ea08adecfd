"""A second way to compute a Fusion: NumPy in float64, straight from the IR. The oracle of lowering and of kernels."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from onnxfuse.ir.fusion import PART_AXIS, Fusion, Load, Pointwise, Step, Tensor
from onnxfuse.ir.normalisation import Normalisation
from tests.helpers.quantized import dequantized

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def _where(condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    return np.where(condition != 0, yes, no)


OPS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "reciprocal": np.reciprocal,
    "erf": lambda x: _erf(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0.0, -x)),
    "softplus": _softplus,
    "relu": lambda x: np.maximum(x, 0.0),
    "leaky_relu": lambda x, alpha: np.where(x < 0, alpha * x, x),
    "elu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(x), x),
    "hard_sigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0.0, 1.0),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "greater": lambda x, y: np.greater(x, y).astype(np.float64),
    "where": _where,
    "round_f32": lambda x: np.float32(x).astype(np.float64),
    "round_f16": lambda x: np.float16(x).astype(np.float64),
    "round_bf16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64),
}


def spread(tensor: Tensor, value: np.ndarray, axes: tuple[str, ...], sizes: dict[str, int]) -> np.ndarray:
    """The tensor as an array over `axes` (size 1 where it lacks one), found by splitting its dimensions into axes."""
    named = [axis for axis in tensor.axes if axis in axes or sizes[axis] != 1]  # one place of a window has a name too
    own = value.reshape([sizes[axis] for axis in named])
    order = [named.index(axis) for axis in axes if axis in named]
    own = own.transpose(order)
    return own.reshape([sizes[axis] if axis in tensor.axes else 1 for axis in axes])


def _window(tensor: Tensor, value: np.ndarray, start: int, sizes: dict[str, int]) -> np.ndarray:
    """The elements of a tensor that a fusion reads, of one that is wider than its axes."""
    if tensor.wide is None:
        return value
    dimension, size = tensor.wide
    assert value.shape[dimension] == size
    width = math.prod(sizes[axis] for axis in tensor.dims[dimension])
    assert start + width <= size, "a window ends within its dimension"
    return value.take(range(start, start + width), dimension)


def evaluate_rows(fusion: Pointwise, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a normalisation or of a rotation in float64, given its inputs by name."""
    values = {name: np.asarray(value, np.float64) for name, value in values.items()}
    sizes = {axis.name: axis.size for axis in fusion.axes}
    _bind(fusion, values, sizes)
    loops = tuple(axis for axis in fusion.operands[0].axes if axis != PART_AXIS)
    loops = (*fusion.rows, *fusion.along) if isinstance(fusion, Normalisation) else loops

    def read(load: Load) -> np.ndarray:
        tensor = fusion.operands[load.operand]
        axes = loops if load.part is None else (PART_AXIS, *loops)
        whole = spread(tensor, _window(tensor, values[tensor.name], load.start or 0, sizes), axes, sizes)
        return whole if load.part is None else whole[load.part]

    names = {f"op{index}": read(load) for index, load in enumerate(fusion.loads)}
    names |= _normals(fusion, names) if isinstance(fusion, Normalisation) else {}
    _apply(fusion.steps, names)
    return _stored(fusion, names, loops, sizes)


def _normals(fusion: Normalisation, names: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parts of the rows, normalised."""
    rows = np.stack([names[f"op{part}"] for part in range(fusion.parts)])
    together = (0, *range(1 + len(fusion.rows), rows.ndim))
    own = rows - rows.mean(together, keepdims=True) if fusion.centred else rows
    variance = np.maximum((own * own).mean(together, keepdims=True), fusion.least) + fusion.epsilon
    normal = own / (np.sqrt(variance) + fusion.added)
    return {f"acc{part}": normal[part] for part in range(fusion.parts)}


def _apply(steps: tuple[Step, ...], names: dict[str, np.ndarray]) -> None:
    with np.errstate(all="ignore"):
        for step in steps:
            inputs = [value if isinstance(value, float) else names[value] for value in step.inputs]
            names[step.result] = OPS[step.op](*inputs)


def _stored(
    fusion: Pointwise, names: dict[str, np.ndarray], loops: tuple[str, ...], sizes: dict[str, int]
) -> list[np.ndarray]:
    """What lies in the outputs."""
    stored: dict[Tensor, list[np.ndarray]] = {}
    for out in fusion.outs:
        assert out.part is None or out.part == len(stored.get(out.tensor, [])), "parts stand in order"
        full = [sizes[axis] for axis in loops]
        stored.setdefault(out.tensor, []).append(np.broadcast_to(names[out.value], full))
    return [_laid(tensor, np.stack(parts), (PART_AXIS, *loops), sizes) for tensor, parts in stored.items()]


def evaluate(fusion: Pointwise, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a fusion in float64, given its inputs by name."""
    if not isinstance(fusion, Fusion):
        return evaluate_rows(fusion, values)
    integers = values
    values = {name: np.asarray(value, np.float64) for name, value in values.items()}
    sizes = {axis.name: axis.size for axis in fusion.axes}
    _bind(fusion, values, sizes)
    out = fusion.outs[0].tensor.axes
    columns = tuple(axis for axis in fusion.rhs[0].axes if axis not in (*fusion.lhs.axes, PART_AXIS))
    contracted = tuple(axis for axis in fusion.lhs.axes if axis in fusion.rhs[0].axes and axis not in out)
    rows = tuple(axis for axis in fusion.lhs.axes if axis not in contracted)
    shared = tuple(axis for axis in rows if axis in fusion.rhs[0].axes)
    alone = tuple(axis for axis in rows if axis not in shared)
    loops = (*rows, *columns)
    repeated = tuple(axis for axis in out if axis not in (*loops, PART_AXIS))

    def read(tensor: Tensor, part: int | None, axes: tuple[str, ...], start: int | None = None) -> np.ndarray:
        value = matrix if tensor in fusion.rhs and fusion.stored else values[tensor.name]
        value = _window(tensor, value, start or 0, sizes)
        whole = spread(tensor, value, axes if part is None else (PART_AXIS, *axes), sizes)
        return whole if part is None else whole[part]

    def count(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    matrix = np.zeros(0)
    batch, k = [sizes[axis] for axis in shared], count(contracted)
    lhs = read(fusion.lhs, None, (*shared, *alone, *contracted)).reshape(*batch, count(alone), k)
    order = [(*shared, *alone, *columns).index(axis) for axis in loops]
    names: dict[str, np.ndarray] = {}
    for index, part in enumerate(fusion.parts):
        matrix = _stored_matrix(fusion, part.tensor, integers, k)
        rhs = read(fusion.rhs[part.tensor], part.part, (*shared, *contracted, *columns), part.start)
        product = lhs @ rhs.reshape(*batch, k, count(columns))
        product = product.reshape([sizes[a] for a in (*shared, *alone, *columns)]).transpose(order)
        names[f"acc{index}"] = product.reshape(*product.shape, *[1] * len(repeated))
    loops = (*loops, *repeated)
    for index, load in enumerate(fusion.loads):
        names[f"op{index}"] = read(fusion.operands[load.operand], load.part, loops, load.start)
    _apply(fusion.steps, names)
    return _stored(fusion, names, loops, sizes)


def _stored_matrix(fusion: Fusion, index: int, values: dict[str, np.ndarray], k: int) -> np.ndarray:
    """What a quantised rhs stands for, [n, k]; nothing for another one."""
    if not fusion.stored or fusion.quantization is None:
        return np.zeros(0)
    held = fusion.stored[index]
    zero_points = None if held.zero_points is None else values[held.zero_points.name]
    return dequantized(values[held.weight.name], values[held.scales.name], zero_points, k, fusion.quantization.bits)


def _bind(fusion: Pointwise, values: dict[str, np.ndarray], sizes: dict[str, int | None]) -> None:
    """Sizes that only the run knows, from the inputs' shapes."""
    for tensor in fusion.inputs:
        for dim, size in zip(tensor.dims, values[tensor.name].shape, strict=True):  # none of a window is unknown
            unknown = [axis for axis in dim if sizes[axis] is None]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // math.prod(sizes[axis] for axis in dim if axis != unknown[0])


def _laid(tensor: Tensor, value: np.ndarray, axes: tuple[str, ...], sizes: dict[str, int]) -> np.ndarray:
    """An array over `axes` in the tensor's own dimensions."""
    order = [axes.index(axis) for axis in tensor.axes]
    rest = [index for index in range(len(axes)) if index not in order]
    return value.transpose(*order, *rest).reshape([math.prod(sizes[axis] for axis in dim) for dim in tensor.dims])
