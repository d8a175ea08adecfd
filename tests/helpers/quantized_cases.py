"""Kernels for tests of sm_90a with a quantized weight: every form, tiles of every schedule, parts, operand kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.quantization import Quantization
from onnxfuse.kernels.hopper_quantized import emit
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile
from onnxfuse.schedule.kernel_family import Launch
from onnxfuse.schedule.kernel_spec import Tile
from tests.helpers.kernel_problem import NUMPY, TF32, Size, TiledSpec, make_spec
from tests.helpers.quantized_problem import QuantizedProblem, make_quantized_problem, math_of, quantized

DEVICE = ARCHITECTURES["sm_90a"]
PORTABLE = Tile(128, 16, 32, 2, 1, 2)  # a test's spec carries one; this kernel does not look at it

TILES = (
    QuantizedTile(64, 128, 64), QuantizedTile(16, 128, 128), QuantizedTile(32, 128, 64, splits=2),
    QuantizedTile(48, 128, 64), QuantizedTile(80, 192, 64, groups=3), QuantizedTile(64, 256, 64),
    QuantizedTile(32, 128, 128, splits=4), QuantizedTile(128, 128, 64),
    QuantizedTile(16, 64, 64, groups=1, k_groups=4), QuantizedTile(32, 64, 64, groups=1, k_groups=2, splits=2),
    QuantizedTile(16, 128, 256), QuantizedTile(16, 128, 64, k_groups=2),
    QuantizedTile(64, 64, 64, groups=1, k_groups=2), QuantizedTile(8, 64, 128, groups=1, k_groups=2, splits=2),
)  # fmt: skip
APART = tuple(QuantizedTile(rows, 64, 64, apart=True) for rows in (64, 96, 256, 32))
# Depths whose columns begin on 16 bytes whatever the form, and whose last blocks are not full.
SIZES = (
    (1, 8, 8), (65, 136, 256), (33, 264, 200), (16, 40, 1000), (130, 72, 72), (64, 200, 328), (100, 16, 40),
    (17, 328, 136),
)  # fmt: skip
BITS, BLOCKS = (4, 8), (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class QuantizedCase:
    """One kernel and the sizes that it runs at: all allow the widths of the first."""

    name: str
    spec: TiledSpec
    tile: QuantizedTile
    sizes: tuple[Size, ...]

    @property
    def source(self) -> str:
        """The kernel's text."""
        return emit(self.spec, self.tile, DEVICE.shared_bytes)

    @property
    def launch(self) -> Launch:
        """How it is launched."""
        return HOPPER_QUANTIZED.launch(self.spec, self.tile, DEVICE)


def rounded(problem: QuantizedProblem) -> QuantizedProblem:
    """The problem with the numbers that the tensor cores get: each rounded once to the type of lhs, or both to TF32."""
    if problem.spec.dtype == F32:
        return replace(problem, rounding=2 * TF32 + TF32**2)
    for part in problem.rhs:
        part.numbers = part.numbers.astype(NUMPY[problem.spec.dtype]).astype(float)  # type: ignore[attr-defined]
    return problem


def problem_of(case: QuantizedCase, size: Size) -> QuantizedProblem:
    """Random tensors, and what the kernel should make of them."""
    return rounded(make_quantized_problem(case.spec, size))


def quantized_cases() -> Iterator[QuantizedCase]:
    """Every form in all types; tiles, parts, sizes and operand kinds take turns."""
    turn = 0
    for dtype in (F16, BF16, F32):
        for bits in BITS:
            for block in BLOCKS:
                for zero_points in (False, True):
                    turn += 1
                    form = Quantization(bits, block, zero_points, dtype)
                    yield from _cases(form, turn)


def _apart(form: Quantization, turn: int) -> Iterator[QuantizedCase]:
    """Each part by a group of its own."""
    m, n, k = SIZES[(turn * 5 + 1) % len(SIZES)]
    sizes = (Size(m, n, k), Size(m + 200, n + 64, k, pad=8))
    kind = ("plain", "residual")[turn % 2]
    spec = quantized(make_spec(math_of(form), 2, "nk", PORTABLE, sizes[0], kind), form, sizes[0])
    tile = APART[turn // 4 % len(APART)]
    if HOPPER_QUANTIZED.why_not(spec, tile, DEVICE) is None:
        yield QuantizedCase(f"{form}-{form.scale.name}-{tile}-{kind}-{k}".replace(" ", "-"), spec, tile, sizes)


def _cases(form: Quantization, turn: int) -> Iterator[QuantizedCase]:
    parts, kind = 1 + turn // 2 % 2, ("plain", "residual", "mixed")[turn % 3]
    outs: tuple[DType | None, ...] = ((None,), (None, F32))[turn % 5 == 0]
    if parts == 2:
        yield from _apart(form, turn)
    for offset in range(2):
        m, n, k = SIZES[(turn + 3 * offset) % len(SIZES)]
        sizes = (Size(m, n, k), Size(m + 31, n + 64, k, pad=8))
        spec = quantized(make_spec(math_of(form), parts, "nk", PORTABLE, sizes[0], kind, outs), form, sizes[0])
        tiles = (TILES[(turn + offset * 3 + index) % len(TILES)] for index in range(len(TILES)))
        legal = [tile for tile in tiles if HOPPER_QUANTIZED.why_not(spec, tile, DEVICE) is None]
        if legal:
            name = f"{form}-{form.scale.name}-{parts}x-{legal[0]}-{kind}-{k}"
            yield QuantizedCase(name.replace(" ", "-"), spec, replace(legal[0]), sizes)
