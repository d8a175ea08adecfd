"""The kernel that normalises rows: what its text depends on, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.limits import MOST_NORMALISED
from onnxfuse.schedule.pointwise_tile import PointwiseSpec

WARP = 32
MOST_THREADS = 1024  # of a block, and so of a row
MOST_ELEMENTS = MOST_NORMALISED // MOST_THREADS  # of a thread: registers hold them
FEWEST = 8  # threads of a row: a line of memory
VECTOR = 8  # columns of 16 bits that a thread reads at once; of wider types it was not measured
MOST_SPANS = 5  # of such a thread
THREADS = 128  # of a block, unless a row has more: many small blocks keep memory busy
# Of a row across, and of its block: 1,024 would spill.
MOST_ACROSS_THREADS, BLOCK_THREADS = 32, 512
SUM_BYTES = 4


@dataclass(frozen=True)
class NormTile:
    """The shape of one thread block's work.

    Attributes:
        block_m: rows of the tile.
        row_threads: threads that share a row, a power of two.
        span: adjacent columns that a thread reads at once.
        spans: how many of them.
        residents: blocks of a multiprocessor, for which the compiler leaves registers; 0 where it chooses.
        across: rows lie beside each other in memory, and so do the threads of different rows.
    """

    block_m: int
    row_threads: int
    span: int
    spans: int
    residents: int = 0
    across: bool = False

    @property
    def block_n(self) -> int:
        """Columns of the tile: a whole row, of each part."""
        return self.row_threads * self.span * self.spans

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.block_m * self.row_threads

    @property
    def shared_bytes(self) -> int:
        """For the sums of the warps of a row, or of its threads, which are of different warps."""
        sums = self.row_threads if self.across else self.row_threads // WARP
        return SUM_BYTES * self.block_m * sums if sums > 1 else 0

    def __str__(self) -> str:
        columns = f"{self.span} columns" if self.spans == 1 else f"{self.spans} x {self.span} columns"
        across = " across" if self.across else ""
        return f"{self.block_m} rows{across}, {self.row_threads} threads each, {columns} a thread"


@dataclass(frozen=True)
class NormSpec(PointwiseSpec):
    """Everything but its tile that the text of the kernel depends on; sizes and strides are run-time arguments.

    Attributes:
        centred: whether the mean is subtracted.
        epsilon: what is added to the variance.
        least: that the variance counts for; 0 where nothing bounds it.
        added: what is added to the deviation.
        batched: whether each batch has parameters of its own.
        parts: of equal columns, of a row; the first loads.
    """

    centred: bool = True
    epsilon: float = 0.0
    least: float = 0.0
    added: float = 0.0
    batched: bool = False
    parts: int = 1


def norm_tile(span: int, columns: int, spans: int) -> NormTile:
    """The tile whose threads have about so many spans of a row each.

    Args:
        span: adjacent columns that a thread reads at once.
        columns: of a row, MOST_NORMALISED at most.
        spans: of a thread; more where a row would have too many threads, or where threads would have no column.
    """
    row_threads = FEWEST
    while row_threads < MOST_THREADS and row_threads * spans * span < columns:
        row_threads *= 2
    if spans > 1 and span == VECTOR:
        row_threads = min(_fewer(row_threads, span, columns), key=lambda threads: _beyond(threads, span, columns))
    return NormTile(max(THREADS // row_threads, 1), row_threads, span, -(-columns // (row_threads * span)))


def across_tile(span: int, columns: int) -> NormTile:
    """The tile whose warps read neighbouring rows, of which a column is a line of memory or a part of one.

    Args:
        span: adjacent columns of a thread, which parameters are read by at once.
        columns: of a row, MOST_ACROSS at most.
    """
    row_threads = FEWEST
    while row_threads < MOST_ACROSS_THREADS and row_threads * MOST_ELEMENTS < columns:
        row_threads *= 2
    rows = min(WARP, BLOCK_THREADS // row_threads)
    return NormTile(rows, row_threads, span, -(-columns // (row_threads * span)), across=True)


def _fewer(row_threads: int, span: int, columns: int) -> list[int]:
    """So many threads, and fewer whose registers hold a row."""
    found = [row_threads]
    while found[-1] > FEWEST and columns <= found[-1] // 2 * MOST_SPANS * span:
        found.append(found[-1] // 2)
    return found


def _beyond(row_threads: int, span: int, columns: int) -> int:
    """Columns of a row's threads that do not exist."""
    return -columns % (row_threads * span)
