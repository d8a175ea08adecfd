"""The kernel's own source, compiled by the C++ compiler and run on the CPU thread by thread.

Checks what no GPU reports: every global access is aligned and inside of its tensor, every output element is written
once, ldmatrix meets no bank conflict, and the result does not depend on when asynchronous copies land.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F16, F32
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.schedule.kernel_spec import Tile
from onnxfuse.schedule.small_m_tile import SmallMTile
from tests.helpers.host_build import EMULATOR, build_library
from tests.helpers.kernel_problem import Buffer, Problem, Size, TiledSpec, cluster_of, make_problem, make_spec

NEXT_FILE = re.compile(r"// ---- (\S+\.cuh|generated)\n")
CLUSTER_PTX = "// ---- common/cluster_ptx.cuh"
SHARED_MEMORY = "extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];"
SHARED_MEMORY_OF_BLOCK = (
    "unsigned char* onnxfuse_shared = ::onnxfuse_shared + onnxfuse::cluster_rank() * EMULATED_BLOCK_PITCH;"
)


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("use", ctypes.c_int), ("widest", ctypes.c_int)
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel, and sizes to run it at: all must allow the widths of the first."""

    name: str
    math: str
    parts: int
    order: str
    tile: Tile | SmallMTile
    sizes: tuple[Size, ...]
    kind: str = "plain"
    outs: tuple = (None,)
    narrow: bool = False
    layout: str = "plain"
    lhs_order: str = "mk"

    @property
    def spec(self) -> TiledSpec:
        how = (self.kind, self.outs, self.narrow, self.layout, self.lhs_order)
        return make_spec(self.math, self.parts, self.order, self.tile, self.sizes[0], *how)


CASES = [
    Case(
        "f16 kn",
        "f16",
        1,
        "kn",
        Tile(32, 32, 32, 2, 1, 3),
        (Size(40, 72, 104), Size(1, 8, 8), Size(33, 32, 200, pad=8)),
    ),
    Case(
        "f16 nk gate",
        "f16",
        2,
        "nk",
        Tile(32, 32, 32, 1, 2, 4),
        (Size(50, 40, 64, pad=8), Size(5, 8, 160), Size(5, 8, 0)),
    ),
    Case("bf16 kn deep", "bf16", 1, "kn", Tile(16, 64, 64, 1, 2, 2), (Size(20, 136, 136), Size(3, 64, 72))),
    Case("bf16 mixed", "bf16", 2, "kn", Tile(64, 16, 32, 2, 1, 2), (Size(70, 24, 40, pad=8),), "mixed", (F32, F16)),
    Case("f16 four parts", "f16", 4, "kn", Tile(32, 16, 32, 2, 1, 3), (Size(40, 40, 48),), "residual"),
    Case("f16 odd", "f16", 2, "kn", Tile(32, 32, 32, 1, 2, 3), (Size(37, 41, 53), Size(1, 1, 1)), "mixed", narrow=True),
    Case("f16 odd nk", "f16", 1, "nk", Tile(32, 32, 32, 2, 2, 3), (Size(35, 67, 31, pad=3),), "residual"),
    Case("f16 x2", "f16", 1, "nk", Tile(32, 48, 32, 2, 1, 3), (Size(35, 50, 66, pad=2),), "residual"),
    Case("f16 x4", "f16", 3, "kn", Tile(32, 16, 32, 2, 1, 3), (Size(35, 52, 68, pad=4),), "residual", (F32,)),
    Case(
        "f16 batch",
        "f16",
        1,
        "kn",
        Tile(32, 32, 32, 2, 1, 3),
        (Size(20, 40, 40, batch=3, broadcast_rhs=False),),
        "mixed",
    ),
    Case(
        "bf16 transposed",
        "bf16",
        1,
        "kn",
        Tile(32, 32, 32, 2, 1, 3),
        (Size(37, 41, 5, 2, 1, transposed=True),),
        "mixed",
        narrow=True,
    ),
    Case(
        "tf32 kn", "tf32", 2, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(35, 40, 52), Size(40, 36, 12, pad=4)), "residual"
    ),
    Case("tf32 nk", "tf32", 1, "nk", Tile(32, 32, 32, 1, 2, 2), (Size(35, 44, 60),)),
    Case("fp32 kn", "fp32", 1, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(35, 40, 52),), "mixed"),
    Case("fp32 nk", "fp32", 2, "nk", Tile(32, 32, 16, 1, 2, 3), (Size(35, 37, 29, pad=1),)),
    Case("fp32 odd", "fp32", 2, "kn", Tile(16, 48, 8, 1, 1, 2), (Size(17, 53, 23, pad=1),), "residual", (F16,)),
]


CASES += [
    Case("3xtf32 kn", "3xtf32", 1, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(35, 40, 52),), "mixed"),
    Case("3xtf32 nk", "3xtf32", 2, "nk", Tile(32, 32, 32, 1, 2, 3), (Size(35, 37, 29, pad=1), Size(1, 1, 1))),
    Case("3xtf32 km kn", "3xtf32", 1, "kn", Tile(64, 32, 16, 2, 1, 3), (Size(68, 40, 52, pad=4),), lhs_order="km"),
    Case("3xtf32 odd", "3xtf32", 2, "kn", Tile(16, 48, 16, 1, 1, 2), (Size(17, 53, 23, pad=1),), "residual", (F16,)),
    Case("3xtf32 batch", "3xtf32", 3, "nk", Tile(32, 16, 32, 2, 1, 2), (Size(20, 40, 36, batch=3),), "masked"),
]

SMALL = Tile(32, 32, 32, 2, 1, 3)
HEADS = (Size(40, 72, 104, n_run=24, pad=8), Size(33, 48, 40, batch=3, n_run=16), Size(1, 8, 8, n_run=8))
IMAGES = (Size(48, 40, 64, m_run=24), Size(80, 24, 72, batch=2, m_run=8, pad=8))
CASES += [
    Case("f16 head split", "f16", 1, "kn", SMALL, HEADS, "residual", layout="heads"),
    Case(
        "bf16 head split gate", "bf16", 2, "nk", Tile(32, 32, 32, 1, 2, 3), HEADS, "mixed", (F32, None), layout="heads"
    ),
    Case("f16 odd heads", "f16", 1, "nk", SMALL, (Size(37, 45, 64, n_run=15),), "residual", layout="heads"),
    Case(
        "f16 transposed",
        "f16",
        1,
        "kn",
        SMALL,
        (Size(48, 72, 40), Size(8, 40, 48, 2, 8)),
        "residual",
        layout="transposed",
    ),
    Case("f16 odd transposed", "f16", 1, "kn", SMALL, (Size(37, 41, 53),), "mixed", (None, F32), True, "transposed"),
    Case(
        "tf32 transposed", "tf32", 1, "kn", Tile(64, 32, 16, 2, 1, 2), (Size(44, 40, 56),), "mixed", layout="transposed"
    ),
    Case(
        "f16 transposed x2",
        "f16",
        2,
        "nk",
        Tile(64, 16, 32, 2, 1, 2),
        (Size(70, 24, 40),),
        "residual",
        layout="transposed",
    ),
    Case("f16 images", "f16", 1, "kn", SMALL, IMAGES, "residual", layout="images"),
    Case("f16 transposed heads", "f16", 1, "kn", SMALL, (Size(40, 48, 32, n_run=12),), layout="transposed heads"),
    Case("fp32 swapped rows", "fp32", 1, "nk", Tile(32, 32, 16, 1, 2, 3), IMAGES, "residual", layout="swapped rows"),
    Case("f16 both", "f16", 1, "kn", SMALL, (Size(48, 48, 40, m_run=12, n_run=16),), "mixed", layout="both"),
    Case("f16 merged heads", "f16", 1, "kn", SMALL, (Size(40, 72, 120, k_run=24), Size(33, 8, 80, 3, k_run=40, pad=8))),
    Case("f16 odd merged heads", "f16", 2, "nk", SMALL, (Size(35, 67, 45, k_run=9),), narrow=True),
    Case("tf32 merged heads", "tf32", 1, "kn", Tile(32, 48, 16, 2, 1, 3), (Size(35, 44, 60, k_run=20),)),
]
# As [b, s, h, d] in memory, h of the batch: both factors of scores, and one of them.
BOTH_RUNS = (
    Size(40, 72, 64, 6, 8, False, lhs_batch_run=3, rhs_batch_run=3),
    Size(33, 40, 24, 4, 0, False, lhs_batch_run=4, rhs_batch_run=2),
    Size(20, 72, 40, 6, 8, False, lhs_batch_run=2, rhs_batch_run=3, same_runs=True),
)
CASES += [
    Case("f16 batch runs", "f16", 1, "nk", SMALL, BOTH_RUNS, "residual"),
    Case(
        "bf16 batch runs of rhs",
        "bf16",
        2,
        "kn",
        Tile(32, 32, 32, 1, 2, 3),
        (Size(33, 48, 72, 6, 0, False, rhs_batch_run=2),),
    ),
    Case("tf32 batch runs", "tf32", 1, "kn", Tile(32, 48, 16, 2, 1, 3), BOTH_RUNS[:1]),
    Case(
        "f16 odd batch runs", "f16", 1, "nk", SMALL, (Size(35, 37, 45, 4, 0, False, False, 1, 1, 0, 2, 2),), narrow=True
    ),
    Case("f16 km batch runs", "f16", 1, "kn", SMALL, (Size(40, 72, 56, 6, 8, lhs_batch_run=2),), lhs_order="km"),
    Case(
        "f16 merged heads of batch runs",
        "f16",
        1,
        "kn",
        SMALL,
        (Size(40, 72, 120, 4, 0, False, k_run=24, rhs_batch_run=2),),
    ),
]
TALL = (Size(40, 72, 104), Size(8, 8, 8, batch=2), Size(72, 40, 37, pad=8))
CASES += [
    Case("f16 km kn", "f16", 1, "kn", SMALL, TALL, "residual", lhs_order="km"),
    Case("bf16 km nk gate", "bf16", 2, "nk", Tile(32, 32, 32, 1, 2, 3), (Size(40, 44, 56),), lhs_order="km"),
    Case("f16 km transposed", "f16", 2, "nk", SMALL, (Size(48, 40, 64),), "mixed", layout="transposed", lhs_order="km"),
    Case("f16 km odd", "f16", 1, "kn", SMALL, (Size(37, 41, 53),), narrow=True, lhs_order="km"),
    Case("tf32 km kn", "tf32", 1, "kn", Tile(64, 32, 16, 2, 1, 3), (Size(68, 40, 52, pad=4),), lhs_order="km"),
    Case("tf32 km nk", "tf32", 2, "nk", Tile(32, 32, 32, 1, 2, 2), (Size(36, 44, 60),), lhs_order="km"),
    Case("fp32 km kn", "fp32", 1, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(36, 40, 52),), "mixed", lhs_order="km"),
    Case("fp32 km odd", "fp32", 2, "nk", Tile(32, 16, 8, 1, 1, 2), (Size(37, 41, 29),), narrow=True, lhs_order="km"),
]
CASES += [
    Case("f16 bool", "f16", 1, "kn", SMALL, (Size(40, 96, 104), Size(1, 16, 8), Size(33, 32, 200, pad=16)), "masked"),
    Case("f16 bool x8", "f16", 2, "nk", SMALL, (Size(50, 40, 64, pad=8), Size(5, 8, 160)), "masks"),
    Case("bf16 bool x4", "bf16", 1, "kn", Tile(32, 48, 32, 2, 1, 3), (Size(35, 52, 68, pad=4),), "masks"),
    Case("f16 bool x2", "f16", 1, "nk", SMALL, (Size(35, 50, 66, pad=2),), "masked", (F32,)),
    Case("f16 odd bool", "f16", 1, "kn", SMALL, (Size(37, 41, 53), Size(1, 1, 1)), "masks", narrow=True),
    Case("f16 bool batch", "f16", 1, "kn", SMALL, (Size(20, 48, 40, batch=3, broadcast_rhs=False),), "masks"),
    Case(
        "f16 bool transposed",
        "f16",
        1,
        "kn",
        SMALL,
        (Size(48, 72, 40), Size(16, 40, 48, 2, 16)),
        "masked",
        layout="transposed",
    ),
    Case(
        "bf16 odd bool transposed",
        "bf16",
        2,
        "nk",
        SMALL,
        (Size(37, 41, 53),),
        "masks",
        narrow=True,
        layout="transposed",
    ),
    Case("f16 bool heads", "f16", 1, "kn", SMALL, (Size(33, 64, 40, batch=3, n_run=32),), "masks", layout="heads"),
    Case("f16 bool images", "f16", 1, "nk", SMALL, (Size(80, 48, 72, batch=2, m_run=8),), "masked", layout="images"),
    Case("tf32 bool", "tf32", 1, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(35, 48, 52),), "masks"),
    Case("fp32 bool both", "fp32", 1, "nk", SMALL, (Size(48, 48, 40, m_run=12, n_run=16),), "masks", layout="both"),
]


def host_source(source: str) -> str:
    """An emitted source with the PTX wrappers replaced by C++, and of a cluster the shared memory of each block."""
    source = _replaced(source, "// ---- common/ptx.cuh", "ptx_host.cuh")
    headers = ("cuda_host.h", "shuffles.h")
    if CLUSTER_PTX in source:
        source = _replaced(source, CLUSTER_PTX, "cluster_ptx_host.cuh")
        source = source.replace(SHARED_MEMORY, SHARED_MEMORY_OF_BLOCK)
        headers += ("cluster_host.h",)
    included = "".join(f'#include "{header}"\n' for header in headers)
    return f"{included}{source}{(EMULATOR / 'launch.h').read_text()}"


def _replaced(source: str, file: str, by: str) -> str:
    start = source.index(file)
    behind = NEXT_FILE.search(source, start + 1)
    assert behind is not None
    return source[:start] + (EMULATOR / by).read_text() + source[behind.start() :]


def build(spec: TiledSpec, folder: Path) -> ctypes.CDLL:
    return build_source(spec.source(), ENTRY, folder, cluster_of(spec.tile))


def build_source(source: str, entry: str, folder: Path, cluster: int = 1) -> ctypes.CDLL:
    blocks = [f"-DEMULATED_BLOCKS={cluster}"] if cluster > 1 else []
    library = build_library(host_source(source), folder, f"-DONNXFUSE_ENTRY={entry}", *blocks)
    library.emulate.restype = ctypes.c_char_p
    return library


def launch(
    library: ctypes.CDLL, problem: Problem, lazy: bool, grid_z: int | None = None, grid_x: int | None = None
) -> list[np.ndarray]:
    return launch_counted(library, problem, lazy, grid_z, grid_x)[0]


def launch_counted(
    library: ctypes.CDLL, problem: Problem, lazy: bool, grid_z: int | None = None, grid_x: int | None = None
) -> tuple[list[np.ndarray], list[int]]:
    """The outputs, and the bytes of the widest access to each of the problem's buffers."""
    for out in problem.outs:
        out.data[...] = np.nan
    buffers = problem.buffers
    arguments = problem.arguments([buffer.data.ctypes.data for buffer in buffers])
    arguments["rhs_ready"] = bool(lazy)
    uses = problem.uses(bool(lazy))
    ranges = (Range * len(buffers))(
        *(Range(buffer.data.ctypes.data, buffer.data.nbytes, use) for buffer, use in zip(buffers, uses, strict=True))
    )
    conflicts = ctypes.c_int()
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data),
        grid_x or problem.grid[0],
        grid_z or problem.grid[2],
        problem.spec.tile.threads,
        int(lazy),
        ranges,
        len(buffers),
        ctypes.byref(conflicts),
    )
    assert failure == b""
    assert conflicts.value == 0, f"{conflicts.value} bank conflicts of ldmatrix"
    return [out.data.copy() for out in problem.outs], [each.widest for each in ranges]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: Case, tmp_path: Path) -> None:
    spec = case.spec
    assert spec.why_not(ARCHITECTURES["sm_90a"]) is None
    library = build(spec, tmp_path)
    for size in case.sizes:
        problem = make_problem(spec, size)
        eager = launch(library, problem, lazy=False)
        problem.check(eager)
        late = launch(library, problem, lazy=True, grid_z=1)
        for first, second in zip(eager, late, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


CHECKED = [
    Case("f16 kn", "f16", 2, "kn", SMALL, (Size(40, 48, 72),), "mixed", (None, F32)),
    Case("f16 nk", "f16", 1, "nk", SMALL, (Size(35, 40, 72, batch=2, broadcast_rhs=False),), "residual"),
    Case("f16 masks", "f16", 1, "kn", SMALL, (Size(33, 48, 40),), "masks"),
    Case(
        "bf16 km transposed",
        "bf16",
        1,
        "kn",
        SMALL,
        (Size(40, 48, 72),),
        "residual",
        layout="transposed",
        lhs_order="km",
    ),
    Case("f16 heads", "f16", 1, "kn", SMALL, (Size(33, 48, 80, k_run=40, n_run=24),), "residual", layout="heads"),
    Case("tf32 images", "tf32", 1, "nk", Tile(32, 32, 16, 2, 1, 3), (Size(48, 40, 28, m_run=24),), layout="images"),
    Case("fp32 kn", "fp32", 1, "kn", Tile(32, 32, 16, 2, 1, 3), (Size(35, 40, 52),), "mixed"),
]


def moved(buffer: Buffer, elements: int) -> Buffer:
    """The same memory, so many elements behind a 16-byte boundary."""
    data = buffer.data
    memory = np.zeros(data.nbytes + 16 + elements * data.itemsize, np.uint8)
    start = -memory.ctypes.data % 16 + elements * data.itemsize
    copy = memory[start:][: data.nbytes].view(data.dtype)
    copy[...] = data
    return replace(buffer, data=copy)


def moved_problem(problem: Problem, elements: list[int]) -> Problem:
    """The problem with each of its buffers moved by its own number of elements."""
    buffers = [moved(buffer, each) for buffer, each in zip(problem.buffers, elements, strict=True)]
    loads = 1 + len(problem.rhs)
    outs = loads + len(problem.loads)
    return replace(problem, lhs=buffers[0], rhs=buffers[1:loads], loads=buffers[loads:outs], outs=buffers[outs:])


def check_ways(library: ctypes.CDLL, problem: Problem, single: list[bool]) -> None:
    """The result is right, and each buffer is reached as wide as the spec says, or in the way that is always legal."""
    outs, widest = launch_counted(library, problem, lazy=True)
    problem.check(outs)
    spec = problem.spec
    widths = [spec.lhs_width, *[spec.rhs_width] * spec.parts, *(each.width for each in (*spec.loads, *spec.outs))]
    always = [spec.dtype.bytes] * (1 + spec.parts) + [each.dtype.bytes for each in (*spec.loads, *spec.outs)]
    assert widest == [
        legal if alone else width * buffer.data.itemsize
        for buffer, width, legal, alone in zip(problem.buffers, widths, always, single, strict=True)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_a_checked_kernel_goes_another_way_to_misaligned_tensors_alone(case: Case, tmp_path: Path) -> None:
    spec = replace(case.spec, checked=True)
    library = build(spec, tmp_path)
    problem = make_problem(spec, case.sizes[0])
    count = len(problem.buffers)
    one_each = [[int(place == chosen) for place in range(count)] for chosen in range(count)]
    for elements in ([0] * count, *one_each, [1] * count):
        check_ways(library, moved_problem(problem, elements), [moved > 0 for moved in elements])
    half = [each.width // 2 if each.width > 1 else 0 for each in (*spec.loads, *spec.outs)]
    elements = [spec.lhs_width // 2, *[0] * spec.parts, *half]
    check_ways(library, moved_problem(problem, elements), [moved > 0 for moved in elements])


def test_a_checked_kernel_goes_another_way_to_odd_sizes_and_pitches(tmp_path: Path) -> None:
    spec = replace(make_spec("f16", 1, "nk", SMALL, Size(40, 48, 72), "residual"), checked=True)
    library = build(spec, tmp_path)
    for size, lhs, rest in [
        (Size(37, 48, 72), False, False),  # an odd m matters to nothing
        (Size(40, 45, 72), False, True),  # of an odd n, rhs[n, k] is none the worse
        (Size(40, 48, 71), True, False),
        (Size(40, 48, 72, pad=8), False, False),
        (Size(40, 48, 72, pad=4), True, True),
        (Size(1, 1, 1), True, True),
    ]:
        problem = make_problem(spec, size)
        narrow = size.pad == 4 or size.m == 1
        check_ways(library, problem, [lhs, narrow or lhs, *[narrow or rest] * 3])


ANYWHERE = [
    Case("f16 mk kn", "f16", 2, "kn", SMALL, (Size(37, 41, 77), Size(5, 40, 64, pad=1)), narrow=True),
    Case("bf16 mk nk", "bf16", 1, "nk", SMALL, (Size(35, 67, 45, batch=2, broadcast_rhs=False),), narrow=True),
    Case("f16 km nk", "f16", 1, "nk", SMALL, (Size(41, 33, 37, batch=2, pad=3),), narrow=True, lhs_order="km"),
    Case("f16 runs", "f16", 1, "kn", SMALL, (Size(33, 9, 66, 2, 5, k_run=33), Size(3, 35, 40, k_run=8)), narrow=True),
    Case("f16 uneven", "f16", 1, "kn", Tile(32, 48, 64, 2, 1, 2), (Size(33, 49, 67),), narrow=True),
    Case("f16 tiny", "f16", 1, "kn", SMALL, (Size(1, 1, 1), Size(3, 3, 3), Size(2, 1, 13)), narrow=True),
]


def cut(buffer: Buffer) -> Buffer:
    """The memory from the tensor's first element to its last."""
    first, last = int(buffer.index.min()), int(buffer.index.max())
    return replace(buffer, data=buffer.data[first : last + 1], offset=buffer.offset - first)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", ANYWHERE, ids=lambda case: case.name)
def test_rows_that_begin_anywhere_are_read_inside_of_their_tensor(case: Case, tmp_path: Path) -> None:
    """At every distance of lhs and of rhs from a 16-byte boundary; the emulator refuses a read of any other byte."""
    library = build(case.spec, tmp_path)
    for size in case.sizes:
        whole = make_problem(case.spec, size)
        tight = replace(whole, lhs=cut(whole.lhs), rhs=[cut(part) for part in whole.rhs])
        for elements in range(8):
            rhs = [(3 * elements + part) % 8 for part in range(case.parts)]
            rest = [0] * len((*whole.loads, *whole.outs))
            problem = moved_problem(tight, [elements, *rhs, *rest])
            problem.check(launch(library, problem, lazy=True))
