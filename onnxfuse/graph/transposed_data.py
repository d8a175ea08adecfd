"""Weights that a model stores in another order than it was read with.

One whose data lie in a file stays there until somebody reads it: the message only says in which order it is wanted, so
that no more than one weight is in memory at a time. Such a message is never written: `save_model` moves the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Perm = tuple[int, ...]
"""As numpy.transpose has it."""

_KEY = "onnxfuse.perm"
_BLOCK = 256  # rows and columns that the caches hold while they are copied


def transpose(tensor: TensorProto, perm: Perm) -> None:
    """Store a tensor in another order, in place; one in a file once that is read."""
    dims = [tensor.dims[place] for place in perm]
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor.metadata_props.add(key=_KEY, value=",".join(map(str, perm)))
        tensor.dims[:] = dims
        return
    data = _transposed(numpy_helper.to_array(tensor), perm)
    tensor.ClearField(helper.tensor_dtype_to_field(tensor.data_type))
    tensor.raw_data = data
    tensor.dims[:] = dims


def pending_order(tensor: TensorProto) -> str:
    """How a tensor's data lie in a file, if in another order than it has; else empty."""
    return next((entry.value for entry in tensor.metadata_props if entry.key == _KEY), "")


def in_order(tensor: TensorProto, data: bytes) -> bytes:
    """A tensor's data as they lie in its file, in the order that it has."""
    perm = pending_order(tensor)
    if not perm:
        return data
    places = tuple(map(int, perm.split(",")))
    shape = [tensor.dims[places.index(place)] for place in range(len(places))]
    return _transposed(np.frombuffer(data, f"u{len(data) // max(math.prod(shape), 1)}").reshape(shape), places)


def settled(tensor: TensorProto) -> None:
    """Forget that a tensor's data lay in another order: they were moved."""
    for index in reversed(range(len(tensor.metadata_props))):
        if tensor.metadata_props[index].key == _KEY:
            del tensor.metadata_props[index]


def _transposed(array: np.ndarray[Any, Any], perm: Sequence[int]) -> bytes:
    """Matrices block by block: line by line would read a cache line for each element."""
    array = array.view(f"u{array.itemsize}")
    if array.ndim != 2:
        return array.transpose(perm).tobytes()
    made = np.empty(array.shape[::-1], array.dtype)
    for row in range(0, array.shape[0], _BLOCK):
        for column in range(0, array.shape[1], _BLOCK):
            made[column : column + _BLOCK, row : row + _BLOCK] = array[row : row + _BLOCK, column : column + _BLOCK].T
    return made.tobytes()
