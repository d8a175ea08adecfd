"""The bridge's pure functions, as Python sees them through the library's test hooks."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnxfuse.limits import MAX_LOADS, MAX_OUTS, MAX_PARTS
from tests.helpers.bridge_build import bridge_library
from tests.helpers.remote_hooks import RemoteHooks

REMOTE = "BRIDGE_HOOKS"  # variable with the command of a hook server: tests.tools.wheels sets it


class Tensor(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_uint64),
        ("batch_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
    )


class Outer(ctypes.Structure):
    _fields_ = (
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("batches", ctypes.c_int),
    )


class Scales(ctypes.Structure):
    """What a quantized rhs has beside its integers."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("zero_points", ctypes.c_void_p),
        ("scales_pitch", ctypes.c_int64),
        ("zero_points_pitch", ctypes.c_int64),
    )


class Arguments(ctypes.Structure):
    """kernels/cuda/common/arguments.cuh."""

    _fields_ = (
        ("lhs", Tensor),
        ("rhs", Tensor * MAX_PARTS),
        ("loads", Tensor * MAX_LOADS),
        ("outs", Tensor * MAX_OUTS),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("lhs_outer", Outer),
        ("rhs_outer", Outer),
        ("loads_outer", Outer * MAX_LOADS),
        ("outs_outer", Outer * MAX_OUTS),
        ("values_outer", Outer),
        ("scales", Scales * MAX_PARTS),
        ("rhs_ready", ctypes.c_int),
    )


class BridgeError(Exception):
    """What the bridge would put into an OrtStatus."""


@dataclass(frozen=True)
class Node:
    """The attributes of a fused node."""

    axes: str
    problem: str
    arguments: str
    sizes: str = ""
    kernel: str = "ab12"
    out_types: str = "f32"
    in_types: str = ""
    original: str = ""
    attributes: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ("kernel", "axes", "sizes", "problem", "arguments", "out_types", "in_types", "original")
        object.__setattr__(self, "attributes", {name: getattr(self, name) for name in names})

    def encoded(self) -> ctypes.Array:
        texts = [text.encode() for text in self.attributes.values()]
        return (ctypes.c_char_p * len(texts))(*texts)


@dataclass(frozen=True)
class Matrix:
    """library_product.h; in elements but the alignment."""

    pitch: int
    batch_stride: int
    transposed: int
    alignment: int


@dataclass(frozen=True)
class Product:
    """A product that the library is asked for, and where its matrices lie."""

    math: int
    m: int
    n: int
    k: int
    batch: int
    lhs: Matrix
    rhs: Matrix
    out: Matrix
    lhs_pointer: int
    rhs_pointer: int
    out_offset: int


@dataclass(frozen=True)
class Box:
    """tensor_maps.h; extents and box in elements, strides in bytes."""

    pointer: int
    element_bytes: int
    swizzle: int
    extents: list[int]
    strides: list[int]
    box: list[int]

    @classmethod
    def of(cls, words: list[int]) -> Box:
        pointer, element_bytes, swizzle, rank, *rest = words
        return cls(pointer, element_bytes, swizzle, rest[:rank], rest[rank : 2 * rank - 1], rest[2 * rank - 1 :])


@dataclass(frozen=True)
class Bridge:
    hooks: ctypes.CDLL | RemoteHooks

    def arguments(
        self,
        node: Node,
        shapes: Sequence[Sequence[int]],
        *,
        element_bytes: int | Sequence[int] = 1,
        inputs: Sequence[int] = (),
        outputs: Sequence[int] = (),
    ) -> tuple[Arguments, list[tuple[int, ...]]]:
        """What Compute would pass to a kernel, and the shapes of the outputs. Pointers are 0 unless given."""
        count = len(shapes)
        dims = np.array([dim for shape in shapes for dim in shape], np.int64)
        ranks = np.array([len(shape) for shape in shapes], np.int32)
        sizes = np.resize(np.array(element_bytes, np.int64), max(count, 1))
        pointers = np.array([*inputs, *[0] * (count - len(inputs))], np.uint64)
        out_pointers = np.array([*outputs, *[0] * (16 - len(outputs))], np.uint64)
        arguments, out_dims, error = Arguments(), np.zeros(512, np.int64), ctypes.create_string_buffer(4096)
        failed = self.hooks.onnxfuse_test_arguments(
            node.encoded(), _data(dims), _data(ranks), _data(sizes), _data(pointers), count, _data(out_pointers),
            ctypes.byref(arguments), _data(out_dims), error, ctypes.c_size_t(len(error)),
        )  # fmt: skip
        _check(failed, error)
        return arguments, _shapes(out_dims.tolist(), node.axes.split("->")[1].count(",") + 1)

    def infer(self, node: Node, shapes: Sequence[str]) -> list[str]:
        """Shapes of the outputs as a session sees them at load: sizes, symbols, `?`."""
        out = ctypes.create_string_buffer(1 << 16)
        text = "".join(f"{shape}\n" for shape in shapes).encode()
        _check(self.hooks.onnxfuse_test_infer(node.encoded(), text, out, ctypes.c_size_t(len(out))), out)
        return out.value.decode().splitlines()

    def archive(self, data: bytes) -> list[list[str]]:
        """The fields of every record as the C++ reader sees them."""
        out = ctypes.create_string_buffer(1 << 16)
        size = ctypes.c_uint64(len(data))
        _check(self.hooks.onnxfuse_test_archive(_exactly(data), size, out, ctypes.c_size_t(len(out))), out)
        return [line.split() for line in out.value.decode().splitlines()]

    def library(
        self, node: Node, arguments: Arguments, math: int, *, element_bytes: int | Sequence[int] = 2
    ) -> tuple[int, list[Product], Arguments]:
        """Bytes of scratch memory, what the library would be asked for, and what the kernel behind it gets."""
        out, behind = ctypes.create_string_buffer(4096), Arguments()
        sizes = np.resize(np.array(element_bytes, np.int64), 16)
        failed = self.hooks.onnxfuse_test_library(
            node.encoded(), _data(sizes), len(sizes), math, ctypes.byref(arguments), ctypes.byref(behind), out,
            ctypes.c_size_t(len(out)),
        )  # fmt: skip
        _check(failed, out)
        lines = [[int(word) for word in line.split()] for line in out.value.decode().splitlines()]
        products = [
            Product(*line[:5], Matrix(*line[5:9]), Matrix(*line[9:13]), Matrix(*line[13:17]), *line[17:])
            for line in lines[1:]
        ]
        return (lines[0][0] if lines else 0), products, behind

    def maps(
        self, data: bytes, node: Node, arguments: Arguments, record: int, *, element_bytes: Sequence[int]
    ) -> list[Box]:
        """What the tensor maps of a record say."""
        out = ctypes.create_string_buffer(1 << 14)
        sizes = np.resize(np.array(element_bytes, np.int64), 16)
        failed = self.hooks.onnxfuse_test_maps(
            _exactly(data), ctypes.c_uint64(len(data)), node.encoded(), _data(sizes), len(sizes), record,
            ctypes.byref(arguments), out, ctypes.c_size_t(len(out)),
        )  # fmt: skip
        _check(failed, out)
        return [Box.of(list(map(int, line.split()))) for line in out.value.decode().splitlines()]

    def choose(
        self,
        data: bytes,
        node: Node,
        arguments: Arguments,
        *,
        capability: int = 90,
        shared_bytes: int = 227 * 1024,
        element_bytes: int | Sequence[int] = 2,
    ) -> int:
        """Position of the record that would be launched; `element_bytes` of all inputs, or of each."""
        error, index = ctypes.create_string_buffer(4096), ctypes.c_int(-1)
        sizes = np.resize(np.array(element_bytes, np.int64), 16)
        failed = self.hooks.onnxfuse_test_choose(
            _exactly(data), ctypes.c_uint64(len(data)), node.encoded(), _data(sizes), len(sizes), capability,
            shared_bytes, ctypes.byref(arguments), ctypes.byref(index), error, ctypes.c_size_t(len(error)),
        )  # fmt: skip
        _check(failed, error)
        return index.value


def load(path: Path) -> Bridge:
    library = ctypes.CDLL(str(path))
    library.onnxfuse_test_sizeof_arguments.restype = ctypes.c_size_t
    return Bridge(library)


@functools.cache
def bridge() -> Bridge:
    """The library at hand, or in a process of its own the one that REMOTE says."""
    command = os.environ.get(REMOTE)
    return Bridge(RemoteHooks(command.split())) if command else load(bridge_library())


def _exactly(data: bytes) -> ctypes.Array:
    """A buffer without the NUL that Python keeps behind its bytes, so that a sanitizer sees a read past the end."""
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


def _data(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def _check(failed: int, error: ctypes.Array) -> None:
    if failed:
        raise BridgeError(error.value.decode())


def _shapes(flat: list[int], count: int) -> list[tuple[int, ...]]:
    shapes = []
    for _ in range(count):
        rank, flat = flat[0], flat[1:]
        shapes.append(tuple(flat[:rank]))
        flat = flat[rank:]
    return shapes
