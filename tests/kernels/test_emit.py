"""The emitted source: complete, self-contained, deterministic, and as large as its footprint says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.dtypes import ALL, F16, F32, FLOATS, DType
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.portable import tiles_for
from onnxfuse.schedule.portable_tile import footprint, why_not
from onnxfuse.schedule.shared_memory import CHUNK_BYTES
from tests.helpers.kernel_problem import TiledSpec

TILES = [Tile(32, 32, 32, 2, 1, 3), Tile(128, 64, 32, 2, 2, 4), Tile(64, 48, 64, 4, 3, 2)]


@st.composite
def accesses(draw: st.DrawFn, dtypes: tuple[DType, ...] = ALL) -> Access:
    kind = draw(st.sampled_from(["scalar", "row", "column", "tile"]))
    width = draw(st.sampled_from([1, 2, 4, 8, 16])) if kind in ("row", "tile") else 1
    return Access(kind, draw(st.sampled_from(dtypes)), width)


@st.composite
def specs(draw: st.DrawFn) -> TiledSpec:
    """Any legal kernel that adds all its parts and loads."""
    dtype = draw(st.sampled_from(FLOATS))
    math_mode = draw(st.sampled_from(["tf32", "fp32", "3xtf32"])) if dtype == F32 else dtype.name
    parts, loads = draw(st.integers(1, 4)), tuple(draw(st.lists(accesses(), max_size=12)))
    names = [f"acc{part}" for part in range(parts)] + [f"op{index}" for index in range(len(loads))]
    steps = [Step("t0", "relu", (names[0],))]
    for index, name in enumerate(names[1:], 1):
        steps.append(Step(f"t{index}", "add", (f"t{index - 1}", name)))
    outs = tuple(replace(access, kind="tile") for access in draw(st.lists(accesses(FLOATS), min_size=1, max_size=4)))
    return TiledSpec(
        dtype=dtype,
        math=math_mode,
        parts=parts,
        rhs_order=draw(st.sampled_from(["kn", "nk"])),
        lhs_width=draw(st.sampled_from([1, 2, 4, 8])),
        rhs_width=draw(st.sampled_from([1, 2, 4, 8])),
        loads=loads,
        outs=outs,
        steps=tuple(steps),
        out_values=tuple(steps[-1].result for _ in outs),
        tile=draw(st.sampled_from(TILES)),
    )


def constants(source: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}


@settings(max_examples=60)
@given(specs())
def test_every_tensor_of_the_spec_is_in_the_source(spec: TiledSpec) -> None:
    source = spec.source()
    for table, tensors in (("Load", spec.loads), ("Out", spec.outs)):
        for index, access in enumerate(tensors):
            (entry,) = re.findall(rf"template <> struct {table}<{index}> {{(.*)}};", source)
            assert f"using Type = {access.dtype.cuda};" in entry
            assert f"WIDTH = {min(access.width, CHUNK_BYTES // access.dtype.bytes)};" in entry
    for name in [f"acc{part}" for part in range(spec.parts)] + [f"op{index}" for index in range(len(spec.loads))]:
        assert f"const float {name} = " in source


@settings(max_examples=60)
@given(specs())
def test_constants_are_those_of_the_spec(spec: TiledSpec) -> None:
    values = constants(spec.source())
    tile = spec.tile
    assert (values["BLOCK_M"], values["BLOCK_N"], values["BLOCK_K"]) == (tile.block_m, tile.block_n, tile.block_k)
    assert (values["PARTS"], values["LOADS"], values["OUTS"]) == (spec.parts, len(spec.loads), len(spec.outs))
    assert values["THREADS"] == tile.threads
    assert values["SHARED_BYTES"] == footprint(spec, tile).total


@settings(max_examples=20)
@given(specs())
def test_source_is_deterministic_and_self_contained(spec: TiledSpec) -> None:
    source = spec.source()
    assert source == spec.source()
    assert set(re.findall(r"#include (\S+)", source)) == {"<cuda_fp16.h>", "<cuda_bf16.h>"}
    assert source.count(f"{ENTRY}(const __grid_constant__") == 1


@settings(max_examples=60)
@given(specs())
def test_shared_memory_regions_do_not_overlap(spec: TiledSpec) -> None:
    layout, tile = footprint(spec, spec.tile), spec.tile
    warps = tile.warps_m * tile.warps_n
    assert layout.vectors_offset >= max(layout.ring, warps * layout.staging)
    assert layout.total == layout.vectors_offset + layout.vectors
    assert tile.block_m // tile.warps_m % (16 * layout.slabs) == 0
    staged = [offset for load, offset in zip(spec.loads, layout.load_offsets, strict=True) if load.kind == "tile"]
    vectors = [offset for load, offset in zip(spec.loads, layout.load_offsets, strict=True) if load.kind != "tile"]
    for offsets, end in ((staged + list(layout.out_offsets), layout.staging), (vectors, layout.vectors)):
        assert len(set(offsets)) == len(offsets)
        assert all(offset % CHUNK_BYTES == 0 and offset < end for offset in offsets)


@pytest.mark.parametrize(
    ("tile", "limit", "reason"),
    [
        (Tile(40, 32, 32, 1, 1, 3), 200_000, "multiples of 16 rows"),
        (Tile(32, 24, 32, 1, 1, 3), 200_000, "16 columns"),
        (Tile(32, 32, 16, 1, 1, 3), 200_000, "multiple of 32"),
        (Tile(32, 32, 32, 1, 1, 1), 200_000, "two stages"),
        (Tile(256, 128, 32, 2, 2, 3), 200_000, "accumulators"),
        (Tile(1024, 32, 32, 64, 1, 2), 200_000, "threads"),
        (Tile(128, 128, 64, 2, 2, 4), 99 * 1024, "shared memory"),
    ],
)
def test_an_illegal_tile_has_a_reason(tile: Tile, limit: int, reason: str) -> None:
    out = (Access("tile", F16, 8),)
    spec = TiledSpec(F16, "f16", 1, "kn", 8, 8, (), out, (Step("y", "relu", ("acc0",)),), ("y",), tile=tile)
    assert reason in str(why_not(spec, tile, limit))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["mk", "km"])
def test_exact_products_have_a_tile_whichever_axis_of_lhs_is_contiguous(parts: int, order: str) -> None:
    out = (Access("tile", F32, 4),)
    legal = [
        tile
        for tile in tiles_for("3xtf32", parts)
        for spec in [TiledSpec(F32, "3xtf32", parts, "kn", 4, 4, (), out, (), ("acc0",), tile=tile, lhs_order=order)]
        if why_not(spec, tile, 99 * 1024) is None
    ]
    assert legal
    most = 128 if order == "mk" and parts <= 2 else 96  # registers of one thread for the sums of both levels
    assert all(2 * parts * tile.block_m * tile.block_n <= tile.threads * most for tile in legal)
