"""The kernel for small M on the GPU: both orders, all parts, operand kinds, tails, and the same bits in every run.

Launches, poisoned outputs and bounds are those of the portable kernel's tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.schedule.small_m import small_m_tiles
from onnxfuse.schedule.small_m_tile import SmallMTile
from tests.gpu.kernels import Kernels
from tests.gpu.test_portable_kernel import Case, device_spec, launch
from tests.helpers.kernel_problem import Size, in_chunks, make_problem, make_spec

pytestmark = pytest.mark.gpu

RUNS = 20
MOST = ARCHITECTURES["sm_90a"]  # shared memory

# (m, n, k): every m up to 16, two block rows and more; k and n short of, at and beyond whole blocks.
WIDE = [
    (1, 8, 8), (2, 16, 2560), (3, 72, 24), (4, 64, 512), (5, 136, 520), (6, 1032, 48), (7, 328, 520), (8, 128, 4096),
    (9, 200, 264), (10, 40, 40), (11, 248, 1000), (12, 320, 1280), (13, 24, 16), (14, 504, 136), (15, 96, 768),
    (16, 256, 128), (16, 1280, 320), (17, 264, 136), (31, 1032, 48), (48, 400, 112), (1, 5120, 1280),
]  # fmt: skip
NARROW_N = [(1, 1, 8), (2, 3, 40), (5, 13, 520), (16, 67, 136), (17, 33, 1032), (9, 129, 4096)]  # for rhs[n, k] only


def some_tile(math: str, parts: int) -> SmallMTile:
    return small_m_tiles(math, parts, "nk", MOST)[0]


def product_cases() -> Iterator[Case]:
    turn = 0
    for math in ("f16", "bf16", "tf32"):
        for order in ("kn", "nk"):
            for parts in (1, 2, 3, 4):
                for tile in small_m_tiles(math, parts, order, MOST):
                    turn += 1
                    sizes = tuple(Size(*WIDE[(turn * 5 + index) % len(WIDE)]) for index in range(8))
                    sizes += tuple(Size(*shape) for shape in NARROW_N) if order == "nk" else ()
                    kind = ("plain", "residual")[turn % 2]
                    spec = in_chunks(make_spec(math, parts, order, tile, sizes[0], kind, narrow=True))
                    if spec.why_not(MOST) is None:
                        yield Case(f"{math}-{order}-{parts}-block{tile.block_n}-{turn}", spec, sizes)


def any_depth_cases() -> Iterator[Case]:
    """Rows of lhs that begin anywhere: every tile with single elements, some with copies of two and four."""
    for math, widths in (("f16", (1, 2, 4)), ("bf16", (1,)), ("tf32", (1, 2))):
        for parts in (1, 2, 3):
            for index, tile in enumerate(small_m_tiles(math, parts, "kn", MOST)):
                width = widths[index % len(widths)]
                sizes = tuple(Size(m, n, k - 8 + width) for m, n, k in WIDE[index % 3 :: 3])
                spec = in_chunks(make_spec(math, parts, "kn", tile, sizes[0], "residual", narrow=True))
                spec = replace(spec, lhs_width=width)
                if spec.why_not(MOST) is None:
                    yield Case(f"{math}-any-depth-{parts}-{tile}-{width}", spec, sizes)


def operand_cases() -> Iterator[Case]:
    outs: dict[str, tuple[DType | None, ...]] = {"f16": (F16,), "f32-bf16": (F32, BF16), "own-f32": (None, F32)}
    for math in ("f16", "bf16", "tf32"):
        for name, out in outs.items():
            for order in ("kn", "nk"):
                size = Size(13, 152, 104, pad=8)
                spec = in_chunks(make_spec(math, 2, order, some_tile(math, 2), size, "mixed", out))
                yield Case(f"{math}-{order}-out-{name}", spec, (size, replace(size, m=35, pad=24)))
        batch = Size(9, 72, 40, batch=5, broadcast_rhs=False)
        yield Case(
            f"{math}-batch",
            in_chunks(make_spec(math, 1, "kn", some_tile(math, 1), batch, "mixed")),
            (batch,),
            grid_z=2,
        )
        runs = Size(9, 72, 40, 6, 8, False, lhs_batch_run=2, rhs_batch_run=3)
        spec = in_chunks(make_spec(math, 1, "nk", some_tile(math, 1), runs, "mixed"))
        yield Case(f"{math}-batch-runs", spec, (runs,))
        swapped = Size(13, 40, 48, batch=2, pad=8, transposed=True)
        spec = in_chunks(make_spec(math, 1, "kn", some_tile(math, 1), swapped, "mixed", narrow=True))
        yield Case(f"{math}-transposed", spec, (swapped,))


CASES = [*product_cases(), *any_depth_cases(), *operand_cases()]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The cases' kernels."""
    sources = {case.name: (case.spec.source(), case.spec.shared_bytes(device_spec())) for case in CASES}
    return Kernels(sources, device_spec(), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: Case, kernels: Kernels) -> None:
    assert case.spec.why_not(device_spec()) is None
    for size in case.sizes:
        problem = make_problem(case.spec, size)
        problem.check(launch(kernels[case.name], problem, case.grid_z))


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.name)
def test_a_product_without_depth_is_zero(case: Case, kernels: Kernels) -> None:
    problem = make_problem(case.spec, replace(case.sizes[0], k=0))
    problem.check(launch(kernels[case.name], problem, case.grid_z))


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.name)
def test_every_run_gives_the_same_bits(case: Case, kernels: Kernels) -> None:
    problem = make_problem(case.spec, case.sizes[0])
    first, *others = ([out.tobytes() for out in launch(kernels[case.name], problem, None)] for _ in range(RUNS))
    assert all(run == first for run in others)


def test_infinities_stay_in_their_row_and_column(kernels: Kernels) -> None:
    """What lies beyond k, or in another row, must not meet an infinity: 0 * inf is NaN."""
    case = next(case for case in CASES if case.name.startswith("f16-nk-1-"))
    problem = make_problem(case.spec, Size(5, 24, 40))
    clean = launch(kernels[case.name], problem, None)[0].reshape(5, 24)
    problem.lhs.view[0, 2, 39] = np.inf
    problem.rhs[0].view[0, 39, 7] = np.inf
    dirty = launch(kernels[case.name], problem, None)[0].reshape(5, 24)
    untouched = np.ones((5, 24), bool)
    untouched[2], untouched[:, 7] = False, False
    np.testing.assert_array_equal(clean[untouched], dirty[untouched])
