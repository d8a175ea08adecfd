"""The sm_90a kernel on the GPU: both schedules, clusters, split k, orders, parts, dtypes, operand kinds, all tails.

Kernels are launched directly, without ONNX Runtime; what the bridge does with tensor maps is done here once more.
Outputs are poisoned with NaN before each run, the padding around every tensor is NaN, and the bounds are those of
`tests/helpers/kernel_problem.py`.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.schedule.hopper_tile import HopperTile
from tests.gpu.kernels import Kernels
from tests.helpers.hopper_cases import (
    DEVICE,
    PORTABLE,
    HopperCase,
    batch_runs_cases,
    cases,
    kept_cases,
    masked_cases,
    served_cases,
    small_m_cases,
    split_cases,
    tall_cases,
    three_groups_cases,
    walked_cases,
)
from tests.helpers.kernel_problem import Problem, Size, make_problem, make_spec
from tests.helpers.quantized_cases import QuantizedCase
from tests.helpers.swapped_cases import SwappedCase
from tests.helpers.tensor_maps import MAP_BYTES, Described, described

pytestmark = pytest.mark.gpu

AnyCase = HopperCase | QuantizedCase | SwappedCase

# Values of cuda.h
UINT8, UINT16, TFLOAT32, INTERLEAVE_NONE, L2_256_BYTES, FILL_ZERO = 0, 1, 11, 0, 3, 0
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}

SPLIT = list(split_cases())
SMALL_M_CASES = list(small_m_cases())
CASES = [*cases(), *walked_cases(), *tall_cases(), *masked_cases(), *batch_runs_cases(), *SPLIT, *SMALL_M_CASES]
CASES += [*three_groups_cases(), *served_cases(), *kept_cases()]
RUNS = 20
# Enough tiles for every block to walk over many, and for the ring and the turns to go round.
LARGE_SIZE = Size(2100, 2568, 584)
LARGE_TILES = (
    (2, HopperTile(128, 64, True)),
    (2, HopperTile(128, 96, True, operands_ahead=True)),
    (2, HopperTile(128, 128, False, 2)),
    (1, HopperTile(128, 192, True, 1, 2)),
    (1, HopperTile(256, 128, False)),
    (1, HopperTile(128, 128, True, groups=4)),
    (2, HopperTile(256, 64, False, groups=4)),
    (2, HopperTile(192, 112, False, groups=3)),
    (1, HopperTile(192, 192, False, groups=3)),
    (2, HopperTile(128, 64, False, splits=2)),
    (1, HopperTile(128, 160, False, splits=4)),
    (1, HopperTile(128, 128, True, groups=4, whole_slabs=True)),
    (2, HopperTile(192, 64, False, groups=3, whole_slabs=True)),
    (1, HopperTile(128, 96, True, group_rows=1, kept_k=640)),
    (2, HopperTile(128, 32, True, groups=4, group_rows=1, kept_k=640)),
    (1, HopperTile(192, 80, False, groups=3, group_rows=1, kept_k=640)),
)
LARGE = [
    HopperCase(
        f"large-{tile}-{order}".replace(" ", "-"),
        make_spec("f16", parts, order, PORTABLE, LARGE_SIZE),
        tile,
        (LARGE_SIZE,),
    )
    for order in ("kn", "nk")
    for parts, tile in LARGE_TILES
]


@pytest.fixture(scope="module", autouse=True)
def _only_on_hopper() -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != str(DEVICE.capability):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def kernel(case: HopperCase, tmp_path: Path) -> object:
    """The case's kernel."""
    return Kernels({case.name: (case.source, case.launch.shared_bytes)}, DEVICE, tmp_path)[case.name]


def encode(described: Described, address: int, target: int) -> None:
    """Write one tensor map to a 64-byte boundary in host memory."""
    size, rank = described.buffer.data.itemsize, len(described.extents)
    element = {1: UINT8, 2: UINT16, 4: TFLOAT32}[size]
    strides = [size * stride for stride in described.strides[1:]]
    result = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(target), element, rank, ctypes.c_uint64(address + described.buffer.offset * size),
        (ctypes.c_uint64 * rank)(*described.extents), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*described.box), (ctypes.c_uint32 * rank)(*[1] * rank),
        INTERLEAVE_NONE, SWIZZLES[described.swizzle], L2_256_BYTES, FILL_ZERO,
    )  # fmt: skip
    assert result == 0, described


def tensor_maps(case: AnyCase, problem: Problem, addresses: list[int]) -> np.ndarray:
    """The kernel's second argument."""
    maps = described(case, problem)
    memory = np.zeros(MAP_BYTES * len(maps) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    address_of = {id(buffer): address for buffer, address in zip(problem.buffers, addresses, strict=True)}
    for place, each in enumerate(maps):
        if each is not None:
            encode(each, address_of[id(each.buffer)], memory.ctypes.data + start + place * MAP_BYTES)
    return memory[start : start + MAP_BYTES * len(maps)].view(f"V{MAP_BYTES * len(maps)}")


def launch(
    function, case: HopperCase | QuantizedCase | SwappedCase, problem: Problem, blocks: int | None = None
) -> list[np.ndarray]:
    """Run a kernel and bring the outputs' memory back; bfloat16 travels as bytes, which CuPy knows."""
    import cupy

    buffers, rule, size = problem.buffers, case.launch, problem.size
    memory = [cupy.asarray(buffer.data.view(np.uint8)) for buffer in buffers]
    addresses = [array.data.ptr for array in memory]
    tiles = math.ceil(size.m / rule.block_m) * math.ceil(size.n / rule.block_n)
    most = blocks or cupy.cuda.Device().attributes["MultiProcessorCount"]
    grid = min(tiles * size.batch, max(most // rule.cluster, 1)) * rule.cluster
    arguments = problem.arguments(addresses)
    arguments["rhs_ready"] = blocks is not None
    maps = tensor_maps(case, problem, addresses)
    function((grid, 1, 1), (rule.threads, 1, 1), (arguments, maps), shared_mem=rule.shared_bytes)
    cupy.cuda.get_current_stream().synchronize()
    return [
        array.get().view(buffer.data.dtype) for array, buffer in zip(memory, buffers, strict=True) if buffer.writable
    ]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: HopperCase, kernel: object) -> None:
    for size in case.sizes:
        problem = make_problem(case.spec, size)
        first = launch(kernel, case, problem)
        problem.check(first)
        # The same bits from a few blocks that walk over many tiles, and load rhs ahead.
        for one, other in zip(first, launch(kernel, case, problem, blocks=2), strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("case", [SPLIT[0], SPLIT[-1], LARGE[-1]], ids=lambda case: case.name)
def test_every_run_with_split_k_gives_the_same_bits(case: HopperCase, kernel: object) -> None:
    problem = make_problem(case.spec, case.sizes[0])
    first, *others = ([out.tobytes() for out in launch(kernel, case, problem)] for _ in range(RUNS))
    assert all(run == first for run in others)
