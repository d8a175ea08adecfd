"""Write a model: as a whole or not at all, never over its source or a file unasked, with the files that it names.

External data that would be out of the written model's reach are copied into a folder beside it. A file of which the
model has some data in another order is not: what the model reads of it is written anew. The compiled parts of other
providers (EPContext nodes) are left as they are, so that the files that they name keep their paths relative to the
model. A device or a named pipe is written to as it is, and never replaced.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo

from onnxfuse.errors import OutputError
from onnxfuse.graph.external_data import external_tensors, locate, locate_tensor, read_data
from onnxfuse.graph.functions import walk
from onnxfuse.graph.load import Model, data_bytes, is_large, leaves_folder
from onnxfuse.graph.transposed_data import bytes_as_they_lie, forget_order, in_order, pending_order
from onnxfuse.staging import staging

LARGEST_MESSAGE = 2**31 - 2**26  # of weights: protobuf refuses 2 GB, and nodes and names need some of it
ALIGNMENT = 64  # of a tensor in the external file, so that it can be mapped
WEIGHTS = "onnxfuse.weights"  # the file of weights in a folder of copied data
STANDARD_OUTPUT = Path("/dev/stdout")
_DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/")  # names of what is open already


@dataclass(frozen=True)
class Saved:
    """What was written.

    Attributes:
        model: the model.
        copied: the files of the input that were copied beside it.
        weights: the file of its weights, where one message cannot hold them, or where files of the input hold them in
            another order.
        instead: those files of the input, which the model does not read.
    """

    model: Path
    copied: tuple[Path, ...] = ()
    weights: Path | None = None
    instead: tuple[Path, ...] = ()


def check_target(source: Path, target: Path, force: bool) -> None:
    """Refuse a target that would lose something, before any work is done.

    Raises:
        OutputError: the target is the source, exists, or its folder does not.
    """
    check_new(target, force, {"the input": source})


def check_new(path: Path, force: bool, kept: Mapping[str, Path]) -> None:
    """Refuse a file to write that is one of those to keep, which are named by what they are.

    Raises:
        OutputError: it is, it exists and may not be overwritten, or its folder does not, or cannot be written.
    """
    if path == Path("-"):
        raise OutputError("-: name a file; /dev/stdout is standard output")
    try:
        for what, other in kept.items():
            if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
                raise OutputError(f"{path}: is {what}; choose another output")
        if path.is_dir():
            raise OutputError(f"{path}: is a folder; name a file")
        if is_stream(path):
            return
        if path.exists() and not path.is_file():
            raise OutputError(f"{path}: is neither a file nor a pipe; choose another output")
        if os.path.lexists(path) and not force:
            raise OutputError(f"{path}: exists; use --force (force=True) to overwrite it")
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent}: no such folder")
        if not os.access(path.parent, os.W_OK):
            raise OutputError(f"{path.parent}: this folder cannot be written")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def is_stream(path: Path) -> bool:
    """Whether a path names a device, a pipe, or what this process has open: written to, never replaced."""
    names = (str(path.absolute()), str(path.readlink()) if path.is_symlink() else "")
    if any(name.startswith(_DESCRIPTORS) for name in names):
        return path.exists()
    mode = path.stat().st_mode if path.exists() else 0
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def make_folder(folder: Path, force: bool) -> None:
    """Make a folder for many files, or take an empty one.

    Raises:
        OutputError: there is a file, or a folder that may not be written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not force:
            raise OutputError(f"{folder}: is not empty; use --force (force=True) to write into it")
    except OSError as error:
        raise OutputError(f"{folder}: cannot be a folder of files: {error.strerror}") from error


def _data_path(target: Path) -> Path:
    """The file, or the folder, of a model's external data."""
    return target.with_name(f"{target.name}.data")


def check_files(source: Model, target: Path, force: bool, transposed: Collection[str] = ()) -> None:
    """Refuse before any work a target in the place of a file that the model names, or where such a file cannot follow.

    Args:
        source: the model.
        target: where it goes.
        force: overwrite what is in the place of its data.
        transposed: names of weights that will be stored in another order.

    Raises:
        OutputError: the target holds weights or a compiled part of the model, or another file is in a part's place.
        ModelError: weights or a part are missing, or outside the model's folder.
    """
    data = _data_path(target)
    anew = {ExternalDataInfo(tensor).location for tensor in external_tensors(source.proto) if tensor.name in transposed}
    copies = _out_of_reach(source.proto, source, target, anew)
    moves = _moves(source, target)
    contexts = list(_context_files(source.proto, source, target)) if moves else []
    has_weights = bool(anew) or _is_too_large(source.proto)
    if is_stream(target) and (copies or contexts or has_weights):
        raise OutputError(f"{target}: this model has data in files of their own, which need a folder; name a file")
    if copies or has_weights:
        check_holds_none(source, target, data)
        _check_data_path(data, bool(copies), force)
    check_holds_none(source, target)
    for path, destination in contexts:
        if destination.exists() and not force and not filecmp.cmp(path, destination, shallow=False):
            raise OutputError(
                f"{destination}: exists, and the model needs another there; use --force (force=True) to overwrite it"
            )


def _check_data_path(data: Path, is_folder: bool, force: bool) -> None:
    """Refuse what is in the place of a model's data."""
    try:
        if data.exists() and data.is_dir() != is_folder:
            raise OutputError(f"{data}: is in the place of the model's data; remove it, or choose another output")
        if os.path.lexists(data) and not force:
            raise OutputError(f"{data}: exists; use --force (force=True) to overwrite it")
    except OSError as error:
        raise OutputError(f"{data}: cannot be written: {error.strerror}") from error


def check_holds_none(source: Model, *targets: Path) -> None:
    """Refuse a file to write that holds weights or a compiled part of a model.

    Raises:
        OutputError: one does.
    """
    named = {(source.folder / each).resolve() for each in _locations(source) if not leaves_folder(each)}
    for path in targets:
        if path.resolve() in named:
            raise OutputError(f"{path}: holds data of the input; choose another output")


def save_model(proto: ModelProto, source: Model, target: Path, force: bool = False) -> Saved:
    """Write a model to `target`; a model over 2 GB gets its weights in `target`.data.

    So do the weights of a file that holds one of them in another order than the model. The message is changed where a
    weight moves to a file: its bytes are dropped as they are written.

    Args:
        proto: the model.
        source: what it was made from; its files are looked for there.
        target: where it goes.
        force: overwrite what is in the place of its data.

    Raises:
        OutputError: the disk refuses.
        ModelError: external data or compiled parts that are missing, or outside the model's folder.
    """
    anew = {ExternalDataInfo(tensor).location for tensor in external_tensors(proto) if pending_order(tensor)}
    copies = _out_of_reach(proto, source, target, anew)
    contexts = list(_context_files(proto, source, target)) if _moves(source, target) else []
    data, moved = _data_path(target), [(path, _data_path(target) / location) for location, path in copies.items()]
    moving = [tensor for tensor in external_tensors(proto) if ExternalDataInfo(tensor).location in anew]
    moving += _movable(proto) if _is_too_large(proto) else []
    weights = (data / WEIGHTS if copies else data) if moving else None
    if copies or weights is not None:
        _check_data_path(data, bool(copies), force)
    try:
        if is_stream(target):
            _write(target, _serialized(proto))
            return Saved(target)
        with staging(target.parent) as files:
            for path, destination in (*moved, *contexts):
                shutil.copyfile(path, files.place(destination))
            if weights is not None:
                location = str(weights.relative_to(target.parent))
                _write(files.place(weights), _weights(moving, source, location))
            _rename_locations(proto, {location: f"{data.name}/{location}" for location in copies})
            _write(files.place(target), _serialized(proto))
            files.publish()
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    instead = tuple(source.folder / location for location in sorted(anew))
    return Saved(target, tuple(destination for _, destination in (*moved, *contexts)), weights, instead)


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)


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
        yield from in_order(tensor, tensor.raw_data)


def _tensor_head(tensor: TensorProto) -> tuple[bytes, int]:
    """What stands before an initializer's raw data in the graph's bytes, and how many bytes of raw data follow."""
    rest, weight = TensorProto(), len(tensor.raw_data)
    _copy_fields(tensor, rest, but="raw_data")
    forget_order(rest)
    fields = rest.SerializeToString()
    if tensor.HasField("raw_data"):
        weight += data_bytes(tensor) - bytes_as_they_lie(tensor)
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
    weights = {ExternalDataInfo(tensor).location for tensor in external_tensors(source.proto)}
    return weights.union(map(_context_file, _nodes(source.proto))) - {""}


def _nodes(proto: ModelProto) -> Iterator[NodeProto]:
    return (node for body in (proto.graph, *proto.functions) for node in walk(body.node))


def _moves(source: Model, target: Path) -> bool:
    return source.path is not None and target.parent.resolve() != source.path.parent.resolve()


def _out_of_reach(proto: ModelProto, source: Model, target: Path, anew: Collection[str]) -> dict[str, Path]:
    """External data, by location, that a model at `target` could not read where they are; none that is written anew.

    They are found relative to the model, and a link out of its folder is followed for a model that is such a link only.
    """
    if source.path is None:
        return {}
    found: dict[str, Path] = {}
    for tensor in external_tensors(proto):
        location = ExternalDataInfo(tensor).location
        if location not in anew:
            found[location] = found[location] if location in found else locate_tensor(source, tensor)
    if _moves(source, target):
        return found
    folder = target.parent.resolve()
    return {location: path for location, path in found.items() if not path.is_relative_to(folder)}


def _rename_locations(proto: ModelProto, names: Mapping[str, str]) -> None:
    for entry in (entry for tensor in external_tensors(proto) for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = names.get(entry.value, entry.value)


def _context_files(proto: ModelProto, source: Model, target: Path) -> Iterator[tuple[Path, Path]]:
    """The files that EPContext nodes name, and where they go: the same path relative to the model."""
    for node in _nodes(proto):
        location = _context_file(node)
        if location:
            yield locate(source, f"the context of {node.name!r}", location), target.parent / location


def _context_file(node: NodeProto) -> str:
    """The path in `ep_cache_context`; with `embed_mode` 1, the default, the compiled part itself is there."""
    if (node.domain, node.op_type) != ("com.microsoft", "EPContext"):
        return ""
    values = {attribute.name: attribute for attribute in node.attribute}
    embedded = values["embed_mode"].i if "embed_mode" in values else 1
    return "" if embedded or "ep_cache_context" not in values else os.fsdecode(values["ep_cache_context"].s)


def _is_too_large(proto: ModelProto) -> bool:
    """Whether one message cannot hold the weights."""
    return _weight_bytes(proto) > LARGEST_MESSAGE


def _weight_bytes(proto: ModelProto) -> int:
    """Bytes of all weights in the message; ByteSize would serialise them."""
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


def _movable(proto: ModelProto) -> list[TensorProto]:
    """The weights that can move to a file."""
    return [
        tensor
        for tensor in proto.graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and tensor.HasField("raw_data") and is_large(tensor)
    ]


def _weights(tensors: Iterable[TensorProto], source: Model, location: str) -> Iterator[bytes]:
    """The weights, each on an aligned offset, what tensors share in a file once; a tensor's own bytes are dropped."""
    end, places = 0, dict[object, int]()
    for tensor in tensors:
        own = _place(tensor)
        if own is None or own not in places:
            padding = -end % ALIGNMENT
            yield bytes(padding)
            yield from in_order(tensor, read_data(source, tensor) if own else tensor.raw_data)
            places[own] = end + padding
            end += padding + data_bytes(tensor)
        _move(tensor, location, places[own])


def _place(tensor: TensorProto) -> object:
    """Equal for tensors of the same bytes of a file; None for one whose bytes are in the message."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    info = ExternalDataInfo(tensor)
    return info.location, info.offset, info.length, tuple(tensor.dims), tensor.data_type, pending_order(tensor)


def _move(tensor: TensorProto, location: str, offset: int) -> None:
    """Say where a tensor's data are now."""
    forget_order(tensor)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(data_bytes(tensor)))):
        tensor.external_data.add(key=key, value=value)


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
        if is_stream(target):
            _write(target, (data,))
            return
        with staging(target.parent) as files:
            _write(files.place(target), (data,))
            files.publish()
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
