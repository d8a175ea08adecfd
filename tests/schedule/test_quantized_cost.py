"""What ONNX Runtime takes for products with a weight of few bits, as the cost model has it, against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F16, F32, DType
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule import library_cost
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED
from onnxfuse.schedule.kernel_family import Candidate, Count, Flow, Problem, ProductFamily, Sizes, costs
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M
from onnxfuse.schedule.row_ranges import MOST_OF_QUANTIZED, choose_ranges
from tests.schedule.test_plan import planned

DEVICE = ARCHITECTURES["sm_90a"]
# One H200, ONNX Runtime 1.31.1, the better of its two modes: microseconds of gate, up and down with four small nodes.
MLP = {1: 59, 4: 70, 16: 105, 64: 143, 300: 325, 2048: 1326}
MLP_OF_FP32 = {1: 91, 4: 245, 16: 865, 64: 1274, 300: 1512, 2048: 3190}
WIDTH, HIDDEN = 4096, 14336
# One H200, docs/kernel-notes.md: microseconds of gate + up and of down, by the best tile of each number of rows.
FEW_ROWS = {1: (19.5, 11.6), 4: (20.0, 12.9), 8: (21.4, 14.6), 16: (29.9, 21.2), 32: (54.8, 36.5)}


# The same of the kernel of sm_90a whose M side is the weight.
MORE_ROWS = {16: (25.7, 14.9), 64: (34.9, 21.2), 128: (49.9, 31.7), 300: (111.2, 57.2), 2048: (724.7, 357.5)}


@pytest.mark.parametrize("m", MLP)
@pytest.mark.parametrize(("dtype", "mlp"), [(F16, MLP), (F32, MLP_OF_FP32)], ids=["f16", "f32"])
def test_stock_is_not_thought_slower_than_it_is(m: int, dtype: DType, mlp: dict[int, float]) -> None:
    math = "tf32" if dtype == F32 else dtype.name
    spec = replace(planned(DEVICE).variants[0].spec, parts=1, rhs_order="nk", dtype=dtype, math=math)
    spec = replace(spec, quantization=Quantization(4, 32, False, dtype))
    up = library_cost.library(spec, Problem(m, HIDDEN, WIDTH), 1, DEVICE)
    down = library_cost.library(spec, Problem(m, WIDTH, HIDDEN), 1, DEVICE)
    assert (0.8 if dtype == F16 else 0.65) * mlp[m] < 2 * up + down < mlp[m]


def part_specs() -> tuple[tuple[KernelSpec, Sizes], ...]:
    """Gate + up and down, of any number of rows."""
    spec = planned(DEVICE).variants[0].spec
    spec = replace(
        spec, loads=(), rhs_order="nk", rhs_width=16, scales_width=8, quantization=Quantization(4, 32, False, F16)
    )
    sizes = [Sizes(None, n, k, 1, False, 0) for n, k in ((HIDDEN, WIDTH), (WIDTH, HIDDEN))]
    return (replace(spec, parts=2), sizes[0]), (replace(spec, parts=1), sizes[1])


def least_estimate(family: ProductFamily, spec: KernelSpec, sizes: Sizes, rows: int) -> float:
    """Microseconds of a family's best tile."""
    legal = [
        entry for entry in family.candidates(spec, DEVICE, sizes.k) if family.why_not(spec, entry.tile, DEVICE) is None
    ]
    flows = [family.flow(spec, entry.tile, DEVICE) for entry in legal]
    every = zip(legal, flows, strict=True)
    return float(np.min([family.cost(entry, flow, spec, sizes.at(rows), DEVICE) for entry, flow in every]))


@pytest.mark.parametrize("rows", FEW_ROWS)
def test_few_rows_take_what_was_measured(rows: int) -> None:
    for (spec, sizes), measured in zip(part_specs(), FEW_ROWS[rows], strict=True):
        assert 0.92 * measured < least_estimate(QUANTIZED_SMALL_M, spec, sizes, rows) < 1.1 * measured


@pytest.mark.parametrize("rows", MORE_ROWS)
def test_more_rows_take_what_was_measured(rows: int) -> None:
    for (spec, sizes), measured in zip(part_specs(), MORE_ROWS[rows], strict=True):
        spec = replace(spec, depth=sizes.k, columns=sizes.n, lhs_width=8)
        assert 0.9 * measured < least_estimate(HOPPER_QUANTIZED, spec, sizes, rows) < 1.12 * measured


def estimates_at(
    candidates: Sequence[Candidate], flows: Sequence[Flow], spec: KernelSpec, sizes: Sizes, rows: Count
) -> np.ndarray:
    return costs(candidates, flows, spec, sizes.at(rows), DEVICE)


def test_one_row_has_the_kernel_that_was_fastest() -> None:
    """Of an LLM with any number of rows: what writes token by token."""
    for (spec, sizes), tile in zip(part_specs(), ("4x16x256", "1x32x256"), strict=True):
        candidates = [
            entry
            for entry in QUANTIZED_SMALL_M.candidates(spec, DEVICE, sizes.k)
            if QUANTIZED_SMALL_M.why_not(spec, entry.tile, DEVICE) is None
        ]

        flows = [QUANTIZED_SMALL_M.flow(spec, entry.tile, DEVICE) for entry in candidates]
        prices = partial(estimates_at, candidates, flows, spec, sizes)
        first = choose_ranges(candidates, prices, calibration(DEVICE).regret, most=MOST_OF_QUANTIZED)[0]
        assert first.low == 0
        assert str(first.entry.tile).startswith(tile)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("math", ["f16", "tf32", "fp32", "3xtf32"])
def test_every_architecture_knows_what_stock_takes(arch: str, math: str) -> None:
    dtype = F16 if math == "f16" else F32
    spec = replace(planned(DEVICE).variants[0].spec, parts=1, rhs_order="nk", dtype=dtype, math=math)
    spec = replace(spec, quantization=Quantization(8, 64, True, dtype))
    times = [library_cost.library(spec, Problem(m, HIDDEN, WIDTH), 1, ARCHITECTURES[arch]) for m in (1, 64, 2048)]
    assert 0 < times[0] < times[1] < times[2]
