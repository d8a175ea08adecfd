"""Read and check an ONNX model; external data stays in its files."""

from __future__ import annotations

import heapq
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import GraphProto, NodeProto, TensorProto, helper
from onnx import ModelProto as ModelProto  # re-exported: the rooms beyond the ONNX world name the type only
from onnx.external_data_helper import ExternalDataInfo

from onnxfuse.errors import ModelError
from onnxfuse.graph.functions import functions_of, reads, subgraphs, walk
from onnxfuse.graph.masks_of_ones import leave_out_ones
from onnxfuse.graph.nested_slices import nest_slices
from onnxfuse.graph.own_views import give_views
from onnxfuse.graph.sizes_of_inputs import read_sizes_of_inputs
from onnxfuse.graph.unread import drop_unread_outputs

_ELEMENT_BITS = {
    int(getattr(TensorProto, name)): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if hasattr(TensorProto, name)
}
"""Of the types that share a byte; versions of onnx differ in which they know."""
OVERRIDING_IR_VERSION = 4  # before, every initializer had to be an input, and none could be overridden
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


def overridable(proto: ModelProto) -> frozenset[str]:
    """Initializers that a run may give another value: from IR version 4 on those that are inputs as well."""
    if proto.ir_version < OVERRIDING_IR_VERSION:
        return frozenset()
    stored = {tensor.name for tensor in proto.graph.initializer}
    return frozenset(value.name for value in proto.graph.input if value.name in stored)


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


OWN_DOMAINS = frozenset({"com.microsoft", "com.microsoft.nchwc"})
MOST_BYTES = 2**31 - 1  # of a message that protobuf reads; it writes larger ones
_TOO_LARGE = "over 2 GiB, which protobuf does not read; save it with its weights beside it (save_as_external_data=True)"
_UNREADABLE = "not an ONNX model, or the file is truncated"
_ORT_FORMAT = slice(4, 8)  # where a flat buffer says what it is


def _parse(path: Path) -> ModelProto:
    if path.is_dir():
        raise ModelError(f"{path}: is a folder; name a model in it")
    if not path.is_file():
        what = "is a pipe or a device, and a model is read more than once; save it" if path.exists() else "no such file"
        raise ModelError(f"{path}: {what}")
    proto = ModelProto()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if data[_ORT_FORMAT] == b"ORTM":
        raise ModelError(f"{path}: in ONNX Runtime's own format (.ort); give the ONNX model that it was made of")
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{path}: {_TOO_LARGE if len(data) > MOST_BYTES else _UNREADABLE}") from None
    return proto


def _check(model: Model) -> None:
    proto = model.proto
    broken = next(_broken_text(proto), None)
    if broken is not None:
        raise ModelError(f"{model.label}: not a valid ONNX model: {broken[:80]!r} is no UTF-8 text")
    if not proto.opset_import or not proto.HasField("graph") or not proto.graph.output:
        raise ModelError(f"{model.label}: not an ONNX model: it has no operator set or no graph output")
    _check_opsets(model)
    _import_own_domains(proto)
    _check_stored_once(model)
    _check_node_names(model, proto.graph)
    for tensor in tensors(proto):
        _check_data(model, tensor)
        _check_location(model, tensor)
    _check_nodes(model)
    put_in_order(proto.graph)
    _check_order(model)
    _check_functions(model)
    drop_unread_outputs(proto)
    nest_slices(proto.graph)
    leave_out_ones(proto.graph)
    give_views(proto.graph)
    read_sizes_of_inputs(proto.graph)


def _check_opsets(model: Model) -> None:
    newest = onnx.defs.onnx_opset_version()
    imported = {opset.version for opset in model.proto.opset_import if opset.domain in ("", "ai.onnx")}
    if len(imported) > 1:
        raise ModelError(f"{model.label}: imports ONNX's operator set in versions {sorted(imported)}; name one")
    for version in imported:
        if not 1 <= version <= newest:
            raise ModelError(f"{model.label}: unknown opset {version}; this version of onnx knows 1 to {newest}")


def _check_stored_once(model: Model) -> None:
    """ONNX's inference refuses two tensors of a name as inputs that are two, where the user sees none."""
    stored = Counter(tensor.name for tensor in model.proto.graph.initializer)
    for name, count in stored.items():
        if count > 1:
            raise ModelError(f"{model.label}: the initializer {name!r} is stored {count} times; ONNX has a name once")


def _check_node_names(model: Model, graph: GraphProto) -> None:
    """ONNX Runtime wants names apart in each graph, but for Constant nodes, which are initializers to it."""
    named: dict[str, str] = {}
    for node in graph.node:
        if node.name and node.op_type != "Constant":
            if node.name in named:
                both = f"a {named[node.name]} and a {node.op_type}"
                raise ModelError(
                    f"{model.label}: two nodes are called {node.name!r}, {both}; ONNX Runtime refuses that"
                )
            named[node.name] = node.op_type
        for _, inner in subgraphs(node):
            _check_node_names(model, inner)


def _import_own_domains(proto: ModelProto) -> None:
    """Name operator sets that ONNX Runtime knows without: its transformer optimizer names them only as it saves."""
    imported = {opset.domain for opset in proto.opset_import}
    used = {node.domain for node in walk(proto.graph.node)}
    for domain in sorted(used & OWN_DOMAINS - imported):
        proto.opset_import.append(helper.make_opsetid(domain, 1))


def _broken_text(message: Message) -> Iterator[bytes]:
    """The strings of a message that are no text: protobuf hands them out as bytes. A tensor's data are not read."""
    if isinstance(message, TensorProto):
        fields: Iterable[object] = (message.name, *message.external_data)
    else:
        fields = (
            value for field, value in message.ListFields() if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)
        )
    for value in fields:
        for each in (value,) if isinstance(value, str | bytes | Message) else cast(Iterable[object], value):
            if isinstance(each, Message):
                yield from _broken_text(each)
            elif isinstance(each, bytes):
                yield each


def _check_nodes(model: Model) -> None:
    """Attributes that ONNX's shape inference takes for granted, or passes over where a runtime refuses the model."""
    functions = (function.node for function in model.proto.functions)
    for node in (node for nodes in (model.proto.graph.node, *functions) for node in walk(nodes)):
        is_known = node.op_type in FAULTS and node.domain in ("", "ai.onnx")
        fault = FAULTS[node.op_type](node) if is_known else ""
        if fault:
            label = node.name or ", ".join(node.output)
            raise ModelError(f"{model.label}: the {node.op_type} {label!r} {fault}")


def _fault_of_split(node: NodeProto) -> str:
    """It has as many outputs as it says, or ONNX's shape inference would abort."""
    counts = [attribute.i for attribute in node.attribute if attribute.name == "num_outputs"]
    return f"has {len(node.output)} outputs and says {counts[0]}" if counts and counts != [len(node.output)] else ""


def _fault_of_transpose(node: NodeProto) -> str:
    """Each axis comes once, counted from the first."""
    perms = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm" and attribute.ints]
    broken = next((perm for perm in perms if sorted(perm) != [*range(len(perm))]), None)
    return "" if broken is None else f"has perm {broken}, which is no order of {len(broken)} axes"


FAULTS: Mapping[str, Callable[[NodeProto], str]] = {"Split": _fault_of_split, "Transpose": _fault_of_transpose}


def _check_functions(model: Model) -> None:
    try:
        functions_of(model.proto)
    except ModelError as error:
        raise ModelError(f"{model.label}: {error}") from None


def tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every dense tensor that a model stores: initializers, and what Constant nodes and other attributes hold."""
    yield from graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _held(function.node)


def graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every dense tensor that a graph, and the graphs inside, store."""
    yield from graph.initializer
    yield from _held(graph.node)


def _held(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            yield from graph_tensors(graph)


def _check_data(model: Model, tensor: TensorProto) -> None:
    """A tensor has as many bytes as its shape needs, or lies elsewhere; a reader would take what follows for data."""
    label = f"{model.label}: tensor {tensor.name!r}"
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise ModelError(f"{label} is of type {tensor.data_type}, which ONNX does not have")
    if any(not 0 <= dim < 2**63 for dim in tensor.dims) or math.prod(tensor.dims) * 16 >= 2**63:
        raise ModelError(f"{label} has an impossible shape {list(tensor.dims)[:8]}")
    if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type == TensorProto.STRING:
        return
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        _same(len(tensor.raw_data), data_bytes(tensor), "bytes", label)
        return
    field = helper.tensor_dtype_to_field(tensor.data_type)
    stored = len(getattr(tensor, field))
    if stored:
        complex_parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
        packed = 8 // _ELEMENT_BITS.get(tensor.data_type, 8)
        _same(stored, -(-count * complex_parts // packed), f"entries of {field}", label)


def data_bytes(tensor: TensorProto) -> int:
    """How many bytes a tensor's data need, by its shape and type."""
    bits = _ELEMENT_BITS.get(tensor.data_type, 8 * _element_bytes(tensor))
    return int(-(-math.prod(tensor.dims) * bits // 8))


def _check_location(model: Model, tensor: TensorProto) -> None:
    """A path that leaves the model's folder by its words; whether a link does is seen where the file is read."""
    if tensor.data_location == TensorProto.EXTERNAL:
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if leaves_folder(location):
            label = f"{model.label}: the data of {tensor.name!r}"
            raise ModelError(f"{label} lies outside the model's folder, or nowhere: {location[:200]!r}")


def leaves_folder(location: str) -> bool:
    """Whether a path that should be relative to the model leads elsewhere, or nowhere, by its words alone."""
    path = Path(os.path.normpath(location))
    return not location or "\0" in location or path.is_absolute() or path.parts[:1] == (os.pardir,)


def check_weights(model: Model) -> None:
    """Every file of external data is there and long enough, which is known before anything else is done.

    Raises:
        ModelError: one is not; the message names the file, and how many tensors lie in it.
    """
    needed: dict[str, int] = {}
    count: Counter[str] = Counter()
    for tensor in tensors(model.proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            info = ExternalDataInfo(tensor)
            needed[info.location] = max(needed.get(info.location, 0), (info.offset or 0) + (info.length or 0))
            count[info.location] += 1
    for location, end in needed.items():
        path = model.folder / location
        if not path.is_file():
            raise ModelError(
                f"{model.label}: its weights are missing: {path}, with the data of {count[location]} tensors"
            )
        if path.stat().st_size < end:
            raise ModelError(f"{model.label}: its weights are cut short: {path} ends before byte {end}")


def _same(stored: int, expected: int, what: str, label: str) -> None:
    if stored != expected:
        raise ModelError(f"{label} has {stored} {what} and its shape needs {expected}")


def put_in_order(graph: GraphProto) -> bool:
    """Put every node behind those that it reads, and else leave them as they stand; with a cycle all, and False.

    ONNX wants it so, but converters append the casts that they insert, and ONNX Runtime sorts what it loads.
    """
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs = [{makers[name] for name in reads(node) if name in makers} for node in graph.node]
    if all(index > need for index, own in enumerate(needs) for need in own):
        return True
    readers: list[list[int]] = [[] for _ in needs]
    for index, own in enumerate(needs):
        for need in own:
            readers[need].append(index)
    ready, missing = [index for index, own in enumerate(needs) if not own], [len(own) for own in needs]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    has_order = len(order) == len(needs)
    if has_order:
        nodes = list(graph.node)
        del graph.node[:]
        graph.node.extend(nodes[index] for index in order)
    return has_order


def _check_order(model: Model) -> None:
    """Every value is made before it is read; a cycle can never be put in such an order."""
    graph = model.proto.graph
    available = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    available |= {tensor.values.name for tensor in graph.sparse_initializer} | {""}
    produced = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in (name for name in node.input if name not in available):
            label = node.name or f"{node.op_type} that makes {node.output[0] if node.output else '?'}"
            why = " before it is made: a cycle" if name in produced else ", which nothing makes"
            raise ModelError(f"{model.label}: node {label!r} reads {name!r}{why}")
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
