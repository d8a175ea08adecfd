"""The sm_90a kernel whose M side is the weight on the GPU: both orders, types, all schedules, ragged m, n and k.

As `test_hopper_kernel.py`: launched directly, outputs poisoned, the padding around tensors NaN.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxfuse.schedule.hopper_swapped import FROM_REGISTERS, HOPPER_SWAPPED, TILES
from tests.gpu.kernels import Kernels
from tests.gpu.test_hopper_kernel import launch
from tests.helpers.kernel_problem import Size, make_problem, make_spec
from tests.helpers.swapped_cases import DEVICE, PORTABLE, TYPES, SwappedCase, swapped_cases

pytestmark = pytest.mark.gpu

# Enough tiles for every block to walk over several, and for the ring to go round.
LARGE = Size(700, 4200, 1096)
RUNS = 20


def large_cases() -> list[SwappedCase]:
    """Every tile, with one part and with two; types and orders take turns."""
    found = []
    turns = [(tile, TYPES[turn % len(TYPES)]) for turn, tile in enumerate(TILES)]
    for tile, (dtype, order) in (*turns, *((tile, ("tf32", "kn")) for tile in FROM_REGISTERS)):
        for parts, kind in ((1, "residual"), (2, "plain")):
            spec = make_spec(dtype, parts, order, PORTABLE, LARGE, kind)
            if HOPPER_SWAPPED.why_not(spec, tile, DEVICE) is None:
                name = f"large-{dtype}-{order}-{parts}x-{tile}".replace(" ", "-")
                found.append(SwappedCase(name, spec, tile, (LARGE,)))
    return found


CASES = [*swapped_cases(), *large_cases()]
SPLIT = [case for case in CASES if case.tile.swapped.splits > 1]


@pytest.fixture(scope="module", autouse=True)
def _only_on_hopper() -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != str(DEVICE.capability):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def kernel(case: SwappedCase, tmp_path: Path) -> object:
    """The case's kernel."""
    return Kernels({case.name: (case.source, case.launch.shared_bytes)}, DEVICE, tmp_path)[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: SwappedCase, kernel: object) -> None:
    for size in case.sizes:
        problem = make_problem(case.spec, size)
        first = launch(kernel, case, problem)
        problem.check(first)
        # The same bits from a few blocks that walk over many tiles, unless their last wave, which is split, is another.
        few = launch(kernel, case, problem, blocks=4)
        problem.check(few)
        for one, other in zip(first, few, strict=True):
            if case.tile.last_wave_splits == 1:
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("case", [SPLIT[0], SPLIT[-1], CASES[-1]], ids=lambda case: case.name)
def test_every_run_gives_the_same_bits(case: SwappedCase, kernel: object) -> None:
    problem = make_problem(case.spec, case.sizes[0])
    first, *others = ([out.tobytes() for out in launch(kernel, case, problem)] for _ in range(RUNS))
    assert all(run == first for run in others)
