"""Parts that take turns along a tensor's columns: kernels without a product move them together, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.fusion import Step
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.kernels import norm, pointwise
from onnxfuse.limits import WIDEST_BYTES
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.kernel_spec import Access, Turn
from onnxfuse.schedule.norm_plan import make_norm_plan
from onnxfuse.schedule.norm_tile import norm_tile
from onnxfuse.schedule.pointwise_tile import span_of, tile_for
from tests.helpers.kernel_problem import Buffer, Problem, Size, make_operand, make_output
from tests.helpers.onnx_build import FLOAT16
from tests.helpers.rotary_models import in_pairs, layer_norm, normalised
from tests.kernels.test_norm_kernel import NOTHING, Rows, TiledNorm
from tests.kernels.test_pointwise_kernel import TiledPointwise
from tests.kernels.test_portable_on_cpu import build_source, launch_counted

Spec = TiledNorm | TiledPointwise


@dataclass(frozen=True)
class Case:
    """Rows of n columns of each part; `normalised` by the kernel that does so, or by none.

    Beside x there are a scale of each column, whose parts are read in reverse, and a table of which one part is read.
    """

    name: str
    normalised: bool
    dtype: DType
    n: int
    rows: int
    parts: int = 2
    out: DType | None = None
    batch: int = 1
    pad: int = 0
    spans: int = 1


CASES = [
    Case("f16 pairs of a head", True, F16, 64, 21),
    Case("f16 four parts", True, F16, 40, 9, parts=4, spans=2),
    Case("f32 pairs of several warps", True, F32, 1030, 3, spans=2),
    Case("bf16 to f32, of batches, with rows apart", True, BF16, 36, 5, out=F32, batch=2, pad=8),
    Case("f16 three columns of a pair", True, F16, 3, 4),
    Case("f16 pairs", False, F16, 64, 37),
    Case("f32 four parts of batches", False, F32, 24, 5, parts=4, batch=3),
    Case("f16 to f32, with rows apart", False, F16, 100, 19, out=F32, pad=8),
    Case("bf16 six columns of a pair", False, BF16, 6, 40),
]


def way(case: Case, kind: str, dtype: DType, leader: int, part: int) -> Access:
    columns = math.gcd(case.n, WIDEST_BYTES // dtype.bytes // case.parts)
    return Access(kind, dtype, 1, turn=Turn(leader, part, case.parts, columns))


def make_spec(case: Case) -> Spec:
    parts = range(case.parts)
    x = [way(case, "tile", case.dtype, 0, part) for part in parts]
    scale = [way(case, "row", case.dtype, case.parts, part) for part in reversed(parts)]
    table = [way(case, "tile", case.dtype, 2 * case.parts, case.parts - 1)]
    loads, outs = (*x, *scale, *table), tuple(way(case, "tile", case.out or case.dtype, 0, part) for part in parts)
    first = "acc" if case.normalised else "op"
    steps = [Step(f"s{part}", "mul", (f"{first}{part}", f"op{2 * case.parts - 1 - part}")) for part in parts]
    steps += [Step(f"t{part}", "add", (f"s{part}", f"op{2 * case.parts}")) for part in parts]
    values, span = tuple(f"t{part}" for part in parts), span_of(loads, outs)
    if not case.normalised:
        return TiledPointwise(loads, outs, tuple(steps), values, tile=tile_for(loads, outs, case.n, 2))
    tile = norm_tile(span, case.n, case.spans)
    return TiledNorm(
        loads, outs, tuple(steps), values, epsilon=1e-5, batched=case.batch > 1, parts=case.parts, tile=tile
    )


def part_of(whole: Buffer, size: Size, part: int, parts: int, moved: int) -> Buffer:
    """Every so many-th column, of a tensor that begins some elements later."""
    batch, row, column = whole.strides
    shape = (size.batch, size.m, size.n)
    return replace(whole, offset=whole.offset + moved + part, shape=shape, strides=(batch, row, column * parts))


def make_problem(case: Case, spec: Spec, moved: int) -> Problem:
    """Tensors lie as the plan has found that they do, each begins so many elements behind where it might."""
    rng, size = np.random.default_rng(case.n), Size(case.rows, case.n, 1, case.batch)
    wide = replace(size, n=case.n * case.parts, pad=case.pad)

    def views(wholes: Sequence[Buffer], ways: Sequence[Access]) -> list[Buffer]:
        later = [replace(each, data=np.roll(np.append(each.data, each.data[:moved]), moved)) for each in wholes]
        turns = [each.turn for each in ways if each.turn is not None]
        return [part_of(later[turn.leader], size, turn.own, case.parts, moved) for turn in turns]

    loads = views([make_operand(rng, replace(load, turn=None), wide) for load in spec.loads], spec.loads)
    outs = views([make_output(spec.outs[0], wide)], spec.outs)
    return (Rows if case.normalised else Problem)(spec, size, NOTHING, [], loads, outs)  # type: ignore[arg-type]


def bytes_at_once(case: Case, spec: Spec, moved: int) -> list[int]:
    """Of each load and output, the bytes of an access, the tensor beginning so many elements later."""
    ways = (*spec.loads, *spec.outs)
    together = [way.dtype.bytes * case.parts * way.columns for way in ways]
    pairs = zip(ways, together, strict=True)
    return [size if (case.pad + moved) * way.dtype.bytes % size == 0 else way.dtype.bytes for way, size in pairs]


def text_of(spec: Spec) -> tuple[str, str]:
    if isinstance(spec, TiledNorm):
        return norm.emit(spec, spec.tile), norm.ENTRY
    return pointwise.emit(spec, spec.tile), pointwise.ENTRY


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_are_moved_together_where_their_tensor_begins_aligned(case: Case, tmp_path: Path) -> None:
    spec = make_spec(case)
    library = build_source(*text_of(spec), tmp_path)
    for moved in (0, 1, case.parts):
        problem = make_problem(case, spec, moved)
        tensors = [id(buffer.data) for buffer in (*problem.loads, *problem.outs)]
        assert all(buffer.data.ctypes.data % WIDEST_BYTES == 0 for buffer in problem.buffers)
        outs, widest = launch_counted(library, problem, lazy=False)
        problem.check(outs)
        own = dict.fromkeys(tensors, 0)
        for tensor, moved_bytes in zip(tensors, widest[1:], strict=True):
            own[tensor] = max(own[tensor], moved_bytes)
        assert [own[tensor] for tensor in tensors] == bytes_at_once(case, spec, moved)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_need_no_local_memory(arch: str) -> None:
    specs = [make_spec(case) for case in CASES[::3]]
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(text_of(spec)[0], ARCHITECTURES[arch]), specs))
    assert {(image.spill_bytes, image.local_bytes) for image in images} == {(0, 0)}


@pytest.mark.parametrize("swapped", [False, True])
def test_normalised_parts_are_moved_together_in_order_alone(swapped: bool) -> None:
    """Beside them whatever order the steps name parts in will do: the sine's second is named first."""
    device = ARCHITECTURES["sm_90a"]
    (site,) = analyse_model(normalised(in_pairs, layer_norm, dtype=FLOAT16), (device,)).sites
    fusion = site.fusion
    assert isinstance(fusion, Normalisation)
    assert [load.part for load in fusion.loads] not in ([0, 1] * 4, [1, 0] * 4)
    first, second, *beside = fusion.loads
    turned = replace(fusion, loads=(second, first, *beside) if swapped else fusion.loads)
    loads = make_norm_plan(turned, site.mapping, device).variants[0].spec.loads
    assert [load.turn is None for load in loads[:2]] == [swapped, swapped]
    for load, way in zip(turned.loads[2:], loads[2:], strict=True):
        assert way.turn is not None
        assert (way.turn.own, turned.loads[way.turn.leader].operand) == (load.part, load.operand)
