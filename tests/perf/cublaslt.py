"""The product of cuBLASLt as the bridge asks for it (`runtime/bridge/cublaslt.cc`), to time by itself."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np

from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16

TYPES: dict[int, tuple[int, int]] = {  # of elements and of arithmetic: library_types.h
    FLOAT16: (2, 68),
    BFLOAT16: (14, 68),
    FLOAT: (0, 77),
}
TRANSPOSE_A = 3  # of an operation
WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of a preference
SUMS_IN_FP32 = 2
WORKSPACE_BYTES = 32 << 20
PITCH_BYTES = 16  # of the product's rows
MOST_ALIGNED = 256  # bytes
RESULT = np.dtype(
    [("algorithm", "u8", 8), ("workspace", "u8"), ("status", "i4"), ("waves", "f4"), ("reserved", "i4", 4)]
)


class Refused(Exception):
    """cuBLASLt has no kernel."""


def _checked(status: int) -> None:
    if status != 0:
        raise Refused(f"status {status}")


@cache
def _library() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """cuBLASLt, which torch has loaded, and a handle for the process."""
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            api = ctypes.CDLL(name)
        except OSError:
            continue
        handle = ctypes.c_void_p()
        _checked(api.cublasLtCreate(ctypes.byref(handle)))
        return api, handle
    raise OSError("cuBLASLt is not loaded")


class Product:
    """out[m, n] = lhs[m, k] * rhs, whose order is `kn` or `nk`."""

    def __init__(self, m: int, n: int, k: int, order: str, element: int, bytes_each: int, workspace: int) -> None:
        self.api, self.handle = _library()
        self.workspace = workspace
        self.scales = np.array([1.0, 0.0], np.float32)  # of the product, and of what it is added to
        operation = ctypes.c_void_p()
        of_elements, arithmetic = TYPES[element]
        _checked(self.api.cublasLtMatmulDescCreate(ctypes.byref(operation), arithmetic, 0))
        if order == "nk":
            self._set("MatmulDesc", operation, TRANSPOSE_A, ctypes.c_int32(1))
        self.pitch = -(-n * bytes_each // PITCH_BYTES) * PITCH_BYTES // bytes_each
        sides = ((n, k, n) if order == "kn" else (k, n, k), (k, m, k), (n, m, self.pitch))
        self.layouts = [self._layout(of_elements, *side) for side in sides]
        self.operation = operation
        self.algorithm = self._choose()

    def _set(self, what: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
        set_attribute = getattr(self.api, f"cublasLt{what}SetAttribute")
        _checked(set_attribute(of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def _layout(self, of_elements: int, rows: int, columns: int, pitch: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(pitch)
        _checked(self.api.cublasLtMatrixLayoutCreate(ctypes.byref(made), of_elements, *sizes))
        return made

    def _choose(self) -> np.ndarray:
        preference, found = ctypes.c_void_p(), ctypes.c_int()
        _checked(self.api.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        with ExitStack() as stack:
            stack.callback(self.api.cublasLtMatmulPreferenceDestroy, preference)
            self._set("MatmulPreference", preference, WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
            self._set("MatmulPreference", preference, REDUCTIONS, ctypes.c_uint32(SUMS_IN_FP32))
            for attribute in ALIGNMENTS:
                self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(MOST_ALIGNED))
            rhs, lhs, out = self.layouts
            results = np.zeros(2, RESULT)
            where = ctypes.c_void_p(results.ctypes.data)
            _checked(
                self.api.cublasLtMatmulAlgoGetHeuristic(
                    self.handle, self.operation, rhs, lhs, out, out, preference, 1, where, ctypes.byref(found)
                )
            )
        if found.value == 0 or results["status"][0] != 0:
            raise Refused("no kernel")
        return results[:1]

    def __call__(self, lhs: int, rhs: int, out: int, stream: int) -> None:
        """Launch it on addresses that are multiples of MOST_ALIGNED."""
        of_rhs, of_lhs, of_out = self.layouts
        scales, algorithm = self.scales.ctypes.data, self.algorithm.ctypes.data
        pointer = ctypes.c_void_p
        _checked(
            self.api.cublasLtMatmul(
                self.handle, self.operation, pointer(scales), pointer(rhs), of_rhs, pointer(lhs), of_lhs,
                pointer(scales + self.scales.itemsize),
                pointer(out), of_out, pointer(out), of_out, pointer(algorithm), pointer(self.workspace),
                ctypes.c_size_t(int(self.algorithm["workspace"][0])), pointer(stream),
            )
        )  # fmt: skip

    def close(self) -> None:
        """Free its descriptions."""
        for layout in self.layouts:
            self.api.cublasLtMatrixLayoutDestroy(layout)
        self.api.cublasLtMatmulDescDestroy(self.operation)
