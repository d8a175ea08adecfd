"""What goes into a session and what comes out: tensors of every type, and the tensors inside sequences and maps."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.errors import ModelError
from onnxfuse.runtime.accuracy import Value
from onnxfuse.runtime.feeds import STRING, Array, InputSpec, from_bfloat16, input_specs
from onnxfuse.runtime.session import onnxruntime

BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
_ELEMENT = re.compile(r"tensor\((\w+)\)")
_NUMPY = {"float": "float32", "double": "float64"}  # where ONNX Runtime's name of a type is not NumPy's


def to_ort_value(spec: InputSpec, array: Array) -> Any:
    """An `onnxruntime.OrtValue` for an input, on the CPU; text is left as it is, which no OrtValue can be made of."""
    runtime = onnxruntime()
    if spec.element == STRING:
        return array
    if spec.element != "bfloat16":
        return runtime.OrtValue.ortvalue_from_numpy(array)
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)


def run(session: Any, path: Path, feeds: Any, hint: str = "") -> dict[str, Value]:
    """The tensors that a run makes, by name; those inside a sequence or map are named by their place in it.

    Args:
        session: an `onnxruntime.InferenceSession`.
        path: what errors call the model.
        feeds: an array for each input.
        hint: what to do about a run that fails, in words.

    Raises:
        ModelError: the run fails.
    """
    specs, outputs = input_specs(session), session.get_outputs()
    values = {spec.name: to_ort_value(spec, feeds[spec.name]) for spec in specs}
    names = [output.name for output in outputs]
    dense = all(_is_numeric(output.type) for output in outputs) and all(spec.element != STRING for spec in specs)
    try:
        results = (session.run_with_ort_values if dense else session.run)(names, values)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(f"{path}: the model fails to run{hint}: {error}") from error
    found = zip(names, (output.type for output in outputs), results, strict=True)
    return dict(pair for name, kind, result in found for pair in _tensors(name, kind, result))


def _is_numeric(kind: str) -> bool:
    return kind.startswith("tensor(") and kind != f"tensor({STRING})"


def _tensors(name: str, kind: str, value: Any) -> Iterator[tuple[str, Value]]:
    """The tensors of a value."""
    if isinstance(value, dict):
        yield from _columns(name, kind, [value])
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        yield from _columns(name, kind, value)
    elif isinstance(value, list):
        yield f"{name} length", Value(np.array(len(value)), "int64")
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", kind, each)
    elif isinstance(value, np.ndarray):
        yield name, Value(value, _dtype(kind))
    elif value is None:
        yield f"{name} length", Value(np.array(0), "int64")
    elif np.isscalar(value):
        yield name, Value(np.array(value), _dtype(kind))
    else:
        yield name, _of_ort_value(value)


def _columns(name: str, kind: str, rows: list[dict[Any, Any]]) -> Iterator[tuple[str, Value]]:
    """Maps, as the scores of some rows by class: the keys, and the values of all rows under each."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    yield f"{name} keys", Value(np.array([str(key) for key in keys]), STRING)
    for key in keys:
        values = np.array([row.get(key, np.nan) for row in rows])
        dtype = _dtype(kind)
        yield f"{name}[{key!r}]", Value(values.astype(dtype) if dtype.startswith("float") else values, dtype)


def _dtype(kind: str) -> str:
    """The innermost type of tensor, by NumPy's name."""
    found = _ELEMENT.search(kind)
    element = found[1] if found else ""
    return _NUMPY.get(element, element)


def _of_ort_value(value: Any) -> Value:
    if value.element_type() == BFLOAT16:
        raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return Value(from_bfloat16(np.frombuffer(raw, np.uint16).reshape(value.shape())), "bfloat16")
    array = value.numpy()
    return Value(array, array.dtype.name)
