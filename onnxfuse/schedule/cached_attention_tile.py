"""The kernel of one token over a cache of keys and values: what its text depends on, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.dtypes import DType
from onnxfuse.ir.fusion import Step
from onnxfuse.schedule.kernel_spec import Access, QuantizedAccess

LANES = 32
WIDTH = 8  # elements of one access
BARRIER_BYTES = 8
SUM_BYTES = 4


@dataclass(frozen=True)
class CachedAttentionSpec:
    """Everything but its tile that the text depends on; how many sequences and what room they have the run tells.

    Attributes:
        dtype: of all tensors but the lengths.
        heads: of the query.
        kv_heads: of keys and values, each for as many of the query's.
        head: columns of one.
        rotary: columns of a head that are turned by the position; 0 for none.
        interleaved: neighbours are turned together, not columns half of the turned ones apart.
        scale: of the products of query and keys.
        softcap: bound of the scores, by a tanh; 0 for none.
        window: keys that a token looks at, its own the last; 0 for all.
        epsilon: of the RMS norm of each head of query and key; 0 for none.
        sink: each head has one more score, of which no value is.
        loads: every input, in the node's order.
        outs: the result, and the cache of keys and of values.
    """

    dtype: DType
    heads: int
    kv_heads: int
    head: int
    rotary: int
    interleaved: bool
    scale: float
    softcap: float
    window: int
    epsilon: float = 0.0
    sink: bool = False
    loads: tuple[Access, ...] = ()
    outs: tuple[Access, ...] = ()
    checked: bool = True
    checks_outs: bool = True

    @property
    def group(self) -> int:
        """Heads of the query that share keys and values."""
        return self.heads // self.kv_heads

    @property
    def math(self) -> str:
        """How both products are computed, as `KernelSpec.math` names it."""
        return self.dtype.name

    @property
    def factors(self) -> tuple[Access, ...]:
        """None that a launch rule knows: the bridge looks at the addresses."""
        return ()

    @property
    def factor_alignments(self) -> tuple[int, int]:
        """None."""
        return 0, 0

    @property
    def quantized_access(self) -> QuantizedAccess | None:
        """None: nothing is quantized."""
        return None

    @property
    def library(self) -> str:
        """None multiplies."""
        return "none"

    @property
    def steps(self) -> tuple[Step, ...]:
        """None: scores have a scale and a bound alone."""
        return ()


@dataclass(frozen=True)
class CachedAttentionTile:
    """The shape of one thread block's work.

    Attributes:
        warps: of a block; each takes 16 keys in turn.
        splits: blocks of a cluster that share the keys of a group of heads.
        residents: blocks of a multiprocessor.
    """

    warps: int
    splits: int
    residents: int

    @property
    def threads(self) -> int:
        """Those of all warps."""
        return self.warps * LANES

    @property
    def block_m(self) -> int:
        """Tokens of one cluster."""
        return 1

    @property
    def block_n(self) -> int:
        """Groups of heads of one cluster."""
        return 1

    def __str__(self) -> str:
        return f"{self.warps} warps cluster {self.splits}"


def shared_bytes(spec: CachedAttentionSpec, tile: CachedAttentionTile) -> int:
    """Of one block: the query's heads, what each warp found, in a cluster each block, and roots of the norms."""
    columns = -(-spec.head // (4 * WIDTH)) * 4 * WIDTH + WIDTH
    found = tile.warps * spec.group * (2 + spec.head + 8) * SUM_BYTES
    share = (spec.group * spec.head + -(-spec.group // 2) * 4) * SUM_BYTES
    shares = tile.splits * share + BARRIER_BYTES if tile.splits > 1 else 0
    roots = (spec.group + 1) * SUM_BYTES if spec.epsilon else 0
    return spec.group * columns * spec.dtype.bytes + found + shares + roots
