"""The sm_90a kernel on the GPU: both schedules, clusters, orders, parts, dtypes, operand kinds, tails in m, n and k.

Kernels are launched directly, without ONNX Runtime; what the bridge does with tensor maps is done here once more.
Outputs are poisoned with NaN before each run, the padding around every tensor is NaN, and the bounds are those of
`tests/kernel_problem.py`.
"""

from __future__ import annotations

import ctypes
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.hopper_tile import THREADS, HopperTile, MapRule, footprint, map_rules
from onnxfuse.kernels.emit import ENTRY
from onnxfuse.kernels.hopper import emit
from onnxfuse.runtime.compile import compile_source
from tests.hopper_cases import DEVICE, PORTABLE, HopperCase, cases, walked_cases
from tests.kernel_problem import FP32, GROWTH, Buffer, Problem, Size, make_problem, make_spec

pytestmark = pytest.mark.gpu

MAP_BYTES = 128
# Values of cuda.h
UINT16, TFLOAT32, INTERLEAVE_NONE, L2_256_BYTES, FILL_ZERO = 1, 11, 0, 3, 0
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}

CASES = [*cases(), *walked_cases()]
# Enough tiles for every block to walk over many, and for the ring and the turns to go round.
LARGE_SIZE = Size(2100, 2568, 584)
LARGE_TILES = (
    (2, HopperTile(128, 64, True)),
    (2, HopperTile(128, 96, True, operands_ahead=True)),
    (2, HopperTile(128, 128, False, 2)),
    (1, HopperTile(128, 192, True, 1, 2)),
    (1, HopperTile(256, 128, False)),
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


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Every case's kernel, compiled in parallel first and loaded."""
    import cupy

    folder = tmp_path_factory.mktemp("hopper")

    def compiled(case: HopperCase) -> Path:
        path = folder / f"{case.name}.cubin"
        path.write_bytes(compile_source(emit(case.spec, case.tile, DEVICE.shared_bytes), DEVICE).data)
        return path

    every = [*CASES, *LARGE]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(compiled, every))
    loaded = {}
    for case, path in zip(every, paths, strict=True):
        function = cupy.RawModule(path=str(path)).get_function(ENTRY)
        function.max_dynamic_shared_size_bytes = footprint(case.spec, case.tile, DEVICE.shared_bytes).total
        loaded[case.name] = function
    return loaded


def encode(buffer: Buffer, address: int, rule: MapRule, target: int) -> None:
    """Write the tensor map of one buffer to a 64-byte boundary in host memory."""
    batch, rows, columns = buffer.shape
    batch_stride, row_stride, column_stride = buffer.strides
    inner, outer, pitch = (rows, columns, column_stride) if rule.rows_contiguous else (columns, rows, row_stride)
    _, run_stride, _, run = buffer.outer
    if run_stride:  # the runs of all batches are the map's batches
        inner, batch, batch_stride = run, batch * columns // run, run_stride
    pitch = pitch or max(-(-inner // 8) * 8, 8)  # one row
    size = buffer.data.itemsize
    element = TFLOAT32 if size == 4 else UINT16
    extents = (ctypes.c_uint64 * 3)(inner, outer, batch if batch_stride else 1)
    strides = (ctypes.c_uint64 * 2)(pitch * size, (batch_stride or pitch * outer) * size)
    box = (ctypes.c_uint32 * 3)(rule.box_inner, rule.box_outer, 1)
    steps = (ctypes.c_uint32 * 3)(1, 1, 1)
    result = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(target), element, 3, ctypes.c_uint64(address + buffer.offset * size), extents, strides, box,
        steps, INTERLEAVE_NONE, SWIZZLES[rule.swizzle], L2_256_BYTES, FILL_ZERO,
    )  # fmt: skip
    assert result == 0, (rule, list(extents), list(strides), list(box))


def tensor_maps(case: HopperCase, problem: Problem, addresses: list[int]) -> np.ndarray:
    """The kernel's second argument."""
    rules = map_rules(case.spec, case.tile, DEVICE.shared_bytes)
    memory = np.zeros(MAP_BYTES * len(rules) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    groups = {"lhs": [problem.lhs], "rhs": problem.rhs, "out": problem.outs}
    address_of = {id(buffer): address for buffer, address in zip(problem.buffers, addresses, strict=True)}
    for place, rule in enumerate(rules):
        if rule is not None:
            buffer = groups[rule.tensor][rule.index]
            encode(buffer, address_of[id(buffer)], rule, memory.ctypes.data + start + place * MAP_BYTES)
    return memory[start : start + MAP_BYTES * len(rules)].view(f"V{MAP_BYTES * len(rules)}")


def launch(function, case: HopperCase, problem: Problem, blocks: int | None = None) -> list[np.ndarray]:
    """Run a kernel and bring the outputs' memory back; bfloat16 travels as bytes, which CuPy knows."""
    import cupy

    buffers, tile, size = problem.buffers, case.tile, problem.size
    memory = [cupy.asarray(buffer.data.view(np.uint8)) for buffer in buffers]
    addresses = [array.data.ptr for array in memory]
    cluster = tile.cluster_m * tile.cluster_n
    tiles = math.ceil(size.m / (tile.block_m * tile.cluster_m)) * math.ceil(size.n / (tile.block_n * tile.cluster_n))
    most = blocks or cupy.cuda.Device().attributes["MultiProcessorCount"]
    grid = min(tiles * size.batch, max(most // cluster, 1)) * cluster
    shared = footprint(case.spec, tile, DEVICE.shared_bytes).total
    arguments = (problem.arguments(addresses), tensor_maps(case, problem, addresses))
    function((grid, 1, 1), (THREADS, 1, 1), arguments, shared_mem=shared)
    cupy.cuda.get_current_stream().synchronize()
    return [
        array.get().view(buffer.data.dtype) for array, buffer in zip(memory, buffers, strict=True) if buffer.writable
    ]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_kernel_computes_the_fusion(
    case: HopperCase, kernels: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # fast_gelu: 5e-7 |x|, as pointwise_fast.cuh argues.
    monkeypatch.setitem(GROWTH, "gelu", lambda a: 1.13 * a.error + 6 * FP32 * np.abs(a.value))
    for size in case.sizes:
        problem = make_problem(case.spec, size)
        first = launch(kernels[case.name], case, problem)
        problem.check(first)
        # The same bits from a few blocks that walk over many tiles.
        for one, other in zip(first, launch(kernels[case.name], case, problem, blocks=2), strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
