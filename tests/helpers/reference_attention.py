"""A second way to compute an Attention: NumPy in float64, straight from the IR. The oracle of matching and joining."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Step, Tensor, acc_name
from tests.helpers.reference_fusion import OPS, _bind, _laid, spread

Axes = tuple[str, ...]
Sizes = dict[str, int]


def evaluate_attention(attention: Attention, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output of an attention in float64, given its inputs by name."""
    given = {name: np.asarray(value, np.float64) for name, value in values.items()}
    sizes: Sizes = {axis.name: axis.size for axis in attention.axes}
    _bind(attention, given, sizes)
    *_, columns = attention.scores
    loops = tuple(axis for dim in attention.scores for axis in dim)
    names = {acc_name(0): _product(attention.query, attention.keys, loops, given, sizes)}
    for index, load in enumerate(attention.loads):
        operand = attention.operands[load.operand]
        names[f"op{index}"] = spread(operand, given[operand.name], loops, sizes)
    with np.errstate(all="ignore"):
        score = _after(attention.steps, attention.score, names) * attention.scale
        p = _softmax(np.broadcast_to(score, [sizes[axis] for axis in loops]), len(columns))
    p = np.nan_to_num(p, nan=0.0) if attention.guarded else p
    (out,) = attention.outs
    probabilities = Tensor("p", attention.query.dtype, tuple((axis,) for axis in loops))
    acc = _product(probabilities, attention.values, out.tensor.axes, {**given, "p": p}, sizes)
    return _laid(
        out.tensor, _after(attention.result_steps, out.value, {acc_name(1): acc}), tuple(out.tensor.axes), sizes
    )


def _product(left: Tensor, right: Tensor, loops: Axes, values: Mapping[str, np.ndarray], sizes: Sizes) -> np.ndarray:
    """The sum over all axes of two tensors that no loop has."""
    every = {axis: number for number, axis in enumerate(dict.fromkeys((*loops, *left.axes, *right.axes)))}
    factors = [
        argument
        for tensor in (left, right)
        for argument in (
            values[tensor.name].reshape([sizes[axis] for axis in tensor.axes]),
            [every[axis] for axis in tensor.axes],
        )
    ]
    held = [axis for axis in loops if axis in (*left.axes, *right.axes)]
    made = np.einsum(*factors, [every[axis] for axis in held])
    return made.reshape([sizes[axis] if axis in held else 1 for axis in loops])


def _after(steps: tuple[Step, ...], value: object, names: Mapping[str, np.ndarray]) -> np.ndarray:
    known = dict(names)
    for step in steps:
        known[step.result] = OPS[step.op](*(each if isinstance(each, float) else known[each] for each in step.inputs))
    return np.asarray(known[value] if isinstance(value, str) else value)


def _softmax(score: np.ndarray, axes: int) -> np.ndarray:
    """Over the innermost axes, which the keys are."""
    over = tuple(range(score.ndim - axes, score.ndim))
    powers = np.exp(score - score.max(over, keepdims=True))
    return np.asarray(powers / powers.sum(over, keepdims=True))
