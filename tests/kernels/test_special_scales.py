"""Scales that are 0, negative, infinite or NaN, on the emulators: what they do to their columns, and to no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import F16
from onnxfuse.ir.fusion import Step
from onnxfuse.ir.quantization import Quantization
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile
from onnxfuse.schedule.quantized_small_m_tile import QuantizedSmallMTile
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec
from tests.helpers.quantized_cases import PORTABLE, QuantizedCase
from tests.helpers.quantized_problem import QuantizedProblem, make_quantized_problem, quantized
from tests.kernels import test_hopper_on_cpu as hopper
from tests.kernels import test_portable_on_cpu as portable

SIZE = Size(5, 24, 128)
SPECIAL = {3: np.inf, 7: -np.inf, 9: np.nan}  # a scale of one block by its column
ZERO, TURNED = 5, 11  # columns all of whose scales are 0, or have the other sign
FORMS = [Quantization(4, 32, False, F16), Quantization(8, 16, True, F16)]
Run = Callable[[QuantizedProblem], np.ndarray]


def plain(form: Quantization, tile: object) -> TiledSpec:
    """The product and a row, without a function that a NaN or an infinity could vanish in."""
    spec = make_spec("f16", 1, "nk", tile, SIZE)  # type: ignore[arg-type]
    steps = (Step("a0", "add", ("acc0", "op0")),)
    return quantized(replace(spec, steps=steps, out_values=("a0",)), form, SIZE)


def few_rows(form: Quantization, folder: Path) -> tuple[TiledSpec, Run]:
    spec = plain(form, QuantizedSmallMTile(8, 16, 64 * 8 // form.bits, 2, 2, 2))
    library = portable.build_source(spec.source(), ENTRY, folder)
    return spec, lambda problem: portable.launch(library, problem, lazy=False)[0]


def many_rows(form: Quantization, folder: Path) -> tuple[TiledSpec, Run]:
    case = QuantizedCase("scales", plain(form, PORTABLE), QuantizedTile(16, 128, 64), (SIZE,))
    library = hopper.build(case, folder)
    return case.spec, lambda problem: hopper.launch(library, case, problem, 1, lazy=False)[0]


@pytest.mark.parametrize("kernel", [few_rows, many_rows])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_of_any_kind(kernel: Callable[..., tuple[TiledSpec, Run]], form: Quantization, tmp_path: Path) -> None:
    spec, run = kernel(form, tmp_path)
    problem = make_quantized_problem(spec, SIZE)
    problem.loads[0].view[...] = 0

    def result() -> np.ndarray:
        return run(problem)[problem.outs[0].index][0]

    before = result()
    assert np.isfinite(before).all()
    scales = problem.scales[0].view[0].T  # [n, blocks]
    assert scales.shape == (SIZE.n, SIZE.k // form.block)
    scales[ZERO] = 0
    scales[TURNED] *= -1
    for column, scale in SPECIAL.items():
        scales[column, 1] = scale
    after = result()
    np.testing.assert_array_equal(after[:, ZERO], 0)
    np.testing.assert_array_equal(after[:, TURNED], -before[:, TURNED])
    assert not np.isfinite(after[:, list(SPECIAL)]).any()
    assert np.isnan(after[:, 9]).all()
    others = [column for column in range(SIZE.n) if column not in {*SPECIAL, ZERO, TURNED}]
    np.testing.assert_array_equal(after[:, others], before[:, others])
