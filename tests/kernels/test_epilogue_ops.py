"""Every CUDA expression of the epilogue, compiled as C++ by the host's compiler, against float64 over a hard sweep.

The intrinsics __expf and __fdividef are stood in for by exact functions with the same special cases; the accuracy of
the real ones is argued in common/math.cuh and checked on the GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.ir.fusion import OPS, ROUNDS, Value
from onnxfuse.kernels.epilogue import EXPRESSIONS, constant
from onnxfuse.kernels.source import TEMPLATES
from tests.helpers.host_build import EMULATOR, build_library
from tests.helpers.reference_fusion import OPS as REFERENCE

ULP = 2.0**-23
SMALLEST_NORMAL = 2.0**-14  # of fp16

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-39, -1e-39, 3e38, -3e38, 1e30, -1e30, 1.0, -1.0]
SWEEP = np.array(
    SPECIAL
    + [0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 20.0, -20.0, 88.0, -88.0, -88.7, 89.5, -89.5, -103.0, -105.0, 1e4, -1e4]
    + [sign * 2.0 ** (step / 8) for step in range(-160, 55) for sign in (1, -1)],
    np.float32,
)


@dataclass(frozen=True)
class Case:
    """An expression over x, y or constants, and its bound.

    Attributes:
        ulps: of the result.
        absolute: added to that.
        scaled: times |x|, added where the definition itself cancels.
        fast: by the fast function; the fast gelu has a test of its own.
    """

    op: str
    arguments: tuple[Value, ...]
    ulps: float = 1.0
    absolute: float = 0.0
    scaled: float = 0.0
    fast: bool = False

    @property
    def expression(self) -> str:
        """In CUDA."""
        written = EXPRESSIONS[self.op]
        return (written.fast if self.fast else written.accurate)(*self.arguments)


CASES = [
    *(Case(op, ("x", "y")) for op in ("add", "sub", "mul", "div", "min", "max")),
    *(Case(op, ("x",)) for op in ("neg", "abs", "sqrt", "relu", "reciprocal")),
    *(Case(op, ("x",), ulps=4) for op in ("exp", "log", "erf", "tanh", "softplus")),
    *(Case(op, ("x",), ulps=2) for op in ("sin", "cos")),
    *(Case("pow", ("x", float(n)), ulps=abs(n) + 2) for n in (1, 2, 3, 4, 5, -1, -2, -3)),
    *(Case("pow", ("x", exponent), ulps=4) for exponent in (0.5, 1.5, -0.5, 0.0)),
    Case("pow", ("x", "y"), ulps=4),
    Case("pow", (2.0, "x"), ulps=4),
    Case("sigmoid", ("x",), ulps=4),
    Case("leaky_relu", ("x", 0.01), ulps=2),
    Case("elu", ("x", 1.5), ulps=4),
    Case("hard_sigmoid", ("x", 0.2, 0.5), ulps=4, absolute=2 * ULP),
    Case("hard_swish", ("x",), ulps=4, scaled=2 * ULP),
    Case("mish", ("x",), ulps=8),
    Case("gelu", ("x",), ulps=4, scaled=ULP),
    # An error of a few ulp in the argument of exp is that many times the argument in the result: |2u| below 40 matters.
    Case("gelu_tanh", ("x",), ulps=4 * 40, scaled=ULP / 4),
    Case("clip", ("x", -1.0, 6.0)),
    Case("clip", ("x", "y", math.inf)),
    Case("greater", ("x", "y")),
    Case("where", ("x", "y", 3.0)),
    *(Case(op, ("x",), ulps=0) for op in sorted(ROUNDS)),
    Case("sigmoid", ("x",), absolute=4 * ULP, fast=True),
    Case("gelu_tanh", ("x",), scaled=4 * ULP, fast=True),
]


def inputs_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    if "y" not in case.arguments:
        return SWEEP, np.zeros_like(SWEEP)
    pairs = np.float32(list(itertools.product(np.concatenate([SPECIAL, SWEEP[15:32], SWEEP[32::37]]), repeat=2)))
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def host_headers() -> str:
    """The hand-written functions, on the CPU."""
    names = ("common/element.cuh", "common/math.cuh", "common/fast_math.cuh")
    ptx = '#include "common/ptx.cuh"'
    element, functions, fast = ((TEMPLATES / name).read_text().replace(ptx, "") for name in names)
    host = (EMULATOR / "ptx_host.cuh").read_text()
    return "\n".join(('#include "cuda_host.h"', element, host, functions, fast))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One function for every case: `case0(count, x, y, out)`."""
    folder = tmp_path_factory.mktemp("ops")
    functions = "\n".join(
        f"""extern "C" void case{index}(int count, const float* xs, const float* ys, float* outs) {{
  using namespace onnxfuse;
  for (int i = 0; i < count; ++i) {{
    const float x = xs[i], y = ys[i];
    const float result = {case.expression};
    outs[i] = result;
  }}
}}"""
        for index, case in enumerate(CASES)
    )
    return build_library(f"{host_headers()}\n{functions}\n", folder)


def test_tables_have_the_same_keys() -> None:
    assert set(EXPRESSIONS) == set(OPS)
    assert {case.op for case in CASES} == set(OPS), "every op is swept"
    for case in CASES:
        assert len(case.arguments) == OPS[case.op]


@pytest.mark.parametrize("op", OPS)
def test_an_expression_is_fast_where_its_function_has_a_fast_version(op: str) -> None:
    source = (TEMPLATES / "common/fast_math.cuh").read_text()
    values = ("x", "y", "z")[: OPS[op]]
    accurate, fast = EXPRESSIONS[op].accurate(*values), EXPRESSIONS[op].fast(*values)
    expected = accurate.replace("pointwise::", "pointwise::fast_")
    name = expected.split("(")[0].removeprefix("pointwise::")
    assert fast == (expected if f"float {name}(" in source else accurate)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{case.op}{case.arguments}" for case in CASES])
def test_expression_agrees_with_float64(index: int, compiled: ctypes.CDLL) -> None:
    case = CASES[index]
    x, y = inputs_of(case)
    out = np.empty_like(x)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, y, out)]
    getattr(compiled, f"case{index}")(len(x), *pointers)
    check(case, x, y, out)


def check(case: Case, x: np.ndarray, y: np.ndarray, out: np.ndarray, allowance: np.ndarray | float = 0.0) -> None:
    """Compare an expression's results with float64; `allowance` is added to the bound."""
    names = {"x": x.astype(np.float64), "y": y.astype(np.float64)}
    arguments = [names[value] if isinstance(value, str) else np.float64(np.float32(value)) for value in case.arguments]
    with np.errstate(all="ignore"):
        exact = np.broadcast_to(REFERENCE[case.op](*arguments), x.shape)
        expected = exact.astype(np.float32).astype(np.float64)  # overflows as fp32 does
        bound = case.ulps * ULP * np.abs(expected) + case.absolute + case.scaled * np.abs(x) + 2.0**-126 + allowance
        same = (out == expected) | (np.isnan(out) & np.isnan(expected))
        close = np.isfinite(expected) & (np.abs(out - expected) <= bound)
    known = np.isneginf(x) if case.op == "pow" and case.arguments[1] == 0.5 else np.zeros(len(x), bool)  # sqrt's NaN
    wrong = np.flatnonzero(~(same | close | known))
    assert wrong.size == 0, [(case, x[i], y[i], out[i], expected[i]) for i in wrong[:8]]


def multiples_of_half_pi() -> list[float]:
    """Those numbers of fp32 which are next to one, of every magnitude, by pi to 600 bits (Machin's formula)."""
    bits = 600
    half_pi = 2 * (4 * _arctangent(5, bits) - _arctangent(239, bits))
    counts = [round(2 ** (step / 8)) for step in range(8 * 126)]
    return [float(np.float32(count * half_pi / 2**bits)) for count in counts]


def _arctangent(inverse: int, bits: int) -> int:
    """Of 1 / `inverse`, times 2^bits."""
    power, total, odd = (1 << bits) // inverse, 0, 1
    while power:
        total += power // odd * (1 if odd % 4 == 1 else -1)
        power, odd = power // inverse**2, odd + 2
    return total


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_angles_of_any_size(op: str, compiled: ctypes.CDLL) -> None:
    """Drawn from all numbers of fp32, and next to multiples of pi/2, where one of the two is smallest."""
    case = next(case for case in CASES if case.op == op)
    near = np.float32(multiples_of_half_pi())
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    around = [near, -near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))]
    small = np.random.default_rng(1).uniform(-200, 200, 200_000).astype(np.float32)
    x = np.concatenate([drawn[np.isfinite(drawn)], small, *around, np.float32([65535.996, 65536, -65536, 65536.01])])
    out = np.empty_like(x)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, x, out)]
    getattr(compiled, f"case{CASES.index(case)}")(len(x), *pointers)
    check(case, x, x, out)
    assert np.abs(out).max() <= 1


FAST = {"fast_gelu_of_half": (2.2, 0.62, 0.53, 9.9e-6), "fast_short_gelu_of_half": (18, 1.4, 0.85, 1.1e-4)}


@pytest.fixture(scope="module")
def fast_math(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every function of FAST for half of x: `NAME(count, x, out)`; ex2 and rcp are exact."""
    functions = "\n".join(
        f"""extern "C" void {name}(int count, const float* xs, float* outs) {{
  for (int i = 0; i < count; ++i) outs[i] = onnxfuse::pointwise::{name}(0.5f * xs[i]);
}}"""
        for name in FAST
    )
    return build_library(f"{host_headers()}\n{functions}\n", tmp_path_factory.mktemp("fast"))


@pytest.mark.parametrize("name", FAST)
def test_fast_gelu_is_off_by_what_its_comment_says(name: str, fast_math: ctypes.CDLL) -> None:
    """All 65,536 numbers in fp16, in units of the last place of the result in fp16."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    out = np.empty_like(x)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, out)]
    getattr(fast_math, name)(len(x), *pointers)
    assert np.isnan(out[np.isnan(x) | np.isneginf(x)]).all()
    assert out[np.isposinf(x)] == math.inf
    x, out = x[np.isfinite(x)].astype(np.float64), out[np.isfinite(x)]
    expected = np.array([0.5 * each * math.erfc(-each / math.sqrt(2)) for each in x])
    every, large, positive, scaled = FAST[name]
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(expected), SMALLEST_NORMAL))) - 10)
    units = np.abs(out.astype(np.float16) - expected) / unit
    assert units.max() <= every
    assert units[np.abs(expected) >= 2.0**-10].max() <= large
    assert units[x > 0].max() <= positive
    assert (np.abs(out - expected) <= scaled * np.abs(x)).all()


@given(st.floats(width=32))
def test_constant_is_the_fp32_number(value: float) -> None:
    text = constant(value).strip("()")
    if math.isfinite(value):
        assert text.endswith("f")
        parsed = np.float32(float(text[:-1]))
    else:
        bits = int(text.removeprefix("__int_as_float(").removesuffix(")"), 16)
        parsed = np.uint32(bits).view(np.float32)
    np.testing.assert_array_equal(parsed, np.float32(value))


@given(st.floats(allow_nan=False))
def test_constant_rounds_to_fp32(value: float) -> None:
    with np.errstate(over="ignore"):
        assert constant(value) == constant(float(np.float32(value)))
