"""The sm_90a kernel for a quantized weight on the emulator of Hopper: results, waiting, every byte that it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import F16
from tests.helpers.quantized_cases import QuantizedCase, problem_of, quantized_cases
from tests.kernels.test_hopper_on_cpu import build, launch

EVERY = list(quantized_cases())
# Every form in one type or the other, and some gates with parts apart; the GPU runs all.
FORMS = {replace(form, scale=F16): case for case in reversed(EVERY[::2]) if (form := case.spec.quantization)}
CASES = [*FORMS.values(), *[case for case in EVERY if case.tile.apart][::4]]


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
