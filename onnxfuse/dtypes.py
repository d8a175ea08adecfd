"""The dtype table: one row a dtype."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: how the IR prints it, `f16`.
        onnx: TensorProto.DataType number.
        numpy: NumPy (or ml_dtypes) name.
        cuda: type name in CUDA C++.
        bytes: size of one element.
    """

    name: str
    onnx: int
    numpy: str
    cuda: str
    bytes: int

    def __str__(self) -> str:
        return self.name


F32 = DType("f32", 1, "float32", "float", 4)
F16 = DType("f16", 10, "float16", "__half", 2)
BF16 = DType("bf16", 16, "bfloat16", "__nv_bfloat16", 2)
BOOL = DType("bool", 9, "bool", "unsigned char", 1)
I32 = DType("i32", 6, "int32", "int", 4)  # of lengths; never computed with
I64 = DType("i64", 7, "int64", "long long", 8)
U8 = DType("u8", 2, "uint8", "unsigned char", 1)  # what quantized weights are packed in; never computed with
INTEGERS = (I32, I64, U8)
STORED = {bits: DType(f"i{bits}", U8.onnx, U8.numpy, U8.cuda, U8.bytes) for bits in (4, 8)}  # the same, unpacked

FLOATS = (F32, F16, BF16)  # what is multiplied, computed with and stored
ALL = (*FLOATS, BOOL)  # what an epilogue reads
BY_ONNX = {dtype.onnx: dtype for dtype in ALL}
FED_BY_ONNX = {dtype.onnx: dtype for dtype in (*ALL, *INTEGERS)}  # what fused nodes are given
FLOATS_BY_ONNX = {dtype.onnx: dtype for dtype in FLOATS}
