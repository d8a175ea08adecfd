"""What a kernel does beside its product, in the report's words: read from the fusion, not from the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnxfuse.dtypes import BOOL
from onnxfuse.ir.fusion import NONLINEAR, PART_AXIS, ROUNDS, Fusion, Tensor, Value, acc_name, load_name


def features_of(fusion: Fusion, has_cast: bool) -> Fusion:
    """The fusion with its features."""
    found = {name for name, holds in _FEATURES.items() if holds(fusion)}
    return replace(fusion, features=tuple(sorted(found | ({"cast"} if has_cast else set()))))


def _read_by(fusion: Fusion, ops: tuple[str, ...]) -> list[Tensor]:
    """Operands that a step of one of these ops reads directly."""
    values = {value for step in fusion.steps if step.op in ops for value in step.inputs}
    return [fusion.operands[load.operand] for index, load in enumerate(fusion.loads) if load_name(index) in values]


def _columns(fusion: Fusion) -> set[str]:
    return set(fusion.rhs[0].axes) - set(fusion.lhs.axes) - {PART_AXIS}


def _is_tile(fusion: Fusion, tensor: Tensor) -> bool:
    """Whether a tensor has every axis of the product's output that is longer than 1."""
    out = set(fusion.outs[-1].tensor.axes) - {PART_AXIS}
    needed = {axis for axis in out if fusion.size(axis) != 1}
    return needed <= set(tensor.axes) and bool((needed - _columns(fusion)) & set(tensor.axes))


def _is_residual(fusion: Fusion, tensor: Tensor) -> bool:
    """Whether a tensor joins a layer's product: what is added to scores, whose rhs has a batch, is none."""
    shared = {*fusion.lhs.axes} & {*fusion.rhs[0].axes} & {*fusion.outs[-1].tensor.axes}
    return _is_tile(fusion, tensor) and not shared


def _is_bias(fusion: Fusion, tensor: Tensor) -> bool:
    return bool(_columns(fusion) & set(tensor.axes)) and not _is_residual(fusion, tensor)


def _has_activation(fusion: Fusion) -> bool:
    """Whether a nonlinear step has the product in it; the root of a variance is none."""
    made: set[Value] = {acc_name(part) for part in range(len(fusion.parts))}
    for step in fusion.steps:
        if made.intersection(step.inputs):
            made.add(step.result)
            if step.op in NONLINEAR:
                return True
    return False


_SUMS, _PRODUCTS = ("add", "sub"), ("mul", "div")
_FEATURES: dict[str, Callable[[Fusion], bool]] = {
    "activation": _has_activation,
    "bias": lambda fusion: any(_is_bias(fusion, tensor) for tensor in _read_by(fusion, _SUMS)),
    "extra_output": lambda fusion: len(fusion.outputs) > 1,
    "gate": lambda fusion: fusion.pattern == "split_gemm",
    "mask": lambda fusion: any(tensor.dtype == BOOL for tensor in fusion.operands),
    "residual": lambda fusion: any(_is_residual(fusion, tensor) for tensor in _read_by(fusion, _SUMS)),
    "rounded": lambda fusion: any(step.op in ROUNDS for step in fusion.steps),
    "scale": lambda fusion: bool(_read_by(fusion, _PRODUCTS)),
}
"""Feature -> whether a fusion has it."""
