"""A plan is legal on its architecture, covers every m, and gives a reason for what it did not take."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile
from onnxfuse.schedule.hopper_tile import HopperTile
from onnxfuse.schedule.plan import SHALLOW, estimated, make_plan, most_kernels
from onnxfuse.schedule.portable import PORTABLE, tiles_for
from onnxfuse.schedule.small_m import small_m_tiles
from tests.helpers.fusions import fusion

CLUSTERED = calibration(ARCHITECTURES["sm_90a"]).hopper_clustered


def planned(device, *, m=None, n=320, k=1280, parts=1, dtype=F16, rhs="k n", exact=False):
    packed = rhs.replace("n", "(p n)") if parts > 1 else rhs
    sizes = {"b": None, "m": m, "n": n, "k": k} | ({"p": parts} if parts > 1 else {})
    operands = [("(p n)" if parts > 1 else "n", dtype)]
    built = fusion(sizes, lhs="b m k", out="b m n", rhs=packed, operands=operands, parts=parts, dtype=dtype)
    mapping = map_axes(built)
    return make_plan(built, mapping, analyse(built, mapping), device, exact)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_every_architecture_has_a_legal_kernel_for_every_m(arch: str, parts: int, dtype) -> None:
    device = ARCHITECTURES[arch]
    plan = planned(device, parts=parts, dtype=dtype)
    for m in (0, 1, 7, 16, 17, 100, 1000, 12345, MAX_M):
        assert any(variant.min_m <= m <= variant.max_m for variant in plan.variants)
    for variant in plan.variants:
        assert variant.family.why_not(variant.spec, variant.tile, device) is None
        assert variant.family.launch(variant.spec, variant.tile, device).shared_bytes <= device.shared_bytes
        assert variant.family is not HOPPER or arch == "sm_90a"
    spec = plan.variants[0].spec
    candidates = [entry for family in PRODUCTS for entry in family.candidates(spec, device, 1280)]
    assert len({(variant.spec, variant.tile) for variant in plan.variants}) <= len(candidates) + 1


def test_the_last_variant_takes_any_pointer_and_pitch() -> None:
    first, *_, last = planned(ARCHITECTURES["sm_90a"], parts=2).variants
    assert last.spec == replace(first.spec, checked=True)
    assert last.family is PORTABLE


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_of_any_length_still_have_large_tiles(arch: str) -> None:
    """Attention's scores with keys [k, n], where n counts tokens: seven lengths of eight are no multiple of 8."""
    plan = planned(ARCHITECTURES[arch], n=None, k=64)
    odd = [variant for variant in plan.variants if variant.spec.rhs_width == 1 and not variant.spec.checked]
    assert [variant.max_m for variant in odd][-1] == MAX_M
    assert all(out.width == 1 for variant in odd for out in variant.spec.outs)
    assert odd[-1].spec.lhs_width > 1
    assert odd[-1].tile.block_m * odd[-1].tile.block_n > plan.variants[-1].tile.block_m * plan.variants[-1].tile.block_n


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("rhs", ["k n", "n k"])
@pytest.mark.parametrize(("n", "k", "parts"), [(4096, 4096, 1), (1280, 5120, 1), (14336, 4096, 2), (1049, 264, 1)])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_no_number_of_rows_takes_a_tile_far_from_the_best(
    arch: str, rhs: str, n: int, k: int, parts: int, dtype
) -> None:
    """At any m, also between the ends at which ranges were looked at; of few kernels."""
    device = ARCHITECTURES[arch]
    plan = planned(device, n=n, k=k, parts=parts, rhs=rhs, dtype=dtype)
    spec, sizes = plan.variants[0].spec, plan.sizes
    candidates = [entry for _, entry in plan.ranked[0].tiles]
    tiles = [entry.tile for entry in candidates]
    ranged = [variant for variant in plan.variants if variant.spec == spec]
    assert len({variant.tile for variant in ranged}) <= most_kernels(spec, sizes)

    def taken(m: int) -> int:
        return tiles.index(next(variant.tile for variant in ranged if variant.min_m <= m <= variant.max_m))

    random = Random(n)
    rows = [1, 17, 129, 154, 300, 514, *(round(math.exp(random.uniform(0, math.log(16384)))) for _ in range(40))]
    times = estimated(spec, candidates, sizes.at(np.array(rows)), device)
    regrets = np.sort(times[[*map(taken, rows)], range(len(rows))] / times.min(axis=0) - 1)
    assert regrets[len(regrets) // 2] <= calibration(device).regret
    assert regrets[-1] <= 0.25 + calibration(device).regret  # with as few kernels as a site may have


def gated(device, batch: int | None, m: int | None, n: int = 1152, k: int = 1152):
    """The plan of a product that a gate of each batch follows."""
    sizes = {"b": batch, "m": m, "n": n, "k": k}
    operands = [("n", F16), ("b 1 n", F16), ("b m n", F16)]
    built = fusion(sizes, lhs="b m k", out="b m n", rhs="n k", operands=operands)
    mapping = map_axes(built)
    return make_plan(built, mapping, analyse(built, mapping), device, exact_fp32=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(("batch", "m"), [(8, 256), (2, 1024), (2, 333), (16, 49), (3, 130)])
def test_a_tile_has_rows_of_one_batch_where_each_has_a_gate_of_its_own(arch: str, batch: int, m: int) -> None:
    """So a tile is priced as one of full tiles that have as many rows as its own have with what is empty."""
    device = ARCHITECTURES[arch]
    plan = gated(device, batch, m)
    spec, (ranked,) = plan.variants[0].spec, plan.ranked
    for us, entry in ranked.tiles[:40]:
        rows = batch * math.ceil(m / entry.tile.block_m) * entry.tile.block_m
        whole = replace(ranked.problem, m=np.array([rows]), bands=1)
        assert us == pytest.approx(float(estimated(spec.priced, [entry], whole, device)[0, 0]))
    best = ranked.tiles[0][1].tile
    assert math.ceil(m / best.block_m) * best.block_m <= 1.5 * m


def test_how_many_batches_some_rows_are_of_may_be_known() -> None:
    device = ARCHITECTURES["sm_90a"]
    for batch, m, rows, bands in ((8, None, 2048, 8), (None, 256, 2048, 8), (None, 256, 100, 1), (None, None, 2048, 1)):
        sizes = gated(device, batch, m).sizes
        assert sizes.at(rows).bands == bands
        assert {problem.bands for problem in sizes.guesses(rows)} == ({1, 2, 4, 8, 16} if batch is m else {bands})
    assert {problem.bands for problem in planned(device).sizes.guesses(2048)} == {1}


def test_a_kernel_of_single_elements_has_nothing_to_check() -> None:
    variants = planned(ARCHITECTURES["sm_80"], n=137, k=1281).variants
    assert not any(variant.spec.checked for variant in variants)
    assert {variant.spec.lhs_width for variant in variants} == {1}


def test_ranges_of_m_do_not_overlap_and_small_m_gets_a_small_tile() -> None:
    plan = planned(ARCHITECTURES["sm_90a"], n=4096, k=4096)
    wide = plan.variants[:-1]
    assert [variant.min_m for variant in wide] == [0, *(variant.max_m + 1 for variant in wide[:-1])]
    assert wide[-1].max_m == MAX_M
    assert wide[0].tile.block_m < wide[-1].tile.block_m


def test_every_candidate_that_was_not_taken_says_why() -> None:
    plan = planned(ARCHITECTURES["sm_86"], dtype=F32)
    taken = {variant.tile for variant in plan.variants}
    everything = {*tiles_for("tf32", 1), *small_m_tiles("tf32", 1, "kn", ARCHITECTURES["sm_86"])}
    assert taken | {entry.tile for entry in plan.rejected} == everything
    assert all(entry.reason for entry in plan.rejected)


@pytest.mark.parametrize(
    ("dtype", "exact", "math"), [(F16, False, "f16"), (BF16, True, "bf16"), (F32, False, "tf32"), (F32, True, "3xtf32")]
)
def test_math_follows_dtype_and_mode(dtype, exact: bool, math: str) -> None:
    assert planned(ARCHITECTURES["sm_80"], dtype=dtype, exact=exact).variants[0].spec.math == math


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("depth", [1, SHALLOW - 1, SHALLOW, 1280, None])
def test_exact_products_take_the_tensor_cores_where_those_are_faster(arch: str, depth: int | None) -> None:
    """The peaks of TF32 on the tensor cores and of fp32 without them, in TFLOP/s; PTX and sm_100 are not known."""
    peaks = {"sm_80": (156, 19.5), "sm_86": (75, 37.4), "sm_89": (183, 91.6), "sm_90a": (495, 67), "sm_120": (105, 105)}
    tensor_cores, scalar = peaks.get(arch, (0, 1))
    faster = tensor_cores > 3 * scalar and (depth is None or depth >= SHALLOW)
    plan = planned(ARCHITECTURES[arch], k=depth, dtype=F32, exact=True)
    assert {variant.spec.math for variant in plan.variants} == {"3xtf32" if faster else "fp32"}
    assert all(each.family.why_not(each.spec, each.tile, plan.device) is None for each in plan.variants)


@pytest.mark.parametrize(("rhs", "order"), [("k n", "kn"), ("n k", "nk")])
def test_the_weight_is_read_as_it_lies(rhs: str, order: str) -> None:
    assert planned(ARCHITECTURES["sm_80"], rhs=rhs).variants[0].spec.rhs_order == order


def hopper_tile_for(m: int, k: int, n: int, rhs: str) -> HopperTile | SwappedTile:
    plan = planned(ARCHITECTURES["sm_90a"], n=n, k=k, rhs=rhs)
    variant = next(variant for variant in plan.variants if variant.min_m <= m <= variant.max_m)
    assert variant.family in (HOPPER, HOPPER_SWAPPED)
    return variant.tile


@pytest.mark.parametrize("rhs", ["k n", "n k"])
@pytest.mark.parametrize(("m", "k", "n"), [(128, 5120, 1280), (128, 8192, 1024)])
def test_few_tiles_of_a_deep_product_are_split(m: int, k: int, n: int, rhs: str) -> None:
    tile = hopper_tile_for(m, k, n, rhs)
    splits = tile.splits * getattr(tile, "last_wave_splits", 1)
    blocks = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n) * splits
    assert splits > 1
    assert blocks <= CLUSTERED[str(splits)]


@pytest.mark.parametrize("rhs", ["k n", "n k"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(8192, 320, 1280), (2048, 1280, 5120), (4096, 4096, 4096), (2048, 320, 320), (128, 320, 1280), (512, 5120, 1280)],
)
def test_what_fills_the_chip_or_is_shallow_is_not_split(m: int, k: int, n: int, rhs: str) -> None:
    assert hopper_tile_for(m, k, n, rhs).splits == 1


@pytest.mark.parametrize("m", [4097, 6304, 8200, 12000])
@pytest.mark.parametrize(("n", "k", "parts"), [(5120, 1280, 1), (4096, 4096, 1), (14336, 4096, 2)])
def test_a_ragged_end_of_many_rows_is_no_reason_for_small_tiles(m: int, n: int, k: int, parts: int) -> None:
    """Rows of zeros fill the last of many tiles only. One batch, as of an image model of fixed sizes."""
    packed = {"p": parts} if parts > 1 else {}
    rhs = "(p n) k" if parts > 1 else "n k"
    built = fusion({"m": m, "n": n, "k": k, **packed}, lhs="m k", out="m n", rhs=rhs, parts=parts)
    mapping = map_axes(built)
    variant = make_plan(built, mapping, analyse(built, mapping), ARCHITECTURES["sm_90a"], False).variants[0]
    assert variant.family in (HOPPER, HOPPER_SWAPPED)
    assert variant.tile.block_m >= 128
    assert not getattr(variant.tile, "lhs_rows", 0)


@pytest.mark.parametrize("rhs", ["k n", "n k"])
def test_one_full_wave_is_taken_over_a_second_that_is_not(rhs: str) -> None:
    """128 rows of SwiGLU: 61 us with 128 tiles, 68 with 224 narrower ones on 132 multiprocessors."""
    device = ARCHITECTURES["sm_90a"]
    variants = planned(device, n=14336, k=4096, parts=2, rhs=rhs).variants
    tile = next(variant.tile for variant in variants if variant.min_m <= 128 <= variant.max_m)
    assert math.ceil(128 / tile.block_m) * math.ceil(14336 / tile.block_n) <= device.multiprocessors


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_that_split_k_all_run_at_once(parts: int) -> None:
    device = ARCHITECTURES["sm_90a"]
    for entry in planned(device, n=1280, k=5120, parts=parts).ranked:
        for cost, tile in [(cost, each.tile) for cost, each in entry.tiles if each.family is HOPPER]:
            if tile.splits > 1:
                tiles = math.ceil(entry.size / tile.block_m) * math.ceil(entry.problem.n / tile.block_n)
                assert (tiles * tile.splits <= CLUSTERED[str(tile.splits)]) == math.isfinite(cost)


def test_k_is_not_split_where_n_may_be_larger_than_guessed() -> None:
    split = [
        cost
        for entry in planned(ARCHITECTURES["sm_90a"], m=128, n=None, k=5120).ranked
        for cost, each in entry.tiles
        if each.family is HOPPER and each.tile.splits > 1
    ]
    assert split
    assert set(split) == {math.inf}
