"""The kernel that normalises rows without a GPU: run on the CPU, compiled within its registers, and its tiles."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.fusion import Axis, Load, Out, Step, Tensor
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.kernels.norm import ENTRY, emit
from onnxfuse.limits import MAX_M, MOST_NORMALISED
from onnxfuse.runtime.compile import compile_source
from onnxfuse.runtime.disassemble import sass
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.norm_plan import make_norm_plan
from onnxfuse.schedule.norm_tile import MOST_THREADS, NormSpec, NormTile, across_tile, norm_tile
from tests.helpers.kernel_problem import GROWTH, Bounded, Buffer, Problem, Size, _stored, make_operand, make_output
from tests.helpers.reference_fusion import OPS
from tests.helpers.thinning import Taken
from tests.kernels.test_portable_on_cpu import build_source, launch

PLANNED_COLUMNS = (64, 320, 768, 1000, 1536, 4096, 9000, 11008, 12287, MOST_NORMALISED - 1, MOST_NORMALISED)
NOTHING = Buffer(np.zeros(1, np.float32), 0, (1, 1, 1), (0, 0, 0))  # there is no lhs
UNIT = 2.0**-24  # rounding of fp32
AFFINE = (Step("t0", "mul", ("acc0", "op1")), Step("t1", "add", ("t0", "op2")))


@dataclass(frozen=True)
class TiledNorm(NormSpec):
    """A spec with the tile that a test computes it with."""

    tile: NormTile = field(kw_only=True)


@dataclass(frozen=True)
class Case:
    """Rows of n elements of a type; `spans` as `norm_tile` has it.

    Attributes:
        kinds: of the parameters: `row`, or `scalar`.
        parameters: their type; that of x where it is None. So of the output.
        batch: how many batches have parameters of their own; 0 where all rows share them.
        parts: of n elements each, of a row.
        across: rows lie beside each other.
    """

    name: str
    dtype: DType
    n: int
    rows: int
    spans: int = 1
    centred: bool = True
    kinds: tuple[str, ...] = ("row", "row")
    parameters: DType | None = None
    out: DType | None = None
    pad: int = 0
    batch: int = 0
    least: float = 0.0
    added: float = 0.0
    parts: int = 1
    across: bool = False


CASES = [
    Case("f16", F16, 320, 5, 4),
    Case("f16 one row", F16, 1024, 1),
    Case("f16 a thread has no column", F16, 72, 33, pad=8),
    Case("f16 every thread has columns", F16, 320, 19, 2),
    Case("f16 odd", F16, 197, 3, 4),
    Case("f16 two columns", F16, 2, 40),
    Case("f16 of several warps", F16, 4096, 3, 4),
    Case("f16 all threads", F16, 8200, 2),
    Case("f16 many columns", F16, 16384, 2, 4),
    Case("bf16 rms", BF16, 768, 4, 2, centred=False, kinds=("row",)),
    Case("f32", F32, 768, 5, 4),
    Case("f32 odd rms", F32, 77, 9, 4, centred=False, kinds=("row",)),
    Case("f32 to f16", F32, 128, 9, 2, parameters=F16, out=F16),
    Case("f16 to f32", F16, 128, 9, 2, parameters=F32, out=F32),
    Case("f16 scalars", F16, 64, 9, 1, kinds=("scalar", "row"), pad=16),
    Case("bf16 alone", BF16, 64, 9, 1, kinds=()),
    Case("f16 bounded", F16, 64, 9, 1, centred=False, kinds=(), least=4.0),
    Case("f32 of a deviation and a little", F32, 96, 9, 1, added=0.25),
    Case("f16 of batches", F16, 320, 5, 2, batch=3),
    Case("f32 of batches and several warps", F32, 2048, 3, 1, batch=4, pad=4),
    Case("bf16 numbers of batches", BF16, 77, 21, 1, kinds=("scalar", "row"), batch=2),
    Case("f16 two halves", F16, 64, 37, 1, centred=False, kinds=("row", "tile"), parts=2),
    Case("f32 two halves of several warps", F32, 2048, 3, 2, kinds=("tile", "column"), parts=2),
    Case("bf16 odd thirds of batches", BF16, 37, 5, 4, kinds=("column", "tile"), parts=3, batch=2),
    Case("f16 an operand of each row", F16, 320, 5, 2, kinds=("tile", "column"), pad=8),
    Case("f16 across", F16, 48, 77, across=True),
    Case("f32 across, of batches, and no column of some threads", F32, 37, 40, batch=3, pad=4, across=True),
    Case("bf16 across, rms, and many columns", BF16, 1000, 37, centred=False, kinds=("tile", "row"), across=True),
    Case("f32 across, of more than a block", F32, 512, 33, kinds=("row", "scalar"), out=F16, across=True),
    Case("f16 across, two halves", F16, 64, 37, kinds=("row", "tile"), parts=2, across=True),
]


def make_spec(case: Case, epsilon: float = 1e-5) -> TiledNorm:
    def access(kind: str, dtype: DType) -> Access:
        widest = math.gcd(case.n, case.pad or case.n, 16 // dtype.bytes)
        is_single = kind in ("scalar", "column") or (kind == "tile" and case.across)
        return Access(kind, dtype, 1 if is_single else widest)

    rows = [access("tile", case.dtype)] * case.parts
    loads = (*rows, *(access(kind, case.parameters or case.dtype) for kind in case.kinds))
    outs = (access("tile", case.out or case.dtype),) * case.parts
    steps, values = steps_of(case)
    span = max(way.width for way in (*loads, *outs))
    tile = across_tile(span, case.n) if case.across else norm_tile(span, case.n, case.spans)
    return TiledNorm(
        loads, outs, steps, values,
        centred=case.centred, epsilon=epsilon, least=case.least, added=case.added, batched=case.batch > 0,
        parts=case.parts, tile=tile,
    )  # fmt: skip


def steps_of(case: Case) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """A scale and a shift, and what is stored: of each part less the next one's."""
    first = case.parts
    affine = [Step("t0", "mul", ("acc0", f"op{first}")), Step("t1", "add", ("t0", f"op{first + 1}"))]
    steps = affine[: len(case.kinds)]
    value = steps[-1].result if steps else "acc0"
    if case.parts == 1:
        return tuple(steps), (value,)
    turned = [Step(f"u{part}", "sub", (f"acc{part}", f"acc{(part + 1) % first}")) for part in range(1, first)]
    return (*steps, *turned), (value, *(step.result for step in turned))


class Rows(Problem):
    """Rows that are normalised; the bound is that of fp32 sums in the order in which threads add them up."""

    spec: TiledNorm  # type: ignore[assignment]

    def expected(self) -> list[Bounded]:
        parts = self.spec.parts
        names = {f"acc{part}": normal for part, normal in enumerate(self._normals())}
        for index, load in enumerate(self.loads[parts:], parts):
            value = load.values.astype(np.float64)
            names[f"op{index}"] = Bounded(value, np.zeros_like(value))
        for step in self.spec.steps:
            inputs = [names[str(value)] for value in step.inputs]
            value = OPS[step.op](*(item.value for item in inputs))
            names[step.result] = Bounded(value, GROWTH[step.op](*inputs)).rounded()
        shape = (self.size.batch, self.size.m, self.size.n)
        outs = zip(self.spec.out_values, self.spec.outs, strict=True)
        return [_stored(names[value], out.dtype, shape) for value, out in outs]

    def _normals(self) -> list[Bounded]:
        """Of each part."""
        parts, tile = self.spec.parts, self.spec.tile
        x = np.concatenate([load.values.astype(np.float64) for load in self.loads[:parts]], -1)
        of_threads = math.log2(min(tile.row_threads, 32)) + tile.row_threads / 32
        depth = parts * tile.spans * tile.span + (tile.row_threads if tile.across else of_threads) + 1
        mean = x.mean(-1, keepdims=True) * self.spec.centred
        off = self.spec.centred * depth * UNIT * np.abs(x).mean(-1, keepdims=True)  # of the mean
        own = x - mean
        error = off + UNIT * np.abs(own)
        variance = (own**2).mean(-1, keepdims=True)
        wrong = (depth + 2) * UNIT * variance + (2 * np.abs(own) * error + error**2).mean(-1, keepdims=True)
        variance = np.maximum(variance, self.spec.least) + self.spec.epsilon
        scale = 1 / (np.sqrt(variance) + self.spec.added)
        relative = wrong / variance / 2 + 4 * UNIT
        normal, error = own * scale, error * scale + np.abs(own * scale) * (relative + UNIT)
        pairs = zip(np.split(normal, parts, -1), np.split(error, parts, -1), strict=True)
        return [Bounded(*pair) for pair in pairs]


def make_parameter(rng: np.random.Generator, load: Access, size: Size) -> Buffer:
    """A row or a number for each batch."""
    alone = make_operand(rng, replace(load, kind="tile"), replace(size, m=1, n=size.n if load.kind == "row" else 1))
    batch, _, column = alone.strides
    return replace(alone, shape=(size.batch, size.m, size.n), strides=(batch, 0, column * (load.kind == "row")))


def _size(case: Case, rows: int) -> Size:
    return Size(rows, case.n, 1, max(case.batch, 1), case.pad, transposed=case.across)


def make_rows(spec: TiledNorm, case: Case, rows: int, mean: float = 0.3, deviation: float = 2.0) -> Rows:
    rng, size = np.random.default_rng([rows, case.n]), _size(case, rows)
    x = [make_operand(rng, load, size) for load in spec.loads[: spec.parts]]
    for part in x:
        part.data[...] = (part.data.astype(np.float32) * deviation + mean).astype(part.data.dtype)
    beside = (
        (make_parameter if case.batch and load.kind in ("scalar", "row") else make_operand)(rng, load, size)
        for load in spec.loads[spec.parts :]
    )
    return Rows(spec, size, NOTHING, [], [*x, *beside], [make_output(out, size) for out in spec.outs])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_normalised(case: Case, tmp_path: Path) -> None:
    spec = make_spec(case)
    library = build_source(emit(spec, spec.tile), ENTRY, tmp_path)
    for rows in {1, case.rows}:
        problem = make_rows(spec, case, rows)
        problem.check(launch(library, problem, lazy=False))


def test_rows_far_from_zero_lose_no_digits_by_squares(tmp_path: Path) -> None:
    """The squares of 1,024 have 20 bits: less the square of the mean little would be left of a deviation of 1."""
    case = Case("", F32, 256, 3, 2)
    spec = make_spec(case)
    problem = make_rows(spec, case, case.rows, mean=1024.0, deviation=1.0)
    (normal,) = problem.expected()
    assert normal.error.max() < 0.02
    problem.check(launch(build_source(emit(spec, spec.tile), ENTRY, tmp_path), problem, lazy=False))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("centred", [True, False])
def test_what_is_not_finite_stays_in_its_row(value: float, centred: bool, tmp_path: Path) -> None:
    case = Case("", F16, 64, 4, 1, centred=centred, kinds=())
    spec = make_spec(case)
    problem = make_rows(spec, case, case.rows)
    x = problem.loads[0]
    x.data[x.index[0, 2, 5]] = value
    outs = launch(build_source(emit(spec, spec.tile), ENTRY, tmp_path), problem, lazy=False)
    got = replace(problem.outs[0], data=outs[0]).values[0].astype(np.float32)
    with np.errstate(all="ignore"):
        row = x.values[0, 2].astype(np.float32)
        own = row - row.mean() * np.float32(centred) if centred else row
        expected = own / np.sqrt((own * own).mean() + np.float32(spec.epsilon))
    np.testing.assert_array_equal(np.isnan(got[2]), np.isnan(expected))
    np.testing.assert_array_equal(got[2][~np.isnan(expected)], expected[~np.isnan(expected)].astype(np.float16))
    assert np.isfinite(np.delete(got, 2, axis=0)).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_need_no_local_memory(arch: str, taken: Taken) -> None:
    specs = [make_spec(case) for case in taken(CASES, 8)]
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(emit(spec, spec.tile), ARCHITECTURES[arch]), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), (arch, spec)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_planned_kernels_spill_a_word_or_two(arch: str, dtype: DType, taken: Taken) -> None:
    """1,024 threads have 64 registers each, and of smaller blocks ptxas wants several to fit.

    Each architecture and type begins with another of the widths, so that a short run meets nearly all of them once.
    """
    first = 3 * ("sm_80", "sm_90a", "sm_120").index(arch) + (F16, BF16, F32).index(dtype)
    mapping, widths = AxisMapping((), ("m",), ("n",), ()), taken(PLANNED_COLUMNS[first:] + PLANNED_COLUMNS[:first], 11)
    plans = [make_norm_plan(planned(columns, None, dtype), mapping, ARCHITECTURES[arch]) for columns in widths]
    kernels = {emit(variant.spec, variant.tile) for plan in plans for variant in plan.variants}
    with ThreadPoolExecutor() as pool:
        images = pool.map(lambda kernel: compile_source(kernel, ARCHITECTURES[arch]), kernels)
    assert max(image.local_bytes for image in images) <= 8


def test_nothing_is_read_before_the_kernel_before_has_ended() -> None:
    spec = make_spec(CASES[0])
    code = sass(compile_source(emit(spec, spec.tile), ARCHITECTURES["sm_90a"]).data)
    assert re.findall(r"\b(ACQBULK|LDG|STG)\b", code)[0] == "ACQBULK"


def planned(columns: int, rows: int | None, dtype: DType = F16) -> Normalisation:
    x, made = (Tensor(name, dtype, (("m",), ("n",))) for name in ("x", "y"))
    parameters = tuple(Tensor(name, dtype, (("n",),)) for name in ("scale", "bias"))
    axes, loads, out = (Axis("m", rows), Axis("n", columns)), tuple(map(Load, range(3))), (Out(made, "t1"),)
    return Normalisation(
        "norm", "normalisation", (), axes, (x, *parameters), loads, AFFINE, out, centred=True, epsilon=1e-5
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("rows", [None, 1, 700, 100_000])
def test_a_plan_has_a_tile_for_every_row(arch: str, rows: int | None) -> None:
    drawn = np.random.default_rng(0).integers(2, MOST_NORMALISED, 60)
    mapping = AxisMapping((), ("m",), ("n",), ())
    for columns in map(int, (*range(2, 300), *drawn, MOST_NORMALISED)):
        variants = make_norm_plan(planned(columns, rows), mapping, ARCHITECTURES[arch]).variants
        for tile in (variant.tile for variant in variants):
            assert tile.block_n >= columns > tile.block_n - tile.row_threads * tile.span
            assert tile.threads == tile.block_m * tile.row_threads <= MOST_THREADS
            assert tile.row_threads & (tile.row_threads - 1) == 0
            assert tile.spans * tile.span <= 40
        assert {load.width for load in variants[-1].spec.loads} == {1}  # whatever the address
        for spec in {variant.spec for variant in variants}:
            own = [variant for variant in variants if variant.spec == spec]
            assert [each.min_m for each in own] == [0, *(each.max_m + 1 for each in own[:-1])]
            assert own[-1].max_m == MAX_M
