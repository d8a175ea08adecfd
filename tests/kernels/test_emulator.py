"""What a kernel may not do is said by what runs it on the CPU, block by block and in clusters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.host_build import EMULATOR, build_library

THREADS = 32
BLOCKS = 2
COUNT = THREADS * BLOCKS
KERNEL = """#include "cuda_host.h"
#include "cluster_host.h"
struct OnnxfuseArguments { float *in, *out; int fault; };
namespace onnxfuse { struct Maps {}; }

float get(float* place) {
  emulator::check_global(place, 4, false);
  float value;
  memcpy(&value, place, 4);
  return value;
}
void put(float* place, float value) {
  emulator::check_global(place, 4, true);
  *place = value;
}
template <typename... Maps>
void onnxfuse_gemm(const OnnxfuseArguments& args, const Maps&...) {
  const int own = blockIdx.x * blockDim + threadIdx.x;
  if (args.fault == 8) get(args.in + own);
  emulator::wait_for_kernel_before();
  const float value = __shfl_sync(0xffffffff, get(args.in + own), (threadIdx.x + 1) % 32);
  __syncthreads();
  if (args.fault == 1) get(args.in + 64 + own);
  if (args.fault == 2) put(args.in + own, value);
  if (args.fault == 3) get(reinterpret_cast<float*>(reinterpret_cast<char*>(args.in) + 1));
  if (args.fault == 4 && own == 3) put(args.out, value);
  if (args.fault == 5) emulator::shared(EMULATED_SHARED_BYTES, 4);
  if (args.fault == 6) emulator::shared(2, 4);
  while (args.fault == 7 && threadIdx.x == 0) emulator::yield();
  put(args.out + own, value);
}
""".replace("blockDim", str(THREADS))
FAULTS = {
    1: b"read of 4 bytes out of bounds",
    2: b"write into an input",
    3: b"misaligned access of 4 bytes",
    4: b"an element was written twice",
    5: b"shared memory out of bounds",
    6: b"misaligned access of shared memory",
    8: b"an access that does not wait for the kernel before",
}
HANGS = {7: b"threads wait for each other"}  # which is counted for clusters alone
Launch = Callable[[int, bool], tuple[bytes, np.ndarray]]
"""`launch(fault, lazy)`: what went wrong, and the outputs."""


class Arguments(ctypes.Structure):
    _fields_ = [("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("fault", ctypes.c_int)]


class Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("use", ctypes.c_int), ("widest", ctypes.c_int)
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["launch.h", "cluster_launch.h"])
def emulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launch, dict[int, bytes]]:
    """A launch in one of the two ways, and the faults that are found there."""
    in_clusters = request.param == "cluster_launch.h"
    options = [f"-DEMULATED_BLOCKS={BLOCKS}"] if in_clusters else []
    source = KERNEL + (EMULATOR / request.param).read_text()
    library = build_library(source, tmp_path_factory.mktemp("emulator"), *options)
    library.emulate.restype = ctypes.c_char_p

    def launched(fault: int, lazy: bool) -> tuple[bytes, np.ndarray]:
        given, made = np.arange(COUNT, dtype=np.float32), np.zeros(COUNT, np.float32)
        places = (given.ctypes.data, made.ctypes.data)
        arguments = Arguments(*places, fault)
        ranges = (Range * 2)(*(Range(place, 4 * COUNT, index) for index, place in enumerate(places)))
        behind = () if in_clusters else (ctypes.byref(ctypes.c_int()),)
        grid = (None, BLOCKS, THREADS) if in_clusters else (BLOCKS, 1, THREADS)
        return library.emulate(ctypes.byref(arguments), *grid, int(lazy), ranges, 2, *behind), made

    return launched, FAULTS | HANGS if in_clusters else FAULTS


@pytest.mark.parametrize("lazy", [False, True])
def test_faults_are_named_and_a_kernel_without_any_runs(emulated: tuple[Launch, dict[int, bytes]], lazy: bool) -> None:
    launch, faults = emulated
    for fault, name in faults.items():
        assert launch(fault, lazy)[0] == name
    failure, made = launch(0, lazy)
    assert failure == b""
    np.testing.assert_array_equal(made.reshape(BLOCKS, THREADS), np.roll(np.arange(COUNT).reshape(BLOCKS, -1), -1, 1))
