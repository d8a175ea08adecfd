"""How far is a value from the float64 reference, and is that near enough?

The rule is derived, never tuned. For each value, the largest and the root mean square error of the optimised model may
each be at most twice the original's own, or 4 ulp of the value's type at its root mean square magnitude, whichever is
larger. NaN and infinities must lie in the same places as in the original. Integers must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxfuse.runtime.feeds import Array

FACTOR = 2.0
ULPS = 4
# dtype -> bits of the significand after the point, smallest exponent of a normal number.
_PRECISION = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}


@dataclass(frozen=True)
class Value:
    """One value of a run: the elements, and their type in the model (a NumPy array of float32 may hold bfloat16)."""

    array: Array
    dtype: str


@dataclass(frozen=True)
class Errors:
    """Absolute errors against the float64 reference.

    Attributes:
        max: the largest.
        rms: the root mean square.
        mean: the mean.
        p999: 99.9 % of the elements have no larger one.
        ulp: the largest in units of the last place at the reference's root mean square magnitude.
        worst: coordinate of the largest.
    """

    max: float
    rms: float
    mean: float = 0.0
    p999: float = 0.0
    ulp: float = 0.0
    worst: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputCheck:
    """The verdict on one value.

    Attributes:
        name: the value's name.
        dtype: its type, `float16`.
        shape: its shape in this run.
        original: the original's errors.
        optimized: the optimised model's errors.
        tolerance: what the optimised model's largest and root mean square error may be at most.
        reason: why it failed, in one sentence; empty when it passed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    original: Errors
    optimized: Errors
    tolerance: Errors
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the optimised model is as good as the rule asks."""
        return not self.reason

    def __str__(self) -> str:
        verdict = "ok" if self.passed else f"FAILED: {self.reason}"
        lines = [f"{self.name}  {self.dtype}[{', '.join(map(str, self.shape))}]  {verdict}"]
        for kind in ("max", "rms", "mean", "p999"):
            allowed = f"  allowed {getattr(self.tolerance, kind):.3g}" if kind in ("max", "rms") else ""
            own, ours = (getattr(errors, kind) for errors in (self.original, self.optimized))
            lines.append(f"  {kind:<4} error  original {own:.3g}  optimised {ours:.3g}{allowed}")
        place = ", ".join(map(str, self.optimized.worst))
        lines.append(f"  largest at [{place}], {self.optimized.ulp:.3g} ulp; the original's {self.original.ulp:.3g}")
        return "\n".join(lines)


def check_output(name: str, original: Value, optimized: Value, exact: Value) -> OutputCheck:
    """Judge one value by the rule at the top of this file."""
    shape = original.array.shape
    if (optimized.array.shape, optimized.dtype) != (shape, original.dtype):
        found, expected = f"{optimized.dtype}{list(optimized.array.shape)}", f"{original.dtype}{list(shape)}"
        return _refused(name, original, f"the optimised output is {found}, the original's {expected}")
    if original.dtype not in _PRECISION:
        equal = np.array_equal(original.array, optimized.array)
        return _refused(name, original, "" if equal else "the values differ", 0.0 if equal else float("inf"))
    before, after, reference = (value.array.astype(np.float64) for value in (original, optimized, exact))
    if not _same_non_finite(before, after):
        return _refused(name, original, "NaN or infinity in other places than in the original")
    finite = np.isfinite(before)
    if not np.isfinite(reference[finite]).all():
        return _refused(name, original, "the float64 reference is not finite where the original is")
    unit = ulp(_rms(reference[finite]), original.dtype)
    own, ours = (_errors(_difference(values, reference, finite), finite, unit) for values in (before, after))
    tolerance = Errors(max(FACTOR * own.max, ULPS * unit), max(FACTOR * own.rms, ULPS * unit))
    return OutputCheck(name, original.dtype, shape, own, ours, tolerance, _why_not(ours, tolerance))


def ulp(magnitude: float, dtype: str) -> float:
    """The distance between neighbours of `magnitude` in a floating-point type, by name; its smallest one near zero."""
    bits, smallest = _PRECISION[dtype]
    exponent = int(np.floor(np.log2(magnitude))) if magnitude > 0 else smallest
    return float(2.0 ** (max(exponent, smallest) - bits))


def _refused(name: str, original: Value, reason: str, error: float = float("inf")) -> OutputCheck:
    """A verdict without measured errors."""
    none = Errors(0.0, 0.0)
    return OutputCheck(name, original.dtype, original.array.shape, none, Errors(error, error), none, reason)


def _same_non_finite(left: Array, right: Array) -> bool:
    """Whether NaN, infinity and minus infinity lie in the same places."""
    return bool(np.array_equal(np.where(np.isfinite(left), 0, left), np.where(np.isfinite(right), 0, right), True))


def _difference(values: Array, reference: Array, counted: Array) -> Array:
    """Zero where an element does not count: a mask's infinity has no distance from itself."""
    return np.subtract(values, reference, out=np.zeros_like(values), where=counted)


def _errors(difference: Array, counted: Array, unit: float) -> Errors:
    """Errors of the elements that count, in units and in ulps of `unit`."""
    absolute = np.abs(difference)
    if not counted.any():
        return Errors(0.0, 0.0)
    sizes = absolute[counted]
    worst = tuple(int(index) for index in np.unravel_index(int(absolute.argmax()), absolute.shape))
    largest = float(sizes.max())
    return Errors(
        largest, _rms(sizes), float(sizes.mean()), float(np.quantile(sizes, 0.999)), largest / unit, worst
    )  # fmt: skip


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _why_not(errors: Errors, tolerance: Errors) -> str:
    if errors.max > tolerance.max:
        return "the largest error is above what is allowed"
    if errors.rms > tolerance.rms:
        return "the root mean square error is above what is allowed"
    return ""
