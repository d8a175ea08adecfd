"""What a quantized rhs takes in memory, and that only families that read one take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F16
from onnxfuse.ir.quantization import Quantization
from onnxfuse.kernels.source import quantized_numbers
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.kernel_spec import QUANTIZED, KernelSpec
from tests.schedule.test_plan import planned


def spec_of(form: Quantization | None) -> KernelSpec:
    base = planned(ARCHITECTURES["sm_90a"]).variants[0].spec
    return replace(base, quantization=form, rhs_order="nk")


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block", QUANTIZED_BLOCKS)
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_a_column_is_counted_block_by_block(bits: int, block: int, zero_points: bool) -> None:
    form = Quantization(bits, block, zero_points, F16)
    for k in (1, block - 1, block, block + 1, 3 * block, 10 * block):
        starts = range(0, k, block)
        assert form.blocks(k) == len(starts)
        stored = sum(block * bits for _ in starts) // 8 + 2 * len(starts)
        packed = (len(starts) * bits + 7) // 8 if zero_points else 0
        assert form.column_bytes(k) == stored + packed


@pytest.mark.parametrize(
    "family", [each for each in PRODUCTS if "quantized" not in each.name], ids=lambda each: each.name
)
def test_a_family_says_that_it_reads_no_quantized_rhs(family: object) -> None:
    device = ARCHITECTURES["sm_90a"]
    spec = spec_of(Quantization(4, 32, False, F16))
    for candidate in family.candidates(spec, device, 4096):  # type: ignore[attr-defined]
        assert candidate.family.why_not(spec, candidate.tile, device) == QUANTIZED


def test_the_text_has_constants_of_a_quantized_rhs_alone() -> None:
    assert quantized_numbers(spec_of(None)) == {}
    assert quantized_numbers(spec_of(Quantization(4, 128, True, F16))) == {
        "QUANTIZED_BITS": 4, "QUANTIZED_BLOCK": 128, "ZERO_POINTS": 1, "SCALES_WIDTH": 1, "ZERO_POINTS_WIDTH": 1,
    }  # fmt: skip
