"""Load an ONNX model and answer what the matcher asks of it: producers, consumers, shapes, dtypes, known values.

The weights stay in the ModelProto that the rewrite edits. Everything here works on a *skeleton*, the same graph whose
large initializers are declared as inputs, so that checking, shape inference and onnx-graphsurgeon never copy a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx import ModelProto as ModelProto  # re-exported: the rooms beyond the ONNX world name the type only
from onnx import TensorProto, helper

from onnxfuse.errors import ModelError
from onnxfuse.facts import Facts
from onnxfuse.known_values import Array, integers
from onnxfuse.symbolic import Size as Size  # re-exported: what a dimension of the graph is

LARGE_BYTES = 1024  # above this an initializer is a weight: its values are never looked at
OLDEST_OPSET = 9  # broadcasting and Slice are spelled differently before; nobody exports these any more


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
        if opset.domain in ("", "ai.onnx") and not OLDEST_OPSET <= opset.version <= newest:
            raise ModelError(
                f"{model.label}: unknown opset {opset.version}; this version of onnx knows {OLDEST_OPSET} to {newest}"
            )
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


def skeleton_of(proto: ModelProto) -> ModelProto:
    """The same model with its weights declared as graph inputs instead of stored."""
    skeleton = ModelProto(ir_version=max(proto.ir_version, 4))
    skeleton.opset_import.extend(proto.opset_import)
    skeleton.functions.extend(proto.functions)
    graph, target = proto.graph, skeleton.graph
    target.name = graph.name or "graph"
    target.node.extend(graph.node)
    target.output.extend(graph.output)
    target.value_info.extend(graph.value_info)
    target.sparse_initializer.extend(graph.sparse_initializer)
    stored = {tensor.name for tensor in graph.initializer}
    target.input.extend(value for value in graph.input if value.name not in stored)
    for tensor in graph.initializer:
        if is_large(tensor):
            target.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims)))
        else:
            target.initializer.append(tensor)
    return skeleton


def _infer(skeleton: ModelProto, label: str) -> ModelProto:
    try:
        onnx.checker.check_model(skeleton)
        return onnx.shape_inference.infer_shapes(skeleton, check_type=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{label}: invalid model: {reason[:300]}") from None


class Graph:
    """The facts of a model's main graph. Read only.

    Attributes:
        model: the model.
        nodes: the main graph's nodes; `nodes[i]` is `model.proto.graph.node[i]`.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        inferred = _infer(skeleton_of(model.proto), model.label)
        graph = gs.import_onnx(inferred)
        self.nodes: tuple[gs.Node, ...] = tuple(graph.nodes)
        self._tensors = {tensor.name: tensor for node in self.nodes for tensor in node.inputs}
        self._index = {id(node): index for index, node in enumerate(self.nodes)}
        self._outputs = {tensor.name for tensor in graph.outputs}
        self._initializers = {tensor.name for tensor in model.proto.graph.initializer}
        self._types = {
            value.name: value.type.tensor_type
            for values in (inferred.graph.input, inferred.graph.value_info, inferred.graph.output)
            for value in values
            if value.type.HasField("tensor_type")
        }
        self._small = {tensor.name: tensor for tensor in inferred.graph.initializer}
        self._facts = Facts(self.nodes, dict(self._inferred_shapes()))
        self._read_by_subgraphs = set(_names_read_by_subgraphs(inferred.graph))

    @cached_property
    def opset(self) -> int:
        """Version of the default operator set."""
        return max(
            (opset.version for opset in self.model.proto.opset_import if opset.domain in ("", "ai.onnx")), default=0
        )

    def index(self, node: gs.Node) -> int:
        """Position of a node in the main graph."""
        return self._index[id(node)]

    def tensor(self, name: str) -> gs.Tensor:
        """A value that some node of the main graph reads."""
        return self._tensors[name]

    def is_escaping(self, name: str) -> bool:
        """Whether a value is read by more than the main graph's nodes: a graph output, or read in a branch or loop."""
        return name in self._outputs or name in self._read_by_subgraphs

    def is_read_by_subgraphs(self, name: str) -> bool:
        """Whether a branch or a loop body reads a value of the main graph."""
        return name in self._read_by_subgraphs

    def is_initializer(self, name: str) -> bool:
        """Whether the value is stored in the model."""
        return name in self._initializers

    def shape(self, name: str) -> tuple[Size, ...] | None:
        """Dimensions: an int, a symbol, or None where nothing is known; None for an unknown rank."""
        return self._facts.shape(name)

    def known_value(self, tensor: gs.Tensor) -> Array | None:
        """The tensor's value, its entries symbols or None where only the run knows; None where nothing is known."""
        return self._facts.value(tensor)

    def known_integers(self, tensor: gs.Tensor) -> list[int] | None:
        """A fully known integer tensor, flattened."""
        return integers(self._facts.value(tensor))

    def _inferred_shapes(self) -> Iterator[tuple[str, tuple[Size, ...]]]:
        for name, tensor_type in self._types.items():
            if tensor_type.HasField("shape"):
                yield name, tuple(_size(dim) for dim in tensor_type.shape.dim)
        for name, tensor in self._small.items():
            yield name, tuple(tensor.dims)

    def dtype(self, name: str) -> int | None:
        """TensorProto.DataType number of a value, None where unknown."""
        if name in self._small:
            return int(self._small[name].data_type)
        tensor_type = self._types.get(name)
        return int(tensor_type.elem_type) or None if tensor_type is not None else None


def _size(dim: onnx.TensorShapeProto.Dimension) -> Size:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None


def _names_read_by_subgraphs(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _all_reads(inner)


def _all_reads(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
    yield from _names_read_by_subgraphs(graph)


Signature = tuple[str, int, tuple[Size, ...] | None]
"""Name, ONNX element type and dimensions; None where the rank is unknown."""


def signature(model: Model) -> tuple[list[Signature], list[Signature]]:
    """A model's inputs, without initializers that are listed among them, and its outputs."""
    stored = {tensor.name for tensor in model.proto.graph.initializer}
    inputs = [value for value in model.proto.graph.input if value.name not in stored]
    return [_signature(value) for value in inputs], [_signature(value) for value in model.proto.graph.output]


def _signature(value: onnx.ValueInfoProto) -> Signature:
    tensor = value.type.tensor_type
    dims = tuple(map(_size, tensor.shape.dim)) if tensor.HasField("shape") else None
    return value.name, tensor.elem_type, dims


def node_label(node: gs.Node) -> str:
    """A node's name, or its first output's where it has none."""
    return str(node.name or node.outputs[0].name)
