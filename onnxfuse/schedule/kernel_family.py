"""What every family of kernels answers: the one interface that planning, packing and reports see.

A family is one hand-written kernel with its tiles. `families.py` is the registry; `kernels/emit.py` has the text of
each under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

# A number, or an array with one for each of several numbers of rows; of their union mypy allows no arithmetic.
Count = Any
Amount = Any

BATCHES = (1, 2, 4, 8, 16)  # that columns of all batches may be of
SAMPLED = (1, 8, 16, 32, 64, 77, 154, 257, 300, 514, 1024, 1500, 2048, 4096, 8192, 16384)
SAMPLED_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # where they alone are not known
NARROWEST = 16  # columns of one such batch
EARLY_SINCE = 90  # compute capability, of programmatic dependent launch
ANY_DEPTH = 2**32 - 1  # however many tiles


class AnyTile(Hashable, Protocol):
    """The shape of one thread block's work; in words, `str(tile)` tells a family's tiles apart."""

    @property
    def block_m(self) -> int:
        """Rows of the output tile."""

    @property
    def block_n(self) -> int:
        """Columns of the output tile, of each part."""

    @property
    def threads(self) -> int:
        """Threads of one block."""


@dataclass(frozen=True)
class MapRule:
    """How the launch describes one tensor to TMA. Elements are 16 or 32 bits, those outside are zero.

    A map has rank 3: the contiguous axis, the other axis, the batch (extent 1 where its stride is 0). That of a factor
    whose batches lie in runs has rank 4: a run's batches, the runs. That of an output walked in two levels has rank 5:
    the columns of a run, its rows, the runs of columns, those of rows, the batch.

    Attributes:
        tensor: `lhs`, `rhs` or `out`.
        index: which part or output.
        rows_contiguous: the contiguous axis is the tensor's rows (k of an [n, k] rhs, m of a [k, m] lhs), not its
            columns.
        swizzle: bytes of the swizzle's span: 0, 32, 64 or 128.
        box_inner: elements of the box along the contiguous axis.
        box_outer: elements of the box along the other axis.
    """

    tensor: str
    index: int
    rows_contiguous: bool
    swizzle: int
    box_inner: int
    box_outer: int


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        block_m: rows that one block, or one cluster that shares loads, computes; likewise `block_n` columns.
        threads: of one block.
        shared_bytes: dynamic shared memory of one block.
        cluster: 0 for one block a tile; blocks of a cluster for a persistent grid.
        maps: tensor maps of the kernel's second argument; None is one that says nothing.
        early_depth: 0 for a kernel that does not wait for the end of the one before it by itself; otherwise how much k
            the tiles of one block of a persistent grid, or all of another, may have for it to start early.
        full_early_depth: the same, where it is more, of a persistent grid that leaves less than a quarter of the
            multiprocessors idle.
    """

    block_m: int
    block_n: int
    threads: int
    shared_bytes: int
    cluster: int = 0
    maps: tuple[MapRule | None, ...] = ()
    early_depth: int = 0
    full_early_depth: int = 0


def any_depth(device: DeviceSpec) -> int:
    """The `early_depth` of a kernel that starts early wherever the chip can launch it beside the end of another."""
    return ANY_DEPTH if device.arch != PTX and device.capability >= EARLY_SINCE else 0


@dataclass(frozen=True)
class Problem:
    """Sizes that tiles are priced for: one number of rows or columns, or an array of them.

    Attributes:
        m: known, or one of several.
        n: may depend on the rows, and so may k.
        batch: counts those with an rhs of their own; of columns of all batches, as many as they are.
        guessed: n or the batch may be larger at run time.
        by: which size kernels are chosen by, `m` or `n`.
        columns: of all batches together, where those are what kernels are chosen by and n is known.
        shared_lhs: all batches are of one lhs, as images of a convolution's weight.
        stored_k: of a weight [n, k] that has zeros behind its rows, elements from row to row; else 0.
        bands: of the rows, with operands of their own; no tile has rows of two.
    """

    m: Any
    n: Any
    k: Any
    batch: Any = 1
    guessed: bool = False
    by: str = "m"
    columns: Any = None
    shared_lhs: bool = False
    stored_k: int = 0
    bands: Any = 1

    @property
    def size(self) -> Any:
        """The size that kernels are chosen by."""
        columns = self.n if self.columns is None else self.columns
        return columns if self.by == "n" else self.m

    def rhs_row(self, order: str) -> Any:
        """Elements from row to row of rhs, [k, n] or [n, k]; of parts beside each other more, and as round a number."""
        return (self.stored_k or self.k) if order == "nk" else self.n

    def in_tiles(self, rows: int) -> Problem:
        """The problem of as many rows as tiles of so many have, full or not."""
        return replace(self, m=self.bands * -(-self.m // self.bands // rows) * rows, bands=1)


@dataclass(frozen=True)
class Sizes:
    """What is known of a site's sizes before the run; None where only the run knows.

    Attributes:
        batch: counts those with an rhs of their own, but for those that only the run knows.
        guessed: the batch may be larger at run time.
        typical: an unknown n or k where m is smaller, an unknown k where n is.
        shared_lhs: all batches are of one lhs.
        stored_k: of a weight [n, k] that has zeros behind its rows, elements from row to row; else 0.
        bands: batches that share rhs and have operands of their own; 0 where only the run knows how many.
        band: rows of each; 0 where only the run knows.
    """

    m: int | None
    n: int | None
    k: int | None
    batch: int
    guessed: bool
    typical: int
    shared_lhs: bool = False
    stored_k: int = 0
    bands: int = 1
    band: int = 0

    @property
    def by(self) -> str:
        """Which size kernels are chosen by: `m`, or `n` where that or the batch alone is not known, as of images."""
        return "n" if self.m is not None and (self.n is None or self.guessed) else "m"

    @property
    def label(self) -> str:
        """The same in words: of batches that only the run knows, the columns count together."""
        return "batch*n" if self.by == "n" and self.guessed else self.by

    @property
    def known(self) -> int | None:
        """The size that kernels are chosen by; None where only the run knows."""
        return None if self.by == "n" else self.m

    @property
    def sampled(self) -> Sequence[int]:
        """The size that kernels are chosen by, or some that it may be."""
        if self.known is not None:
            return (self.known,)
        return SAMPLED if self.by == "m" or self.n is None else [self.n * count for count in SAMPLED_BATCHES]

    def at(self, size: Count) -> Problem:
        """The problem with so many rows, or columns: what else is not known is a sequence as well."""
        unknown = max(size, self.typical) if isinstance(size, int) else np.maximum(size, self.typical)
        m, k, shared = self.m or size, self.k or unknown, self.shared_lhs
        problem = Problem(m, size, k, self.batch, self.guessed, self.by, shared_lhs=shared, stored_k=self.stored_k)
        if self.by == "m":
            of_bands = replace(problem, bands=self._bands(size))
            return replace(of_bands, n=self.n or unknown, guessed=self.guessed or self.n is None)
        if self.n is None:
            return problem
        batches = np.maximum(np.ceil(size / self.n), 1)
        return replace(problem, n=self.n, batch=self.batch * batches, guessed=False, columns=size)

    def guesses(self, size: Count) -> tuple[Problem, ...]:
        """The problems that so many rows, or columns, may be of; several where more is not known."""
        at, batches = self.at(size), BATCHES if self.guessed else (1,)
        if self.n is not None and not self.bands and not self.band:
            return tuple(replace(at, bands=np.minimum(count, size)) for count in BATCHES)
        if self.n is not None:
            return (at,)
        if self.by == "n":
            return tuple(self._shared(size, count) for count in batches)
        return tuple(replace(at, n=n, batch=at.batch * count) for n in (at.n, size) for count in batches)

    def _bands(self, size: Count) -> Count:
        """Batches that so many rows are of, where that is known."""
        return self.bands or (np.maximum(-(-size // self.band), 1) if self.band else 1)

    def _shared(self, size: Count, batches: int) -> Problem:
        """The problem of so many columns of all batches together."""
        columns = np.maximum(-(-size // batches), np.minimum(size, NARROWEST))
        return replace(self.at(columns), batch=self.batch * size / columns)


class Tiles:
    """Tiles of one family in place of one: an attribute is that of all, [tiles, 1], behind which sizes have their axis.

    What a family says of the cost of one tile it says so of many at once: NumPy's calls cost more than their numbers.
    """

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = each

    def __getattr__(self, name: str) -> Any:
        own = [getattr(tile, name) for tile in self.each]
        found = np.array(own)[:, None] if isinstance(own[0], (int, float)) else Tiles(own)
        setattr(self, name, found)
        return found


def of_each(tile: Any, trait: Callable[[Any], float]) -> Amount:
    """What is to be found out of one tile at a time, of one or of several."""
    return np.array([trait(each) for each in tile.each])[:, None] if isinstance(tile, Tiles) else trait(tile)


@dataclass(frozen=True)
class Flow:
    """How a tile's blocks run and read rhs; of several tiles, [tiles, 1].

    Attributes:
        blocks: that run at once on the whole chip.
        depth: of k, that a block has on its way at any time.
        early_depth: as its launch has it.
    """

    blocks: Count
    depth: Count
    early_depth: Count = 0


class KernelFamily(Protocol):
    """One hand-written kernel. Its methods are only ever given specs and tiles of its own.

    Attributes:
        name: in code, and in the tables of `kernels/`.
        label: in reports.
        tile_type: the dataclass of its tiles, as a model's description of its kernels names them.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def label(self) -> str: ...  # noqa: D102

    @property
    def tile_type(self) -> type[Any]: ...  # noqa: D102

    def launch(self, spec: Any, tile: Any, device: DeviceSpec) -> Launch:
        """How a legal tile is launched."""

    def access_path(self, role: str, access: Access) -> str:
        """Which way the kernel takes to `lhs`, `rhs`, a `load` or an `out`, in words."""


class ProductFamily(KernelFamily, Protocol):
    """A kernel that multiplies: a plan chooses among its tiles."""

    def candidates(self, spec: KernelSpec, device: DeviceSpec, k: int) -> tuple[Candidate, ...]:
        """The tiles to consider for a product of depth k on a device, legal or not, and how fast each multiplies."""

    def why_not(self, spec: KernelSpec, tile: Any, device: DeviceSpec) -> str | None:
        """Why the kernel cannot run with a tile, or would be slow with it for certain; None if it can."""

    def copied(self, spec: KernelSpec) -> tuple[str, ...]:
        """The factors of which the kernel reads a copy, whose rows begin where it needs them to."""
        return ()

    def read_by(self, spec: KernelSpec) -> KernelSpec:
        """The spec as this kernel's text is made of: with factors copied that have to be."""
        factors = self.copied(spec)
        return replace(spec, copied=factors) if factors else spec

    def early_share(self, spec: KernelSpec, device: DeviceSpec) -> float:
        """Of its time, what a kernel takes that starts early, beyond what its terms and networks say."""
        return 1.0

    def shared_bytes(self, spec: KernelSpec, tile: Any, device: DeviceSpec) -> int:
        """Dynamic shared memory of one block, in bytes."""

    def flow(self, spec: KernelSpec, tile: Any, device: DeviceSpec) -> Flow:
        """How a legal tile reads rhs."""

    def cost(self, entry: Candidate, reads: Flow, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Estimated microseconds; infinite for a tile that is not to be taken.

        Args:
            entry: a tile, or `Tiles`.
            reads: its flow, or theirs.
            spec: the kernel.
            problem: of one size, or of several.
            device: to plan for.
        """

    def launch(self, spec: KernelSpec, tile: Any, device: DeviceSpec) -> Launch:
        """How a legal tile is launched: by default one block a tile."""
        shared = self.shared_bytes(spec, tile, device)
        return Launch(tile.block_m, tile.block_n, tile.threads, shared, early_depth=any_depth(device))

    def copying(self, tile: Any, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
        """Of them, those for copies of single elements through registers, which a library does not need."""
        return 0.0

    def is_on_par(self, tile: Any, m: int) -> bool:
        """Whether no library multiplies m rows faster: the units are the chip's fastest, or memory is what counts."""
        return False

    def is_of_one_depth(self, tile: Any) -> bool:
        """Whether a tile is for products of one k alone."""
        return False

    def alike(self, tile: Any) -> AnyTile:
        """Equal for tiles of which measuring one tells enough of the others."""
        found: AnyTile = tile
        return found


@dataclass(frozen=True)
class Candidate:
    """A tile that a plan may take.

    Attributes:
        pace: products that a multiprocessor makes in a unit of time with it, relative to the portable kernel's fastest
            tile.
    """

    family: ProductFamily
    tile: Any
    pace: Amount


def costs(
    entries: Sequence[Candidate], flows: Sequence[Flow], spec: KernelSpec, problem: Problem, device: DeviceSpec
) -> NDArray[np.float64]:
    """What the families say that tiles take, microseconds f64[tiles, sizes]."""
    found = np.empty((len(entries), np.size(problem.size)))
    for family in {entry.family: None for entry in entries}:
        own = [index for index, entry in enumerate(entries) if entry.family is family]
        tiles = Candidate(
            family, Tiles([entries[index].tile for index in own]),
            np.array([entries[index].pace for index in own])[:, None],
        )  # fmt: skip
        reads = Flow(*(np.array([[getattr(flows[index], each.name)] for index in own]) for each in fields(Flow)))
        found[own] = family.cost(tiles, reads, spec, problem, device)
    return found
