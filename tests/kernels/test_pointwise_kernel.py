"""The epilogue-only kernel without a GPU: run on the CPU, compiled within its registers, and its tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, BOOL, F16, F32, DType
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.pointwise import ENTRY, emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.pointwise_plan import checked_tile
from onnxfuse.schedule.pointwise_tile import (
    THREADS,
    PointwiseSpec,
    PointwiseTile,
    rows_in_flight,
    tile_for,
)
from tests.helpers.kernel_problem import (
    KINDS,
    LAYOUTS,
    Buffer,
    Problem,
    Size,
    make_operand,
    make_output,
    widest,
    with_operand,
)
from tests.helpers.thinning import Taken
from tests.kernels.test_portable_on_cpu import build_source, launch, launch_counted, moved_problem

DEVICE = ARCHITECTURES["sm_90a"]
NOTHING = Buffer(np.zeros(1, np.float32), 0, (1, 1, 1), (0, 0, 0))  # there is no lhs


@dataclass(frozen=True)
class Case:
    name: str
    dtype: DType
    parts: int
    sizes: tuple[Size, ...]
    kind: str = "plain"
    outs: tuple[DType | None, ...] = (None,)
    narrow: bool = False
    layout: str = "plain"


CASES = [
    Case("f16 gate", F16, 2, (Size(40, 328, 1), Size(1, 8, 1), Size(33, 32, 1, pad=8))),
    Case("f16 residual", F16, 1, (Size(70, 520, 1, pad=8),), "residual"),
    Case("bf16 mixed", BF16, 2, (Size(37, 40, 1, pad=8), Size(5, 264, 1, batch=3)), "mixed", (F32, BF16)),
    Case("f16 x2", F16, 3, (Size(35, 50, 1, pad=2),), "residual"),
    Case("f16 odd", F16, 2, (Size(37, 41, 1), Size(1, 1, 1)), "mixed", narrow=True),
    Case("f32", F32, 2, (Size(35, 300, 1, pad=4), Size(2, 4, 1, batch=2)), "residual", (F16,)),
    Case("f16 wide sum", F16, 1, (Size(20, 72, 1),), "plain", (F32,)),
    Case("bf16 odd transposed", BF16, 1, (Size(37, 41, 1, 2, 1, transposed=True),), "mixed", narrow=True),
    Case("f16 head split", F16, 1, (Size(40, 72, 1, n_run=24, pad=8), Size(33, 48, 1, 3, n_run=16)), layout="heads"),
    Case("f16 odd heads", F16, 2, (Size(37, 45, 1, n_run=15),), "residual", layout="heads"),
    Case("f16 images", F16, 1, (Size(48, 40, 1, m_run=24),), "residual", layout="images"),
    Case("f32 swapped rows", F32, 2, (Size(48, 40, 1, m_run=24),), "residual", layout="swapped rows"),
    Case("bf16 transposed", BF16, 1, (Size(48, 72, 1),), "mixed", (None, F32), layout="transposed"),
    Case("f16 bool", F16, 2, (Size(37, 96, 1), Size(5, 272, 1, batch=3, pad=16)), "masks"),
    Case("f16 bool x8", F16, 1, (Size(40, 328, 1), Size(33, 40, 1, pad=8)), "masked", (None, F32)),
    Case("bf16 odd bool", BF16, 1, (Size(37, 41, 1), Size(1, 1, 1)), "masks", narrow=True),
    Case("f32 bool transposed", F32, 1, (Size(48, 72, 1),), "masks", layout="transposed"),
    Case("f16 bool heads", F16, 1, (Size(33, 96, 1, 3, n_run=32),), "masks", layout="heads"),
]


@dataclass(frozen=True)
class TiledPointwise(PointwiseSpec):
    """A spec with the tile that a test computes it with."""

    tile: PointwiseTile = field(kw_only=True)


def make_spec(case: Case) -> TiledPointwise:
    """The gate of kernel_problem.make_spec with the product's parts among the operands."""
    size = case.sizes[0]

    def access(kind: str, dtype: DType, layout: str) -> Access:
        dims = LAYOUTS[layout]
        across = kind in ("row", "tile") and not case.narrow and dims[-1] == "n"
        run = size.n_run if "N" in dims else size.n
        two_levels = tuple(loop for loop, name in (("m", "M"), ("n", "N")) if name in dims) if kind == "tile" else ()
        element_bytes = case.dtype.bytes if dtype == BOOL else dtype.bytes  # masks take no more elements than numbers
        return Access(kind, dtype, widest(size, element_bytes, run) if across else 1, False, two_levels)

    made = [access("tile", case.dtype, "plain")] * case.parts + [access("row", case.dtype, "plain")] * case.parts
    loads = (*made, *(access(kind, dtype or case.dtype, case.layout) for kind, dtype in KINDS[case.kind]))
    parts = range(case.parts)
    steps = [Step(f"a{part}", "add", (f"op{part}", f"op{case.parts + part}")) for part in parts]
    steps.append(Step("g0", "gelu", (f"a{case.parts - 1}",)))
    steps += [Step(f"g{part + 1}", "mul", (f"g{part}", f"a{part}")) for part in parts[:-1]]
    values = [steps[-1].result]
    for index in range(2 * case.parts, len(loads)):
        steps += with_operand(steps[-1].result, index, loads[index].dtype, index % 2 == 1)
    values = ([steps[-1].result, *values] * 2)[: len(case.outs)]
    outs = tuple(access("tile", dtype or case.dtype, case.layout) for dtype in case.outs)
    tile = tile_for(loads, outs, size.n, rows_in_flight(loads, 8, DEVICE))
    return TiledPointwise(loads, outs, tuple(steps), tuple(values), tile=tile)


def checked(spec: TiledPointwise) -> TiledPointwise:
    """As the plan makes it."""
    return replace(spec, tile=checked_tile(spec, spec.tile.span, spec.tile.block_n, DEVICE), checked=True)


def make_problem(spec: TiledPointwise, size: Size, case: Case) -> Problem:
    """The products lie plainly, other tensors as the case says; a transposed one is reached by single elements."""
    rng, transposed = np.random.default_rng([size.m, size.n]), LAYOUTS[case.layout][-1] == "m"
    lies = [replace(load, transposed=transposed and index >= case.parts) for index, load in enumerate(spec.loads)]
    outs = [make_output(replace(out, transposed=transposed), size) for out in spec.outs]
    return Problem(spec, size, NOTHING, [], [make_operand(rng, load, size) for load in lies], outs)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_steps(case: Case, tmp_path: Path) -> None:
    spec = make_spec(case)
    library = build_source(emit(spec, spec.tile), ENTRY, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size, case)
        problem.check(launch(library, problem, lazy=False))
        problem.check(launch(library, problem, lazy=False, grid_z=1))


WIDE = [case for case in CASES if not case.narrow]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_a_checked_kernel_reads_misaligned_tensors_alone_by_elements(case: Case, tmp_path: Path) -> None:
    spec = checked(make_spec(case))
    library = build_source(emit(spec, spec.tile), ENTRY, tmp_path)
    problem = make_problem(spec, case.sizes[0], case)
    count, outs = len(spec.loads), [0] * len(spec.outs)
    one_each = [[int(place == chosen) for place in range(count)] for chosen in range(count)]
    for elements in ([0] * count, *one_each, [1] * count):
        moved = moved_problem(problem, [0, *elements, *outs])
        results, widest = launch_counted(library, moved, lazy=False)
        moved.check(results)
        widths = [1 if shifted else load.width for load, shifted in zip(spec.loads, elements, strict=True)]
        accesses = zip(spec.loads, widths, widest[1:], strict=False)
        assert all(found == width * load.dtype.bytes for load, width, found in accesses)
        assert widest[1 + count :] == [out.width * out.dtype.bytes for out in spec.outs]


def test_a_checked_kernel_reads_a_tensor_of_odd_pitch_by_elements(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "f16 residual")
    spec = checked(make_spec(case))
    library = build_source(emit(spec, spec.tile), ENTRY, tmp_path)
    odd, even = (make_problem(spec, Size(70, 520, 1, pad=pad), case) for pad in (3, 8))
    problem = replace(even, loads=[*even.loads[:-1], odd.loads[-1]])
    results, widest = launch_counted(library, problem, lazy=False)
    problem.check(results)
    assert widest[1:] == [16, 16, 2, 16]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_need_no_local_memory(arch: str, taken: Taken) -> None:
    specs = taken([*(make_spec(case) for case in CASES), *(checked(make_spec(case)) for case in WIDE)], 10)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(emit(spec, spec.tile), ARCHITECTURES[arch]), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), (arch, spec)


@pytest.mark.parametrize("n", [1, 8, 40, 41, 64, 320, 1280, 2624, 14336])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_tile_is_made_of_whole_threads(n: int, width: int, rows: int) -> None:
    loads = (Access("tile", F16, width), Access("row", F32, min(width, 4)))
    tile = tile_for(loads, (Access("tile", F16, 1),), n, rows)
    assert tile.span == width
    assert tile.block_m * tile.block_n == THREADS * rows * width
    wasted = -(-n // tile.block_n) * tile.block_n - n
    assert wasted < 8 * width or wasted <= n // 3


def test_a_thread_asks_for_no_more_than_its_registers_hold() -> None:
    tile = Access("tile", F32, 4)
    assert rows_in_flight((Access("row", F32, 4),), 8, DEVICE) == calibration(DEVICE).pointwise_most_rows
    assert [rows_in_flight((tile,) * count, 4, DEVICE) for count in (1, 2, 3, 8, 12)] == [4, 4, 2, 1, 1]
