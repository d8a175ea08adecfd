"""The attention kernel's own source, compiled by the C++ compiler and run on the CPU; see `test_hopper_on_cpu.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.errors import CompileError
from onnxfuse.ir.attention import Diagonal
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.attention import ENTRY, emit, emit_portable
from onnxfuse.runtime import disassemble
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.attention_plan import tiles
from onnxfuse.schedule.attention_tile import AttentionSpec, AttentionTile, PortableAttentionTile
from onnxfuse.schedule.kernel_spec import Access
from tests.helpers.attention_problem import AttentionProblem, AttentionSize, make_attention
from tests.helpers.host_build import EMULATOR, build_library
from tests.helpers.kernel_problem import ROUNDING
from tests.helpers.tensor_maps import MAP_BYTES
from tests.kernels.test_hopper_on_cpu import HostMap
from tests.kernels.test_portable_on_cpu import SHARED_MEMORY, SHARED_MEMORY_OF_BLOCK, Range
from tests.kernels.test_portable_on_cpu import host_source as portable_host_source

TF32_ROUNDING = 2.0**-11

MASKED = (Step("t0", "mul", ("acc0", 0.125)), Step("t1", "add", ("t0", "op0")))
TWICE = (*MASKED, Step("t2", "add", ("t1", "op1")))
MASK = (Access("tile", F16, 8),)
ONE_MASK = (Access("tile", F32, 4),)
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
    "split by 4, the last blocks with fewer keys": (
        AttentionSpec(F16, 64, 40, scale=0.125),
        AttentionTile(1, 48, splits=4),
        AttentionSize(2, 3, 9, 430, kv_heads=1),
    ),
    "split by 2, masks": (
        AttentionSpec(BF16, 64, 64, MASK, MASKED, "t1"),
        AttentionTile(1, 64, splits=2, rescale_above=8),
        AttentionSize(1, 2, 33, 264, masks=((1, 2, 33, 264),)),
    ),
    "fp32": (
        AttentionSpec(F32, 64, 64, scale=0.125, out_width=4),
        AttentionTile(2, 64, landed=2),
        AttentionSize(2, 2, 170, 200),
    ),
    "fp32, two atoms of keys, parts of atoms of columns, grouped": (
        AttentionSpec(F32, 40, 72, scale=0.2, out_width=4),
        AttentionTile(1, 64, 3, landed=1),
        AttentionSize(1, 4, 70, 200, kv_heads=2, tokens_first=True),
    ),
    "fp32, three groups of few tiles, masks": (
        AttentionSpec(F32, 16, 24, (ONE_MASK[0], Access("row", F32, 2)), TWICE, "t2", guarded=True, out_width=4),
        AttentionTile(3, 32, landed=2, rescale_above=8),
        AttentionSize(1, 3, 300, 104, masks=((1, 1, 300, 104), (1, 1, 1, 104))),
    ),
    "fp32, one block of keys": (
        AttentionSpec(F32, 8, 8, scale=0.5, out_width=4),
        AttentionTile(2, 32, landed=2),
        AttentionSize(1, 2, 20, 3),
    ),
    "split by 8, blocks without keys": (
        AttentionSpec(F16, 32, 32, MASK, MASKED, "t1", guarded=True),
        AttentionTile(1, 48, splits=8),
        AttentionSize(1, 3, 5, 88, masks=((1, 1, 5, 88),)),
    ),
}


NARROW = (Access("tile", F16, 1), Access("row", F16, 1))

PORTABLE = {
    "plain": (AttentionSpec(F16, 64, 64, scale=0.125), PortableAttentionTile(4, 64), AttentionSize(2, 2, 70, 200)),
    "bf16, heads of 40, one block of keys": (
        AttentionSpec(BF16, 40, 40, scale=0.2),
        PortableAttentionTile(2, 80),
        AttentionSize(1, 3, 50, 77, tokens_first=True),
    ),
    "fp32, two masks, fully masked rows": (
        AttentionSpec(F32, 40, 24, (ONE_MASK[0], Access("row", F16, 2)), TWICE, "t2", out_width=4),
        PortableAttentionTile(2, 32),
        AttentionSize(2, 2, 45, 104, masks=((2, 1, 45, 104), (1, 1, 1, 104))),
    ),
    "fp32, grouped, guarded": (
        AttentionSpec(F32, 16, 80, ONE_MASK, MASKED, "t1", guarded=True, out_width=4),
        PortableAttentionTile(1, 48),
        AttentionSize(1, 4, 30, 100, kv_heads=2, masks=((1, 4, 30, 100),)),
    ),
    "16-bit, a mask, wide values": (
        AttentionSpec(F16, 128, 72, MASK, MASKED, "t1", out_width=8, out_dtype=F32),
        PortableAttentionTile(2, 48),
        AttentionSize(1, 2, 33, 120, masks=((1, 1, 33, 120),)),
    ),
    "element by element": (
        AttentionSpec(F16, 40, 40, NARROW, TWICE, "t2", out_width=1, checked=True),
        PortableAttentionTile(2, 32),
        AttentionSize(2, 2, 33, 77, tokens_first=True, masks=((2, 1, 33, 77), (1, 1, 1, 77))),
    ),
    "fp32, split by 4, a mask, stages without keys for all": (
        AttentionSpec(F32, 40, 24, ONE_MASK, MASKED, "t1", out_width=4),
        PortableAttentionTile(4, 16, 4),
        AttentionSize(2, 2, 21, 204, masks=((2, 1, 21, 204),)),
    ),
    "16-bit, split by 2, keys of one warp": (
        AttentionSpec(F16, 64, 40, scale=0.2),
        PortableAttentionTile(2, 32, 2),
        AttentionSize(1, 4, 5, 24, kv_heads=2),
    ),
    "fp32, a cluster of 4, heads that share keys": (
        AttentionSpec(F32, 64, 40, scale=0.2, out_width=4),
        PortableAttentionTile(2, 16, 8),
        AttentionSize(1, 4, 5, 500, kv_heads=2),
    ),
    "fp32, a cluster of 2, masks, rows of two tiles": (
        AttentionSpec(F32, 40, 24, ONE_MASK, MASKED, "t1", guarded=True, out_width=4),
        PortableAttentionTile(4, 16, 8),
        AttentionSize(2, 2, 21, 204, masks=((2, 1, 21, 204),)),
    ),
    "16-bit, a cluster of 8, blocks without keys": (
        AttentionSpec(BF16, 32, 32, NARROW[:1], MASKED, "t1", out_width=1, checked=True),
        PortableAttentionTile(2, 32, 16),
        AttentionSize(1, 3, 9, 77, masks=((1, 1, 9, 77),)),
    ),
    "fp32, element by element": (
        AttentionSpec(F32, 24, 24, scale=0.2, out_width=1, checked=True),
        PortableAttentionTile(1, 32),
        AttentionSize(1, 2, 20, 45),
    ),
}


def replaced(text: str, first: str, behind: str, by: str) -> str:
    start = text.index(first)
    return text[:start] + by + text[text.index(behind, start) :]


def host_source(source: str) -> str:
    def host(name: str) -> str:
        return (EMULATOR / name).read_text()

    source = replaced(source, "// ---- common/ptx.cuh", "// ---- common/math.cuh", host("ptx_host.cuh"))
    source = replaced(source, "// acc[64, BLOCK_N]", "}  // namespace onnxfuse", "")
    ptx = host("cluster_ptx_host.cuh") + host("hopper_ptx_host.cuh")
    source = replaced(source, "// ---- common/cluster_ptx.cuh", "// ---- common/cluster_shares.cuh", ptx)
    source = on_the_cpu(source)
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


def portable_source(source: str) -> str:
    """The same of the portable kernel."""
    return on_the_cpu(portable_host_source(source))


def on_the_cpu(source: str) -> str:
    """With the shared memory of a block of the emulated cluster."""
    return source.replace(SHARED_MEMORY, SHARED_MEMORY_OF_BLOCK)


def build_portable(spec: AttentionSpec, tile: PortableAttentionTile, folder: Path) -> ctypes.CDLL:
    blocks = [f"-DEMULATED_BLOCKS={tile.cluster}"] if tile.cluster > 1 else []
    return build_library(portable_source(emit_portable(spec, tile)), folder, f"-DONNXFUSE_ENTRY={ENTRY}", *blocks)


def portable_grid(rows: int, heads: int, tile: PortableAttentionTile, fewer: bool) -> tuple[int, int]:
    """Blocks of x and z: one, or a cluster, for each tile of rows of each head, or not for all."""
    tiles = -(-rows // tile.block_m)
    if tile.cluster > 1:
        return (tiles * heads - int(fewer)) * tile.cluster, 1
    return tiles, heads - int(fewer)


def launch_portable(library: ctypes.CDLL, problem: AttentionProblem, tile: PortableAttentionTile, lazy: bool) -> None:
    tensors = problem.tensors
    problem.out[...] = np.nan
    arguments = problem.arguments([tensor.ctypes.data for tensor in tensors])
    ranges = (Range * len(tensors))(*(Range(each.ctypes.data, each.nbytes, each is problem.out, 0) for each in tensors))
    grid = portable_grid(problem.size.rows, problem.size.batch * problem.size.heads, tile, fewer=lazy)
    conflicts = ctypes.c_int()
    library.emulate.restype = ctypes.c_char_p
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), *grid, tile.threads, int(lazy), ranges, len(tensors),
        ctypes.byref(conflicts),
    )  # fmt: skip
    assert failure == b"", failure
    assert conflicts.value == 0


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_kernel_computes_the_attention(name: str, tmp_path: Path) -> None:
    """By mma.sync, of all types, vectors or elements; with fewer blocks than heads the rest follows."""
    spec, tile, size = PORTABLE[name]
    library = build_portable(spec, tile, tmp_path)
    problem = make_attention(spec, size)
    if problem.loads:
        problem.loads[0][..., 3, :] = -np.inf
    launch_portable(library, problem, tile, lazy=False)
    eager = problem.out.copy()
    launch_portable(library, problem, tile, lazy=True)
    np.testing.assert_array_equal(eager.view(np.uint8), problem.out.view(np.uint8))
    check_numbers(problem, eager)


@pytest.mark.parametrize("tile", [PortableAttentionTile(2, 32), PortableAttentionTile(2, 16, 2)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda dtype: dtype.name)
def test_query_keys_and_values_may_lie_transposed(dtype: DType, tile: PortableAttentionTile, tmp_path: Path) -> None:
    """[d, n] in memory: the kernel that walks any strides reads elements, or vectors of rows that begin on 16 bytes."""
    spec = AttentionSpec(dtype, 24, 16, scale=0.3, out_width=1, checked=True)
    library = build_portable(spec, tile, tmp_path)
    for rows, keys in ((9, 45), (33, 40), (40, 72), (16, 8)):
        if tile.splits > 1 and rows > 16:
            continue
        problem = make_attention(spec, AttentionSize(2, 2, rows, keys))
        for name in ("query", "keys", "values"):
            plain = getattr(problem, name)
            setattr(problem, name, np.ascontiguousarray(plain.swapaxes(2, 3)).swapaxes(2, 3))
        launch_portable(library, problem, tile, lazy=True)
        check_numbers(problem, problem.out.copy())


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_the_attention(name: str, tmp_path: Path) -> None:
    spec, tile, size = CASES[name]
    library = build_library(host_source(emit(spec, tile)), tmp_path, f"-DEMULATED_BLOCKS={tile.splits}")
    problem = make_attention(spec, size)
    if problem.loads:
        problem.loads[0][..., 3, :] = -np.inf
    eager = launch(library, problem, tile, tile.splits, lazy=False)
    late = launch(library, problem, tile, 2 * tile.splits, lazy=True)
    np.testing.assert_array_equal(eager.view(np.uint8), late.view(np.uint8))
    check_numbers(problem, eager)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("keys", [24, 72, 250])
@pytest.mark.parametrize("rows", [40, 130, 320, 700])
def test_tiles_of_three_groups_and_of_fewer_cover_all_rows(rows: int, keys: int, tmp_path: Path) -> None:
    """However many blocks there are, and tiles of either kind; groups may share a tile's keys, and some have none."""
    spec, tile = AttentionSpec(F16, 32, 24, MASK, MASKED, "t1"), AttentionTile(3, 32, rescale_above=8)
    library = build_library(host_source(emit(spec, tile)), tmp_path, "-DEMULATED_BLOCKS=1")
    problem = make_attention(spec, AttentionSize(1, 2, rows, keys, masks=((1, 1, rows, keys),)))
    problem.loads[0][..., 3, :] = -np.inf
    for blocks in (1, 2, 3, 4, 7, 11, 22):
        eager = launch(library, problem, tile, blocks, lazy=False)
        check_numbers(problem, eager)
        late = launch(library, problem, tile, blocks, lazy=True)
        np.testing.assert_array_equal(eager.view(np.uint16), late.view(np.uint16), f"{blocks} blocks")


def check_numbers(problem: AttentionProblem, found: np.ndarray, rows_of_nothing: bool | None = None) -> None:
    """Against float64: probabilities and values are rounded once each, and q and keys of TF32 move a score a little."""
    spec = problem.spec
    expected, got = problem.reference(), found.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    if rows_of_nothing is None:
        rows_of_nothing = bool(problem.loads) and not spec.guarded
    assert np.isnan(expected).any() == rows_of_nothing
    # A mean of values: their weights are rounded once, and the result once.
    largest = np.abs(problem.values.astype(np.float64)).max()
    if spec.dtype != F32:
        assert np.nanmax(np.abs(got - expected)) <= 2.1 * ROUNDING[spec.dtype] * largest
        return
    # Each score moves by the roundings of its factors at most, a probability by twice that of its own.
    magnitudes = (np.abs(each.astype(np.float64)) for each in (problem.query, problem.keys))
    q, k = (each.max(axis=(0, 1)) for each in magnitudes)
    factor = 0.125 if spec.score else spec.scale
    moved = factor * (q @ k.T).max() * 2 * TF32_ROUNDING
    assert np.nanmax(np.abs(got - expected)) <= (2 * moved + 2.1 * TF32_ROUNDING) * largest


WINDOW = Diagonal(0, False, -65504.0, -128)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("head", "groups", "diagonal"),
    [(64, 2, None), (128, 2, None), (64, 2, WINDOW), (128, 2, WINDOW), (64, 3, None)],
    ids=str,
)
def test_exponentials_run_beside_the_second_product(head: int, groups: int, diagonal: Diagonal | None) -> None:
    """The wait for the sums comes behind the exponentials, nothing spills or serialises, no load loops."""
    tile = AttentionTile(groups, 128)
    spec = AttentionSpec(F16, head, head, MASK, MASKED, "t1", diagonal=diagonal)
    image = compile_source(emit(spec, tile), ARCHITECTURES["sm_90a"])
    assert image.spill_bytes == 0
    assert "(C75" not in image.log
    try:
        listing = disassemble.sass(image.data)
    except CompileError as error:
        pytest.skip(str(error))
    beside = listing.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1].split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0]
    assert beside.count("MUFU.EX2") >= tile.block_n // 2
    assert "BRA.U.ANY" not in listing, "one lane loads, and ptxas knows it"


@pytest.mark.one_in(16)
@pytest.mark.parametrize("diagonal", [None, WINDOW], ids=str)
@pytest.mark.parametrize("head", [40, 64, 96, 128, 256])
def test_every_tile_of_fp32_has_its_registers(head: int, diagonal: Diagonal | None) -> None:
    """With a mask, and what a window notes of rows: no kernel that a plan may take spills or serialises wgmma."""
    spec = AttentionSpec(F32, head, head, ONE_MASK, MASKED, "t1", out_width=4, diagonal=diagonal)
    device = ARCHITECTURES["sm_90a"]
    found = tiles(spec, 1000, device)
    assert found or head == 256
    for tile in found:
        image = compile_source(emit(spec, tile), device)
        assert image.spill_bytes == 0, tile
        assert "(C75" not in image.log, tile


DIAGONALS = [
    Diagonal(0, False, -np.inf),
    Diagonal(2, True, -np.inf),
    Diagonal(0, False, -65504.0),
    Diagonal(0, True, -np.inf, first=-70),
    Diagonal(30, False, -65504.0, first=-40),
]


def causal_problem(spec: AttentionSpec, size: AttentionSize) -> AttentionProblem:
    """Scores behind the diagonal are filled, and three rows throughout."""
    problem = make_attention(spec, size)
    diagonal = spec.diagonal
    assert diagonal is not None
    distance = np.arange(size.keys) - np.arange(size.rows)[:, None]
    distance -= size.keys - size.rows if diagonal.from_end else 0
    behind = (distance > diagonal.offset) | (distance < (-np.inf if diagonal.first is None else diagonal.first))
    behind[[0, 40, size.rows - 1]] = True
    problem.loads[0][...] = np.where(behind, diagonal.fill, problem.loads[0].clip(-8, 8))
    return problem


def check_nothing_behind_is_read(problem: AttentionProblem, again: Callable[[], None], block: int) -> None:
    """Values behind every row's diagonal, from the next block of keys on, may be anything; then rows are as before."""
    before = problem.out.copy()
    problem.values[:, :, -(-problem.size.rows // block) * block :] = np.nan
    again()
    np.testing.assert_array_equal(problem.out, before)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("dtype", "landed"), [(F16, 0), (F32, 2)], ids=["f16", "f32"])
@pytest.mark.parametrize("diagonal", DIAGONALS, ids=str)
def test_blocks_behind_the_diagonal_are_left_out(diagonal: Diagonal, dtype: DType, landed: int, tmp_path: Path) -> None:
    """Rows that are masked throughout by finite numbers are means of all values, or of as many as count."""
    out_width = 16 // dtype.bytes
    spec = AttentionSpec(dtype, 32, 32, ONE_MASK, MASKED, "t1", out_width=out_width, diagonal=diagonal)
    tile = AttentionTile(2, 32, landed=landed)
    library = build_library(host_source(emit(spec, tile)), tmp_path, "-DEMULATED_BLOCKS=1")
    problem = causal_problem(spec, AttentionSize(1, 2, 300, 360, masks=((1, 1, 300, 360),)))
    eager = launch(library, problem, tile, 2, lazy=False)
    np.testing.assert_array_equal(eager.view(np.uint16), launch(library, problem, tile, 3, lazy=True).view(np.uint16))
    check_numbers(problem, eager, rows_of_nothing=np.isinf(diagonal.fill))
    if np.isinf(diagonal.fill) and not diagonal.from_end:
        check_nothing_behind_is_read(
            problem, lambda: problem.out.__setitem__(..., launch(library, problem, tile, 2, False)), 128
        )


@pytest.mark.one_in(8)
@pytest.mark.parametrize("diagonal", DIAGONALS, ids=str)
def test_the_portable_kernel_leaves_them_out_too(diagonal: Diagonal, tmp_path: Path) -> None:
    spec = AttentionSpec(F32, 16, 16, (Access("tile", F32, 4),), MASKED, "t1", out_width=4, diagonal=diagonal)
    tile = PortableAttentionTile(2, 16)
    library = build_portable(spec, tile, tmp_path)
    problem = causal_problem(spec, AttentionSize(1, 2, 90, 120, masks=((1, 1, 90, 120),)))
    launch_portable(library, problem, tile, lazy=True)
    check_numbers(problem, problem.out.copy(), rows_of_nothing=np.isinf(diagonal.fill))
    if np.isinf(diagonal.fill) and not diagonal.from_end:
        check_nothing_behind_is_read(problem, lambda: launch_portable(library, problem, tile, lazy=False), 32)
