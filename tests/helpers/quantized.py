"""Quantised weights for tests: matrices packed as MatMulNBits has them and unpacked again, models with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Form:
    """How to quantise: bits, elements of a block, whether zero points are stored, scales in one dimension or two."""

    bits: int = 4
    block: int = 32
    zero_points: bool = False
    flat: bool = False

    @property
    def attributes(self) -> dict[str, int]:
        return {"bits": self.bits, "block_size": self.block}


@dataclass(frozen=True)
class Packed:
    """A matrix [n, k] as MatMulNBits has it."""

    form: Form
    weight: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None

    @property
    def tensors(self) -> list[np.ndarray]:
        return [self.weight, self.scales, *([] if self.zero_points is None else [self.zero_points])]


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of bytes, along the last dimension; of 4 bits the low half comes first."""
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """The reverse; what is left of the last byte is 0."""
    if bits == 8:
        return numbers.astype(np.uint8)
    numbers = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], numbers.shape[-1] % 2), numbers.dtype)], -1)
    return (numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)


def dequantized(
    weight: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None, k: int, bits: int
) -> np.ndarray:
    """The matrix [n, k] in float64."""
    n, blocks, _ = weight.shape
    numbers = unpacked(weight, bits).astype(np.float64)
    zeros = np.full((n, blocks), 2.0 ** (bits - 1))
    if zero_points is not None:
        zeros = unpacked(zero_points.reshape(n, -1), bits)[:, :blocks].astype(np.float64)
    values = (numbers - zeros[..., None]) * scales.reshape(n, blocks, 1).astype(np.float64)
    return values.reshape(n, -1)[:, :k]


def quantize(matrix: np.ndarray, form: Form, dtype: np.dtype) -> Packed:
    """A matrix [n, k], each block by its own range; what lies beyond k is drawn, as nobody may read it."""
    n, k = matrix.shape
    blocks, top = -(-k // form.block), 2**form.bits - 1
    padded = np.concatenate([matrix, np.zeros((n, blocks * form.block - k))], 1).reshape(n, blocks, form.block)
    low, high = np.minimum(padded.min(-1), 0), np.maximum(padded.max(-1), 0)
    reach = high - low if form.zero_points else 2 * np.maximum(high, -low)
    scales = np.maximum(reach / top, 1e-4).astype(dtype)
    numbers = scales.astype(np.float64)
    zeros = np.clip(np.round(-low / numbers), 0, top) if form.zero_points else np.full((n, blocks), (top + 1) // 2)
    codes = np.clip(np.round(padded / numbers[..., None] + zeros[..., None]), 0, top).astype(np.uint8)
    beyond = np.arange(blocks * form.block).reshape(blocks, form.block) >= k
    codes[:, beyond] = np.random.default_rng(n).integers(0, top, (n, int(beyond.sum())), np.uint8)
    stored = packed(zeros.astype(np.uint8), form.bits) if form.zero_points else None
    if form.flat:
        scales, stored = scales.reshape(-1), None if stored is None else stored.reshape(-1)
    return Packed(form, packed(codes, form.bits), scales, stored)


def nbits_node(
    x: str, out: str, names: list[str], form: Form, n: int, k: int, bias: str = "", name: str = ""
) -> NodeProto:
    """A MatMulNBits of a weight [n, k] under the names of its tensors."""
    inputs = [x, *names] + ([""] * (4 - len(names)) + [bias] if bias else [])
    return helper.make_node(
        "MatMulNBits", inputs, [out], name=name, domain=MICROSOFT, N=n, K=k, **form.attributes
    )  # fmt: skip


def quantized_model(model: ModelProto, form: Form, bias: bool = False) -> ModelProto:
    """A copy of a model whose products with a constant matrix [k, n] are MatMulNBits, as quantising tools leave them.

    With `bias` an Add of a vector right behind such a product is its own.
    """
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    readers = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        weight = stored.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or len(weight.dims) != 2:
            continue
        matrix = numpy_helper.to_array(weight).astype(np.float64).T
        made = quantize(matrix, form, helper.tensor_dtype_to_np_dtype(weight.data_type))
        names = [f"{weight.name}.{part}" for part in ("q", "scales", "zero_points")][: len(made.tensors)]
        graph.initializer.extend(map(numpy_helper.from_array, made.tensors, names))
        x, out = node.input[0], node.output[0]
        added, vector = readers.get(out), ""
        if bias and added is not None and added.op_type == "Add":
            vector = next((name for name in added.input if name in stored and len(stored[name].dims) == 1), "")
        if vector and added is not None:
            out = added.output[0]
            added.Clear()
        node.CopyFrom(nbits_node(x, out, names, form, *matrix.shape, vector, node.name))
    nodes = [node for node in graph.node if node.op_type]
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    if not any(entry.domain == MICROSOFT for entry in result.opset_import):
        result.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return result
