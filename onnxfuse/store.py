"""Write a model: atomically, never over its source or an existing file unasked, with the files that it names.

External data moves into a folder beside the model. The compiled parts of other providers (EPContext nodes) are left
as they are, so that the files that they name keep their paths relative to the model.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, set_external_data

from onnxfuse.errors import ModelError, OutputError
from onnxfuse.inline import walk
from onnxfuse.model import Model, is_large, leaves_folder, tensors

LARGEST_MESSAGE = 2**31 - 2**26  # of weights: protobuf refuses 2 GB, and nodes and names need some of it
ALIGNMENT = 64  # of a tensor in the external file, so that it can be mapped


def check_target(source: Path, target: Path, force: bool) -> None:
    """Refuse a target that would lose something, before any work is done.

    Raises:
        OutputError: the target is the source, exists, or its folder does not.
    """
    check_new(target, force, {"the input": source})
    if _data_path(target).exists() and not force:
        raise OutputError(f"{_data_path(target)}: exists; use --force to overwrite it")


def check_new(path: Path, force: bool, kept: Mapping[str, Path]) -> None:
    """Refuse a file to write that is one of those to keep, which are named by what they are.

    Raises:
        OutputError: it is, it exists and may not be overwritten, or its folder does not.
    """
    try:
        for what, other in kept.items():
            if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
                raise OutputError(f"{path}: is {what}; choose another output")
        if path.is_dir():
            raise OutputError(f"{path}: is a folder; name a file")
        if path.exists() and not force:
            raise OutputError(f"{path}: exists; use --force to overwrite it")
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent}: no such folder")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def make_folder(folder: Path, force: bool) -> None:
    """Make a folder for many files, or take an empty one.

    Raises:
        OutputError: there is a file, or a folder that may not be written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not force:
            raise OutputError(f"{folder}: is not empty; use --force to write into it")
    except OSError as error:
        raise OutputError(f"{folder}: cannot be a folder of files: {error.strerror}") from error


def _data_path(target: Path) -> Path:
    """The file, or the folder, of a model's external data."""
    return target.with_name(f"{target.name}.data")


def check_files(source: Model, target: Path, force: bool) -> None:
    """Refuse before any work a target in the place of a file that the model names, or where such a file cannot follow.

    Raises:
        OutputError: the target holds weights or a compiled part of the model, or another file is in a part's place.
        ModelError: a part is missing, or outside the model's folder.
    """
    check_holds_none(source, target, _data_path(target))
    if not _moves(source, target):
        return
    for path, destination in _context_files(source.proto, source, target):
        if destination.exists() and not force and not filecmp.cmp(path, destination, shallow=False):
            raise OutputError(f"{destination}: exists, and the model needs another there; use --force to overwrite it")


def check_holds_none(source: Model, *targets: Path) -> None:
    """Refuse a file to write that holds weights or a compiled part of a model.

    Raises:
        OutputError: one does.
    """
    named = {(source.folder / each).resolve() for each in _locations(source) if not leaves_folder(each)}
    for path in targets:
        if path.resolve() in named:
            raise OutputError(f"{path}: holds data of the input; choose another output")


def save_model(proto: ModelProto, source: Model, target: Path) -> None:
    """Write a model to `target`; a model over 2 GB gets its weights in `target`.data.

    The message is changed where a weight moves to a file: its bytes are dropped as they are written.

    Raises:
        OutputError: the disk refuses.
        ModelError: external data or compiled parts that are missing, or outside the model's folder.
    """
    try:
        if _moves(source, target):
            _copy_external_data(proto, source, target)
            for path, destination in _context_files(proto, source, target):
                _copy_file(path, destination)
        if _weight_bytes(proto) > LARGEST_MESSAGE:
            _move_weights_out(proto, target)
        _write(target, _serialized(proto))
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error


def _write(target: Path, chunks: Iterator[bytes] | tuple[bytes, ...]) -> None:
    """All of it or nothing: a temporary file beside the target, then a rename."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _serialized(proto: ModelProto) -> Iterator[bytes]:
    """The model's bytes with one weight at a time in memory; SerializeToString would hold all of them twice more."""
    shell, graph = ModelProto(), GraphProto()
    _copy_fields(proto, shell, but="graph")
    _copy_fields(proto.graph, graph, but="initializer")
    head = graph.SerializeToString()
    tensors = [_tensor_head(tensor) for tensor in proto.graph.initializer]
    yield shell.SerializeToString()
    length = len(head) + sum(len(start) + weight for start, weight in tensors)
    yield _tag(ModelProto.GRAPH_FIELD_NUMBER) + _varint(length) + head
    for tensor, (start, _) in zip(proto.graph.initializer, tensors, strict=True):
        yield start
        yield tensor.raw_data


def _tensor_head(tensor: TensorProto) -> tuple[bytes, int]:
    """What stands before an initializer's raw data in the graph's bytes, and how many bytes of raw data follow."""
    rest = TensorProto()
    _copy_fields(tensor, rest, but="raw_data")
    fields, weight = rest.SerializeToString(), len(tensor.raw_data)
    if tensor.HasField("raw_data"):
        fields += _tag(TensorProto.RAW_DATA_FIELD_NUMBER) + _varint(weight)
    return _tag(GraphProto.INITIALIZER_FIELD_NUMBER) + _varint(len(fields) + weight) + fields, weight


def _copy_fields(source: Message, target: Message, but: str) -> None:
    for field, value in source.ListFields():
        if field.name == but:
            continue
        if isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        elif isinstance(value, str | bytes | int | float):
            setattr(target, field.name, value)
        else:
            getattr(target, field.name).extend(value)


def _tag(field: int) -> bytes:
    """Wire format of a length-delimited field: field number and type 2 (protobuf encoding specification)."""
    return _varint(field << 3 | 2)


def _varint(number: int) -> bytes:
    """Seven bits a byte, low ones first, the high bit set on all but the last byte."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _locations(source: Model) -> set[str]:
    """The files that a model from a folder names, relative to it."""
    if source.path is None:
        return set()
    external = (tensor for tensor in tensors(source.proto) if tensor.data_location == TensorProto.EXTERNAL)
    weights = {ExternalDataInfo(tensor).location for tensor in external}
    return weights.union(map(_context_file, _nodes(source.proto))) - {""}


def _nodes(proto: ModelProto) -> Iterator[NodeProto]:
    return (node for body in (proto.graph, *proto.functions) for node in walk(body.node))


def _moves(source: Model, target: Path) -> bool:
    return source.path is not None and target.parent.resolve() != source.path.parent.resolve()


def _copy_external_data(proto: ModelProto, source: Model, target: Path) -> None:
    """External data is found relative to the model, so a model in another folder takes its files along."""
    folder = _data_path(target).name
    copied: set[str] = set()
    for tensor in (tensor for tensor in tensors(proto) if tensor.data_location == TensorProto.EXTERNAL):
        info = ExternalDataInfo(tensor)
        path = _inside(source, f"the data of {tensor.name!r}", info.location)
        if info.location not in copied:
            _copy_file(path, target.parent / folder / info.location)
            copied.add(info.location)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = f"{folder}/{info.location}"


def _context_files(proto: ModelProto, source: Model, target: Path) -> Iterator[tuple[Path, Path]]:
    """The files that EPContext nodes name, and where they go: the same path relative to the model."""
    for node in _nodes(proto):
        location = _context_file(node)
        if location:
            yield _inside(source, f"the context of {node.name!r}", location), target.parent / location


def _context_file(node: NodeProto) -> str:
    """The path in `ep_cache_context`; with `embed_mode` 1, the default, the compiled part itself is there."""
    if (node.domain, node.op_type) != ("com.microsoft", "EPContext"):
        return ""
    values = {attribute.name: attribute for attribute in node.attribute}
    embedded = values["embed_mode"].i if "embed_mode" in values else 1
    return "" if embedded or "ep_cache_context" not in values else os.fsdecode(values["ep_cache_context"].s)


def _copy_file(path: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(path, temporary)
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)


def _inside(source: Model, what: str, location: str) -> Path:
    folder = source.folder.resolve()
    if leaves_folder(location) or not (path := (folder / location).resolve()).is_relative_to(folder):
        raise ModelError(f"{source.label}: {what} lies outside the model's folder: {location[:200]!r}")
    if not path.is_file():
        raise ModelError(f"{source.label}: {what} is missing: {path}")
    return path


def _weight_bytes(proto: ModelProto) -> int:
    """Bytes of all weights in the message; ByteSize would serialise them."""
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


def _move_weights_out(proto: ModelProto, target: Path) -> None:
    data = _data_path(target)
    tensors = [
        tensor
        for tensor in proto.graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and tensor.HasField("raw_data") and is_large(tensor)
    ]
    _write(data, _weights(tensors, data.name))


def _weights(tensors: list[TensorProto], location: str) -> Iterator[bytes]:
    """The weights, each on an aligned offset; a tensor's own bytes are dropped once they are written."""
    offset = 0
    for tensor in tensors:
        padding = -offset % ALIGNMENT
        length = len(tensor.raw_data)
        yield bytes(padding)
        yield tensor.raw_data
        set_external_data(tensor, location, offset + padding, length)
        tensor.ClearField("raw_data")
        offset += padding + length


def write_text(target: Path, text: str) -> None:
    """Write a small text file, all of it or nothing.

    Raises:
        OutputError: the disk refuses.
    """
    write_bytes(target, text.encode())


def write_bytes(target: Path, data: bytes) -> None:
    """Write a small file, all of it or nothing.

    Raises:
        OutputError: the disk refuses.
    """
    try:
        _write(target, (data,))
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
