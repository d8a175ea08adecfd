"""How far is a value from the float64 reference, and is that near enough?

The rule is derived, never tuned. For each value, the largest and the root mean square error of the optimised model may
each be at most the largest of:

- twice the original's own;
- where fused nodes compute fp32 products in TF32, twice the error of TF32: how far the float64 reference moves when
  both factors of each of the original's fp32 products are rounded to TF32. At small sizes ONNX Runtime multiplies in
  full fp32, so the original's own error says nothing of it;
- 4 ulp of the value's type at its root mean square magnitude.

Twice the larger of two errors is no less than their sum, so that a model which has both passes. NaN and infinities must
lie in the same places as in the original. Integers must be equal.

An element of its own is never refused for 2 ulp of itself, half of one for its rounding and for that of each of three
numbers it is the sum of: where one number is a hundred times all others, as in the hidden states of LLMs, the largest
error is that number's, and what the original's roundings of it come to is luck.

Of few numbers neither error says much: of two sets of four independent errors of one size, the one is twice the other
one time in eight. Values of fewer than ENOUGH elements are judged with those of the other runs: of 32 it is one in 200.

Elements that the original puts in the top binade of the type are judged by the same rule apart from all others: they
hold the type's lowest or largest number, which masks write, and beside its ulp no error of a result would count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.runtime.feeds import Array

FACTOR = 2.0
ENOUGH = 32
ULPS = 4
OWN_ULPS = 2
BY_ORIGINAL, BY_TF32, BY_ULP = "twice the original's own", "twice the error of TF32", f"{ULPS} ulp"
BY_NUMBER = f"{OWN_ULPS} ulp of the number itself"
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
class Tolerance:
    """What the optimised model's errors may be at most.

    Attributes:
        max: the largest; that of the element with the largest error, where elements differ in it.
        rms: the root mean square.
        max_term: which term of the rule the first is, in words.
        rms_term: which the second is.
    """

    max: float = 0.0
    rms: float = 0.0
    max_term: str = ""
    rms_term: str = ""


@dataclass(frozen=True)
class OutputCheck:
    """The verdict on one value.

    Attributes:
        name: the value's name.
        dtype: its type, `float16`.
        shape: its shape in this run.
        original: the original's errors, outside of the type's top binade unless `reason` is of that; None, as the next
            two, where the values could not be compared, so that nothing was measured.
        optimized: the optimised model's errors, at the same elements; the largest of those that are refused, if one is.
        tolerance: what the latter may be at most.
        reason: why it failed, in one sentence; empty when it passed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    original: Errors | None
    optimized: Errors | None
    tolerance: Tolerance | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the optimised model is as good as the rule asks."""
        return not self.reason

    def __str__(self) -> str:
        verdict = "ok" if self.passed else f"FAILED: {self.reason}"
        head = f"{self.name}  {self.dtype}[{', '.join(map(str, self.shape))}]  {verdict}"
        if self.original is None or self.optimized is None or self.tolerance is None:
            return head
        return "\n".join([head, *_figures(self.original, self.optimized, self.tolerance)])


def _figures(original: Errors, optimized: Errors, tolerance: Tolerance) -> list[str]:
    """What was measured, as lines of text."""
    lines = []
    for kind in ("max", "rms", "mean", "p999"):
        allowed = _allowed(tolerance, kind) if kind in ("max", "rms") else ""
        own, ours = (getattr(errors, kind) for errors in (original, optimized))
        lines.append(f"  {kind:<4} error  original {own:.3g}  optimised {ours:.3g}{allowed}")
    place = f" at [{', '.join(map(str, optimized.worst))}]," if optimized.worst else ""
    return [*lines, f"  largest{place} {optimized.ulp:.3g} ulp; the original's {original.ulp:.3g}"]


def _allowed(tolerance: Tolerance, kind: str) -> str:
    term = getattr(tolerance, f"{kind}_term")
    return f"  allowed {getattr(tolerance, kind):.3g}{f' ({term})' if term else ''}"


def check_output(
    name: str, original: Value, optimized: Value, exact: Value, in_tf32: Value | None = None
) -> OutputCheck:
    """Judge one value by the rule at the top of this file.

    Args:
        name: what the verdict calls it.
        original: the original's, floats or integers `[...]`.
        optimized: the optimised model's.
        exact: the float64 reference's.
        in_tf32: what the float64 reference makes of rounded factors, where TF32 is allowed.
    """
    shape = original.array.shape
    if (optimized.array.shape, optimized.dtype) != (shape, original.dtype):
        found, expected = f"{optimized.dtype}{list(optimized.array.shape)}", f"{original.dtype}{list(shape)}"
        return _refused(name, original, f"the optimised output is {found}, the original's {expected}")
    if original.dtype not in _PRECISION:
        if not np.array_equal(original.array, optimized.array):
            return _refused(name, original, "the values differ")
        return OutputCheck(name, original.dtype, shape, Errors(0.0, 0.0), Errors(0.0, 0.0), Tolerance())
    before, after, reference = (value.array.astype(np.float64) for value in (original, optimized, exact))
    if not _same_non_finite(before, after):
        return _refused(name, original, "NaN or infinity in other places than in the original")
    finite = np.isfinite(before)
    if not np.isfinite(reference[finite]).all():
        return _refused(name, original, "the float64 reference is not finite where the original is")
    rounded = reference if in_tf32 is None else in_tf32.array
    top = finite & (np.abs(before) >= _top_binade(original.dtype))
    others, highest = (_judge(before, after, reference, rounded, each, original.dtype) for each in (finite & ~top, top))
    reason, beside = (_why_not(ours, tolerance) for _, ours, tolerance in (others, highest))
    if beside and not reason:
        return OutputCheck(name, original.dtype, shape, *highest, f"near the type's largest number {beside}")
    return OutputCheck(name, original.dtype, shape, *others, reason)


def check_together(checks: Sequence[OutputCheck], *values: Sequence[Value | None]) -> list[OutputCheck]:
    """Judge one value of several runs, of few elements each, by all of them; each gets the verdict on all.

    Args:
        checks: of each run by itself, of which none is refused.
        values: the original's of each run, the optimised model's, the reference's, and that of rounded factors or None.
    """
    before, after, exact, rounded = (_together(each) for each in values)
    assert before is not None
    assert after is not None
    assert exact is not None
    every = check_output(checks[0].name, before, after, exact, rounded)
    own, ours = (replace(errors, worst=()) for errors in (every.original, every.optimized) if errors is not None)
    return [replace(every, original=own, optimized=ours, shape=check.shape) for check in checks]


def _together(values: Sequence[Value | None]) -> Value | None:
    arrays = [np.ravel(value.array) for value in values if value is not None]
    first = values[0]
    return None if first is None else Value(np.concatenate(arrays), first.dtype)


def _judge(
    before: Array, after: Array, reference: Array, rounded: Array, counted: Array, dtype: str
) -> tuple[Errors, Errors, Tolerance]:
    """The original's and the optimised model's errors, and what the latter may be, over the elements that count."""
    unit = ulp(_rms(reference[counted]), dtype)
    own, ours = (_errors(_difference(values, reference, counted), counted, unit) for values in (before, after))
    known = counted & np.isfinite(rounded)  # an infinity that is a factor has no splitting
    tf32 = _errors(_difference(rounded, reference, known), known, unit)
    near = ULPS * unit
    (largest, max_term), (rms, rms_term) = (
        max((near, BY_ULP), (FACTOR * mine, BY_ORIGINAL), (FACTOR * theirs, BY_TF32), key=lambda term: term[0])
        for mine, theirs in ((own.max, tf32.max), (own.rms, tf32.rms))
    )
    tolerance = Tolerance(largest, rms, max_term, rms_term)
    if ours.max <= largest:
        return own, ours, tolerance
    return own, *_by_number(ours, tolerance, after, reference, counted, dtype)


def _by_number(
    ours: Errors, tolerance: Tolerance, after: Array, reference: Array, counted: Array, dtype: str
) -> tuple[Errors, Tolerance]:
    """What is reported of errors above the tolerance: the largest that is no more of its number's own last places."""
    own_places = OWN_ULPS * _ulps(reference, dtype)
    difference = _difference(after, reference, counted)
    refused = counted & (np.abs(difference) > np.maximum(own_places, tolerance.max))
    if not refused.any():
        return ours, replace(tolerance, max=float(own_places[ours.worst]), max_term=BY_NUMBER)
    worst = _errors(np.where(refused, difference, 0), counted, ours.max)
    return replace(ours, max=worst.max, ulp=worst.ulp * ours.ulp, worst=worst.worst), tolerance


def _ulps(values: Array, dtype: str) -> Array:
    """Of each number the distance to its neighbour; `[...]`."""
    bits, smallest = _PRECISION[dtype]
    exponents = np.where(values == 0, smallest, np.frexp(values)[1] - 1)
    places: Array = np.ldexp(1.0, np.maximum(exponents, smallest) - bits)
    return places


def ulp(magnitude: float, dtype: str) -> float:
    """The distance between neighbours of `magnitude` in a floating-point type, by name; its smallest one near zero."""
    return float(_ulps(np.array(magnitude), dtype))


def _top_binade(dtype: str) -> float:
    """The smallest number of the type's largest exponent."""
    return float(2.0 ** (1 - _PRECISION[dtype][1]))


def _refused(name: str, original: Value, reason: str) -> OutputCheck:
    """A verdict without measured errors."""
    return OutputCheck(name, original.dtype, original.array.shape, None, None, None, reason)


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
    largest = float(np.abs(values).max(initial=0.0))  # whose square may be no float64
    return largest * float(np.sqrt(np.mean(np.square(values / largest)))) if largest else 0.0


def _why_not(errors: Errors, tolerance: Tolerance) -> str:
    if errors.max > tolerance.max:
        return f"the largest error is above what is allowed, {tolerance.max_term}"
    if errors.rms > tolerance.rms:
        return f"the root mean square error is above what is allowed, {tolerance.rms_term}"
    return ""
