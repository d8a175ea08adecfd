"""What a kernel is: everything that its text depends on. The plan chooses it, the emitter obeys it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from onnxfuse.dtypes import U8, DType
from onnxfuse.ir.fusion import NONLINEAR, Step
from onnxfuse.ir.quantization import Quantization

QUANTIZED = "rhs is quantized"  # what a family says that cannot read one
TMA_BYTES = 16  # that rows of what TMA reads begin on multiples of
FACTORS = ("lhs", "rhs")
EXACT = ("fp32", "3xtf32")  # arithmetic with all 24 bits of an fp32 number


@dataclass(frozen=True)
class Tile:
    """The shape of one thread block's work in the portable kernel.

    Attributes:
        block_m: rows of the output tile.
        block_n: columns of the output tile, of each part.
        block_k: depth of one pipeline stage, in elements.
        warps_m: warps along m; each owns block_m / warps_m rows.
        warps_n: warps along n; each owns block_n / warps_n columns of every part.
        stages: depth of the pipeline in shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps_m * self.warps_n

    def __str__(self) -> str:
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{shape} warps {self.warps_m}x{self.warps_n} stages {self.stages}"


class Turn(NamedTuple):
    """Parts of one tensor that take turns along its columns: one access moves some columns of all.

    Attributes:
        leader: index of the load or the output that moves all of them.
        own: which part this is.
        parts: how many there are.
        columns: of each part, that an access moves.
    """

    leader: int
    own: int
    parts: int
    columns: int


@dataclass(frozen=True)
class Access:
    """How the kernel reaches one tensor of the epilogue.

    Attributes:
        kind: `scalar` (one value), `row` (varies along n only), `column` (along m only) or `tile` (both); each may
            also vary along the batch.
        width: elements of one access along the contiguous axis; 1 for a scalar and a column.
        transposed: a tile's contiguous axis is m, not n: accesses go down the columns.
        two_levels: the loops, `m`, `n` or `batch`, that no single stride walks: the kernel steps through runs of them.
        run: columns of one run where n is walked in two levels and the run is known before the launch; else 0.
        copied: the launch copies the tensor first, to rows that begin on 16-byte boundaries.
        turn: of a part that takes turns with the others, and is moved with them where the tensor's address allows it:
            otherwise `width` counts, and that alone is what the launch rule asks for.
    """

    kind: str
    dtype: DType
    width: int
    transposed: bool = False
    two_levels: tuple[str, ...] = ()
    run: int = 0
    copied: bool = False
    turn: Turn | None = None

    @property
    def columns(self) -> int:
        """That one access moves, of one part."""
        return self.width if self.turn is None else self.turn.columns

    def alignment(self, checked: bool) -> int:
        """Bytes that the launch rule asks of an address and its pitches; a kernel that checks them itself takes any."""
        return self.dtype.bytes * (1 if checked else self.width)


class QuantizedAccess(NamedTuple):
    """How a quantized rhs is reached: its form, and the bytes of an access to its scales and zero points."""

    bits: int
    block: int
    scales_bytes: int
    zero_points_bytes: int


@dataclass(frozen=True)
class KernelSpec:
    """Everything but its tile that the text of a kernel depends on; sizes and strides are run-time arguments.

    Attributes:
        dtype: element type of lhs and rhs; of a quantized rhs that of the numbers that it stands for.
        math: `f16`, `bf16` and `tf32` use the tensor cores, and so does `3xtf32`, whose sums are as exact as those of
            `fp32`, which uses the ordinary fp32 units; all accumulate in fp32.
        parts: products accumulated in one thread.
        rhs_order: `kn` where n is the contiguous axis of rhs, `nk` where k is.
        lhs_width: elements of one copy of lhs along its contiguous axis.
        rhs_width: elements of one copy of rhs along its contiguous axis; of a quantized rhs, bytes of its integers.
        loads: what the steps call `op0`, `op1`, ...
        outs: the stored tensors; `out_values` names the value that each stores.
        lhs_run: columns of one run where no single stride walks the k of lhs, as after heads were merged; else 0.
        lhs_order: `mk` where k is the contiguous axis of lhs, `km` where m is.
        checked: the portable kernel looks at the address and the pitches of each tensor, and treats one that its
            width does not fit as one of width 1; otherwise the launch rule looks, and takes another kernel.
        lhs_batch_runs: no single stride walks the batches of lhs: the kernel steps through runs of them.
        rhs_batch_runs: the same of rhs.
        quantization: how rhs is stored, if it is quantized; then its order is `nk`.
        scales_width: elements of one access to the scales of a quantized rhs, along k.
        zero_points_width: bytes of one access to its zero points.
        depth: k of a quantized rhs, which is a weight, so that it is known; else 0.
        columns: n of a quantized rhs; else 0.
        copied: factors, `lhs` and `rhs`, that the launch copies first, to rows of their contiguous axis that
            begin on 16-byte boundaries; the kernel reads those.
    """

    dtype: DType
    math: str
    parts: int
    rhs_order: str
    lhs_width: int
    rhs_width: int
    loads: tuple[Access, ...]
    outs: tuple[Access, ...]
    steps: tuple[Step, ...]
    out_values: tuple[str, ...]
    lhs_run: int = 0
    lhs_order: str = "mk"
    checked: bool = False
    lhs_batch_runs: bool = False
    rhs_batch_runs: bool = False
    quantization: Quantization | None = None
    scales_width: int = 1
    zero_points_width: int = 1
    depth: int = 0
    columns: int = 0
    copied: tuple[str, ...] = ()

    @property
    def rhs_dtype(self) -> DType:
        """What rhs is stored in: bytes where it is quantized."""
        return self.dtype if self.quantization is None else U8

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Found once: what is known of each of a hundred tiles is looked up by the spec."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def factors(self) -> tuple[Access, ...]:
        """How lhs and rhs are reached, as [m, k] and [k, n]; `n` among the levels is the columns, whatever the loop."""
        lhs_levels = (*(("n",) if self.lhs_run else ()), *(("batch",) if self.lhs_batch_runs else ()))
        rhs_levels = ("batch",) if self.rhs_batch_runs else ()
        lhs = Access("tile", self.dtype, self.lhs_width, self.lhs_order == "km", lhs_levels, self.lhs_run)
        rhs = Access("tile", self.rhs_dtype, self.rhs_width, self.rhs_order == "nk", rhs_levels)
        return self._as_read("lhs", lhs), self._as_read("rhs", rhs)

    @property
    def without_copies(self) -> KernelSpec:
        """The kernel with factors as the model has them, of which the tiles of all families are made."""
        return replace(self, copied=())

    @cached_property
    def priced(self) -> KernelSpec:
        """The kernel as tiles are chosen for it: of its steps those that are not linear are counted, and that is all.

        Equal for kernels of which what is known of each tile is equal: found once for all of them.
        """
        nonlinear = sum(step.op in NONLINEAR for step in self.steps)
        return replace(self, steps=(Step("", "exp", ()),) * nonlinear, out_values=())

    def _as_read(self, factor: str, access: Access) -> Access:
        if factor not in self.copied:
            return access
        return replace(access, width=TMA_BYTES // self.dtype.bytes, copied=True)

    @property
    def factor_alignments(self) -> tuple[int, int]:
        """Bytes that the launch rule asks of lhs and rhs; no kernel looks at how integers are aligned."""
        lhs, rhs = self.factors
        return lhs.alignment(self.checked), rhs.alignment(self.checked and self.quantization is None)

    @property
    def quantized_access(self) -> QuantizedAccess | None:
        """The way to the integers, scales and zero points of a quantized rhs."""
        form = self.quantization
        if form is None:
            return None
        zero_points = self.zero_points_width if form.zero_points else 0
        return QuantizedAccess(form.bits, form.block, form.scale.bytes * self.scales_width, zero_points)

    @property
    def library(self) -> str:
        """How the library multiplies: not at all."""
        return "none"

    @property
    def checks_outs(self) -> bool:
        """Whether the kernel looks at its outputs as well as at what it reads."""
        return self.checked
