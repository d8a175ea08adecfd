"""What an attention kernel is, the shape of its blocks, and the shared memory that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxfuse.dtypes import F32, DType
from onnxfuse.ir.attention import Diagonal
from onnxfuse.ir.fusion import Step, Value
from onnxfuse.schedule.kernel_spec import Access, QuantizedAccess

GROUP_ROWS = 64  # of one wgmma
WARP_ROWS = 16  # of one mma.sync, and of a warp's part of wgmma
LANES = 32
ROW_BYTES = 128  # of shared memory: the widest swizzle
BARRIER_BYTES = 8
WARPS_OF_GROUP = 4
LOOKED_AT = 64  # tiles of a block of which it is noted whether they are to be looked at again
PORTABLE_STAGES = 2  # blocks of keys, and of values, of a block, or of each of its warps that have keys of their own
VECTOR_BYTES = 16  # that every row of a tensor map begins at a multiple of


@dataclass(frozen=True)
class AttentionSpec:
    """Everything but its tile that the text depends on.

    Attributes:
        dtype: of q, keys and values.
        head: columns of q and the keys.
        value_head: columns of the values and the output.
        loads: what the score's steps call `op0`, `op1`, ...
        score: steps over `acc0` and the loads.
        score_value: the value that the softmax is of.
        scale: a positive number that this value is multiplied by.
        guarded: a row of NaN becomes 0.
        result: steps over `acc0`, an element of the second product.
        result_value: the value that is stored.
        out_width: elements of one store.
        out_dtype: of the output, where it is fp32 and all else is not.
        diagonal: behind which keys there is nothing to look at, if that is known.
        checked: every tensor is read and written element by element, wherever it lies.
    """

    dtype: DType
    head: int
    value_head: int
    loads: tuple[Access, ...] = ()
    score: tuple[Step, ...] = ()
    score_value: Value = "acc0"
    scale: float = 1.0
    guarded: bool = False
    result: tuple[Step, ...] = ()
    result_value: Value = "acc0"
    out_width: int = 8
    out_dtype: DType | None = None
    diagonal: Diagonal | None = None
    checked: bool = False

    @property
    def math(self) -> str:
        """How both products are computed, as `KernelSpec.math` names it."""
        return "tf32" if self.dtype == F32 else self.dtype.name

    @property
    def factors(self) -> tuple[Access, ...]:
        """How q and the keys are reached, as [m, k] and [k, n]; the values as the keys are, but not transposed."""
        width = 1 if self.checked else VECTOR_BYTES // self.dtype.bytes
        query = Access("tile", self.dtype, width, two_levels=("batch",))
        return query, replace(query, transposed=True)

    @property
    def factor_alignments(self) -> tuple[int, int]:
        """Bytes that the launch rule asks of q and the keys."""
        query, keys = self.factors
        return query.alignment(self.checked), keys.alignment(self.checked)

    @property
    def quantized_access(self) -> QuantizedAccess | None:
        """None: nothing is quantized."""
        return None

    @property
    def library(self) -> str:
        """None multiplies."""
        return "none"

    @property
    def outs(self) -> tuple[Access, ...]:
        """The stored tensor."""
        return (Access("tile", self.out_dtype or self.dtype, self.out_width, two_levels=("batch",)),)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those of the scores and of the result."""
        return (*self.score, *self.result)

    @property
    def checks_outs(self) -> bool:
        """Whether the output may lie anywhere as well."""
        return self.checked


@dataclass(frozen=True)
class AttentionTile:
    """The shape of one thread block's work.

    Attributes:
        consumers: groups of 64 rows.
        block_n: keys of one step.
        stages: blocks of keys, and of values, in shared memory.
        turns: whether groups line their products up behind each other.
        together: the groups have the same rows of neighbouring heads, which share keys, values and masks.
        splits: blocks of a cluster that share 16 rows, each a range of their keys.
        residents: blocks of a multiprocessor.
        rescale_above: sums are scaled down where a maximum grows by more than a factor of 2 to this power; 0: always.
        landed: blocks of values in shared memory as they are loaded, from where they are turned; of fp32 alone.
    """

    consumers: int
    block_n: int
    stages: int = 2
    turns: bool = True
    rescale_above: int = 0
    residents: int = 1
    together: bool = False
    splits: int = 1
    landed: int = 0

    def __str__(self) -> str:
        rows = f"{WARP_ROWS} rows" if self.splits > 1 else f"{self.consumers}x{GROUP_ROWS} rows"
        keys = f"{rows} {self.block_n} keys stages {self.stages}"
        keys += f" split by {self.splits}" if self.splits > 1 else ""
        return f"{keys} lazy {self.rescale_above}" if self.rescale_above else keys

    def pace(self, dtype: DType) -> str:
        """The row of the calibration's tables."""
        return f"{self.consumers} groups" if dtype.bytes == 2 else f"{self.consumers} groups {dtype.bytes} bytes"

    @property
    def threads(self) -> int:
        """Those of the groups and of the producers."""
        return (self.consumers + 1) * 128

    @property
    def block_m(self) -> int:
        """Rows of one head."""
        if self.splits > 1:
            return WARP_ROWS
        return GROUP_ROWS if self.together else self.consumers * GROUP_ROWS


@dataclass(frozen=True)
class PortableAttentionTile:
    """The same of the kernel for sm_80 and later.

    Attributes:
        warps: of 16 rows each.
        block_n: keys of one step.
        splits: all warps of a block, or of a cluster of blocks, where they have the same 16 rows and keys of their own;
            else 1.
    """

    warps: int
    block_n: int
    splits: int = 1

    def __str__(self) -> str:
        if self.splits > 1:
            cluster = f" cluster {self.cluster}" if self.cluster > 1 else ""
            return f"{WARP_ROWS} rows {self.warps}x{self.block_n} keys{cluster}"
        return f"{self.warps}x{WARP_ROWS} rows {self.block_n} keys"

    @property
    def cluster(self) -> int:
        """Blocks that share rows."""
        return max(self.splits // self.warps, 1)

    def pace(self, dtype: DType) -> str:
        """The row of the calibration's tables."""
        return f"portable {dtype.bytes} bytes"

    @property
    def threads(self) -> int:
        """Of one block."""
        return self.warps * 32

    @property
    def block_m(self) -> int:
        """Rows of one head."""
        return WARP_ROWS if self.splits > 1 else self.warps * WARP_ROWS


Tile = AttentionTile | PortableAttentionTile


def is_mixed(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether tiles of fewer groups stand beside those of three, so that the last turn has work for more blocks."""
    three = isinstance(tile, AttentionTile) and tile.consumers == 3 and not tile.together
    return three and spec.diagonal is None


def least_rows(spec: AttentionSpec, tile: Tile) -> int:
    """Rows of the lowest tile, as many of which as there may be have a block each."""
    return GROUP_ROWS if is_mixed(spec, tile) else tile.block_m


def atoms(columns: int, bytes_each: int) -> int:
    """Rows of 128 bytes for so many columns."""
    return -(-columns * bytes_each // ROW_BYTES)


def is_mapped(load: Access) -> bool:
    """Whether TMA brings a load, in rows of 16 bytes; what is narrower is read element by element."""
    return load.kind == "tile" and load.width > 1


def looks_again(spec: AttentionSpec) -> bool:
    """Whether a row may be so low throughout that what lies behind the diagonal counts: a mask of finite numbers."""
    return spec.diagonal is not None and math.isfinite(spec.diagonal.fill)


def mask_bytes(spec: AttentionSpec, tile: AttentionTile) -> list[int]:
    """Of a stage, of each load; 0 for one that is no tile."""
    return [
        atoms(tile.block_n, load.dtype.bytes) * tile.block_m * ROW_BYTES if is_mapped(load) else 0
        for load in spec.loads
    ]


def shared_bytes(spec: AttentionSpec, tile: AttentionTile) -> int:
    """Of one block."""
    keys, values = atoms(spec.head, spec.dtype.bytes), atoms(spec.value_head, spec.dtype.bytes)
    landed = values * tile.block_n * ROW_BYTES
    multiplied = spec.value_head * tile.block_n * spec.dtype.bytes if tile.landed else landed
    stage = keys * tile.block_n * ROW_BYTES + multiplied + sum(mask_bytes(spec, tile))
    barriers = (4 * tile.stages + 2 * tile.consumers + 2 * tile.landed) * BARRIER_BYTES
    if looks_again(spec):
        barriers += BARRIER_BYTES + LOOKED_AT * tile.consumers * WARPS_OF_GROUP
    if tile.splits > 1:
        barriers += 2 * BARRIER_BYTES + (tile.splits - 1) * share_bytes(spec)
    return tile.consumers * GROUP_ROWS * keys * ROW_BYTES + tile.stages * stage + tile.landed * landed + barriers


def share_bytes(spec: AttentionSpec) -> int:
    """What one block of a cluster sends: of each thread of a warp its sums, and of two rows the maxima and row sums."""
    return LANES * (spec.value_head // 2 + 4) * F32.bytes


def portable_shared_bytes(spec: AttentionSpec, tile: PortableAttentionTile) -> int:
    """Of one block of the portable kernel: q, stages of keys and values in rows that are padded, a cluster's shares."""
    chunk = VECTOR_BYTES // spec.dtype.bytes
    pitch = -(-spec.head // (2 * chunk)) * 2 * chunk + chunk
    values = (
        spec.value_head + (20 - spec.value_head % 16) % 16
        if spec.dtype == F32
        else -(-spec.value_head // 16) * 16 + chunk
    )
    keys = PORTABLE_STAGES * tile.block_n * (tile.warps if tile.splits > 1 else 1)
    shares = 2 * BARRIER_BYTES + (tile.cluster - 1) * share_bytes(spec) if tile.cluster > 1 else 0
    return spec.dtype.bytes * (tile.block_m * pitch + keys * (pitch + values)) + shares
