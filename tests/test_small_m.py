"""The kernel for few rows without a GPU: run on the CPU, compiled within its registers, and chosen where it is for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F16, F32
from onnxfuse.kernels.emit import emit
from onnxfuse.plan import KernelSpec, Tile
from onnxfuse.runtime.compile import compile_source
from onnxfuse.tile_footprint import why_not
from tests.kernel_problem import Size, make_problem, make_spec
from tests.test_kernel_on_cpu import Case, build, launch


def tile(block_n: int, block_k: int = 32, stages: int = 2, warps_k: int = 2) -> Tile:
    return Tile(16, block_n, block_k, 1, 1, stages, warps_k, "small_m")


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
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: Case, tmp_path: Path) -> None:
    spec = make_spec(case.math, case.parts, case.order, case.tile, case.sizes[0], case.kind, case.outs)
    spec = replace(spec, lhs_width=8, rhs_width=8, outs=tuple(replace(out, width=1) for out in spec.outs))
    assert why_not(spec, 99 * 1024) is None
    library = build(spec, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size)
        problem.check(launch(library, problem, lazy=False))
        problem.check(launch(library, problem, lazy=False, grid_z=1))
