"""The portable kernel on the GPU: every dtype, order, number of parts, tile, operand kind and width, at many shapes.

Kernels are launched directly, without ONNX Runtime. Outputs are poisoned with NaN before each run, the padding around
every tensor is NaN, and the bounds are those of `tests/helpers/kernel_problem.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.fusion import Step, Value
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.portable import PORTABLE, tiles_for
from tests.gpu.kernels import Kernels
from tests.helpers.kernel_problem import Problem, Size, TiledSpec, make_problem, make_spec
from tests.kernels.test_epilogue_ops import CASES as EXPRESSION_CASES
from tests.kernels.test_epilogue_ops import SWEEP
from tests.kernels.test_epilogue_ops import check as check_expression

H200 = ARCHITECTURES["sm_90a"]
MATHS = ("f16", "bf16", "tf32", "3xtf32", "fp32")
ORDERS = ("kn", "nk")
PARTS = (1, 2, 3, 4)

# (m, n, k); n and k multiples of 8, so that every access is 16 bytes wide.
WIDE = [
    (1, 8, 8), (2, 16, 2560), (7, 328, 520), (16, 256, 128), (17, 264, 136), (31, 1032, 48), (48, 400, 112),
    (63, 8, 96),
    (64, 64, 32), (65, 200, 160), (96, 96, 96), (127, 120, 56), (128, 128, 64), (129, 136, 72), (130, 24, 1024),
    (200, 160, 80), (255, 512, 40), (256, 248, 1280), (300, 72, 24), (333, 64, 8), (504, 136, 248), (505, 136, 248),
    (512, 1280, 64), (1, 640, 320), (1000, 320, 640), (77, 768, 16), (128, 8, 8), (8, 128, 4096), (129, 1288, 200),
]  # fmt: skip
# Odd, prime and tiny: single-element accesses.
ODD = [
    (1, 1, 1), (1, 1, 7), (1, 13, 1), (13, 1, 1), (1, 13, 7), (7, 1, 13), (13, 17, 1), (2, 2, 2), (3, 5, 7), (5, 3, 2),
    (4, 4, 4), (6, 10, 14), (12, 20, 28), (31, 33, 513), (33, 31, 37), (64, 65, 66), (97, 101, 103), (127, 129, 131),
    (128, 127, 33), (129, 1, 65), (1, 129, 65), (65, 129, 1), (130, 66, 34), (211, 223, 227), (17, 1023, 5),
    (1000, 3, 3), (504, 135, 247), (503, 137, 249), (505, 136, 247), (504, 137, 248), (257, 511, 31), (63, 61, 59),
]  # fmt: skip
LARGE = (2048, 2560, 640)
BY_WIDTH = {1: (67, 61, 43), 2: (67, 150, 54), 4: (131, 84, 60), 8: (131, 152, 104)}


def test_there_are_enough_shapes() -> None:
    assert len({*WIDE, *ODD, LARGE, *BY_WIDTH.values()}) >= 60


@dataclass(frozen=True)
class Case:
    """One kernel and the sizes that it runs at; `grid_z` below the batch makes blocks loop over it."""

    name: str
    spec: TiledSpec
    sizes: tuple[Size, ...]
    grid_z: int | None = None


def rotated(shapes: list[tuple[int, int, int]], turn: int, count: int) -> tuple[Size, ...]:
    """Some of the shapes: all of them appear over neighbouring turns."""
    return tuple(Size(*shapes[(turn * count + index) % len(shapes)]) for index in range(count))


def offered(math: str, parts: int) -> list[Tile]:
    """The tiles that a plan may take."""
    spec = make_spec(math, parts, "kn", tiles_for(math, parts)[0], Size(8, 8, 8))
    return [tile for tile in tiles_for(math, parts) if PORTABLE.why_not(spec, tile, H200) is None]


def default_tile(math: str, parts: int, turn: int = 0) -> Tile:
    tiles = offered(math, parts)
    return tiles[turn % len(tiles)]


def product_cases() -> Iterator[Case]:
    turn = 0
    for math in MATHS:
        for order in ORDERS:
            for parts in PARTS:
                turn += 1
                tile = default_tile(math, parts, turn)
                wide, odd = rotated(WIDE, turn, 10), rotated(ODD, turn, 16)
                name = f"{math}-{order}-{parts}"
                yield Case(f"{name}-wide", make_spec(math, parts, order, tile, wide[0]), wide)
                yield Case(f"{name}-odd", make_spec(math, parts, order, tile, odd[0], narrow=True), odd)


def tile_cases() -> Iterator[Case]:
    for math in MATHS:
        for parts in PARTS:
            for index, tile in enumerate(offered(math, parts)):
                sizes = rotated(WIDE, index + parts, 5)
                yield Case(
                    f"{math}-{parts}-tile{index}", make_spec(math, parts, "kn", tile, sizes[0], "residual"), sizes
                )


def operand_cases() -> Iterator[Case]:
    for math in MATHS:
        for width, (m, n, k) in BY_WIDTH.items():
            size = Size(m, n, k, pad=width)
            spec = make_spec(math, 2, "kn", default_tile(math, 2, width), size, "mixed", (None, F32))
            yield Case(f"{math}-operands-x{width}", spec, (size, replace(size, pad=3 * width)))
        outs: dict[str, tuple[DType | None, ...]] = {"f16": (F16,), "bf16": (BF16, F16), "f32": (F32, BF16)}
        for name, out in outs.items():
            size = Size(131, 152, 104)
            yield Case(
                f"{math}-out-{name}", make_spec(math, 1, "nk", default_tile(math, 1, 1), size, "mixed", out), (size,)
            )
        size = Size(67, 61, 43, batch=2, pad=1, transposed=True)
        spec = make_spec(math, 1, "kn", default_tile(math, 1), size, "mixed", narrow=True)
        yield Case(f"{math}-transposed", spec, (size,))


def batch_cases() -> Iterator[Case]:
    for math in MATHS:
        for broadcast in (True, False):
            size = Size(65, 72, 40, batch=5, broadcast_rhs=broadcast)
            spec = make_spec(math, 2, "kn", default_tile(math, 2), size, "mixed")
            yield Case(f"{math}-batch-{broadcast}", spec, (size,), grid_z=2)


WALKED = (
    ("heads", Size(130, 192, 128, batch=3, n_run=64)),
    ("transposed", Size(136, 96, 72, batch=2)),
    ("transposed", Size(77, 72, 64)),
    ("images", Size(96, 72, 64, batch=2, m_run=24, pad=8)),
    ("both", Size(96, 64, 64, m_run=24, n_run=32)),
    ("heads", Size(129, 120, 128, batch=2, n_run=40, k_run=64)),
)


def walked_cases() -> Iterator[Case]:
    for math in MATHS:
        for turn, (layout, size) in enumerate(WALKED):
            kind, order = ("residual", "mixed")[turn % 2], ORDERS[turn % 3 % 2]
            spec = make_spec(math, 1 + turn % 2, order, default_tile(math, 1 + turn % 2), size, kind, layout=layout)
            yield Case(f"{math}-walked-{layout}-{turn}", spec, (size,))


def batch_runs_cases() -> Iterator[Case]:
    """Batches of both factors, or of one, in runs, as heads lie before they are split."""
    for math in MATHS:
        for turn, (lhs, rhs, same) in enumerate(((3, 3, False), (2, 0, False), (0, 3, False), (3, 2, True))):
            size = Size(130, 72, 88, 6, 8, False, lhs_batch_run=lhs, rhs_batch_run=rhs, same_runs=same)
            spec = make_spec(math, 1, ORDERS[turn % 2], default_tile(math, 1), size, ("residual", "plain")[turn % 2])
            yield Case(f"{math}-batch-runs-{turn}", spec, (size,))


def pitch_cases() -> Iterator[Case]:
    """Rows one, two and eight elements longer than what is read of them, and as far behind a boundary."""
    for order in ORDERS:
        for pad in (1, 2, 8):
            for layout in ("plain", "transposed"):
                size = Size(504, 136, 248, pad=pad)
                spec = make_spec("f16", 2, order, default_tile("f16", 2), size, "mixed", (None, F32), layout=layout)
                yield Case(f"pitch-{order}-{pad}-{layout}", spec, (size,))


def anywhere_cases() -> Iterator[Case]:
    """Rows of lhs and rhs at every distance from a 16-byte boundary: whole, in runs, and with m contiguous."""
    for math in ("f16", "bf16"):
        for turn, order in enumerate(ORDERS):
            sizes = [Size(131, 153, 77, batch=3, pad=pad, broadcast_rhs=pad % 2 == 0) for pad in range(8)]
            long = Size(520, 264, 2047)
            for tile in tiles_for(math, 1):
                spec = make_spec(math, 1, order, tile, long, narrow=True)
                yield Case(f"{math}-anywhere-{order}-{tile.block_m}x{tile.block_n}", spec, (*sizes, long))
            tile = default_tile(math, 2, turn + 1)
            spec = make_spec(math, 2, order, tile, long, narrow=True, lhs_order="km")
            yield Case(f"{math}-anywhere-km-{order}", spec, (*sizes, long))
            runs = [Size(131, 67, 231, batch=2, pad=pad, k_run=77) for pad in range(8)]
            spec = make_spec(math, 1, order, tile, runs[0], narrow=True)
            yield Case(f"{math}-anywhere-runs-{order}", spec, tuple(runs))


def large_cases() -> Iterator[Case]:
    for math in MATHS:
        size = Size(*LARGE)
        yield Case(f"{math}-large", make_spec(math, 2, "kn", default_tile(math, 2), size), (size,))


CASES = [
    *product_cases(),
    *tile_cases(),
    *operand_cases(),
    *batch_cases(),
    *walked_cases(),
    *batch_runs_cases(),
    *pitch_cases(),
    *anywhere_cases(),
    *large_cases(),
]


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("parts", PARTS)
def test_every_case_has_a_tile_that_a_plan_takes(math: str, parts: int) -> None:
    cases = [case for case in CASES if case.spec.math == math and case.spec.parts == parts]
    assert cases
    assert not [(case.name, reason) for case in cases if (reason := case.spec.why_not(H200))]


def device_spec() -> DeviceSpec:
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return next((spec for spec in ARCHITECTURES.values() if str(spec.capability) == capability), ARCHITECTURES["ptx"])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The cases' kernels."""
    sources = {case.name: (case.spec.source(), case.spec.shared_bytes(device_spec())) for case in CASES}
    return Kernels(sources, device_spec(), tmp_path_factory.mktemp("kernels"))


def launch(function, problem: Problem, grid_z: int | None) -> list[np.ndarray]:
    """Run a kernel and bring the outputs' memory back; bfloat16 travels as bytes, which CuPy knows."""
    import cupy

    buffers = problem.buffers
    memory = [cupy.asarray(buffer.data.view(np.uint8)) for buffer in buffers]
    arguments = problem.arguments([array.data.ptr for array in memory])
    tile = problem.spec.tile
    grid = (*problem.grid[:2], grid_z or problem.grid[2])
    function(grid, (tile.threads, 1, 1), (arguments,), shared_mem=problem.spec.shared_bytes(device_spec()))
    cupy.cuda.get_current_stream().synchronize()
    return [
        array.get().view(buffer.data.dtype) for array, buffer in zip(memory, buffers, strict=True) if buffer.writable
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: Case, kernels: Kernels) -> None:
    assert case.spec.why_not(device_spec()) is None
    for size in case.sizes:
        problem = make_problem(case.spec, size)
        problem.check(launch(kernels[case.name], problem, case.grid_z))


EXPRESSIONS_AT_ONCE = 4
APPROXIMATED = ("sigmoid", "gelu_tanh")  # through __expf: off by 4e-7 of the numerator, as common/math.cuh argues


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, len(EXPRESSION_CASES), EXPRESSIONS_AT_ONCE))
def test_expressions_agree_with_float64(first: int, tmp_path: Path) -> None:
    """The GPU's own functions: x comes in as the product x * 1, y as a tile operand."""
    import cupy

    cases = EXPRESSION_CASES[first : first + EXPRESSIONS_AT_ONCE]
    names: dict[Value, Value] = {"x": "acc0", "y": "op0"}
    steps = [
        Step(f"t{index}", case.op, tuple(names.get(value, value) for value in case.arguments))
        for index, case in enumerate(cases)
    ]
    whole = Access("tile", F32, 1)
    spec = TiledSpec(
        F32, "fp32", 1, "kn", 1, 1, (whole,), (whole,) * len(cases), tuple(steps),
        tuple(step.result for step in steps), tile=tiles_for("fp32", 1)[-1],
    )  # fmt: skip
    pairs = np.array(np.meshgrid(SWEEP, SWEEP[:48]), np.float32).reshape(2, -1)
    pairs[0] += 0.0  # a sum of products has no negative zero
    problem = make_problem(spec, Size(pairs.shape[1], 1, 1))
    problem.lhs.data[:], problem.rhs[0].data[:], problem.loads[0].data[:] = pairs[0], 1.0, pairs[1]
    path = tmp_path / "expressions.cubin"
    path.write_bytes(compile_source(spec.source(), device_spec()).data)
    function = cupy.RawModule(path=str(path)).get_function(ENTRY)
    function.max_dynamic_shared_size_bytes = spec.shared_bytes(device_spec())
    for case, out in zip(cases, launch(function, problem, None), strict=True):
        scale = np.maximum(1.0, np.where(np.isfinite(pairs[0]), np.abs(pairs[0]), 1.0))
        check_expression(case, pairs[0], pairs[1], out, 4e-7 * scale if case.op in APPROXIMATED else 0.0)
