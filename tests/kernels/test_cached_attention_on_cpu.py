"""The kernel of one token over a cache, on the CPU: every access inside of its tensor, every result against float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.dtypes import BF16, F16, DType
from onnxfuse.kernels.cached_attention import ENTRY, emit
from onnxfuse.schedule.cached_attention_tile import CachedAttentionSpec, CachedAttentionTile
from tests.helpers.cached_attention import CachedProblem, Tokens, make_tokens
from tests.helpers.host_build import build_library
from tests.kernels.test_attention_on_cpu import portable_source
from tests.kernels.test_portable_on_cpu import Range

LLAMA = CachedAttentionSpec(F16, 8, 2, 128, 128, False, 128**-0.5, 0.0, 0)
TILES = {splits: CachedAttentionTile(2, splits, 1) for splits in (1, 2, 4)}


@dataclass(frozen=True)
class Case:
    """A kernel, and how many keys each sequence has, its own the last."""

    spec: CachedAttentionSpec
    splits: int
    lengths: tuple[int, ...]
    room: int
    packed: bool = True


CASES = {
    "llama": Case(LLAMA, 1, (1, 16, 17, 70), 80),
    "cluster of two": Case(LLAMA, 2, (33, 2), 64),
    "cluster of four, fewer keys than warps": Case(LLAMA, 4, (5, 129, 160), 160),
    "apart": Case(LLAMA, 1, (40,), 48, packed=False),
    "bf16": Case(replace(LLAMA, dtype=BF16), 2, (50, 3), 64),
    "one head each": Case(replace(LLAMA, heads=3, kv_heads=3, head=64, rotary=64), 2, (21, 20), 32),
    "eight heads": Case(replace(LLAMA, heads=8, kv_heads=1, head=96, rotary=96), 2, (37,), 40),
    "seven heads of 256": Case(replace(LLAMA, heads=7, kv_heads=1, head=256, rotary=256), 1, (19,), 20),
    "80 columns, 32 of them turned": Case(replace(LLAMA, heads=4, kv_heads=2, head=80, rotary=32), 1, (30, 4), 30),
    "neighbours turned": Case(replace(LLAMA, interleaved=True), 1, (18,), 20),
    "not turned": Case(replace(LLAMA, rotary=0), 2, (18,), 20),
    "bounded scores": Case(replace(LLAMA, softcap=5.0), 1, (34,), 40),
    "norms": Case(replace(LLAMA, epsilon=1e-6), 2, (40, 1), 48, packed=False),
    "norms of eight heads, neighbours turned": Case(
        replace(LLAMA, kv_heads=1, epsilon=0.01, interleaved=True), 1, (9,), 10
    ),
    "a sink": Case(replace(LLAMA, head=64, rotary=64, sink=True), 2, (1, 60), 64),
    "norms and a sink, one block": Case(
        replace(LLAMA, heads=6, head=80, rotary=0, epsilon=1e-5, sink=True), 1, (21,), 24
    ),
    "window": Case(replace(LLAMA, window=20), 2, (90, 20, 7), 96),
}


def build(spec: CachedAttentionSpec, tile: CachedAttentionTile, folder: Path) -> ctypes.CDLL:
    blocks = [f"-DEMULATED_BLOCKS={tile.splits}"] if tile.splits > 1 else []
    library = build_library(portable_source(emit(spec, tile)), folder, f"-DONNXFUSE_ENTRY={ENTRY}", *blocks)
    library.emulate.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, problem: CachedProblem, tile: CachedAttentionTile, lazy: bool) -> None:
    """The problem's outputs, and its cache."""
    tensors = problem.tensors
    arguments = problem.arguments([tensor.ctypes.data for tensor in tensors])
    written = [any(each is one for one in problem.written) for each in tensors]
    ranges = (Range * len(tensors))(
        *(Range(each.ctypes.data, each.nbytes, out, 0) for each, out in zip(tensors, written, strict=True))
    )
    conflicts = ctypes.c_int()
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), problem.tiles * tile.splits, 1, tile.threads, int(lazy), ranges,
        len(tensors), ctypes.byref(conflicts),
    )  # fmt: skip
    assert failure == b"", failure


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_the_attention(name: str, tmp_path: Path) -> None:
    """And stores the token's own key and value, and nothing else, in the cache."""
    case = CASES[name]
    tile = replace(TILES[case.splits])
    library = build(case.spec, tile, tmp_path)
    problem = make_tokens(case.spec, Tokens(case.lengths, case.room, case.packed))
    late = make_tokens(case.spec, Tokens(case.lengths, case.room, case.packed))
    launch(library, problem, tile, lazy=False)
    launch(library, late, tile, lazy=True)
    np.testing.assert_array_equal(problem.out.view(np.uint16), late.out.view(np.uint16))
    problem.check()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda dtype: dtype.name)
def test_lengths_beyond_the_cache_write_nothing_outside(dtype: DType, tmp_path: Path) -> None:
    """What a caller must not ask for stays within the tensors, as the emulator checks."""
    spec = replace(LLAMA, dtype=dtype)
    library = build(spec, TILES[1], tmp_path)
    problem = make_tokens(spec, Tokens((12, 12), 16))
    problem.lengths[:] = (-1, 999)
    launch(library, problem, TILES[1], lazy=False)
    assert problem.out.shape == (2, spec.heads * spec.head)
