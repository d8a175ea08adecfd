"""The kernel for few rows and a quantized rhs on the GPU: every form and type, 1 to 33 rows, ragged n and k.

As `test_quantized_hopper.py`: launched directly, outputs poisoned, the padding around tensors NaN. Integers, scales and
zero points lie in buffers of exactly their own bytes, which `python -m tests.tools.memcheck` watches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.ir.quantization import Quantization
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M
from tests.gpu.kernels import Kernels
from tests.gpu.test_portable_kernel import device_spec, launch
from tests.helpers.kernel_problem import Size, TiledSpec
from tests.kernels.test_quantized_small_m import problem_of, quantized_spec, tile

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
# Whole and ragged columns and blocks; more tiles than multiprocessors; k of one step of one warp and of many.
SHAPES = ((1, 8), (16, 4096), (35, 520), (264, 1096), (1500, 296), (77, 2056))
RUNS = 20


@dataclass(frozen=True)
class Case:
    """A kernel, its name, and sizes to run it at."""

    name: str
    spec: TiledSpec
    sizes: tuple[Size, ...]


def cases() -> Iterator[Case]:
    """Every form in all types; tiles, parts, depths and operand kinds take turns."""
    turn, device = 0, device_spec()
    forms = itertools.product((F16, BF16, F32), QUANTIZED_BITS, QUANTIZED_BLOCKS, (False, True))
    for dtype, bits, block, zero_points in forms:
        form = Quantization(bits, block, zero_points, dtype)
        for part_turn in range(2):
            turn += 1
            parts, kind = (2, 1 + turn // 2 % 4)[part_turn], ("plain", "residual", "mixed")[turn % 3]
            n, k = SHAPES[turn % len(SHAPES)]
            base = quantized_spec(form, parts, tile(bits, 1, 16, 64), Size(1, n, k), kind, exact=turn % 3 == 0)
            legal = [
                entry.tile
                for entry in QUANTIZED_SMALL_M.candidates(base, device, k)
                if QUANTIZED_SMALL_M.why_not(base, entry.tile, device) is None
            ]
            for number, each in enumerate(legal):
                if (number + turn) % 5:
                    continue
                rows = [ROWS[(turn * 3 + number * 5 + index) % len(ROWS)] for index in range(2)] + [each.block_m]
                sizes = tuple(Size(m, n, k) for m in rows)
                name = f"{dtype.name}-{form}-{parts}x-{n}-{k}-{number}".replace(" ", "-")
                yield Case(name, replace(base, tile=each), sizes)


@pytest.fixture(scope="module")
def every_case() -> list[Case]:
    """Only where there is a GPU to choose tiles for."""
    return list(cases())


FORMS = [
    f"{of}-i{bits}-blocks-of-{block}"
    for of in ("f16", "bf16", "f32")
    for bits in QUANTIZED_BITS
    for block in QUANTIZED_BLOCKS
]


@pytest.mark.parametrize("form", FORMS)
def test_kernel_computes_the_fusion(form: str, every_case: list[Case], tmp_path: Path) -> None:
    """Likewise with a grid of fewer blocks than tiles, to the bit."""
    chosen = [case for case in every_case if case.name.startswith((f"{form}-",))]
    assert len(chosen) >= 5
    sources = {case.name: (case.spec.source(), case.spec.shared_bytes(device_spec())) for case in chosen}
    kernels = Kernels(sources, device_spec(), tmp_path)
    for case in chosen:
        for size in case.sizes:
            problem = problem_of(case.spec, size)
            first = launch(kernels[case.name], problem, None)
            problem.check(first)
            for one, other in zip(first, launch(kernels[case.name], replace(problem, blocks=3), None), strict=True):
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("number", [0, -1])
def test_every_run_gives_the_same_bits(number: int, every_case: list[Case], tmp_path: Path) -> None:
    case = every_case[number]
    source = {case.name: (case.spec.source(), case.spec.shared_bytes(device_spec()))}
    kernel = Kernels(source, device_spec(), tmp_path)[case.name]
    problem = problem_of(case.spec, case.sizes[0])
    first, *others = ([out.tobytes() for out in launch(kernel, problem, None)] for _ in range(RUNS))
    assert all(run == first for run in others)


def test_infinities_stay_in_their_row(tmp_path: Path) -> None:
    """What lies beyond k, or in another row, must not meet an infinity: 0 * inf is NaN."""
    size = Size(5, 24, 200)
    spec = quantized_spec(Quantization(4, 32, True, F16), 1, tile(4, 8, 16, 64), size, "plain")
    kernel = Kernels({"k": (spec.source(), spec.shared_bytes(device_spec()))}, device_spec(), tmp_path)["k"]
    problem = problem_of(spec, size)
    clean = launch(kernel, problem, None)[0].reshape(5, 24)
    problem.lhs.view[0, 2, 199] = np.inf
    dirty = launch(kernel, problem, None)[0].reshape(5, 24)
    np.testing.assert_array_equal(np.delete(clean, 2, 0), np.delete(dirty, 2, 0))
    assert not np.isfinite(dirty[2]).all()
