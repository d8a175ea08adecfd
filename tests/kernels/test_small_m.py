"""The kernel for small M without a GPU: run on the CPU, compiled within its registers, and chosen where it is for."""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.small_m import SMALL_M, small_m_tiles
from onnxfuse.schedule.small_m_tile import SmallMTile
from tests.helpers.kernel_problem import Size, TiledSpec, in_chunks, make_problem, make_spec
from tests.helpers.thinning import Taken
from tests.kernels.test_portable_on_cpu import Case, build, launch
from tests.schedule.test_plan import planned


def tile(block_n: int, block_k: int = 32, stages: int = 2, warps_k: int = 2, splits: int = 1) -> SmallMTile:
    return SmallMTile(block_n, block_k, stages, warps_k, splits)


TAIL = Size(37, 40, 136, pad=8)
CASES = [
    Case("f16 nk", "f16", 1, "nk", tile(32), (Size(1, 8, 8), Size(16, 67, 264), replace(TAIL, n=33)), "residual"),
    Case("f16 kn", "f16", 1, "kn", tile(64), (Size(16, 72, 104), Size(1, 8, 8), TAIL), "residual"),
    Case("f16 kn gate", "f16", 2, "kn", tile(32), (Size(5, 48, 64, pad=8), Size(9, 200, 168)), "mixed", (None, F32)),
    Case("bf16 nk gate", "bf16", 2, "nk", tile(16, 64), (Size(16, 40, 200), Size(17, 19, 72)), "mixed", (F32, F16)),
    Case("bf16 kn wide", "bf16", 1, "kn", tile(128), (Size(8, 136, 40),)),
    Case("bf16 kn narrow", "bf16", 1, "kn", tile(32), (Size(8, 136, 40), Size(9, 24, 200)), "residual"),
    Case("f16 kn narrow gate", "f16", 2, "kn", tile(16, 32, 1), (Size(11, 136, 296),), "mixed"),
    Case("f16 three", "f16", 3, "kn", tile(16, 32, 3, 4), (Size(7, 40, 520),)),
    Case("f16 four", "f16", 4, "nk", tile(8, 128, 2, 1), (Size(3, 21, 328),), "residual"),
    Case("f16 batch", "f16", 1, "kn", tile(64), (Size(6, 40, 40, batch=3, broadcast_rhs=False),), "mixed"),
    Case("f16 batch runs", "f16", 1, "nk", tile(32), (
        Size(6, 40, 40, 6, 8, False, lhs_batch_run=3, rhs_batch_run=2),
        Size(6, 40, 40, 6, 8, False, lhs_batch_run=3, rhs_batch_run=2, same_runs=True),
    )),
    Case("3xtf32 batch runs", "3xtf32", 1, "kn", tile(16, 16), (
        Size(5, 36, 44, 4, 4, False, lhs_batch_run=2, rhs_batch_run=2),
    )),
    Case("f16 head split", "f16", 1, "kn", tile(64), (Size(6, 48, 40, 2, n_run=16),), "residual", layout="heads"),
    Case("bf16 transposed", "bf16", 2, "nk", tile(16), (Size(5, 40, 72),), "mixed", (None, F32), layout="transposed"),
    Case("f16 bool", "f16", 2, "nk", tile(16), (Size(5, 48, 72), Size(16, 16, 64, 2, 16)), "masks"),
    Case("bf16 bool transposed", "bf16", 1, "kn", tile(64), (Size(16, 40, 72),), "masks", layout="transposed"),
    Case("tf32 nk", "tf32", 1, "nk", tile(32, 16), (Size(1, 4, 4), Size(16, 67, 268), replace(TAIL, n=33)), "residual"),
    Case("tf32 kn", "tf32", 1, "kn", tile(64, 16), (Size(16, 76, 108), Size(1, 4, 4), TAIL), "residual"),
    Case("tf32 kn gate", "tf32", 2, "kn", tile(32, 32), (Size(5, 52, 60, pad=4), Size(9, 200, 168)), "mixed"),
    Case("tf32 nk gate", "tf32", 2, "nk", tile(16, 32), (Size(16, 40, 204), Size(17, 19, 76)), "mixed", (F16, F32)),
    Case("tf32 kn narrow", "tf32", 1, "kn", tile(16, 16), (Size(8, 132, 44), Size(9, 20, 204)), "residual"),
    Case("tf32 kn narrow gate", "tf32", 2, "kn", tile(8, 16, 3, 4), (Size(11, 132, 300),), "mixed"),
    Case("3xtf32 nk", "3xtf32", 1, "nk", tile(32, 16), (Size(1, 4, 4), Size(16, 67, 268), TAIL), "residual"),
    Case("3xtf32 kn", "3xtf32", 2, "kn", tile(32, 16), (Size(16, 76, 108), Size(1, 4, 4), TAIL), "mixed"),
    Case("3xtf32 kn narrow", "3xtf32", 1, "kn", tile(16, 16), (Size(8, 132, 44), Size(9, 20, 204)), "masks"),
    Case("tf32 three", "tf32", 3, "kn", tile(16, 16, 3, 4), (Size(7, 36, 524),)),
    Case("tf32 batch", "tf32", 1, "kn", tile(32, 16), (Size(6, 36, 44, batch=3, broadcast_rhs=False),), "masks"),
    Case("tf32 transposed", "tf32", 2, "nk", tile(16, 16), (Size(5, 40, 72),), "mixed", layout="transposed"),
]  # fmt: skip
CLUSTERS = [
    Case("f16 nk", "f16", 1, "nk", tile(32, splits=2), (Size(1, 8, 8), Size(16, 67, 264), TAIL), "masks"),
    Case("bf16 kn", "bf16", 1, "kn", tile(64, splits=4), (Size(16, 72, 104), Size(1, 8, 8), TAIL), "residual"),
    Case("f16 gate", "f16", 2, "kn", tile(32, splits=8), (Size(5, 48, 64, pad=8), Size(9, 200, 168)), "mixed", (F32,)),
    Case("f16 batch", "f16", 1, "kn", tile(64, splits=2), (Size(6, 40, 40, batch=3, broadcast_rhs=False),), "mixed"),
    Case("tf32 three", "tf32", 3, "nk", tile(8, 16, 3, 4, 8), (Size(7, 21, 524), Size(20, 8, 4))),
    Case("tf32 heads", "tf32", 1, "kn", tile(32, 16, splits=4), (Size(6, 48, 40, 2, n_run=16),), layout="heads"),
    Case("3xtf32", "3xtf32", 2, "kn", tile(32, 16, splits=4), (Size(16, 76, 108), Size(1, 4, 4), TAIL), "mixed"),
]  # fmt: skip

# Depths whose rows of lhs begin anywhere, and elements of a copy of lhs that fit all of a case.
ANY_DEPTH = [
    (Case("f16", "f16", 1, "kn", tile(64), (Size(16, 72, 105), Size(1, 8, 1), Size(37, 40, 263)), "residual"), 1),
    (Case("f16 gate", "f16", 2, "kn", tile(32, 64, 1), (Size(5, 48, 67), Size(17, 200, 167)), "mixed", (None, F32)), 1),
    (Case("bf16 pairs", "bf16", 2, "kn", tile(16), (Size(9, 136, 42), Size(3, 24, 202)), "residual"), 2),
    (Case("bf16 fours", "bf16", 1, "kn", tile(128), (Size(8, 136, 44), Size(16, 16, 4)), "masks"), 4),
    (Case("f16 batch", "f16", 1, "kn", tile(64), (Size(6, 40, 41, batch=3, broadcast_rhs=False),), "mixed"), 1),
    (Case("f16 cluster", "f16", 1, "kn", tile(32, splits=4), (Size(16, 72, 105), Size(2, 8, 1), Size(9, 40, 999))), 1),
    (Case("f16 columns", "f16", 1, "nk", tile(32), (Size(16, 67, 104), Size(3, 9, 8)), "residual"), 1),
    (Case("tf32", "tf32", 2, "kn", tile(32, 16), (Size(16, 76, 105), Size(1, 4, 1), Size(9, 200, 171)), "residual"), 1),
    (Case("tf32 pairs", "tf32", 1, "kn", tile(16, 32, 3, 4), (Size(11, 132, 302), Size(16, 4, 2))), 2),
    (Case("3xtf32", "3xtf32", 1, "kn", tile(32, 16, splits=2), (Size(16, 76, 105), Size(1, 4, 3))), 1),
]  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("case", "width"), ANY_DEPTH, ids=lambda each: getattr(each, "name", str(each)))
def test_rows_of_lhs_begin_anywhere(case: Case, width: int, tmp_path: Path) -> None:
    spec = replace(in_chunks(case.spec), lhs_width=width, outs=tuple(replace(o, width=1) for o in case.spec.outs))
    assert spec.why_not(ARCHITECTURES["sm_90a"]) is None
    library = build(spec, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size)
        problem.check(launch(library, problem, lazy=False))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: Case, tmp_path: Path) -> None:
    spec = replace(in_chunks(case.spec), outs=tuple(replace(out, width=1) for out in case.spec.outs))
    assert spec.why_not(ARCHITECTURES["sm_86"]) is None
    library = build(spec, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size)
        problem.check(launch(library, problem, lazy=False))
        problem.check(launch(library, problem, lazy=False, grid_z=1))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CLUSTERS, ids=lambda case: case.name)
def test_clusters_share_k(case: Case, tmp_path: Path) -> None:
    """With a cluster for each tile, and with one for all of them, whenever what a block sends lands: the same bits."""
    spec = replace(in_chunks(case.spec), outs=tuple(replace(out, width=1) for out in case.spec.outs))
    assert spec.why_not(ARCHITECTURES["sm_90a"]) is None
    library = build(spec, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size)
        outs = launch(library, problem, lazy=False)
        problem.check(outs)
        for lazy, grid_x in ((True, None), (True, case.tile.splits), (False, case.tile.splits)):
            others = launch(library, problem, lazy=lazy, grid_x=grid_x)
            assert [out.tobytes() for out in others] == [out.tobytes() for out in outs]


def test_what_is_not_finite_stays_so_behind_a_cluster(tmp_path: Path) -> None:
    """Exact fp32: a share with an infinity is computed again, whichever block has it, as without a cluster."""
    libraries = []
    for splits in (1, 4):
        spec = in_chunks(make_spec("3xtf32", 1, "nk", tile(32, 16, splits=splits), Size(3, 32, 512)))
        folder = tmp_path / str(splits)
        folder.mkdir()
        libraries.append((spec, build(spec, folder)))
    for k in (0, 40, 130, 511):
        alone, together = (_with_an_infinity(spec, library, k) for spec, library in libraries)
        assert not np.isfinite(together[:, 5]).any()
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


def _with_an_infinity(spec: TiledSpec, library: ctypes.CDLL, k: int) -> np.ndarray:
    problem = make_problem(spec, Size(3, 32, 512))
    problem.rhs[0].view[0, k, 5] = np.inf
    return launch(library, problem, lazy=False)[0].reshape(3, 32)


def small_kernels(arch: str) -> list[TiledSpec]:
    """Every candidate tile with every order and number of parts of one architecture.

    In 16 bits with every epilogue but that of nine loads for four parts, of which ptxas spills 32 bytes on sm_120, and
    8 on sm_80 with more registers; in fp32 with epilogues in turn.
    """
    kinds = {1: ("plain", "residual", "mixed"), 2: ("plain", "residual", "mixed"), 3: ("plain",), 4: ("residual",)}
    turn = itertools.cycle(("plain", "residual", "mixed"))
    specs = [
        make_spec(math, parts, order, tile, Size(16, 4096, 4096), kind)
        for order in ("nk", "kn")
        for parts in (1, 2, 3, 4)
        for math in (("f16", "bf16")[parts % 2], "tf32", *({"3xtf32"} & {calibration(ARCHITECTURES[arch]).exact}))
        for tile in small_m_tiles(math, parts, order, ARCHITECTURES[arch])
        for kind in (kinds[parts] if math in ("f16", "bf16") else (next(turn),))
    ]
    specs += [replace(spec, lhs_width=1) for spec in specs]
    return [spec for spec in specs if spec.why_not(ARCHITECTURES[arch]) is None]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_candidates_need_no_local_memory(arch: str, taken: Taken) -> None:
    candidates = small_kernels(arch)
    assert len(candidates) > 50
    specs = taken(candidates, 48)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(spec.source(), ARCHITECTURES[arch]), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), (arch, spec)


@pytest.mark.parametrize(
    ("arch", "rhs", "parts", "n", "k", "rows"),
    [
        *(("sm_80", rhs, *sizes, 16) for rhs in ("n k", "k n") for sizes in ((1, 1024, 4096), (2, 1280, 320))),
        *(("sm_80", rhs, 1, 4096, 4096, 16) for rhs in ("n k", "k n")),
        ("sm_90a", "n k", 1, 4096, 4096, 8),
    ],
)
@pytest.mark.parametrize(("dtype", "exact"), [(F16, False), (F32, False), (F32, True)])
def test_few_rows_get_the_kernel_for_them(
    arch: str, rhs: str, parts: int, n: int, k: int, rows: int, dtype, exact: bool
) -> None:
    """With smaller weights sm_90a's own tiles of 64 rows are as fast; with larger ones all wait for memory.

    So they are from nine rows on: 14 rows of 8192 -> 4096 [k, n] 21.2 us, by the kernel for few rows 21.5. Of 4096
    -> 4096 [k, n] three rows take 12.5 us by them where they start early, by the kernel for few rows 13.4.
    """
    plan = planned(ARCHITECTURES[arch], parts=parts, n=n, k=k, rhs=rhs, dtype=dtype, exact=exact)
    assert plan.variants[0].family is SMALL_M
    assert plan.variants[0].max_m >= rows
    assert all(variant.family is not SMALL_M for variant in plan.variants if variant.max_m > 256)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "rhs"),
    [(F32, 4097, 4096, "k n"), (F16, 4099, 4096, "k n"), (BF16, 4096, 4100, "n k"), (F16, 4096, 4099, "n k")],
)
def test_it_is_for_wide_accesses_of_rhs(dtype, n: int, k: int, rhs: str) -> None:
    plan = planned(ARCHITECTURES["sm_90a"], m=1, n=n, k=k, dtype=dtype, rhs=rhs)
    assert all(variant.family is not SMALL_M for variant in plan.variants)


@pytest.mark.parametrize(("dtype", "k"), [(F32, 4097), (F16, 4099), (BF16, 4100), (F16, 1026)])
def test_it_takes_any_depth_of_rows_of_n(dtype, k: int) -> None:
    """And is about as fast as what reads a copy of them."""
    plan = planned(ARCHITECTURES["sm_90a"], m=7, n=4096, k=k, dtype=dtype, rhs="k n")
    best, _ = plan.ranked[0].tiles[0]
    assert min(us for us, entry in plan.ranked[0].tiles if entry.family is SMALL_M) <= 1.15 * best


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"math": "fp32"}, "no kernel for fp32"),
        ({"rhs_width": 4}, "16-byte boundaries"),
        ({"lhs_width": 3}, "copies of 3 elements"),
        ({"tile": tile(20)}, "multiple of 8"),
        ({"tile": tile(32, 32, 1, 64)}, "threads"),
        ({"tile": tile(256)}, "registers"),
        ({"tile": tile(64, 32, 1, 32)}, "shared memory"),
    ],
)
def test_an_illegal_tile_has_a_reason(changed: dict, reason: str) -> None:
    spec = make_spec("f16", 1, "nk", tile(32), Size(16, 64, 64))
    assert spec.why_not(ARCHITECTURES["sm_86"]) is None
    assert reason in str(replace(spec, **changed).why_not(ARCHITECTURES["sm_86"]))
