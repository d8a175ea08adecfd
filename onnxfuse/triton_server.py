"""A folder that Triton Inference Server serves a fused model from: model, bridge and configuration.

    REPOSITORY/NAME/config.pbtxt
    REPOSITORY/NAME/libonnxfuse.so
    REPOSITORY/NAME/1/model.onnx        (and model.onnx.data)

The configuration's fields are those of Triton's `model_config.proto`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.errors import ModelError, OutputError, SettingError
from onnxfuse.graph.functions import DOMAIN, walk
from onnxfuse.graph.graph import Model, load_model, signature
from onnxfuse.graph.load import check_weights
from onnxfuse.graph.save import save_model, write_text
from onnxfuse.staging import whole_folder

MAX_BATCH = 8  # what Triton gathers at most, unless the caller says otherwise
LARGEST_BATCH = 2**31 - 1  # of the field's int32
UNKNOWN = -1  # a dimension that each request chooses
BRIDGE = "libonnxfuse.so"
# onnx.TensorProto.DataType -> the server's name of it.
DATA_TYPES = {
    1: "TYPE_FP32", 2: "TYPE_UINT8", 3: "TYPE_INT8", 4: "TYPE_UINT16", 5: "TYPE_INT16", 6: "TYPE_INT32",
    7: "TYPE_INT64", 8: "TYPE_STRING", 9: "TYPE_BOOL", 10: "TYPE_FP16", 11: "TYPE_FP64", 12: "TYPE_UINT32",
    13: "TYPE_UINT64", 16: "TYPE_BF16",
}  # fmt: skip


@dataclass(frozen=True)
class TritonTensor:
    """An input or output of the model.

    Attributes:
        dims: an integer, a symbol, or None for a size that only a request knows.
    """

    name: str
    data_type: str
    dims: tuple[int | str | None, ...]


def export_triton(
    model: Path,
    folder: Path,
    bridge: Path,
    *,
    name: str | None = None,
    max_batch: int = MAX_BATCH,
    mount: str = "",
    unfused: bool = False,
) -> Path:
    """Write a model repository's entry for a fused model.

    Args:
        model: the fused model.
        folder: the model repository.
        bridge: the library of the fused nodes.
        name: what clients call the model; by default the file's name without its endings.
        max_batch: rows that the server may gather into one run, where the model's axes allow it; 0 for none.
        mount: where the server sees `folder`; by default at the same path.
        unfused: whether a model without a fused node is written as well.

    Returns:
        The folder of this model.

    Raises:
        ModelError: the model or its external data cannot be read, it has an input that Triton has no type for, or it
            has no fused node.
        OutputError: the entry exists, or the disk refuses.
        SettingError: max_batch is negative, or larger than the configuration's field.
    """
    if not 0 <= max_batch <= LARGEST_BATCH:
        raise SettingError(f"the largest batch is {max_batch}; expected 0 to {LARGEST_BATCH}")
    source = _fused_model(model, unfused)
    place = folder / (name or re.sub(r"\W+", "_", model.name.split(".")[0]))
    _check_place(folder, place)
    inputs, outputs = (tuple(map(_tensor, ports)) for ports in signature(source))
    seen_at = f"{mount.rstrip('/') or folder.resolve()}/{place.name}/{BRIDGE}"
    batch = max_batch if has_batch(inputs, outputs) else 0
    text = configuration(place.name, inputs, outputs, seen_at, batch)
    try:
        with whole_folder(place) as unfinished:
            _write(source, unfinished, bridge, text)
    except OSError as error:
        raise OutputError(f"{place}: cannot be written: {error.strerror}") from error
    return place


def _fused_model(path: Path, unfused: bool) -> Model:
    source = load_model(path)
    check_weights(source)
    if not unfused and all(node.domain != DOMAIN for node in walk(source.proto.graph.node)):
        raise ModelError(f"{path}: has no fused node; `onnxfuse optimize` makes them, and --unfused writes it as it is")
    return source


def _check_place(folder: Path, place: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder, the model repository")
    if place.exists():
        raise OutputError(f"{place}: exists; remove it, or choose another --name")


def _write(source: Model, place: Path, bridge: Path, text: str) -> None:
    version = place / "1"
    version.mkdir()
    shutil.copyfile(bridge, place / BRIDGE)
    save_model(source.proto, source, version / "model.onnx")
    write_text(place / "config.pbtxt", text)


def _tensor(entry: tuple[str, int, tuple[int | str | None, ...] | None]) -> TritonTensor:
    name, element, dims = entry
    if element not in DATA_TYPES:
        raise ModelError(f"{name!r}: Triton has no tensor type for ONNX element type {element}")
    if dims is None:
        raise ModelError(f"{name!r}: its rank is unknown; Triton needs one")
    return TritonTensor(name, DATA_TYPES[element], dims)


def has_batch(inputs: Sequence[TritonTensor], outputs: Sequence[TritonTensor]) -> bool:
    """Whether the first axis is a batch: dynamic everywhere, and one symbol in all inputs.

    Exporters name the dimensions of outputs as they like, so those need only be dynamic.
    """
    ports = (*inputs, *outputs)
    if not all(tensor.dims and not isinstance(tensor.dims[0], int) for tensor in ports):
        return False
    return len({tensor.dims[0] for tensor in inputs}) == 1


def configuration(
    name: str, inputs: Sequence[TritonTensor], outputs: Sequence[TritonTensor], bridge: str, max_batch: int
) -> str:
    """The text of config.pbtxt; with a batch, dimensions are given without it."""
    first = 1 if max_batch else 0
    lines = [
        f"name: {_quoted(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {max_batch}",
        *(_tensor_text("input", tensor, first) for tensor in inputs),
        *(_tensor_text("output", tensor, first) for tensor in outputs),
        f"model_operations {{ op_library_filename: {_quoted(bridge)} }}",
        "instance_group { kind: KIND_GPU }",
        *(["dynamic_batching { }"] if max_batch else []),
    ]
    return "\n".join(lines) + "\n"


def _tensor_text(kind: str, tensor: TritonTensor, first: int) -> str:
    dims = [dim if isinstance(dim, int) else UNKNOWN for dim in tensor.dims[first:]]
    # The server wants at least one dimension; a batch of single values is one of [1] reshaped to [].
    shape = f"dims: {dims}" if dims else "dims: [1] reshape { shape: [] }"
    return f"{kind} {{ name: {_quoted(tensor.name)} data_type: {tensor.data_type} {shape} }}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
