"""The sm_90a kernel's own source, compiled by the C++ compiler and run on the CPU, all threads of a cluster in turn.

TMA, mbarriers, wgmma and distributed shared memory are those of `tests/emulator`. Checks what compiling cannot: that
threads do not wait for each other for ever, that every element is written once, and the results; with copies that land
at once and with copies that land as late as they may.
"""

from __future__ import annotations

import copy
import ctypes
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfuse.schedule.hopper_swapped_tile import seen
from onnxfuse.schedule.hopper_tile import begins_at_any_column, begins_at_any_row
from tests.helpers.all_lanes_arrive import with_all_lanes
from tests.helpers.hopper_cases import (
    HopperCase,
    batch_runs_cases,
    cases,
    copied_cases,
    kept_cases,
    served_cases,
    small_m_cases,
    split_cases,
    three_groups_cases,
)
from tests.helpers.host_build import EMULATOR, build_library
from tests.helpers.kernel_problem import Problem, Size, make_problem
from tests.helpers.quantized_cases import QuantizedCase
from tests.helpers.swapped_cases import SwappedCase
from tests.helpers.tensor_maps import MAP_BYTES, described
from tests.kernels.test_portable_on_cpu import Range

MAX_WORK = 1e7  # products of one size: seconds on the CPU


class HostMap(ctypes.Structure):
    """As tests/emulator/hopper_ptx_host.cuh has it."""

    _fields_ = (
        ("tensor", ctypes.c_void_p), ("element", ctypes.c_int64), ("rank", ctypes.c_int64), ("swizzle", ctypes.c_int64),
        ("extents", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5), ("box", ctypes.c_int64 * 5),
    )  # fmt: skip


AnyCase = HopperCase | QuantizedCase | SwappedCase


def emit(case: AnyCase) -> str:
    return case.source


def host_source(source: str) -> str:
    """An emitted source with PTX replaced by C++."""
    source = _replaced(source, "// ---- common/ptx.cuh", "// ---- common/math.cuh", _text("ptx_host.cuh"))
    source = _replaced(source, "// acc[64, ", "}  // namespace onnxfuse", "")
    ptx = _text("cluster_ptx_host.cuh") + _text("hopper_ptx_host.cuh")
    source = _replaced(source, "// ---- common/cluster_ptx.cuh", "// ---- hopper/epilogue.cuh", ptx)
    shared = "unsigned char* onnxfuse_shared = ::onnxfuse_shared + cluster_rank() * EMULATED_BLOCK_PITCH;"
    source = re.sub(r"extern __shared__ [^;]*;", shared, source)
    return f'#include "cuda_host.h"\n#include "cluster_host.h"\n{source}{_text("cluster_launch.h")}'


def _text(name: str) -> str:
    return (EMULATOR / name).read_text()


def _replaced(source: str, first: str, behind: str, text: str) -> str:
    start = source.index(first)
    return source[:start] + text + source[source.index(behind, start) :]


def build(case: AnyCase, folder: Path, emitted: Callable[[Any], str] = emit) -> ctypes.CDLL:
    flags = (f"-DEMULATED_BLOCKS={case.launch.cluster}", f"-DEMULATED_WRITES={writes_of(case)}")
    library = build_library(host_source(emitted(case)), folder, *flags)
    library.emulate.restype = ctypes.c_char_p
    return library


def writes_of(case: AnyCase) -> int:
    """How often an element may be written: by the last tile down, its neighbour, a tile behind both; and so on."""
    if isinstance(case, SwappedCase):
        return 1 + case.tile.cluster_m * begins_at_any_column(seen(case.spec))
    if not isinstance(case, HopperCase):
        return 1
    rows = 1 + case.tile.cluster_m * begins_at_any_row(case.spec)
    return rows * (1 + case.tile.cluster_n * begins_at_any_column(case.spec))


def tensor_maps(case: AnyCase, problem: Problem) -> tuple[np.ndarray, int, list[HostMap]]:
    """The kernel's second argument: memory, where it begins, and what it points to."""
    kept, maps = [], described(case, problem)
    memory = np.zeros(MAP_BYTES * len(maps) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    for place, each in enumerate(maps):
        if each is None:
            continue
        size = each.buffer.data.itemsize
        unused = [0] * (5 - len(each.extents))
        host = HostMap(
            each.buffer.data.ctypes.data + each.buffer.offset * size, size, len(each.extents), each.swizzle,
            (*each.extents, *unused), (*(size * stride for stride in each.strides), *unused), (*each.box, *unused),
        )  # fmt: skip
        kept.append(host)
        memory[start + place * MAP_BYTES :][:8].view(np.uint64)[0] = ctypes.addressof(host)
    return memory, memory.ctypes.data + start, kept


def launch(library: ctypes.CDLL, case: AnyCase, problem: Problem, clusters: int, lazy: bool) -> list[np.ndarray]:
    failed = failure(library, case, problem, clusters, lazy)
    assert failed == b"", failed
    return [out.data.copy() for out in problem.outs]


def failure(library: ctypes.CDLL, case: AnyCase, problem: Problem, clusters: int, lazy: int) -> bytes:
    """What goes wrong in a launch, or nothing; cluster_launch.h says what `lazy` is. Then rhs is ready, too."""
    for out in problem.outs:
        out.data[...] = np.nan
    buffers = problem.buffers
    arguments = problem.arguments([buffer.data.ctypes.data for buffer in buffers])
    arguments["rhs_ready"] = bool(lazy)
    uses = problem.uses(bool(lazy))
    ranges = (Range * len(buffers))(
        *(Range(buffer.data.ctypes.data, buffer.data.nbytes, use) for buffer, use in zip(buffers, uses, strict=True))
    )
    memory, maps, kept = tensor_maps(case, problem)
    rule, size = case.launch, problem.size
    # A block, or a cluster that shares loads; blocks that split k share a tile.
    tiles = math.ceil(size.m / rule.block_m) * math.ceil(size.n / rule.block_n)
    blocks = min(clusters, tiles * size.batch) * rule.cluster
    failed: bytes = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), ctypes.c_void_p(maps), blocks, rule.threads, int(lazy), ranges,
        len(buffers),
    )  # fmt: skip
    assert memory.size
    assert kept
    return failed


SPLIT = list(split_cases())
STAGED = next(case for case in cases() if any(load.kind == "tile" for load in case.spec.loads))
MERGED = next(case for case in SPLIT if case.sizes[0].k_run and case.tile.splits == 4)
SHARED = [next(case for case in cases() if getattr(case.tile, shared) == 2) for shared in ("cluster_m", "cluster_n")]
SAMPLE = [*SHARED, *list(cases())[::37], *SPLIT[::4], *list(small_m_cases())[::2], *list(batch_runs_cases())[::2]]
SAMPLE += [*list(three_groups_cases())[::6], *list(served_cases())[::3]]
KEPT = list(kept_cases())
PIECES = [case for case in three_groups_cases() if case.name.startswith("three-pieces")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", list(copied_cases()), ids=lambda case: case.name)
def test_kernels_of_copied_rows_begin_each_box_on_a_boundary(case: HopperCase, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_kernel_computes_the_fusion(case: HopperCase, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_rhs_stays_until_columns_or_batches_change(case: HopperCase, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_rhs_that_is_still_read_is_not_replaced(tmp_path: Path) -> None:
    """Without the wait for its readers the columns of the next tile overwrite it."""

    def hasty(case: HopperCase) -> str:
        return _replaced(emit(case), "    if (KEEPS_RHS && brings_rhs && !is_first)", "    kept = tile;", "")

    problem = make_problem(KEPT[0].spec, Size(330, 600, 64))
    library = build(KEPT[0], tmp_path, hasty)
    with pytest.raises(AssertionError):
        problem.check(launch(library, KEPT[0], problem, 2, lazy=True))


def test_blocks_share_columns_that_two_products_multiply(tmp_path: Path) -> None:
    check(replace(PIECES[0], sizes=(Size(193, 120, 72),)), tmp_path)


def _splits_last_wave(case: AnyCase) -> bool:
    """Whether sums depend on how many blocks there are."""
    return getattr(case.tile, "last_wave_splits", 1) > 1


def check(case: HopperCase | SwappedCase, folder: Path) -> None:
    """The results of each size, with copies that land at once and, to the same bits, as late as they may."""
    library = build(case, folder)
    for size in case.sizes:
        if size.batch * size.m * size.n * size.k * case.spec.parts > MAX_WORK:
            continue
        problem = make_problem(case.spec, size)
        eager = launch(library, case, problem, 2, lazy=False)
        problem.check(eager)
        late = launch(library, case, problem, 2 if _splits_last_wave(case) else 1, lazy=True)
        for first, second in zip(eager, late, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [SPLIT[0], SHARED[0]], ids=lambda case: case.name)
def test_a_block_ends_behind_those_that_need_its_memory(case: HopperCase, tmp_path: Path) -> None:
    """One block stands still from any of the first rounds on: the other waits, and fails if it does not."""

    def hasty(case: HopperCase) -> str:
        return _replaced(emit(case), "  await_cluster(shared, ring", "}", "")

    problem = make_problem(case.spec, case.sizes[0])

    def failures(library: ctypes.CDLL) -> set[bytes]:
        return {failure(library, case, problem, 1, still_from) for still_from in range(2, 8)}

    assert failures(build(case, _folder(tmp_path / "whole"))) == {b""}
    assert b"shared memory of a block that has ended" in failures(build(case, _folder(tmp_path / "hasty"), hasty))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _is_plain(case: HopperCase) -> bool:
    return not case.spec.lhs_run and not any(each.two_levels for each in (*case.spec.loads, *case.spec.outs))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_row_gives_the_same_bits_anywhere_in_a_tile(splits: int, tmp_path: Path) -> None:
    """The last tile down computes rows of its neighbour again, each at another place."""
    every = [case for case in [*cases(), *SPLIT] if case.tile.splits == splits and begins_at_any_row(case.spec)]
    case = next(case for case in every if _is_plain(case) and all(load.kind == "row" for load in case.spec.loads))
    size = replace(case.sizes[0], m=case.tile.block_m, k=512, batch=1)
    library, problem = build(case, tmp_path), make_problem(case.spec, size)
    first = launch(library, case, problem, 1, lazy=False)
    rows = problem.lhs.index
    for shift in (16, 24):
        moved = copy.deepcopy(problem)
        moved.lhs.data[rows] = problem.lhs.data[np.roll(rows, shift, axis=1)]
        for before, after, out in zip(first, launch(library, case, moved, 1, lazy=False), problem.outs, strict=True):
            np.testing.assert_array_equal(np.roll(before[out.index], shift, axis=1), after[out.index])


def test_blocks_behind_the_end_of_k_do_not_read_the_next_batch(tmp_path: Path) -> None:
    """Merged heads of all batches are one axis of the tensor map; zero times infinity would be NaN."""
    size = replace(MERGED.sizes[0], m=66, k=5 * MERGED.sizes[0].k_run)  # 5 steps for 4 blocks
    library, problem = build(MERGED, tmp_path), make_problem(MERGED.spec, size)
    clean = launch(library, MERGED, problem, 1, lazy=False)[0]
    problem.lhs.data[problem.lhs.index[1]] = np.inf
    dirty = launch(library, MERGED, problem, 1, lazy=False)[0]
    first = problem.outs[0].index[0]
    np.testing.assert_array_equal(clean[first], dirty[first])


@pytest.mark.parametrize("case", [SPLIT[0], STAGED], ids=lambda case: case.name)
def test_the_kernel_that_racecheck_sees_computes_the_same(case: HopperCase, tmp_path: Path) -> None:
    """A barrier that expected fewer arrivals than come, or more, would let a warp read too early or wait for ever."""
    library, problem = (
        build(case, tmp_path, lambda case: with_all_lanes(emit(case))),
        make_problem(case.spec, case.sizes[0]),
    )
    problem.check(launch(library, case, problem, 1, lazy=True))
