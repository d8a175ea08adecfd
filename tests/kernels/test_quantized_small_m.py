"""The kernel for few rows and a quantized rhs without a GPU: run on the CPU, and compiled within its registers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.quantization import Quantization
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.limits import QUANTIZED_BITS as BITS
from onnxfuse.limits import QUANTIZED_BLOCKS as BLOCKS
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M, spread_of
from onnxfuse.schedule.quantized_small_m_tile import PIECE_BYTES, TERMS, QuantizedSmallMTile
from tests.helpers.all_lanes_arrive import with_all_lanes
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec
from tests.helpers.quantized_problem import Packed, QuantizedProblem, make_quantized_problem, math_of, quantized
from tests.helpers.thinning import Taken
from tests.kernels.test_portable_on_cpu import build_source, launch, moved

SM_90A = ARCHITECTURES["sm_90a"]
EXCESS = {"f16": 1024 + 255, "bf16": 128 + 15, "f32": 128 + 15}  # what unpacking leaves in an integer, at most
ROUNDING = {"tf32": 2.0**-16}  # two terms of 8 bits; of three, none


@dataclass(frozen=True)
class Case:
    """A kernel, and sizes to run it at; the depth of the first says what accesses are legal."""

    form: Quantization
    parts: int
    tile: QuantizedSmallMTile
    sizes: tuple[Size, ...]
    kind: str = "residual"
    exact: bool = False

    @property
    def spec(self) -> TiledSpec:
        return quantized_spec(self.form, self.parts, self.tile, self.sizes[0], self.kind, self.exact)

    def __str__(self) -> str:
        return f"{math_of(self.form, self.exact)} {self.form}, {self.parts} parts, k {self.sizes[0].k}"


def quantized_spec(
    form: Quantization, parts: int, tile: QuantizedSmallMTile, size: Size, kind: str, exact: bool = False
) -> TiledSpec:
    tile = replace(tile, terms=TERMS[math_of(form, exact)])
    lhs_width = int(np.gcd(size.k, PIECE_BYTES // form.scale.bytes))
    spec = make_spec(math_of(form, exact), parts, "nk", tile, size, kind, narrow=True)
    return quantized(replace(spec, lhs_width=lhs_width), form, size)


def problem_of(spec: TiledSpec, size: Size) -> QuantizedProblem:
    return replace(make_quantized_problem(spec, size, EXCESS[spec.dtype.name]), rounding=ROUNDING.get(spec.math, 0.0))


def tile(bits: int, rows: int, columns: int, step: int, stages: int = 2, slots: int = 2) -> QuantizedSmallMTile:
    """Of two warps; `step` in bytes of a column."""
    return QuantizedSmallMTile(rows, columns, step * 8 // bits, stages, slots, 2)


def every_form() -> Iterator[Case]:
    """Each with another tile: few and many rows, lhs that stays and that does not, whole and ragged columns and k."""
    rows, parts, steps = (
        itertools.cycle((1, 4, 8, 16, 32)),
        itertools.cycle((1, 2, 2, 1, 3)),
        itertools.cycle((64, 128)),
    )
    types = itertools.cycle((F16, BF16, BF16, F16, F16))
    depths = itertools.cycle((520, 392, 264))
    for bits, block, zero_points in itertools.product(BITS, BLOCKS, (False, True)):
        count, part_count, k = next(rows), next(parts), next(depths)
        columns = {1: 32, 2: 8, 3: 16}[part_count]
        shape = tile(bits, count, columns, next(steps), slots=count % 3 + 2)
        sizes = (Size(count, 35, k), Size(count + 1, 16, k))
        yield Case(Quantization(bits, block, zero_points, next(types)), part_count, shape, sizes)


def other_depths() -> Iterator[Case]:
    """Depths of odd numbers of blocks, and of less than a block; scales and zero points that begin within a word."""
    for form, k, others in [
        (Quantization(4, 16, True, F16), 17 * 16, (5,)),
        (Quantization(4, 32, True, BF16), 7 * 32, (32,)),
        (Quantization(4, 64, False, F16), 64, (8,)),
        (Quantization(4, 128, True, F16), 3 * 128, (40,)),
        (Quantization(8, 16, True, BF16), 5 * 16, (7,)),
        (Quantization(8, 128, True, F16), 128 + 1, (1,)),
        (Quantization(8, 32, False, BF16), 3 * 32 - 2, (2,)),
    ]:
        yield Case(form, 1, tile(form.bits, 4, 16, 64, 3, 4), (Size(3, 19, k), *(Size(2, 5, each) for each in others)))


def kept_in_registers() -> Iterator[Case]:
    """Rows spread as far as they may be, kept or streamed; more than a tile has, of more steps than are kept."""
    rows, parts = itertools.cycle((1, 4, 2, 16, 8, 1, 3)), itertools.cycle((1, 2, 1, 2, 3))
    types, depths = itertools.cycle((F16, BF16, F16)), itertools.cycle((520, 1064, 1288, 320))
    for bits, block, zero_points in itertools.product(BITS, BLOCKS, (False, True)):
        form, count, k = Quantization(bits, block, zero_points, next(types)), next(rows), next(depths)
        if form.block_bytes < PIECE_BYTES:
            continue
        part_count = next(parts)
        ring = tile(bits, count, {1: 32, 2: 8, 3: 16}[part_count], 64 if count > 8 else 128, 3)
        kept = replace(ring, lhs_slots=0, kept_steps=1 + count % 2, spread=spread_of(ring, form))
        kept = replace(kept, streamed=kept.kept_steps == 1 and block in (32, 256))
        yield Case(form, part_count, kept, (Size(count, 35, k), Size(2 * count + 1, 16, k)))


def of_fp32() -> Iterator[Case]:
    """Every form, in two terms and in three; rows in shared memory, and kept in registers."""
    rows, parts = itertools.cycle((1, 2, 4, 5, 8)), itertools.cycle((1, 2, 1, 3))
    depths = itertools.cycle((520, 264, 1064, 130))
    for bits, block, zero_points in itertools.product(BITS, BLOCKS, (False, True)):
        form, count, k, part_count = Quantization(bits, block, zero_points, F32), next(rows), next(depths), next(parts)
        exact = count % 2 == 1
        ring = tile(bits, count, {1: 32, 2: 8, 3: 16}[part_count], 64, 2, 3)
        sizes = (Size(count, 35, k), Size(2 * count + 1, 16, k))
        yield Case(form, part_count, ring, sizes, exact=exact)
        if form.block_bytes >= PIECE_BYTES:
            ring = replace(ring, block_m=min(count, 8 // (2 + exact)), terms=2 + exact)
            kept = replace(ring, lhs_slots=0, kept_steps=1 + count % 2, spread=spread_of(ring, form))
            yield Case(form, part_count, kept, sizes, exact=exact)


CASES = [*every_form(), *other_depths(), *kept_in_registers(), *of_fp32()]


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_computes_the_fusion(case: Case, tmp_path: Path) -> None:
    """At other depths with the accesses that those allow: the text is another, and so are the tensors' ends."""
    for (k, n), sizes in itertools.groupby(case.sizes, key=lambda size: (size.k, size.n)):
        spec = replace(case, sizes=(replace(case.sizes[0], k=k, n=n),)).spec
        assert spec.why_not(SM_90A) is None
        folder = tmp_path / f"{k}-{n}"
        folder.mkdir()
        library = build_source(spec.source(), ENTRY, folder)
        for size in sizes:
            problem = problem_of(spec, size)
            eager = launch(library, problem, lazy=False)
            problem.check(eager)
            late = launch(library, problem, lazy=True)
            for first, second in zip(eager, late, strict=True):
                np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize(
    "form", [Quantization(bits, 32, True, of) for bits in BITS for of in (F16, BF16, F32)], ids=str
)
def test_every_byte_is_unpacked(form: Quantization, tmp_path: Path) -> None:
    """Rows of lhs with a single one each: every number of the weight comes out by itself, rounded once."""
    size = Size(32, 48, 256)
    spec = quantized_spec(form, 1, tile(form.bits, 32, 16, 64), size, "plain")
    library = build_source(spec.source(), ENTRY, tmp_path)
    seen = np.zeros(256, bool)
    for first in range(0, size.k, size.m):
        problem = problem_of(spec, size)
        problem.lhs.view[...] = np.eye(size.k)[first : first + size.m]
        for load in problem.loads:
            load.view[...] = 0
        problem.check(launch(library, problem, lazy=False))
        packed = problem.rhs[0]
        assert isinstance(packed, Packed)
        seen[packed.data] = True
    assert seen.all()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_any_number_of_blocks_computes_all_tiles(blocks: int, tmp_path: Path) -> None:
    """A persistent grid has fewer blocks than there are tiles."""
    case = Case(Quantization(4, 32, False, F16), 2, tile(4, 4, 8, 64, 3, 3), (Size(3, 37, 264), Size(9, 37, 264)))
    library = build_source(case.spec.source(), ENTRY, tmp_path)
    for size in case.sizes:
        problem = problem_of(case.spec, size)
        problem.check(launch(library, replace(problem, blocks=blocks), lazy=True))


def test_a_checked_kernel_reads_lhs_from_anywhere(tmp_path: Path) -> None:
    case = Case(Quantization(4, 32, True, F16), 1, tile(4, 4, 16, 64), (Size(3, 19, 200),))
    kept = replace(case.tile, lhs_slots=0, kept_steps=1, spread=2)
    for shape in (case.tile, kept):
        spec = replace(case.spec, checked=True, tile=shape)
        folder = tmp_path / str(shape.kept_steps)
        folder.mkdir()
        library = build_source(spec.source(), ENTRY, folder)
        for elements in (0, 1, 4):
            problem = problem_of(spec, case.sizes[0])
            elsewhere = replace(problem, lhs=moved(problem.lhs, elements))
            elsewhere.check(launch(library, elsewhere, lazy=True))


def test_all_lanes_may_arrive(tmp_path: Path) -> None:
    """As racecheck's plugin has it: the same bits."""
    case = next(case for case in CASES if case.tile.kept_steps and case.tile.block_m > 1)
    outs = []
    for name, change in (("one", str), ("all", with_all_lanes)):
        folder = tmp_path / name
        folder.mkdir()
        problem = problem_of(case.spec, case.sizes[0])
        outs.append(launch(build_source(change(case.spec.source()), ENTRY, folder), problem, lazy=True)[0])
    np.testing.assert_array_equal(*(out.view(np.uint8) for out in outs))


def candidate_kernels(device: DeviceSpec, types: tuple[DType, ...]) -> Iterator[TiledSpec]:
    """Half of the tiles of each form, depth and epilogue, in turn."""
    turns = itertools.count()
    forms = itertools.cycle(
        Quantization(bits, block, zero_points, of)
        for bits, (block, zero_points), of in itertools.product(BITS, ((32, False), (16, True), (128, True)), types)
    )
    for parts, kind in ((1, "residual"), (2, "plain"), (2, "mixed"), (3, "plain"), (4, "plain")):
        for k in (4096, 14336):
            form = next(forms)
            base = quantized_spec(form, parts, tile(4, 1, 16, 64), Size(1, 4096, k), kind)
            for candidate in QUANTIZED_SMALL_M.candidates(base, device, k)[next(turns) % 2 :: 2]:
                spec = replace(base, tile=candidate.tile)
                if spec.why_not(device) is None:
                    yield spec


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_candidates_need_no_local_memory(arch: str, taken: Taken) -> None:
    device = ARCHITECTURES[arch]
    specs = taken([*candidate_kernels(device, (F16, BF16)), *candidate_kernels(device, (F32,))], 24)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(spec.source(), device), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), (arch, spec)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_form_has_a_tile_on_every_chip(arch: str, parts: int) -> None:
    device = ARCHITECTURES[arch]
    for bits, block, zero_points in itertools.product(BITS, BLOCKS, (False, True)):
        for k in (33, 896, 4096, 14336):
            form = Quantization(bits, block, zero_points, F16)
            spec = quantized_spec(form, parts, tile(4, 1, 16, 64), Size(1, 4096, k), "plain")
            tiles = [entry.tile for entry in QUANTIZED_SMALL_M.candidates(spec, device, k)]
            assert any(QUANTIZED_SMALL_M.why_not(spec, each, device) is None for each in tiles)


FORM = Quantization(4, 32, False, F16)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quantization": None}, "not quantized"),
        ({"math": "tf32"}, "2 terms of tf32"),
        ({"tile": replace(tile(4, 1, 16, 64), terms=2)}, "1 terms of f16"),
        ({"lhs_order": "km"}, "contiguous axis"),
        ({"tile": tile(4, 1, 8, 64)}, "multiple of 16"),
        ({"tile": tile(4, 1, 16, 16)}, "multiple of 32 bytes"),
        ({"tile": tile(4, 1, 16, 32), "parts": 2}, None),
        ({"tile": tile(4, 1, 8, 32), "parts": 2}, "whole columns"),
        ({"tile": QuantizedSmallMTile(1, 16, 128, 2, 2, 64)}, "threads"),
        ({"tile": tile(4, 32, 128, 64)}, "sums"),
        ({"tile": tile(4, 32, 16, 64, 9, 99)}, "shared memory"),
    ],
)
def test_an_illegal_tile_has_a_reason(changed: dict, reason: str | None) -> None:
    spec: KernelSpec = quantized_spec(FORM, 1, tile(4, 1, 16, 64), Size(1, 64, 4096), "plain")
    why = replace(spec, **changed).why_not(SM_90A)  # type: ignore[attr-defined]
    assert why is None if reason is None else reason in str(why)


def test_other_products_see_nothing_of_it() -> None:
    spec = quantized_spec(FORM, 1, tile(4, 1, 16, 64), Size(1, 64, 4096), "plain")
    assert QUANTIZED_SMALL_M.candidates(replace(spec, quantization=None), SM_90A, 4096) == ()
