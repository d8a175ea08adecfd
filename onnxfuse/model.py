"""Read and check an ONNX model; external data stays in its files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto as ModelProto  # re-exported: the rooms beyond the ONNX world name the type only
from onnx import TensorProto, helper

from onnxfuse.errors import ModelError

LARGE_BYTES = 1024  # above this an initializer is a weight: its values are never looked at


@dataclass(frozen=True)
class Model:
    """A model as it was read; no stage before the rewrite changes `proto`."""

    proto: ModelProto
    path: Path | None

    @property
    def label(self) -> str:
        """What messages call the model."""
        return str(self.path) if self.path else "model"

    @property
    def folder(self) -> Path:
        """The folder that external data is relative to."""
        return self.path.parent if self.path else Path()


def load_model(source: str | Path | ModelProto) -> Model:
    """Read and check a model; external data stays in its files.

    Raises:
        ModelError: missing, truncated, not ONNX, or invalid; the message names the file and the fault.
    """
    if isinstance(source, ModelProto):
        own = ModelProto()
        own.CopyFrom(source)  # the rewrite edits in place, and the caller's message is the caller's
        model = Model(own, None)
    else:
        path = Path(source)
        model = Model(_parse(path), path)
    _check(model)
    return model


def _parse(path: Path) -> ModelProto:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    proto = ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        raise ModelError(f"{path}: not an ONNX model, or the file is truncated") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return proto


def _check(model: Model) -> None:
    proto = model.proto
    if not proto.opset_import or not proto.HasField("graph") or not proto.graph.output:
        raise ModelError(f"{model.label}: not an ONNX model: it has no operator set or no graph output")
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not 1 <= opset.version <= newest:
            raise ModelError(f"{model.label}: unknown opset {opset.version}; this version of onnx knows 1 to {newest}")
    _check_order(model)


def _check_order(model: Model) -> None:
    """ONNX wants every node behind the nodes that it reads; a cycle can never be put in such an order."""
    graph = model.proto.graph
    available = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    available |= {tensor.values.name for tensor in graph.sparse_initializer} | {""}
    produced = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            if name in available:
                continue
            label = node.name or f"{node.op_type} that makes {node.output[0] if node.output else '?'}"
            if name in produced:
                raise ModelError(
                    f"{model.label}: node {label!r} reads {name!r} before it is made: a cycle, or nodes out of order"
                )
            raise ModelError(f"{model.label}: node {label!r} reads {name!r}, which nothing makes")
        available.update(node.output)
    for value in graph.output:
        if value.name not in available:
            raise ModelError(f"{model.label}: nothing makes the graph output {value.name!r}")


def _element_bytes(tensor: TensorProto) -> int:
    return int(np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)


def is_large(tensor: TensorProto) -> bool:
    """Whether an initializer is a weight, or one whose values are not in the file."""
    if tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        return False
    in_file = tensor.data_location != TensorProto.EXTERNAL and (
        tensor.raw_data or tensor.float_data or tensor.int32_data or tensor.int64_data or tensor.double_data
        or tensor.uint64_data or 0 in tensor.dims
    )  # fmt: skip
    return not in_file or math.prod(tensor.dims) * _element_bytes(tensor) > LARGE_BYTES
