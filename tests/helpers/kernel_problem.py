"""One launch of the GEMM kernel: its tensors in host memory, its arguments, and what it should compute, with bounds.

Shared by the emulator's tests and the GPU's. Tensors lie in padded buffers, so that pitches, offsets and broadcasts are
those of views; everything around a tensor's own elements is NaN, or True, and must neither be used nor be overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import BF16, BOOL, F16, F32, DType
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.emit import TEXTS
from onnxfuse.kernels.epilogue import is_fast
from onnxfuse.schedule.kernel_family import ProductFamily
from onnxfuse.schedule.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.portable import PORTABLE
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M
from onnxfuse.schedule.quantized_small_m_tile import QuantizedSmallMTile
from onnxfuse.schedule.small_m import SMALL_M
from onnxfuse.schedule.small_m_tile import SmallMTile, chunk
from tests.helpers.reference_fusion import OPS

TENSOR = np.dtype([("pointer", "<u8"), ("batch_stride", "<i8"), ("row_stride", "<i8"), ("column_stride", "<i8")])
OUTER = np.dtype(
    [(name, "<i8") for name in ("row_stride", "column_stride", "batch_stride")]
    + [(name, "<i4") for name in ("rows", "columns", "batches", "padding")]
)
SCALES = np.dtype(
    [(name, "<u8") for name in ("scales", "zero_points")] + [("scales_pitch", "<i8"), ("zero_points_pitch", "<i8")]
)
ARGUMENTS = np.dtype(
    [("lhs", TENSOR), ("rhs", TENSOR, 4), ("loads", TENSOR, 12), ("outs", TENSOR, 4)]
    + [(name, "<i4") for name in ("m", "n", "k", "batch")]
    + [("lhs_outer", OUTER), ("rhs_outer", OUTER), ("loads_outer", OUTER, 12), ("outs_outer", OUTER, 4)]
    + [("values_outer", OUTER), ("scales", SCALES, 4), ("rhs_ready", "<i4"), ("padding", "<i4")]
)

FAMILIES_OF_TILES = {Tile: PORTABLE, SmallMTile: SMALL_M, QuantizedSmallMTile: QUANTIZED_SMALL_M}

# How tile operands and outputs lie in memory, outermost dimension first: `m` and `n` whole, or in runs: `M` counts the
# runs of `Size.m_run` rows, `N` those of `Size.n_run` columns.
LAYOUTS = {
    "plain": "mn",
    "transposed": "nm",
    "heads": "Nmn",  # [b, s, (h d)] stored as [b, h, s, d]
    "images": "Mnm",  # [(b s), c] stored as [b, c, s]
    "transposed heads": "Nnm",  # two levels that one stride would walk as well
    "swapped rows": "mMn",
    "both": "NmMn",
}

READY = 2  # what a kernel may do with a buffer: read it before the kernel before has ended

NUMPY = {
    F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16), F32: np.dtype(np.float32), BOOL: np.dtype(np.bool_)
}  # fmt: skip
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}  # half a unit in the last place, relative
SMALLEST = {F16: 2.0**-25, BF16: 2.0**-134, F32: 2.0**-150}  # half a subnormal
FP32 = 2.0**-23  # tensor cores cut where they align summands: a whole unit in the last place for every addition
TF32 = 2.0**-11  # rounding of one operand to 10 bits
SPLIT = 2.0**-21  # what two TF32 numbers are short of each of two operands, and the product that is left out


@dataclass(frozen=True)
class Size:
    """The run-time side of a launch; `pad` is the number of elements between rows, a multiple of every width."""

    m: int
    n: int
    k: int
    batch: int = 1
    pad: int = 0
    broadcast_rhs: bool = True  # one rhs for the whole batch, as a Linear's weight
    broadcast_tiles: bool = False  # one tile operand for the whole batch
    transposed: bool = False  # tile operands and outputs lie with m contiguous; only for single-element accesses
    m_run: int = 1
    n_run: int = 1
    k_run: int = 0  # lhs lies as [batch, k / k_run, m, k_run]; 0: as [batch, m, k]
    lhs_batch_run: int = 0  # lhs lies as [batch / run, m, run, k], as heads do before they are split; likewise km
    rhs_batch_run: int = 0  # the same of rhs
    same_runs: bool = False  # all runs of batches read the same: lhs lies as [run, m, k], and rhs likewise


@dataclass
class Bounded:
    """A value in float64 and a bound of what the kernel's fp32 arithmetic may differ from it."""

    value: np.ndarray
    error: np.ndarray

    def rounded(self, units: float = 1.0) -> Bounded:
        return Bounded(self.value, self.error + units * FP32 * np.abs(self.value))


# How an error of the inputs grows, for the operations that the kernel tests use; their own rounding is added after.
GROWTH: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a.error + b.error,
    "sub": lambda a, b: a.error + b.error,
    "max": lambda a, b: np.maximum(a.error, b.error),
    "mul": lambda a, b: np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error,
    "gelu": lambda a: 1.13 * a.error + 4 * FP32 * np.abs(a.value),  # 1 + erf loses digits of x when x is negative
    "sigmoid": lambda a: 0.25 * a.error + 4 * FP32,
    "neg": lambda a: a.error,
    "where": lambda condition, a, b: np.where(condition.value != 0, a.error, b.error),
}


def growth_of(spec: KernelSpec | PointwiseSpec) -> dict[str, Callable[..., np.ndarray]]:
    """With what cuda/common/fast_math.cuh says of its gelu, where the kernel has it, and its rounding."""
    if not is_fast(spec):
        return GROWTH
    off = (1.1e-4 if all(out.dtype.bytes <= 2 for out in spec.outs) else 9.9e-6) + 4 * FP32
    return {**GROWTH, "gelu": lambda a: 1.13 * a.error + off * np.abs(a.value)}


@dataclass
class Buffer:
    """Flat memory with one tensor in it, seen as [batch, rows, columns] through strides that may be 0."""

    data: np.ndarray
    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    writable: bool = False
    outer: tuple[int, int, int, int] = (0, 0, 1, 1)  # strides of runs of rows and columns, their lengths
    batch_outer: tuple[int, int] = (0, 0)  # the same of batches; 0 where one stride walks them

    @property
    def index(self) -> np.ndarray:
        """Flat element at every [batch, row, column]."""
        batch, row, column = np.ogrid[tuple(slice(extent) for extent in self.shape)]
        row_stride, column_stride, rows, columns = self.outer
        at_row = _steps(row, self.strides[1], rows, row_stride)
        at_column = _steps(column, self.strides[2], columns, column_stride)
        outer_stride, batches = self.batch_outer
        at_batch = batch * self.strides[0]
        if batches:
            at_batch = batch // batches * outer_stride + batch % batches * self.strides[0]
        return self.offset + at_batch + at_row + at_column

    @property
    def values(self) -> np.ndarray:
        """A copy, [batch, rows, columns]."""
        return self.data[self.index]

    @property
    def view(self) -> np.ndarray:
        """The memory itself; only where one stride walks each loop."""
        bytes_each = self.data.itemsize
        return np.lib.stride_tricks.as_strided(
            self.data[self.offset :], self.shape, [stride * bytes_each for stride in self.strides]
        )


def _steps(index: np.ndarray, stride: int, run: int, outer_stride: int) -> np.ndarray:
    return index // run * outer_stride + index % run * stride if outer_stride else index * stride


@dataclass(frozen=True)
class TiledSpec(KernelSpec):
    """A spec with the tile that a test computes it with; the sm_90a kernel's tests have tiles of their own."""

    tile: Tile | SmallMTile | QuantizedSmallMTile = field(kw_only=True)

    @property
    def family(self) -> ProductFamily:
        return FAMILIES_OF_TILES[type(self.tile)]

    def why_not(self, device: DeviceSpec) -> str | None:
        return self.family.why_not(self, self.tile, device)

    def shared_bytes(self, device: DeviceSpec) -> int:
        return self.family.shared_bytes(self, self.tile, device)

    def source(self, device: DeviceSpec = ARCHITECTURES["sm_80"]) -> str:
        return TEXTS[self.family.name].emit(self, self.tile, device)


def cluster_of(tile: object) -> int:
    """Blocks that share a tile; most kernels have one of each."""
    return int(getattr(tile, "splits", 1))


@dataclass
class Problem:
    spec: TiledSpec
    size: Size
    lhs: Buffer
    rhs: list[Buffer]
    loads: list[Buffer]
    outs: list[Buffer] = field(default_factory=list)

    @property
    def buffers(self) -> list[Buffer]:
        return [self.lhs, *self.rhs, *self.loads, *self.outs]

    def uses(self, rhs_ready: bool) -> list[int]:
        """What a kernel may do with each buffer, as tests/emulator/cuda_host.h has it."""
        ready = {id(buffer) for buffer in self.weights if rhs_ready or self.rhs_always_ready}
        return [READY if id(buffer) in ready else int(buffer.writable) for buffer in self.buffers]

    @property
    def weights(self) -> list[Buffer]:
        """What rhs consists of."""
        return self.rhs

    @property
    def rhs_always_ready(self) -> bool:
        """Whether nothing ever writes it while kernels run."""
        return False

    @property
    def grid(self) -> tuple[int, int, int]:
        tile = self.spec.tile
        tiles = math.ceil(self.size.m / tile.block_m) * math.ceil(self.size.n / tile.block_n)
        if (blocks := cluster_of(tile)) > 1:
            return tiles * self.size.batch * blocks, 1, 1
        return tiles, 1, min(self.size.batch, 65535)

    def arguments(self, addresses: Sequence[int]) -> np.ndarray:
        """The kernel's argument, given the address of every buffer in `buffers`."""
        return self._arguments(self.buffers, addresses)

    def _arguments(self, buffers: Sequence[Buffer], addresses: Sequence[int]) -> np.ndarray:
        arguments = np.zeros(1, ARGUMENTS)
        tensors = [
            (buffer.offset * buffer.data.itemsize + address, *buffer.strides)
            for buffer, address in zip(buffers, addresses, strict=True)
        ]
        first_load = 1 + len(self.rhs)
        first_out = first_load + len(self.loads)
        arguments["lhs"][0] = tensors[0]
        for name, group in (
            ("rhs", tensors[1:first_load]),
            ("loads", tensors[first_load:first_out]),
            ("outs", tensors[first_out:]),
        ):
            for index, tensor in enumerate(group):
                arguments[name][0, index] = tensor
        for name in ("m", "n", "k", "batch"):
            arguments[name] = getattr(self.size, name)
        arguments["lhs_outer"] = self._outer(self.lhs)
        for rhs in self.rhs[:1]:
            arguments["rhs_outer"] = self._outer(rhs)
        for name, buffers in (("loads_outer", self.loads), ("outs_outer", self.outs)):
            for index, buffer in enumerate(buffers):
                arguments[name][0, index] = self._outer(buffer)
        return arguments

    def _outer(self, buffer: Buffer) -> tuple[int, ...]:
        row_stride, column_stride, rows, columns = buffer.outer
        batch_stride, batches = buffer.batch_outer
        return row_stride, column_stride, batch_stride, rows, columns, batches or self.size.batch, 0

    def product(self, rhs: Buffer) -> Bounded:
        """One part's."""
        return _product(self.spec.math, self.lhs.values, rhs.values, self.size.k)

    def expected(self) -> list[Bounded]:
        """Every output with its bound, before and after rounding to its type."""
        names: dict[str, Bounded] = {}
        for part, rhs in enumerate(self.rhs):
            names[f"acc{part}"] = self.product(rhs)
        for index, load in enumerate(self.loads):
            value = load.values.astype(np.float64)
            names[f"op{index}"] = Bounded(value, np.zeros_like(value))
        growth = growth_of(self.spec)
        for step in self.spec.steps:
            inputs = [_bounded(value) if isinstance(value, float) else names[value] for value in step.inputs]
            value = OPS[step.op](*(item.value for item in inputs))
            names[step.result] = Bounded(value, growth[step.op](*inputs)).rounded()
        shape = (self.size.batch, self.size.m, self.size.n)
        return [
            _stored(names[value], out.dtype, shape)
            for value, out in zip(self.spec.out_values, self.spec.outs, strict=True)
        ]

    def check(self, outs: Sequence[np.ndarray]) -> None:
        """Compare the flat memory of the outputs after a launch with what was expected, padding included."""
        for number, (buffer, data, expected) in enumerate(zip(self.outs, outs, self.expected(), strict=True)):
            got = replace_data(buffer, data).values.astype(np.float64)
            wrong = ~(np.abs(got - expected.value) <= expected.error)
            where = [tuple(int(axis) for axis in index) for index in np.argwhere(wrong)[:4]]
            detail = [(at, float(got[at]), float(expected.value[at]), float(expected.error[at])) for at in where]
            assert not wrong.any(), (
                f"out {number}: {wrong.sum()} of {wrong.size} wrong, (index, got, want, bound): {detail}"
            )
            outside = np.ones(data.size, bool)
            for other in (other for other in self.outs if other.data is buffer.data):  # parts of one tensor
                outside[other.index] = False
            assert np.isnan(data[outside].astype(np.float32)).all(), f"out {number}: wrote outside of its elements"


def replace_data(buffer: Buffer, data: np.ndarray) -> Buffer:
    return replace(buffer, data=data)


def _bounded(value: float) -> Bounded:
    return Bounded(np.float64(value), np.float64(0.0))


def _product(math_mode: str, lhs: np.ndarray, rhs: np.ndarray, depth: int) -> Bounded:
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    magnitude = np.abs(lhs) @ np.abs(rhs)
    inputs = {"tf32": 2 * TF32 + TF32**2, "3xtf32": SPLIT}.get(math_mode, 0.0)
    return Bounded(lhs @ rhs, magnitude * (inputs + (depth + 1) * FP32))


def _stored(result: Bounded, dtype: DType, shape: tuple[int, int, int]) -> Bounded:
    value, error = np.broadcast_to(result.value, shape), np.broadcast_to(result.error, shape)
    return Bounded(value, error + ROUNDING[dtype] * (np.abs(value) + error) + SMALLEST[dtype])


def in_chunks(spec: TiledSpec) -> TiledSpec:
    """What the kernel for small M asks of lhs and rhs; the epilogue's accesses stay as they are."""
    return replace(spec, lhs_width=chunk(spec), rhs_width=chunk(spec))


def make_problem(spec: TiledSpec, size: Size, seed: int = 0) -> Problem:
    """Random tensors for a spec; pitches keep every width of the spec legal."""
    rng = np.random.default_rng([seed, size.m, size.n, size.k])
    scale = 1 / math.sqrt(max(size.k, 1))
    rhs_batch = 1 if size.broadcast_rhs else size.batch
    swap = spec.rhs_order == "nk"
    rhs_shape = (rhs_batch, size.n, size.k) if swap else (rhs_batch, size.k, size.n)
    packed = _buffer(rng, spec.dtype, rhs_shape, size.pad, scale, spec.parts, size.rhs_batch_run, size.same_runs)
    loads = [make_operand(rng, load, size) for load in spec.loads]
    outs = [make_output(out, size) for out in spec.outs]
    return Problem(
        spec,
        size,
        _lhs(rng, spec, size),
        [_rhs_view(part, size, swap) for part in packed],
        loads,
        outs,
    )


def _buffer(
    rng: np.random.Generator,
    dtype: DType,
    shape: tuple[int, int, int],
    pad: int,
    scale: float,
    parts: int = 1,
    batch_run: int = 0,
    same_runs: bool = False,
) -> list[Buffer]:
    """`parts` tensors of one shape, side by side in each row of one buffer; so are the rows of a run of batches."""
    batch, rows, columns = shape
    pitch = parts * (columns + pad)
    assert not batch_run or batch % batch_run == 0, "runs are whole"
    strides, runs = (rows * pitch, pitch, 1), (0, batch_run)
    if batch_run and not same_runs:
        strides, runs = (pitch, batch_run * pitch, 1), (batch_run * rows * pitch, batch_run)
    stored = batch_run if batch_run and same_runs else batch
    data = np.full(stored * rows * pitch + 2 * pad, np.nan, np.float32).astype(NUMPY[dtype])
    places = [pad + part * (columns + pad) for part in range(parts)]
    return [_filled(rng, dtype, Buffer(data, place, shape, strides, batch_outer=runs), scale) for place in places]


def _laid(dtype: DType, size: Size, layout: str, writable: bool = False) -> Buffer:
    """An empty [batch, m, n] tensor that lies as `LAYOUTS` says, with padding behind its innermost dimension."""
    extents = {"m": size.m, "n": size.n}
    for loop, runs, run in (("m", "M", size.m_run), ("n", "N", size.n_run)):
        if runs in layout:
            assert extents[loop] % run == 0, "runs are whole"
            extents |= {loop: run, runs: extents[loop] // run}
    strides, stride = {}, 1
    for dim in reversed(layout):
        strides[dim] = stride
        stride *= extents[dim] + (size.pad if stride == 1 else 0)
    data = np.full(size.batch * stride + 2 * size.pad, np.nan, np.float32).astype(NUMPY[dtype])
    outer = (strides.get("M", 0), strides.get("N", 0), extents["m"], extents["n"])
    shape = (size.batch, size.m, size.n)
    return Buffer(data, size.pad, shape, (stride, strides["m"], strides["n"]), writable, outer)


def _filled(rng: np.random.Generator, dtype: DType, buffer: Buffer, scale: float = 1.0) -> Buffer:
    buffer.data[buffer.index] = _random(rng, dtype, buffer.shape, scale)
    return buffer


def _random(rng: np.random.Generator, dtype: DType, shape: tuple[int, int, int], scale: float = 1.0) -> np.ndarray:
    values = rng.standard_normal(shape) * scale
    return values > 0 if dtype == BOOL else values.astype(NUMPY[dtype])


def _lhs(rng: np.random.Generator, spec: KernelSpec, size: Size) -> Buffer:
    transposed = spec.lhs_order == "km"
    if transposed or not size.k_run:
        shape = (size.batch, size.k, size.m) if transposed else (size.batch, size.m, size.k)
        (buffer,) = _buffer(rng, spec.dtype, shape, size.pad, 1.0, 1, size.lhs_batch_run, size.same_runs)
        return _transposed(buffer) if transposed else buffer
    as_columns = replace(size, n=size.k, n_run=size.k_run)
    return _filled(rng, spec.dtype, _laid(spec.dtype, as_columns, LAYOUTS["heads"]))


def _rhs_view(part: Buffer, size: Size, swap: bool) -> Buffer:
    batch_stride, row, column = part.strides
    strides = (0 if part.shape[0] == 1 else batch_stride, *((column, row) if swap else (row, column)))
    return replace(part, shape=(size.batch, size.k, size.n), strides=strides)


def make_operand(rng: np.random.Generator, load: Access, size: Size) -> Buffer:
    if load.kind == "tile" and (load.transposed or load.two_levels):
        return _filled(rng, load.dtype, _laid(load.dtype, size, _layout(load)))
    rows = size.m if load.kind in ("column", "tile") else 1
    columns = size.n if load.kind in ("row", "tile") else 1
    batch = size.batch if load.kind == "tile" and not size.broadcast_tiles else 1
    if size.transposed and load.kind == "tile":
        return _transposed(_buffer(rng, load.dtype, (batch, columns, rows), size.pad, 1.0)[0])
    buffer = _buffer(rng, load.dtype, (batch, rows, columns), size.pad, 1.0)[0]
    strides = tuple(0 if extent == 1 else stride for extent, stride in zip(buffer.shape, buffer.strides, strict=True))
    return replace(buffer, shape=(size.batch, size.m, size.n), strides=strides)


def _layout(access: Access) -> str:
    """The first layout that needs what an access can do."""
    wanted = (access.transposed, "m" in access.two_levels, "n" in access.two_levels)
    return next(dims for dims in LAYOUTS.values() if (dims[-1] == "m", "M" in dims, "N" in dims) == wanted)


def make_output(out: Access, size: Size) -> Buffer:
    if out.transposed or out.two_levels:
        return _laid(out.dtype, size, _layout(out), writable=True)
    dtype = out.dtype
    rows, columns = (size.n, size.m) if size.transposed else (size.m, size.n)
    pitch = columns + size.pad
    data = np.full(size.batch * rows * pitch + 2 * size.pad, np.nan, np.float32).astype(NUMPY[dtype])
    buffer = Buffer(data, size.pad, (size.batch, rows, columns), (rows * pitch, pitch, 1), writable=True)
    return _transposed(buffer) if size.transposed else buffer


def _transposed(buffer: Buffer) -> Buffer:
    batch, rows, columns = buffer.shape
    return replace(buffer, shape=(batch, columns, rows), strides=(buffer.strides[0], 1, buffer.strides[1]))


def widest(size: Size, element_bytes: int, extent: int) -> int:
    """The widest access that an extent and the padding allow, in elements."""
    for width in (16, 8, 4, 2):
        if width * element_bytes <= 16 and extent % width == 0 and size.pad % width == 0:
            return width
    return 1


KINDS: dict[str, tuple[tuple[str, DType | None], ...]] = {
    # What the epilogue loads beside one row operand for each part; None is the product's own dtype.
    "plain": (),
    "residual": (("tile", None),),
    "mixed": (("tile", F32), ("scalar", F32), ("column", F16), ("tile", BF16), ("row", F16)),
    "masked": (("tile", BOOL),),
    "masks": (("tile", BOOL), ("row", BOOL), ("tile", None), ("column", BOOL), ("scalar", BOOL)),
}


def with_operand(value: str, index: int, dtype: DType, first: bool) -> list[Step]:
    """Steps that add a number or subtract it; a mask decides whether a value changes its sign."""
    result, operand = f"r{index}", f"op{index}"
    if dtype != BOOL:
        return [Step(result, "add" if first else "sub", (value, operand))]
    branches = (value, f"n{index}") if first else (f"n{index}", value)
    return [Step(f"n{index}", "neg", (value,)), Step(result, "where", (operand, *branches))]


def make_spec(
    math_mode: str,
    parts: int,
    rhs_order: str,
    tile: Tile | SmallMTile | QuantizedSmallMTile,
    size: Size,
    kind: str = "plain",
    outs: Sequence[DType | None] = (None,),
    narrow: bool = False,
    layout: str = "plain",
    lhs_order: str = "mk",
) -> TiledSpec:
    """A gated epilogue over all parts: (acc0 + row0) * gelu(acc1 + row1) ..., then `with_operand` for the others."""
    dtype = {"f16": F16, "bf16": BF16}.get(math_mode, F32)

    def width(of: DType, extent: int) -> int:
        return 1 if narrow else widest(size, of.bytes, extent)

    operands = [("row", dtype)] * parts + [(name, of or dtype) for name, of in KINDS[kind]]

    def tile_access(of: DType) -> Access:
        dims = LAYOUTS[layout]
        runs = size.m_run if "M" in dims else size.m, size.n_run if "N" in dims else size.n
        two_levels = tuple(loop for loop, name in (("m", "M"), ("n", "N")) if name in dims)
        run = size.n_run if "n" in two_levels else 0
        return Access("tile", of, width(of, runs[dims[-1] == "n"]), dims[-1] == "m", two_levels, run)

    def access(name: str, of: DType) -> Access:
        return tile_access(of) if name == "tile" else Access(name, of, width(of, size.n) if name == "row" else 1)

    loads = tuple(access(name, of) for name, of in operands)
    steps = [Step(f"a{part}", "add", (f"acc{part}", f"op{part}")) for part in range(parts)]
    steps.append(Step("g0", "gelu", (f"a{parts - 1}",)))
    steps += [Step(f"g{part + 1}", "mul", (f"g{part}", f"a{part}")) for part in range(parts - 1)]
    values = [steps[-1].result]
    for index in range(parts, len(operands)):
        steps += with_operand(steps[-1].result, index, operands[index][1], index % 2 == 1)
    values = ([steps[-1].result, *values] * 2)[: len(outs)]
    rhs_extent = size.n if rhs_order == "kn" else size.k
    return TiledSpec(
        dtype=dtype,
        math=math_mode,
        parts=parts,
        rhs_order=rhs_order,
        lhs_width=width(dtype, size.m if lhs_order == "km" else size.k_run or size.k),
        rhs_width=width(dtype, rhs_extent),
        loads=loads,
        outs=tuple(tile_access(of or dtype) for of in outs),
        steps=tuple(steps),
        out_values=tuple(values),
        tile=tile,
        lhs_run=size.k_run,
        lhs_order=lhs_order,
        lhs_batch_runs=size.lhs_batch_run > 0,
        rhs_batch_runs=size.rhs_batch_run > 0,
    )
