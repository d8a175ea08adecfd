"""The sm_90a kernel for a quantized weight on the GPU: every form and type, all schedules, ragged m, n and k.

As `test_hopper_kernel.py`: launched directly, outputs poisoned, the padding around tensors NaN. Integers, scales and
zero points lie in buffers of exactly their own bytes, which `python -m tests.tools.memcheck` watches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED, TILES
from tests.gpu.kernels import Kernels
from tests.gpu.test_hopper_kernel import launch
from tests.helpers.kernel_problem import Size, make_spec
from tests.helpers.quantized_cases import DEVICE, PORTABLE, QuantizedCase, problem_of, quantized_cases
from tests.helpers.quantized_problem import math_of, quantized

pytestmark = pytest.mark.gpu

# Enough tiles for every block to walk over several, and for the ring to go round.
LARGE = Size(700, 4200, 1096)
RUNS = 20


def large_cases() -> list[QuantizedCase]:
    """Every tile, with one part and with two; forms take turns."""
    cases = []
    for turn, tile in enumerate(TILES):
        form = Quantization(
            (4, 4, 8)[turn % 3], (32, 128, 64, 16)[turn % 4], turn % 2 == 1, (F16, BF16, F32)[turn // 2 % 3]
        )
        for parts, kind in ((1, "residual"), (2, "plain")):
            spec = quantized(make_spec(math_of(form), parts, "nk", PORTABLE, LARGE, kind), form, LARGE)
            if HOPPER_QUANTIZED.why_not(spec, tile, DEVICE) is None:
                name = f"large-{form}-{form.scale.name}-{parts}x-{tile}".replace(" ", "-")
                cases.append(QuantizedCase(name, spec, tile, (LARGE,)))
    return cases


CASES = [*quantized_cases(), *large_cases()]
SPLIT = [case for case in CASES if case.tile.splits > 1]


@pytest.fixture(scope="module", autouse=True)
def _only_on_hopper() -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != str(DEVICE.capability):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def kernel(case: QuantizedCase, tmp_path: Path) -> object:
    """The case's kernel."""
    return Kernels({case.name: (case.source, case.launch.shared_bytes)}, DEVICE, tmp_path)[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: QuantizedCase, kernel: object) -> None:
    for size in case.sizes:
        problem = problem_of(case, size)
        first = launch(kernel, case, problem)
        problem.check(first)
        # The same bits from a few blocks that walk over many tiles.
        for one, other in zip(first, launch(kernel, case, problem, blocks=4), strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("case", [SPLIT[0], SPLIT[-1], CASES[-1]], ids=lambda case: case.name)
def test_every_run_gives_the_same_bits(case: QuantizedCase, kernel: object) -> None:
    problem = problem_of(case, case.sizes[0])
    first, *others = ([out.tobytes() for out in launch(kernel, case, problem)] for _ in range(RUNS))
    assert all(run == first for run in others)
