"""The sm_90a kernel for a quantized weight on the emulator of Hopper: results, waiting, every byte that it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import BF16, F16
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile
from tests.helpers.kernel_problem import Size, make_spec
from tests.helpers.quantized_cases import PORTABLE, QuantizedCase, problem_of, quantized_cases
from tests.helpers.quantized_problem import quantized
from tests.kernels.test_hopper_on_cpu import build, launch

EVERY = list(quantized_cases())
# Every form in one type of 16 bits or the other, and in fp32; and some gates with parts apart. The GPU runs all.
FORMS = {
    replace(form, scale=F16 if form.scale == BF16 else form.scale): case
    for case in reversed(EVERY[::2])
    if (form := case.spec.quantization)
}
CASES = [*FORMS.values(), *[case for case in EVERY if case.tile.apart][::4]]
SHARED = [QuantizedTile(8, 64, 64, groups=1, k_groups=4), QuantizedTile(16, 128, 64, k_groups=2, splits=2)]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: QuantizedCase, tmp_path: Path) -> None:
    library = build(case, tmp_path)
    for size in case.sizes:
        problem = problem_of(case, size)
        eager = launch(library, case, problem, 2, lazy=False)
        problem.check(eager)
        late = launch(library, case, problem, 1, lazy=True)
        for first, second in zip(eager, late, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize("tile", SHARED, ids=str)
def test_bits_do_not_depend_on_the_tiles_before(tile: QuantizedTile, tmp_path: Path) -> None:
    """Of groups that share k, whose steps are no multiple of theirs: each multiplies the same part of all tiles' k."""
    size = Size(30, 400, 64 * 9 + 32)
    form = Quantization(4, 32, False, F16)
    spec = quantized(make_spec("f16", 1, "nk", PORTABLE, size, "residual"), form, size)
    case = QuantizedCase("shared", spec, tile, (size,))
    library, problem = build(case, tmp_path), problem_of(case, size)
    few, many = (launch(library, case, problem, clusters, lazy=False) for clusters in (1, 7))
    problem.check(few)
    for first, second in zip(few, many, strict=True):
        np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))
