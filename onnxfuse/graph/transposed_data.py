"""Weights that a model stores in another order than it was read with.

A message only says in which order a weight is wanted, until somebody reads it: so no more than one is in memory twice,
and a file is not read before another is written. No such message leaves this package: `save_model` writes weights in
their order, and `put_in_order` moves the bytes of those that a message holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.load import data_bytes
from onnxfuse.graph.packed_data import Packing, packed, packing_of
from onnxfuse.graph.padded_rows import PaddedRows, padded_rows_of, with_padding
from onnxfuse.graph.rows_in_turn import RowsInTurn, part_by_part, rows_in_turn_of

Perm = tuple[int, ...]
"""As numpy.transpose has it."""
Order = Perm | Packing | RowsInTurn | PaddedRows
"""How a weight is stored otherwise than the model has it."""

_KEY = "onnxfuse.perm"
_BLOCK = 256  # columns that become rows at once: what a cache line holds of each row is used while it is there


def transpose(tensor: TensorProto, order: Order) -> None:
    """Say that a tensor is wanted in another order; its bytes stay as they are.

    Raises:
        ModelError: it has none, as in a model that was stored without its weights.
    """
    if tensor.data_location != TensorProto.EXTERNAL and not tensor.HasField("raw_data"):
        if not len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))):
            raise ModelError(f"the weight {tensor.name!r} has no data: the model was stored without")
        raw = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
        tensor.ClearField(helper.tensor_dtype_to_field(tensor.data_type))
        tensor.raw_data = raw
    text = ",".join(map(str, order)) if isinstance(order, tuple) else str(order)
    tensor.metadata_props.add(key=_KEY, value=text)
    tensor.dims[:] = _stored_shape(order, tuple(tensor.dims))
    if isinstance(order, Packing):
        tensor.data_type = TensorProto.UINT8


def _stored_shape(order: Order, shape: tuple[int, ...]) -> Sequence[int]:
    """The dimensions in which a tensor is stored that the model has in others."""
    if isinstance(order, Packing):
        return order.dims
    if isinstance(order, RowsInTurn):
        return order.dims if order.turned else shape
    if isinstance(order, PaddedRows):
        return order.stored_shape(shape)
    return [shape[place] for place in order]


def put_in_order(proto: ModelProto) -> None:
    """Move the bytes of every tensor of the main graph that the message holds in another order than it has."""
    for tensor in proto.graph.initializer:
        if pending_order(tensor) and tensor.data_location != TensorProto.EXTERNAL:
            tensor.raw_data = b"".join(in_order(tensor, tensor.raw_data))
            forget_order(tensor)


def pending_order(tensor: TensorProto) -> str:
    """How a tensor's data lie, if in another order than it has; else empty."""
    return next((entry.value for entry in tensor.metadata_props if entry.key == _KEY), "")


def bytes_as_they_lie(tensor: TensorProto) -> int:
    """How many bytes a tensor's data need before they are in the order that it has."""
    padding = padded_rows_of(pending_order(tensor))
    return data_bytes(tensor) if padding is None else data_bytes(tensor) // padding.whole * padding.row


def in_order(tensor: TensorProto, data: bytes) -> Iterator[bytes]:
    """A tensor's data as they lie, in the order that it has, in pieces."""
    perm = pending_order(tensor)
    if not perm:
        yield data
        return
    packing = packing_of(perm)
    if packing is not None:
        yield packed(packing, data)
        return
    rows = rows_in_turn_of(perm)
    if rows is not None:
        yield part_by_part(rows, data)
        return
    padding = padded_rows_of(perm)
    if padding is not None:
        yield from with_padding(padding, tuple(tensor.dims), data)
        return
    yield from _permuted(tensor, data, tuple(map(int, perm.split(","))))


def _permuted(tensor: TensorProto, data: bytes, places: Perm) -> Iterator[bytes]:
    shape = [tensor.dims[places.index(place)] for place in range(len(places))]
    array = np.frombuffer(data, f"u{len(data) // max(math.prod(shape), 1)}").reshape(shape).transpose(places)
    if array.ndim > 2:
        yield array.tobytes()
        return
    for first in range(0, array.shape[0], _BLOCK):
        yield array[first : first + _BLOCK].tobytes()


def forget_order(tensor: TensorProto) -> None:
    """Forget that a tensor's data lay in another order: they were moved."""
    for index in reversed(range(len(tensor.metadata_props))):
        if tensor.metadata_props[index].key == _KEY:
            del tensor.metadata_props[index]
