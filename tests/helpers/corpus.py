"""The corpus: 117 graphs of real exporters without their weights, feeds of them, and how many sites each has."""

from __future__ import annotations

import functools
import json
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

ARCHIVE = Path(__file__).parents[1] / "corpus.tar.xz"


@functools.cache
def _unpacked() -> tuple[tempfile.TemporaryDirectory, Path]:
    folder = tempfile.TemporaryDirectory(prefix="onnxfuse-corpus-")
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later; from 3.14 on it is the default
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder.name)
    _draw_feeds(Path(folder.name))
    return folder, Path(folder.name)


def _draw_feeds(unpacked: Path) -> None:
    """Put into the feeds what is no token and no mask: seeded standard normal draws, of which `feeds.json` tells."""
    for name, tensors in json.loads((unpacked / "feeds.json").read_text()).items():
        with np.load(unpacked / name) as stored:
            arrays = dict(stored)
        for tensor, (dtype, shape, seed) in tensors.items():
            arrays[tensor] = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)
        np.savez(unpacked / name, **arrays)


def folder() -> Path:
    return _unpacked()[1]


def manifest() -> dict[str, dict]:
    with tarfile.open(ARCHIVE) as archive:
        member = next(entry for entry in archive if entry.name.endswith("manifest.json"))
        return json.load(archive.extractfile(member))


def families(*names: str, size: str = "") -> list[str]:
    """Files of the given models, `tiny` or `real` or both."""
    return sorted(key for key, entry in manifest().items() if entry["model"] in names and key.startswith(size))


def materialize(key: str) -> ModelProto:
    """A graph with weights: seeded normal draws with the recorded mean and standard deviation."""
    return with_weights(onnx.load(folder() / key))


def with_weights(model: ModelProto) -> ModelProto:
    """Fill in, in place, the weights that a model was stored without; others stay."""
    stats = json.loads({entry.key: entry.value for entry in model.metadata_props}.get("synthetic_weights", "{}"))
    for tensor in model.graph.initializer:
        if tensor.name in stats:
            seed, mean, deviation = stats[tensor.name]
            draw = np.random.default_rng(seed).standard_normal(tuple(tensor.dims), dtype=np.float32)
            value = (draw * deviation + mean).astype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def with_positions(model: ModelProto, positions: int) -> ModelProto:
    """Widen, in place, the table of positions of a graph without weights, and the ids [1, P] that are read from it."""
    (table,) = (tensor for tensor in model.graph.initializer if "position_embeddings" in tensor.name)
    old, table.dims[0] = table.dims[0], positions
    values = [attribute.t for node in model.graph.node if node.op_type == "Constant" for attribute in node.attribute]
    for tensor in (tensor for tensor in values if tuple(tensor.dims) == (1, old)):
        first, second = numpy_helper.to_array(tensor)[0, :2]
        ids = first + (second - first) * np.arange(positions)[np.newaxis]
        tensor.CopyFrom(numpy_helper.from_array(ids.astype(np.int64), tensor.name))
    return model


def feed(key: str, index: int) -> dict[str, np.ndarray]:
    path = folder() / key
    with np.load(path.with_suffix(f".feed{index}.npz")) as arrays:
        return dict(arrays)


def feeds(key: str) -> int:
    """How many feeds a model has."""
    path = folder() / key
    return len(list(path.parent.glob(f"{path.stem}.feed*.npz")))
