"""The kernel that normalises groups of channels, on the CPU: every access inside of its tensor, against float64."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.kernels.group_norm import ENTRY, emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.group_norm import CLUSTERS, HELD, MOST_THREADS
from onnxfuse.schedule.group_norm_tile import GroupNormSpec, GroupNormTile
from tests.helpers.group_norm import GroupProblem, Images, make_images, make_spec
from tests.helpers.host_build import build_library
from tests.helpers.thinning import Taken
from tests.kernels.test_attention_on_cpu import on_the_cpu
from tests.kernels.test_portable_on_cpu import Range, host_source

TILE = GroupNormTile(64, 2, 1)


@dataclass(frozen=True)
class Case:
    """A kernel and what it is given; clusters are fewer than groups where `clusters` says how many."""

    spec: GroupNormSpec
    images: Images
    tile: GroupNormTile = TILE
    clusters: int = 0


CASES = {
    "f16": Case(make_spec(4, 3), Images(2, 64)),
    "two of a cluster, groups in turn": Case(make_spec(5, 2), Images(2, 320), GroupNormTile(32, 1, 2), 2),
    "four of a cluster": Case(make_spec(2, 4), Images(1, 200), GroupNormTile(32, 2, 4), 1),
    "bf16, one channel": Case(make_spec(6, 1, BF16), Images(1, 96)),
    "f32": Case(make_spec(2, 2, F32), Images(2, 52), GroupNormTile(32, 2, 2)),
    "f16 to f32": Case(make_spec(2, 2, F16, F32), Images(1, 36)),
    "odd pixels": Case(make_spec(3, 5), Images(2, 49), GroupNormTile(64, 2, 2)),
    "pixels beside vectors": Case(make_spec(3, 2), Images(1, 12)),
    "one pixel": Case(make_spec(2, 7), Images(3, 1)),
    "an odd address": Case(make_spec(3, 2), Images(1, 64, offset=1)),
    "far from zero": Case(make_spec(2, 2, F32), Images(1, 400, mean=100.0)),
    "no parameters": Case(make_spec(2, 2, affine=False, silu=False), Images(1, 40)),
}


def build(spec: GroupNormSpec, tile: GroupNormTile, folder: Path) -> ctypes.CDLL:
    blocks = [f"-DEMULATED_BLOCKS={tile.splits}"] if tile.splits > 1 else []
    library = build_library(on_the_cpu(host_source(emit(spec, tile))), folder, f"-DONNXFUSE_ENTRY={ENTRY}", *blocks)
    library.emulate.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, problem: GroupProblem, case: Case, lazy: bool) -> None:
    """The problem's output."""
    tensors = problem.tensors
    arguments = problem.arguments([tensor.ctypes.data for tensor in tensors])
    ranges = (Range * len(tensors))(*(Range(each.ctypes.data, each.nbytes, each is problem.out, 0) for each in tensors))
    blocks, conflicts = (case.clusters or problem.rows) * case.tile.splits, ctypes.c_int()
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), blocks, 1, case.tile.threads, int(lazy), ranges, len(tensors),
        ctypes.byref(conflicts),
    )  # fmt: skip
    assert failure == b"", failure


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_kernel_normalises_groups(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    library = build(case.spec, case.tile, tmp_path)
    early, late = (make_images(case.spec, case.images) for _ in range(2))
    launch(library, early, case, lazy=False)
    launch(library, late, case, lazy=True)
    np.testing.assert_array_equal(early.out, late.out)
    early.check()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_kernels_need_no_local_memory(arch: str, taken: Taken) -> None:
    splits = (1, *(splits for splits, _ in CLUSTERS)) if arch == "sm_90a" else (1,)
    specs = (make_spec(32, 10), make_spec(32, 4, F32), make_spec(16, 1, BF16, F32))
    for spec, each in taken([*itertools.product(specs, splits)], 3):
        image = compile_source(emit(spec, GroupNormTile(MOST_THREADS, HELD, each)), ARCHITECTURES[arch])
        assert (image.spill_bytes, image.local_bytes) == (0, 0), each
