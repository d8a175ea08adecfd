"""The attention kernel's own source, compiled by the C++ compiler and run on the CPU; see `test_hopper_on_cpu.py`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.errors import CompileError
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.attention import emit
from onnxfuse.runtime import disassemble
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.attention_tile import AttentionSpec, AttentionTile
from onnxfuse.schedule.kernel_spec import Access
from tests.helpers.attention_problem import AttentionProblem, AttentionSize, make_attention
from tests.helpers.host_build import EMULATOR, build_library
from tests.helpers.kernel_problem import ROUNDING
from tests.helpers.tensor_maps import MAP_BYTES
from tests.kernels.test_hopper_on_cpu import HostMap
from tests.kernels.test_portable_on_cpu import Range

MASKED = (Step("t0", "mul", ("acc0", 0.125)), Step("t1", "add", ("t0", "op0")))
TWICE = (*MASKED, Step("t2", "add", ("t1", "op1")))
MASK = (Access("tile", F16, 8),)
TWO_MASKS = (Access("tile", F32, 4), Access("row", F16, 2))

CASES = {
    "plain": (AttentionSpec(F16, 64, 64, scale=0.125), AttentionTile(2, 64), AttentionSize(2, 2, 70, 200)),
    "three groups, one block of keys": (
        AttentionSpec(BF16, 40, 40, scale=0.2),
        AttentionTile(3, 80),
        AttentionSize(1, 3, 200, 77, tokens_first=True),
    ),
    "two atoms, grouped": (
        AttentionSpec(F16, 80, 128, scale=0.1),
        AttentionTile(2, 48, rescale_above=8),
        AttentionSize(1, 4, 130, 100, kv_heads=2),
    ),
    "heads together, three turns": (
        AttentionSpec(F16, 64, 64, MASK, MASKED, "t1"),
        AttentionTile(3, 48, together=True),
        AttentionSize(2, 6, 70, 200, kv_heads=2, masks=((2, 1, 70, 200),)),
    ),
    "three turns": (AttentionSpec(F16, 32, 32, scale=0.2), AttentionTile(3, 32, 3), AttentionSize(1, 2, 260, 150)),
    "mask": (
        AttentionSpec(F16, 64, 64, MASK, MASKED, "t1"),
        AttentionTile(2, 96),
        AttentionSize(2, 2, 70, 200, masks=((2, 1, 70, 200),)),
    ),
    "guarded, a mask in fp32 and one of the keys": (
        AttentionSpec(F16, 64, 64, TWO_MASKS, TWICE, "t2", guarded=True),
        AttentionTile(1, 64),
        AttentionSize(2, 1, 33, 104, masks=((2, 1, 33, 104), (1, 1, 1, 104))),
    ),
}


def host_source(source: str) -> str:
    def replaced(text: str, first: str, behind: str, by: str) -> str:
        start = text.index(first)
        return text[:start] + by + text[text.index(behind, start) :]

    def host(name: str) -> str:
        return (EMULATOR / name).read_text()

    source = replaced(source, "// ---- common/ptx.cuh", "// ---- common/math.cuh", host("ptx_host.cuh"))
    source = replaced(source, "// ---- hopper/fast_math.cuh", "// ---- generated", "")
    source = replaced(source, "// acc[64, BLOCK_N]", "}  // namespace onnxfuse", "")
    source = replaced(source, "// ---- hopper/ptx.cuh", "// ---- hopper/attention.cuh", host("hopper_ptx_host.cuh"))
    shared = "unsigned char* onnxfuse_shared = ::onnxfuse_shared + cluster_rank() * EMULATED_BLOCK_PITCH;"
    source = source.replace("extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];", shared)
    source = source.replace("pointwise::fast_exp2", "exp2f").replace("pointwise::fast_", "pointwise::")
    launch = host("cluster_launch.h").replace("onnxfuse_gemm", "onnxfuse_attention")
    return f'#include "cuda_host.h"\n#include "cluster_host.h"\n{source}{launch}'


def launch(library: ctypes.CDLL, problem: AttentionProblem, tile: AttentionTile, blocks: int, lazy: bool) -> np.ndarray:
    tensors = problem.tensors
    problem.out[...] = np.nan
    arguments = problem.arguments([tensor.ctypes.data for tensor in tensors])
    ranges = (Range * len(tensors))(*(Range(each.ctypes.data, each.nbytes, each is problem.out, 0) for each in tensors))
    described = problem.maps(tile)
    memory = np.zeros(MAP_BYTES * (len(described) + 1) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    kept = []
    for place, (number, extents, steps, box) in enumerate(described):
        tensor = tensors[number]
        size = tensor.itemsize
        host = HostMap(
            tensor.ctypes.data, size, 4, 128, (*extents, 0), (*(size * step for step in steps), 0), (*box, 0)
        )
        kept.append(host)
        memory[start + place * MAP_BYTES :][:8].view(np.uint64)[0] = ctypes.addressof(host)
    library.emulate.restype = ctypes.c_char_p
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), ctypes.c_void_p(memory.ctypes.data + start), blocks, tile.threads,
        int(lazy), ranges, len(tensors),
    )  # fmt: skip
    assert failure == b"", failure
    return problem.out.copy()


@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_the_attention(name: str, tmp_path: Path) -> None:
    spec, tile, size = CASES[name]
    library = build_library(host_source(emit(spec, tile)), tmp_path, "-DEMULATED_BLOCKS=1")
    problem = make_attention(spec, size)
    if problem.loads:
        problem.loads[0][..., 3, :] = -np.inf
    eager = launch(library, problem, tile, 1, lazy=False)
    late = launch(library, problem, tile, 2, lazy=True)
    np.testing.assert_array_equal(eager.view(np.uint16), late.view(np.uint16))
    expected, got = problem.reference(), eager.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    assert np.isnan(expected).any() == (bool(problem.loads) and not spec.guarded)
    # A mean of values: their weights are rounded once, and the result once.
    largest = np.abs(problem.values.astype(np.float64)).max()
    assert np.nanmax(np.abs(got - expected)) <= 2.1 * ROUNDING[spec.dtype] * largest


@pytest.mark.parametrize("head", [64, 128])
def test_exponentials_run_beside_the_second_product(head: int) -> None:
    """The wait for the sums comes behind the exponentials, and neither spills nor serialises wgmma."""
    tile = AttentionTile(2, 128)
    image = compile_source(emit(AttentionSpec(F16, head, head, MASK, MASKED, "t1"), tile), ARCHITECTURES["sm_90a"])
    assert image.spill_bytes == 0
    assert "(C75" not in image.log
    try:
        listing = disassemble.sass(image.data)
    except CompileError as error:
        pytest.skip(str(error))
    beside = listing.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1].split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0]
    assert beside.count("MUFU.EX2") >= tile.block_n // 2
