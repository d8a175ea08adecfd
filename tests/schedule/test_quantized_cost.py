"""What ONNX Runtime takes for products with a weight of few bits, as the cost model has it, against measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F16, F32
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule import cost_model
from onnxfuse.schedule.kernel_family import Problem
from tests.schedule.test_plan import planned

DEVICE = ARCHITECTURES["sm_90a"]
# One H200, ONNX Runtime 1.31.1, the better of its two modes: microseconds of gate, up and down with four small nodes.
MLP = {1: 59, 4: 70, 16: 105, 64: 143, 300: 325, 2048: 1326}
WIDTH, HIDDEN = 4096, 14336


@pytest.mark.parametrize("m", MLP)
def test_stock_is_not_thought_slower_than_it_is(m: int) -> None:
    spec = planned(DEVICE).variants[0].spec
    spec = replace(spec, parts=1, rhs_order="nk", quantization=Quantization(4, 32, False, F16))
    up = cost_model.library(spec, Problem(m, HIDDEN, WIDTH), 1, DEVICE)
    down = cost_model.library(spec, Problem(m, WIDTH, HIDDEN), 1, DEVICE)
    assert 0.8 * MLP[m] < 2 * up + down < MLP[m]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("math", ["f16", "tf32", "fp32", "3xtf32"])
def test_every_architecture_knows_what_stock_takes(arch: str, math: str) -> None:
    dtype = F16 if math == "f16" else F32
    spec = replace(planned(DEVICE).variants[0].spec, parts=1, rhs_order="nk", dtype=dtype, math=math)
    spec = replace(spec, quantization=Quantization(8, 64, True, dtype))
    times = [cost_model.library(spec, Problem(m, HIDDEN, WIDTH), 1, ARCHITECTURES[arch]) for m in (1, 64, 2048)]
    assert 0 < times[0] < times[1] < times[2]
