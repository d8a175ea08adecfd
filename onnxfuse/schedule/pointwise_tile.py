"""The epilogue-only kernel, whose product another kernel makes: what its text depends on, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.device import DeviceSpec
from onnxfuse.ir.fusion import Step
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_spec import Access, QuantizedAccess

THREADS = 256
REGISTER_BYTES = 4
LONG = 1 << 14  # columns from which rows may be few, as those of whole images: a block's threads are beside each other
COLUMN_THREADS = (32, 16, 8)  # a warp reads at least 8 neighbours' columns, whole lines of memory, of one row


@dataclass(frozen=True)
class PointwiseTile:
    """The shape of one thread block's work.

    Attributes:
        block_m: rows of the tile.
        block_n: columns of the tile.
        span: adjacent columns that one thread owns.
    """

    block_m: int
    block_n: int
    span: int

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return THREADS

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} pointwise, {self.span} columns a thread"


@dataclass(frozen=True)
class PointwiseSpec:
    """Everything but its tile that the text of the kernel depends on; sizes and strides are run-time arguments.

    Attributes:
        loads: what the steps call `op0`, `op1`, ...
        outs: the stored tensors; `out_values` names the value that each stores.
        checked: the kernel looks at the address and the pitches of each load, and reads one that its width does not fit
            element by element.
    """

    loads: tuple[Access, ...]
    outs: tuple[Access, ...]
    steps: tuple[Step, ...]
    out_values: tuple[str, ...]
    checked: bool = False

    @property
    def factors(self) -> tuple[Access, ...]:
        """None: another kernel multiplies."""
        return ()

    @property
    def factor_alignments(self) -> tuple[int, int]:
        """None is asked: there is no product."""
        return 0, 0

    @property
    def quantized_access(self) -> QuantizedAccess | None:
        """None: nothing is quantized."""
        return None

    @property
    def library(self) -> str:
        """Whoever multiplies is no part of the node."""
        return "none"

    @property
    def math(self) -> str:
        """Nothing is multiplied."""
        return ""

    @property
    def checks_outs(self) -> bool:
        """Stores are as wide as the tensors say: of single ones, a span's would lie apart."""
        return False


def span_of(loads: tuple[Access, ...], outs: tuple[Access, ...]) -> int:
    """Adjacent columns of one thread: as many as its widest access moves."""
    return max(access.columns for access in (*loads, *outs))


def tile_for(loads: tuple[Access, ...], outs: tuple[Access, ...], n: int, rows: int) -> PointwiseTile:
    """The tile whose threads own `rows` rows each and which wastes the fewest of n columns; the wider of equals."""
    span = span_of(loads, outs)
    choices = (THREADS,) if n >= LONG else COLUMN_THREADS
    threads = min(choices, key=lambda threads: -(-n // (threads * span)) * threads)
    return PointwiseTile(THREADS // threads * rows, threads * span, span)


def rows_in_flight(loads: tuple[Access, ...], span: int, device: DeviceSpec) -> int:
    """Rows of one thread whose operands it can have in flight at once: a power of two."""
    row_bytes = sum(span * _bytes_in_registers(load) for load in loads if load.kind == "tile")
    rows = calibration(device).pointwise_most_rows
    while rows > 1 and rows * row_bytes > calibration(device).pointwise_bytes_in_flight:
        rows //= 2
    return rows


def _bytes_in_registers(load: Access) -> int:
    """Of one element: one that is loaded alone takes a whole register."""
    return max(load.dtype.bytes, REGISTER_BYTES // load.width)
