"""Is the optimised model as good as the original? Both are compared with the same model in float64.

The rule is derived, never tuned. For each output, the largest and the root mean square error of the optimised model may
each be at most twice the original's own, or 4 ulp of the output's type at the output's root mean square magnitude,
whichever is larger. NaN and infinities must lie in the same places as in the original. Integers must be equal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.reference import write_float64
from onnxfuse.runtime.feeds import Array, InputSpec, from_bfloat16, input_specs, make_feeds
from onnxfuse.runtime.session import CPU, Provider, default_providers, onnxruntime, open_session

FACTOR = 2.0
ULPS = 4
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
# dtype -> bits of the significand after the point, smallest exponent of a normal number.
_PRECISION = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}


@dataclass(frozen=True)
class Errors:
    """Errors against the float64 reference: the largest, and the root mean square."""

    max: float
    rms: float


@dataclass(frozen=True)
class OutputCheck:
    """The verdict on one output.

    Attributes:
        name: the output's name.
        dtype: its type, `float16`.
        shape: its shape in this run.
        original: the original's errors.
        optimized: the optimised model's errors.
        tolerance: what the optimised model's errors may be at most.
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
        rows = (("max", self.original.max, self.optimized.max, self.tolerance.max),
                ("rms", self.original.rms, self.optimized.rms, self.tolerance.rms))  # fmt: skip
        lines = [f"  {kind} error  original {a:.3g}  optimised {b:.3g}  allowed {c:.3g}" for kind, a, b, c in rows]
        return "\n".join([f"{self.name}  {self.dtype}[{', '.join(map(str, self.shape))}]  {verdict}", *lines])


@dataclass(frozen=True)
class VerifyResult:
    """The verdict on a model.

    Attributes:
        provider: the ONNX Runtime execution provider that ran both models.
        shapes: the shape of each input.
        outputs: one check for each output.
    """

    provider: str
    shapes: dict[str, tuple[int, ...]]
    outputs: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every output passed."""
        return all(output.passed for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        outputs = [{**asdict(output), "passed": output.passed} for output in self.outputs]
        return {"passed": self.passed, "provider": self.provider, "shapes": self.shapes, "outputs": outputs}

    def __str__(self) -> str:
        inputs = "  ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.shapes.items())
        verdict = "passed" if self.passed else "FAILED"
        return "\n".join([f"{self.provider}  {inputs}", *map(str, self.outputs), f"verify {verdict}"])


def verify(
    original: Path,
    optimized: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
) -> VerifyResult:
    """Run both models in ONNX Runtime, on CUDA where it is usable, and judge the optimised one.

    The sessions live one after the other, so memory holds one model at a time.

    Args:
        original: the model before.
        optimized: the model after.
        inputs: an array for each input, by name; random ones by default.
        shapes: shapes of random inputs, by name.
        seed: of the random inputs.

    Raises:
        ModelError: a model cannot be run, or the inputs do not fit it, or the models have different outputs.
        DeviceError: ONNX Runtime is missing.
    """
    original, optimized, providers = Path(original), Path(optimized), default_providers()
    feeds, before = _run_original(original, providers, inputs, shapes, seed)
    after = _run(optimized, providers, feeds)
    exact = _run_reference(original, feeds)
    if before.keys() != after.keys():
        raise ModelError(
            f"{optimized}: its outputs are {', '.join(after)}; those of {original} are {', '.join(before)}"
        )
    checks = tuple(check_output(name, before[name], after[name], exact[name]) for name in before)
    return VerifyResult(str(providers[0]), {name: array.shape for name, array in feeds.items()}, checks)


@dataclass(frozen=True)
class Value:
    """One output of a run: the values, and their type in the model (a NumPy array of float32 may hold bfloat16)."""

    array: Array
    dtype: str


def _run_original(
    path: Path,
    providers: Sequence[Provider],
    inputs: Mapping[str, Array] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    seed: int,
) -> tuple[dict[str, Array], dict[str, Value]]:
    session = open_session(path, providers)
    specs = input_specs(session)
    feeds = make_feeds(specs, inputs, shapes, seed)
    return feeds, _outputs(session, path, specs, feeds, guessed=inputs is None)


def _run(path: Path, providers: Sequence[Provider], feeds: Mapping[str, Array]) -> dict[str, Value]:
    session = open_session(path, providers)
    specs = input_specs(session)
    try:
        checked = make_feeds(specs, feeds)
    except ModelError as error:
        raise ModelError(f"{path}: the original's inputs do not fit: {error}") from error
    return _outputs(session, path, specs, checked)


def _run_reference(original: Path, feeds: Mapping[str, Array]) -> dict[str, Value]:
    """Run in float64 on the CPU. Unoptimised: constant folding would hold every weight in double at once."""
    options = onnxruntime().SessionOptions()
    options.graph_optimization_level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    with TemporaryDirectory(prefix="onnxfuse-") as folder:
        session = open_session(write_float64(original, Path(folder)), [CPU], options)
        return _outputs(session, original, input_specs(session), feeds)


def _outputs(
    session: Any, path: Path, specs: Sequence[InputSpec], feeds: Mapping[str, Array], guessed: bool = False
) -> dict[str, Value]:
    values = {spec.name: to_ort_value(spec, feeds[spec.name]) for spec in specs}
    names = [output.name for output in session.get_outputs()]
    try:
        results = session.run_with_ort_values(names, values)
    except Exception as error:  # onnxruntime's exceptions share no base class
        used = ", ".join(f"{name} [{', '.join(map(str, array.shape))}]" for name, array in feeds.items())
        hint = f"; give the sizes that it accepts with --shape NAME=2,77,768 (tried {used})" if guessed else ""
        raise ModelError(f"{path}: the model fails to run{hint}: {error}") from error
    return {name: _from_ort_value(name, value) for name, value in zip(names, results, strict=True)}


def to_ort_value(spec: InputSpec, array: Array, device: str = "cpu") -> Any:
    """An `onnxruntime.OrtValue` for an input, on `cpu` or `cuda`."""
    runtime = onnxruntime()
    if spec.element != "bfloat16":
        return runtime.OrtValue.ortvalue_from_numpy(array, device, 0)
    if device != "cpu":
        raise DeviceError(f"input {spec.name!r}: ONNX Runtime's Python API cannot place bfloat16 on a GPU")
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)


def _from_ort_value(name: str, value: Any) -> Value:
    if not value.is_tensor():
        raise ModelError(f"output {name!r}: outputs of type {value.data_type()} are not supported")
    if value.element_type() == _BFLOAT16:
        raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return Value(from_bfloat16(np.frombuffer(raw, np.uint16).reshape(value.shape())), "bfloat16")
    array = value.numpy()
    return Value(array, array.dtype.name)


def check_output(name: str, original: Value, optimized: Value, exact: Value) -> OutputCheck:
    """Judge one output by the rule at the top of this file."""
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
    own, ours = (_errors(values[finite] - reference[finite]) for values in (before, after))
    tolerance = _tolerance(own, reference[finite], original.dtype)
    return OutputCheck(name, original.dtype, shape, own, ours, tolerance, _why_not(ours, tolerance))


def _refused(name: str, original: Value, reason: str, error: float = float("inf")) -> OutputCheck:
    """A verdict without measured errors."""
    none = Errors(0.0, 0.0)
    return OutputCheck(name, original.dtype, original.array.shape, none, Errors(error, error), none, reason)


def _same_non_finite(left: Array, right: Array) -> bool:
    """Whether NaN, infinity and minus infinity lie in the same places."""
    return bool(np.array_equal(np.where(np.isfinite(left), 0, left), np.where(np.isfinite(right), 0, right), True))


def _errors(difference: Array) -> Errors:
    if difference.size == 0:
        return Errors(0.0, 0.0)
    return Errors(float(np.abs(difference).max()), _rms(difference))


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _tolerance(own: Errors, reference: Array, dtype: str) -> Errors:
    floor = ULPS * ulp(_rms(reference), dtype)
    return Errors(max(FACTOR * own.max, floor), max(FACTOR * own.rms, floor))


def ulp(magnitude: float, dtype: str) -> float:
    """The distance between neighbours of `magnitude` in a floating-point type, by name; its smallest one near zero."""
    bits, smallest = _PRECISION[dtype]
    exponent = int(np.floor(np.log2(magnitude))) if magnitude > 0 else smallest
    return float(2.0 ** (max(exponent, smallest) - bits))


def _why_not(errors: Errors, tolerance: Errors) -> str:
    if errors.max > tolerance.max:
        return "the largest error is above what is allowed"
    if errors.rms > tolerance.rms:
        return "the root mean square error is above what is allowed"
    return ""
