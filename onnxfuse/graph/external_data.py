"""Where a model's external data lie, and reading them.

Links are followed as ONNX Runtime follows them: to a file in the model's folder, or, where the model itself is a
link, in the folder of the real model. So a model in the cache of the Hugging Face hub is read, whose files are links
into `blobs/`, and a link out of a downloaded folder to any file of the machine is not. `onnx.load` follows none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx import ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo

from onnxfuse.errors import ModelError
from onnxfuse.graph.load import Model, leaves_folder, load_model, tensors
from onnxfuse.graph.transposed_data import bytes_as_they_lie, forget_order, in_order


def external_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """The tensors whose data are not in the message."""
    return (tensor for tensor in tensors(proto) if tensor.data_location == TensorProto.EXTERNAL)


def data_files(proto: ModelProto) -> frozenset[str]:
    """The files that hold a model's external data, relative to its folder."""
    return frozenset(ExternalDataInfo(tensor).location for tensor in external_tensors(proto))


def locate(source: Model, what: str, location: str) -> Path:
    """The file that a model names, its links followed.

    Args:
        source: the model.
        what: what the file is, for the message.
        location: its path, relative to the model.

    Raises:
        ModelError: there is none, or it lies elsewhere.
    """
    if leaves_folder(location):
        raise ModelError(f"{source.label}: {what} lies outside the model's folder: {location[:200]!r}")
    path = source.folder / location
    real = path.resolve()
    if not any(real.is_relative_to(folder) for folder in _folders(source)):
        message = f"{what} lies outside the model's folder: {location[:200]!r} is a link to {real}"
        raise ModelError(f"{source.label}: {message}, where ONNX Runtime does not follow; put the file itself there")
    if not real.is_file():
        raise ModelError(f"{source.label}: {what} is missing: {path}")
    return real


def _folders(source: Model) -> tuple[Path, ...]:
    """The model's folder, and that of the real model behind a link."""
    own = source.folder.resolve()
    return (own, source.path.resolve().parent) if source.path is not None else (own,)


def locate_tensor(source: Model, tensor: TensorProto) -> Path:
    """The file with a tensor's data.

    Raises:
        ModelError: there is none, or it lies elsewhere.
    """
    return locate(source, f"the data of {tensor.name!r}", ExternalDataInfo(tensor).location)


def read_data(source: Model, tensor: TensorProto) -> bytes:
    """A tensor's bytes as they lie in its file.

    Raises:
        ModelError: the file is missing, lies elsewhere, ends too early or cannot be read.
    """
    path, info = locate_tensor(source, tensor), ExternalDataInfo(tensor)
    expected = bytes_as_they_lie(tensor)
    length = expected if info.length is None else info.length
    label = f"{source.label}: the data of {tensor.name!r}"
    if length != expected:
        raise ModelError(f"{label} are {length} bytes, and its shape needs {expected}")
    try:
        with path.open("rb") as file:
            file.seek(info.offset or 0)
            data = file.read(length)
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {path}: {error.strerror}") from error
    if len(data) != length:
        raise ModelError(f"{label} are cut off: {path} ends before byte {(info.offset or 0) + length}")
    return data


def take_in(proto: ModelProto, source: Model) -> None:
    """Bring a model's external data into its message, as `onnx.load` does.

    Args:
        proto: is changed.
        source: the model that it was made from.

    Raises:
        ModelError: as `read_data`.
    """
    for tensor in external_tensors(proto):
        tensor.raw_data = b"".join(in_order(tensor, read_data(source, tensor)))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
        forget_order(tensor)


def load_whole(path: Path) -> ModelProto:
    """A model from a file with all its data in the message.

    Raises:
        ModelError: it cannot be read, or its data cannot.
    """
    model = load_model(path)
    take_in(model.proto, model)
    return model.proto
