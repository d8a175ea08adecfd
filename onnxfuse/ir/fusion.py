"""The IR of one fusion: named axes, a product in parts, operands, a straight line of pointwise steps. No ONNX in it.

A dimension is a tuple of axes and is written as einops writes it: `f16[b, m, (h d)]`; `1` is a dimension of no axis,
and `n:6144` one of 6144 elements of which n is a window.
The product is `acc_p[batch, m, n] = sum over k of lhs[batch, m, k] * rhs_p[k, n]`; all parts p multiply the same lhs.
The epilogue computes in fp32 over `acc0 .. accP-1` and over loads, in static single assignment. Steps `round_f16` stand
where the model stores an intermediate in a narrower type, if the user wants each of them rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxfuse.dtypes import DType
from onnxfuse.ir.quantization import Quantization

MAX_STEPS = 32  # three times the longest epilogue of the corpus; each costs seconds of compiling, for every kernel
PART_AXIS = "p"  # along which equal column ranges of one tensor lie side by side
BLOCK_AXES = ("kb", "kc")  # of k of a quantized rhs: blocks, and elements of one
STORED_AXES = ("kb", "kq", "kz")  # of what holds it: blocks, bytes of a block, bytes of a column's zero points

# IR op -> number of arguments. Attributes of ONNX ops (alpha, lo, hi) are trailing constant arguments.
OPS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "pow": 2, "min": 2, "max": 2,
    "neg": 1, "abs": 1, "sqrt": 1, "exp": 1, "log": 1, "reciprocal": 1, "erf": 1, "tanh": 1, "sigmoid": 1,
    "sin": 1, "cos": 1,
    "softplus": 1, "relu": 1, "leaky_relu": 2, "elu": 2, "hard_sigmoid": 3, "hard_swish": 1, "mish": 1,
    "gelu": 1, "gelu_tanh": 1, "clip": 3, "greater": 2, "where": 3, "round_f32": 1, "round_f16": 1, "round_bf16": 1,
}  # fmt: skip
ROUNDS = frozenset({"round_f32", "round_f16", "round_bf16"})  # to the nearest number of a dtype, ties to even
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
NONLINEAR = frozenset(OPS) - ROUNDS - {"add", "sub", "mul", "div", "neg", "min", "max", "greater", "where"}

Dim = tuple[str, ...]
Value = str | float  # what steps read and stores take: a name, made below, or a number


def acc_name(part: int) -> str:
    """What steps call the sums of a part."""
    return f"acc{part}"


def load_name(index: int) -> str:
    """What steps call a load."""
    return f"op{index}"


def step_name(index: int) -> str:
    """What steps call the result of an earlier one."""
    return f"t{index}"


@dataclass(frozen=True)
class Axis:
    """A named axis; `size` is None where only the run knows it."""

    name: str
    size: int | None


@dataclass(frozen=True)
class Tensor:
    """A tensor that the kernel reads or writes: contiguous, row-major, its dimensions made of named axes.

    Attributes:
        name: the value's name in the model.
        dims: one tuple of axes for each dimension, outermost first; an empty tuple is a dimension of size 1.
        wide: a dimension whose axes are a window of it, and all elements of it; None where there is none.
    """

    name: str
    dtype: DType
    dims: tuple[Dim, ...]
    wide: tuple[int, int] | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes of the tensor, outermost first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def has_parts_in_turn(self) -> bool:
        """Whether the columns of parts take turns, `(n p)`, and do not lie side by side."""
        return any(PART_AXIS in dim[1:] for dim in self.dims)

    @property
    def einops(self) -> str:
        """The dimensions in einops notation without brackets, `b m (p n)`."""
        return " ".join(self._dim_texts())

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self._dim_texts())}]"

    def _dim_texts(self) -> list[str]:
        texts = [_dim_text(dim) for dim in self.dims]
        if self.wide is not None:
            texts[self.wide[0]] += f":{self.wide[1]}"
        return texts


@dataclass(frozen=True)
class Load:
    """One value that the epilogue reads for each output element: an operand, or a column range of it.

    Attributes:
        operand: which.
        part: index along axis `p`, of one whose columns are parts.
        start: first column, of one whose columns are wider than the fusion's.
    """

    operand: int
    part: int | None = None
    start: int | None = None


@dataclass(frozen=True)
class RhsPart:
    """The right-hand side of one part: an index into `Fusion.rhs`, and the column range as `Load` has it."""

    tensor: int
    part: int | None = None
    start: int | None = None


@dataclass(frozen=True)
class StoredRhs:
    """What holds a quantized right-hand side, as `Quantization` has it.

    Attributes:
        weight: `u8[n, kb, kq]`: blocks of k, and the bytes of each.
        scales: `[n, kb]`, or all in one dimension.
        zero_points: `u8[n, kz]`, or all in one dimension; None where they are implied.
    """

    weight: Tensor
    scales: Tensor
    zero_points: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """All three, in the order of the fields."""
        return self.weight, self.scales, self.zero_points


@dataclass(frozen=True)
class Step:
    """`result = op(inputs)`; an input is `accI`, `opI` (load I), an earlier result, or a constant."""

    result: str
    op: str
    inputs: tuple[Value, ...]

    def __eq__(self, other: object) -> bool:
        """As they are written: 0.0 and -0.0 are equal numbers, and no equal inputs."""
        return isinstance(other, Step) and self._written == other._written

    @property
    def _written(self) -> tuple[str, ...]:
        return self.result, self.op, *map(str, self.inputs)


@dataclass(frozen=True)
class Out:
    """A tensor that the kernel stores, or one part (column range) of it, and the epilogue value that goes there."""

    tensor: Tensor
    value: str
    part: int | None = None


@dataclass(frozen=True)
class Pointwise:
    """Pointwise steps over operands; by itself, the epilogue of a product that another kernel computes.

    Attributes:
        anchor: name of the MatMul or Gemm, with the first column where several fusions share it: `/qkv/MatMul/4096`.
        pattern: a name in `patterns.PATTERNS`.
        features: what the kernel does beside the product, sorted.
        axes: every axis with its size.
        operands: what the steps read, beside the product of a `Fusion`.
        loads: what the steps call `op0`, `op1`, ...
        steps: the epilogue, in order.
        outs: what is stored; parts of one tensor stand one after the other.
    """

    anchor: str
    pattern: str
    features: tuple[str, ...]
    axes: tuple[Axis, ...]
    operands: tuple[Tensor, ...]
    loads: tuple[Load, ...]
    steps: tuple[Step, ...]
    outs: tuple[Out, ...]
    _sizes: dict[str, int | None] = field(init=False, repr=False, compare=False, hash=False)
    _named_loads: dict[Value, Load] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", {axis.name: axis.size for axis in self.axes})
        object.__setattr__(self, "_named_loads", {load_name(index): load for index, load in enumerate(self.loads)})

    def size(self, axis: str) -> int | None:
        """Size of an axis, None where only the run knows it."""
        return self._sizes[axis]

    def load(self, value: Value) -> Load | None:
        """The load of a name; None for any other value."""
        return self._named_loads.get(value)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that the kernel reads, in the order of the fused node's inputs."""
        return self.operands

    @property
    def einops(self) -> str:
        """The whole as an einops equation, `b m k, k (p n), (p n) -> b m n`."""
        inputs = ", ".join(tensor.einops for tensor in self.inputs)
        return f"{inputs} -> {', '.join(tensor.einops for tensor in self.outputs)}"

    @property
    def unresolved(self) -> frozenset[str]:
        """Axes whose size the shapes of the inputs do not tell: a dimension tells one that it has beside known ones."""
        open_axes = {axis.name for axis in self.axes if axis.size is None}
        dims = [set(dim) for tensor in self.inputs for dim in tensor.dims]
        while told := {axis for dim in dims if len(dim & open_axes) == 1 for axis in dim & open_axes}:
            open_axes -= told
        return frozenset(open_axes)

    def _product_rows(self) -> list[tuple[str, str]]:
        return []

    def starts(self, tensor: Tensor) -> list[int]:
        """The first column of every window of a tensor that is read."""
        return [load.start or 0 for load in self.loads if self.operands[load.operand] == tensor]

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Every tensor that the kernel writes, in the order of the fused node's outputs."""
        return tuple(dict.fromkeys(out.tensor for out in self.outs))

    def __str__(self) -> str:
        sizes = "  ".join(f"{axis.name}={'?' if axis.size is None else axis.size}" for axis in self.axes)
        rows = [("fusion", self.anchor), ("axes", sizes), *self._product_rows()]
        rows += [(f"in{index}", f"{operand}  {operand.name}") for index, operand in enumerate(self.operands)]
        rows += [("", f"{step.result} = {step_text(step, self)}") for step in self.steps]
        rows += [("out", f"{out.tensor}{part_text(out.part)} <- {value_text(out.value, self)}") for out in self.outs]
        return "\n".join(f"{label:<7} {text}".rstrip() for label, text in rows)


@dataclass(frozen=True)
class Fusion(Pointwise):
    """A product of parts with its epilogue.

    Attributes:
        lhs: `[..., m, k]`.
        rhs: `[k, n]`, `[n, k]`, or with the parts packed along an axis `p`: `[k, (p n)]`, `[(p n), k]`; or with their
            columns in turn: `[(n p), k]`.
        parts: the right-hand side of each part.
        quantization: how rhs is stored, if it is quantized; then `rhs` is what it stands for, `i4[n, k]`, which is
            printed in its blocks: `i4[n, (kb kc)]`.
        stored: what holds each of a quantized rhs.
    """

    lhs: Tensor
    rhs: tuple[Tensor, ...]
    parts: tuple[RhsPart, ...]
    quantization: Quantization | None = field(default=None, kw_only=True)
    stored: tuple[StoredRhs, ...] = field(default=(), kw_only=True)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that the kernel reads, in the order of the fused node's inputs."""
        return (self.lhs, *(tensor for group in self.stored_rhs for tensor in group), *self.operands)

    @property
    def stored_rhs(self) -> tuple[tuple[Tensor, ...], ...]:
        """What holds rhs: the tensors themselves, or the integers, the scales and the zero points of all of them."""
        if not self.stored:
            return (self.rhs,)
        zero_points = tuple(each.zero_points for each in self.stored if each.zero_points is not None)
        groups = tuple(each.weight for each in self.stored), tuple(each.scales for each in self.stored)
        return (*groups, zero_points) if zero_points else groups

    def _product_rows(self) -> list[tuple[str, str]]:
        starts = "".join(f"  from {part.start}" for part in self.parts if part.start is not None)
        rows = [("lhs", str(self.lhs))]
        for index, rhs in enumerate(self.rhs):
            rows.append(("rhs", f"{self._in_blocks(rhs)}  parts {len(self.parts)}{starts}"))
            rows += [("", f"{name} {tensor}") for name, tensor in self._scales_of(index)]
        return rows

    def _in_blocks(self, rhs: Tensor) -> Tensor:
        """A quantized rhs with k as blocks and what is in them."""
        return replace(rhs, dims=(*rhs.dims[:-1], BLOCK_AXES)) if self.stored else rhs

    def _scales_of(self, index: int) -> list[tuple[str, Tensor]]:
        """What a quantized rhs has beside its integers, unpacked."""
        if not self.stored:
            return []
        stored, dtype = self.stored[index], self.rhs[index].dtype
        zero_points = Tensor("", dtype, stored.scales.dims, stored.scales.wide)
        return [("scale", stored.scales), *([("zero point", zero_points)] if stored.zero_points else [])]

    def starts(self, tensor: Tensor) -> list[int]:
        """The first column of every window of a tensor that is read."""
        own = [part for part in self.parts if tensor in (self.rhs[part.tensor], *self._stored_in(part.tensor))]
        return [*super().starts(tensor), *(self.start(part, tensor) or 0 for part in own)]

    def _stored_in(self, index: int) -> tuple[Tensor | None, ...]:
        return self.stored[index].tensors if self.stored else ()

    def start(self, part: RhsPart, tensor: Tensor) -> int | None:
        """Where the window of a part begins in one of the tensors that hold rhs, in steps of its wide dimension."""
        if part.start is None or tensor.wide is None:
            return part.start
        inner = [axis for axis in tensor.dims[tensor.wide[0]] if axis in STORED_AXES]
        return part.start * math.prod(self.size(axis) or 1 for axis in inner)


def _dim_text(dim: Dim) -> str:
    if not dim:
        return "1"
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def value_text(value: Value, fusion: Pointwise) -> str:
    """A value as the IR prints it: `in0[p=1]` for a load, six digits for a constant."""
    if isinstance(value, float):
        return f"{value:.6g}"
    load = fusion.load(value)
    return value if load is None else f"in{load.operand}{part_text(load.part, load.start)}"


def part_text(part: int | None, start: int | None = None) -> str:
    """`[p=1]` for a part, `[+4096]` for a window, nothing for a whole tensor."""
    if start is not None:
        return f"[+{start}]"
    return "" if part is None else f"[{PART_AXIS}={part}]"


def step_text(step: Step, fusion: Pointwise) -> str:
    """The right-hand side of one step, infix where a reader expects it."""
    inputs = [value_text(value, fusion) for value in step.inputs]
    if step.op in INFIX:
        return f" {INFIX[step.op]} ".join(inputs)
    return f"{step.op}({', '.join(inputs)})"
