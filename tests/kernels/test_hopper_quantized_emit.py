"""The sm_90a kernel for a quantized weight compiles without spills in every form, and lies in memory as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.quantization import Quantization
from onnxfuse.kernels.hopper_quantized import emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED, TILES
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile, footprint, map_rules, max_accumulators, stage_bytes
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec
from tests.helpers.quantized_cases import BITS, BLOCKS, DEVICE, PORTABLE
from tests.helpers.quantized_problem import math_of, quantized

K = 4096
FORMS = [
    Quantization(bits, block, zero_points, dtype)
    for bits in BITS
    for block in BLOCKS
    for zero_points in (False, True)
    for dtype in (F16, BF16, F32)
]


def spec_of(
    form: Quantization, parts: int = 1, kind: str = "plain", outs: tuple[DType | None, ...] = (None,)
) -> TiledSpec:
    size = Size(64, 256, K)
    return quantized(make_spec(math_of(form), parts, "nk", PORTABLE, size, kind, outs), form, size)


def legal(spec: KernelSpec) -> list[QuantizedTile]:
    return [tile for tile in TILES if HOPPER_QUANTIZED.why_not(spec, tile, DEVICE) is None]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_has_tiles_for_few_rows_and_for_many(form: Quantization, parts: int) -> None:
    rows = {tile.block_m for tile in legal(spec_of(form, parts))}
    # Of 8 rows a stage has 128 of k, whose zero points are one register and whose scales one load, and four groups hold
    # the sums of two parts.
    assert min(rows) == (8 if parts <= 2 and 128 // form.block * max(form.bits, 2 * form.scale.bytes) <= 32 else 16)
    assert max(rows) * parts >= 240


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_boxes_and_copies_fill_a_stage(form: Quantization) -> None:
    for parts, kind in ((1, "residual"), (2, "plain")):
        spec = spec_of(form, parts, kind)
        for tile in legal(spec):
            lhs, *rhs = [rule for rule in map_rules(spec, tile) if rule is not None]
            activations = lhs.box_inner * lhs.box_outer * tile.block_k // lhs.box_inner * spec.dtype.bytes
            held = activations + sum(rule.box_inner * rule.box_outer for rule in rhs)
            held += parts * tile.block_n * max(tile.block_k // form.block * form.scale.bytes, 4)
            held += parts * tile.block_n * 4 * form.zero_points
            layout = footprint(spec, tile, DEVICE.shared_bytes)
            assert held <= layout.stage == stage_bytes(spec, tile) < held + 1024
            assert layout.total <= DEVICE.shared_bytes
            # A group that shares k waits for its own stages alone, of which it holds one while it reads the next.
            assert layout.stages % tile.k_groups == 0
            assert layout.stages >= 2 * tile.k_groups


def _heaviest() -> list[tuple[KernelSpec, QuantizedTile]]:
    """Of every form the tile with the most sums in a thread; parts, operands and outputs take turns."""
    cases = []
    for turn, form in enumerate(FORMS[::3]):
        kind = ("plain", "residual", "mixed")[turn % 3]
        spec = spec_of(form, 1 + turn % 2, kind, ((None,), (None, None))[turn % 4 == 3])
        sums = {tile: spec.parts * tile.swapped.group_m // 64 * tile.block_m // 2 for tile in legal(spec)}
        wanted = (2, 4)[turn % 2]
        heaviest = max(sums, key=lambda tile: (tile.all_groups == wanted, sums[tile], tile.splits))
        cases.append((spec, heaviest))
    (apart,) = (tile for tile in TILES if tile.apart)
    kinds = ((form, ("plain", "residual")[turn % 2]) for turn, form in enumerate(FORMS[1::5]))
    return cases + [(spec_of(form, 2, kind), apart) for form, kind in kinds]


def _named(value: KernelSpec | QuantizedTile) -> str:
    if isinstance(value, QuantizedTile):
        return str(value)
    form = value.quantization
    assert form is not None
    return f"{form.bits} bits, blocks of {form.block}, {value.dtype}, {value.parts} parts, {len(value.loads)} loads"


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("spec", "tile"), _heaviest(), ids=_named)
def test_it_compiles_without_spills(spec: KernelSpec, tile: QuantizedTile) -> None:
    image = compile_source(emit(spec, tile, DEVICE.shared_bytes), DEVICE)
    assert (image.spill_bytes, image.local_bytes) == (0, 0)
    assert "C75" not in image.log  # wgmma that wait for each other


def test_what_it_does_not_run_says_why() -> None:
    spec, tile = spec_of(FORMS[0]), QuantizedTile(64, 128, 128)

    def why(**changes: object) -> str | None:
        return HOPPER_QUANTIZED.why_not(replace(spec, **changes), tile, DEVICE)  # type: ignore[arg-type]

    assert why() is None
    assert "not quantized" in str(why(quantization=None))
    assert "16-byte" in str(why(lhs_width=4))
    assert "16-byte" in str(why(rhs_width=8))
    assert "n contiguous" in str(why(outs=(replace(spec.outs[0], transposed=True),)))
    assert "one stride" in str(why(lhs_order="km"))
    assert "accumulators" in str(HOPPER_QUANTIZED.why_not(spec_of(FORMS[0], 4), QuantizedTile(96, 128, 128), DEVICE))
    assert max_accumulators(spec_of(FORMS[0], kind="residual"), tile) < max_accumulators(spec, tile)
    for groups in ({"groups": 4}, {"groups": 1}, {"groups": 1, "k_groups": 3}, {"k_groups": 4}):
        assert "groups" in str(HOPPER_QUANTIZED.why_not(spec, replace(tile, block_n=256, **groups), DEVICE))
    apart = QuantizedTile(32, 64, 64, apart=True, k_groups=2)
    assert "of all of k" in str(HOPPER_QUANTIZED.why_not(spec_of(FORMS[0], 2), apart, DEVICE))
