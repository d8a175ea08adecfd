"""IR op -> CUDA expression, and the epilogue's steps as one straight-line functor in fp32.

The table has exactly the keys of `fusion.OPS`. Functions that CUDA does not name are hand-written in
`cuda/common/math.cuh`, and their fast versions in `cuda/common/fast_math.cuh`, where their accuracy is argued.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.ir.fusion import ROUNDS, Step, Value, acc_name, load_name
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.norm_tile import NormSpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec

ROUNDED_MATH = ("f16", "bf16", "tf32")  # of operands of 11 bits at most: the fast functions are off by less
SHORT_BYTES = 2  # of an output for which the shorter gelu is exact enough
MAX_EXPANDED_POWER = 4  # x^5 and above: powf is as accurate and rare enough

Writer = Callable[..., str]
"""A step's arguments, numbers or names -> the CUDA expression."""


@dataclass(frozen=True)
class Expression:
    """How an op is written: as accurate as fp32 allows, and accurate enough for 16-bit and TF32 operands."""

    accurate: Writer
    fast: Writer


def constant(value: float) -> str:
    """A CUDA literal of the fp32 number nearest to `value`."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isnan(rounded) or math.isinf(rounded):
        return f"__int_as_float(0x{struct.pack('>f', rounded).hex()})"
    return f"{rounded!r}f" if math.copysign(1.0, rounded) > 0 else f"({rounded!r}f)"


def _text(value: Value) -> str:
    return value if isinstance(value, str) else constant(float(value))


def _template(text: str, fast: str = "") -> Expression:
    return Expression(_formatted(text), _formatted(fast or text))


def _formatted(text: str) -> Writer:
    return lambda *values: text.format(*map(_text, values))


def _power(base: Value, exponent: Value) -> str:
    """`base ** exponent`; small integer exponents as multiplications, which are exact in sign for a negative base."""
    if exponent == 0.5:
        return f"sqrtf({_text(base)})"
    if isinstance(exponent, float) and exponent.is_integer() and 1 <= abs(exponent) <= MAX_EXPANDED_POWER:
        product = " * ".join([_text(base)] * abs(int(exponent)))
        return product if exponent > 0 else f"1.0f / ({product})"
    return f"powf({_text(base)}, {_text(exponent)})"


EXPRESSIONS: dict[str, Expression] = {
    "add": _template("{} + {}"),
    "sub": _template("{} - {}"),
    "mul": _template("{} * {}"),
    "div": _template("{} / {}"),
    "pow": Expression(_power, _power),
    "min": _template("minimum({}, {})"),
    "max": _template("maximum({}, {})"),
    "neg": _template("-{}"),
    "abs": _template("fabsf({})"),
    "sqrt": _template("sqrtf({})"),
    "exp": _template("expf({})"),
    "log": _template("logf({})"),
    "reciprocal": _template("1.0f / {}"),
    "erf": _template("erff({})"),
    "tanh": _template("tanhf({})"),
    "sin": _template("pointwise::sin({})"),
    "cos": _template("pointwise::cos({})"),
    "sigmoid": _template("pointwise::sigmoid({})", fast="pointwise::fast_sigmoid({})"),
    "softplus": _template("pointwise::softplus({})"),
    "relu": _template("maximum({}, 0.0f)"),
    "leaky_relu": _template("pointwise::leaky_relu({}, {})"),
    "elu": _template("pointwise::elu({}, {})"),
    "hard_sigmoid": _template("pointwise::hard_sigmoid({}, {}, {})"),
    "hard_swish": _template("pointwise::hard_swish({})"),
    "mish": _template("pointwise::mish({})"),
    "gelu": _template("pointwise::gelu({})", fast="pointwise::fast_gelu({})"),
    "gelu_tanh": _template("pointwise::gelu_tanh({})", fast="pointwise::fast_gelu_tanh({})"),
    "clip": _template("pointwise::clip({}, {}, {})"),
    "greater": _template("{} > {} ? 1.0f : 0.0f"),
    "where": _template("{} != 0.0f ? {} : {}"),
    # Adding -0 changes no number; as an intrinsic it is never contracted with the product before it into one fma.
    "round_f32": _template("__fadd_rn({}, -0.0f)"),
    "round_f16": _template("__half2float(__float2half_rn({}))"),
    "round_bf16": _template("__bfloat162float(__float2bfloat16_rn({}))"),
}


def functor(spec: KernelSpec, halves: bool = False) -> str:
    """The CUDA source of `struct Epilogue`: accumulators and operands of one output element in, results out.

    Args:
        spec: what to compute.
        halves: whether the kernel stages half of what `halved_sums` names.
    """
    accumulators = [f"    const float {acc_name(part)} = accumulators[{part}];" for part in range(spec.parts)]
    steps = _fast_steps(spec, halved_sums(spec) if halves else {}) if is_fast(spec) else _steps(spec)
    return _struct("const float (&accumulators)[PARTS], ", [*accumulators, *_body(spec, steps)])


def pointwise_functor(spec: PointwiseSpec) -> str:
    """The same without a product: operands of one output element in, results out."""
    return _struct("", _body(spec, _fast_steps(spec, {}) if is_fast(spec) else _steps(spec)))


def norm_functor(spec: NormSpec) -> str:
    """The same of one normalised element of each part and what is beside it; the first operands are the row itself."""
    parts = range(spec.parts)
    normals = [f"    const float {acc_name(part)} = normals[{part}];" for part in parts]
    loads = [f"    const float {load_name(index)} = operands[{index}];" for index in range(len(parts), len(spec.loads))]
    results = [f"    results[{index}] = {_text(value)};" for index, value in enumerate(spec.out_values)]
    return _struct(f"const float (&normals)[{len(parts)}], ", [*normals, *loads, *_steps(spec), *results])


def straight_line(name: str, loads: int, steps: Sequence[Step], value: Value) -> str:
    """A functor of one sum and some operands, by the fast functions."""
    lines = [f"    const float {acc_name(0)} = accumulators[0];"]
    lines += [f"    const float {load_name(index)} = operands[{index}];" for index in range(loads)]
    lines += [f"    const float {step.result} = {EXPRESSIONS[step.op].fast(*step.inputs)};" for step in steps]
    body = "\n".join([*lines, f"    results[0] = {_text(value)};"])
    return f"""\
struct {name} {{
  static __device__ __forceinline__ void apply(const float (&accumulators)[1], const float (&operands)[{loads + 1}],
                                               float (&results)[1]) {{
{body}
  }}
}};
"""


def is_fast(spec: KernelSpec | PointwiseSpec) -> bool:
    """Whether the fast functions are accurate enough.

    They are where what is multiplied is rounded to 16 bits or TF32, or, where nothing is, all that is stored; and no
    step rounds as the model's tensors do, which would show them.
    """
    rounded = spec.math in ROUNDED_MATH if isinstance(spec, KernelSpec) else _is_short(spec)
    return rounded and not any(step.op in ROUNDS for step in spec.steps)


def _is_short(spec: KernelSpec | PointwiseSpec) -> bool:
    return all(out.dtype.bytes <= SHORT_BYTES for out in spec.outs)


def halved_sums(spec: KernelSpec) -> dict[Value, tuple[str, int]]:
    """Sums of which a fast gelu takes half, acc / 2 + bias / 2, in one FFMA where half of the bias is staged.

    Returns:
        The name of each sum of an accumulator and a row operand, of which nothing but a gelu reads the one and nothing
        but the sum the other: what it is in halves, and the operand's index among the loads.
    """
    if not is_fast(spec):
        return {}
    reads = Counter((*(value for step in spec.steps for value in step.inputs), *spec.out_values))
    of_gelu = {step.inputs[0] for step in spec.steps if step.op == "gelu"}
    accumulators = {acc_name(part) for part in range(spec.parts)}
    rows = {load_name(index): index for index, load in enumerate(spec.loads) if load.kind == "row"}
    return {
        step.result: (f"fmaf({_text(first)}, 0.5f, {_text(second)})", rows[str(second)])
        for step in spec.steps
        if step.op == "add" and step.result in of_gelu and reads[step.result] == 1
        for first, second in (step.inputs, step.inputs[::-1])
        if first in accumulators and second in rows and reads[second] == 1
    }


def _fast_steps(spec: KernelSpec | PointwiseSpec, halved: Mapping[Value, tuple[str, int]]) -> list[str]:
    """By the fast functions, of which gelu takes half of its argument and is shorter where 16 bits are stored."""
    gelu = "fast_short_gelu_of_half" if _is_short(spec) else "fast_gelu_of_half"
    lines = []
    for step in spec.steps:
        expression = EXPRESSIONS[step.op].fast(*step.inputs)
        if step.op == "gelu":
            half, _ = halved.get(step.inputs[0], (f"0.5f * {_text(step.inputs[0])}", 0))
            expression = f"pointwise::{gelu}({half})"
        if step.result not in halved:
            lines.append(f"    const float {step.result} = {expression};")
    return lines


def _steps(spec: KernelSpec | PointwiseSpec) -> list[str]:
    return [f"    const float {step.result} = {EXPRESSIONS[step.op].accurate(*step.inputs)};" for step in spec.steps]


def _body(spec: KernelSpec | PointwiseSpec, steps: list[str]) -> list[str]:
    loads = (f"    const float {load_name(index)} = operands[{index}];" for index in range(len(spec.loads)))
    results = (f"    results[{index}] = {_text(value)};" for index, value in enumerate(spec.out_values))
    return [*loads, *steps, *results]


def _struct(accumulators: str, lines: list[str]) -> str:
    body = "\n".join(lines)
    return f"""\
struct Epilogue {{
  static __device__ __forceinline__ void apply({accumulators}const float (&operands)[LOADS + 1],
                                               float (&results)[OUTS]) {{
{body}
  }}
}};
"""
