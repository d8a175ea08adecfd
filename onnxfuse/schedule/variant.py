"""What a plan is made of: kernels with the rows that they are for, and the tiles that were not taken."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from onnxfuse.analysis.vector_width import EpilogueWidths, Widths
from onnxfuse.device import DeviceSpec
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.attention_tile import AttentionSpec
from onnxfuse.schedule.cached_attention_tile import CachedAttentionSpec
from onnxfuse.schedule.kernel_family import Candidate, KernelFamily, Problem, Sizes
from onnxfuse.schedule.kernel_spec import FACTORS, KernelSpec
from onnxfuse.schedule.library_tile import LibrarySpec
from onnxfuse.schedule.norm_tile import NormSpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec

CARRIED = 1.02  # where the library is faster at all rows, a model need not carry kernels beside: the epilogue only
SLOWER = "slower by the cost model"
AnySpec = KernelSpec | PointwiseSpec | LibrarySpec | AttentionSpec | CachedAttentionSpec
Spec = TypeVar("Spec", bound=AnySpec, covariant=True)
Rows = tuple[int, int]  # the first and the last of a range
TensorWidths = TypeVar("TensorWidths", bound=EpilogueWidths, covariant=True)


@dataclass(frozen=True)
class Variant(Generic[Spec]):
    """A kernel and the sizes that it is for, `min_m <= m <= max_m`; of n, where the plan is by that."""

    family: KernelFamily
    spec: Spec
    tile: Any
    min_m: int
    max_m: int
    by: str = "m"

    def __str__(self) -> str:
        widths = " ".join(
            f"{name} x{each.width}{' copied' if each.copied else ''}"
            for name, each in zip(FACTORS, self.spec.factors, strict=False)
        )
        sizes = f"{self.by} {self.min_m}..{self.max_m if self.max_m < MAX_M else ''}  {self.tile}"
        where = ", where a tensor lies so" if self.spec.checked else ""
        return f"{sizes}  {widths}{where}" if widths else sizes


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not taken, and why."""

    tile: Any
    reason: str


@dataclass(frozen=True)
class Ranked:
    """Every legal tile for one problem, with its estimated microseconds, the fastest first.

    Attributes:
        copying: of the fastest tile's microseconds, those for narrow copies.
        risk: microseconds to expect beside them, where only the run knows whether wider copies are legal.
        library: microseconds with the library's product, where the plan takes that; else infinite.
    """

    problem: Problem
    tiles: tuple[tuple[float, Candidate], ...]
    copying: float = 0.0
    risk: float = 0.0
    library: float = math.inf

    @property
    def one_kernel(self) -> float:
        """Microseconds of the fused node."""
        return min(self.tiles[0][0] + self.risk, self.library * CARRIED)

    @property
    def size(self) -> int:
        """The size that kernels are chosen by."""
        return int(self.problem.size)


@dataclass(frozen=True)
class Plan(Generic[Spec, TensorWidths]):
    """The kernels of one fusion on one architecture, in the order in which a launch tries them.

    The first variants use the widest accesses; the last looks at every tensor by itself and fits any pointer.

    Attributes:
        widths: the widest legal accesses, which the variants keep to.
        rejected: candidates that were not taken.
        ranked: the legal tiles at some numbers of rows; none where there is nothing to choose.
        sizes: what is known of the product's.
        library: kernels behind the library's product, for every number of rows; none where it cannot make it.
        library_rows: the ranges of rows that take them; elsewhere, and in a process without the library, the variants.
    """

    device: DeviceSpec
    variants: tuple[Variant[Spec], ...]
    widths: TensorWidths
    rejected: tuple[Rejected, ...] = ()
    ranked: tuple[Ranked, ...] = ()
    sizes: Sizes | None = None
    library: tuple[LibraryVariant, ...] = ()
    library_rows: tuple[Rows, ...] = ()

    def __hash__(self) -> int:
        """Of what few plans share: one of all tiles takes longer than much that is kept by plans."""
        return hash((self.device, self.widths, self.variants[:1]))

    @property
    def tried(self) -> tuple[AnyVariant, ...]:
        """Every kernel, in the order in which a launch tries them."""
        behind_library = tuple(
            replace(each, min_m=max(low, each.min_m), max_m=min(high, each.max_m))
            for low, high in self.library_rows
            for each in self.library
            if max(low, each.min_m) <= min(high, each.max_m)
        )
        own: tuple[AnyVariant, ...] = self.variants  # type: ignore[assignment]
        return (*behind_library, *own)

    def __str__(self) -> str:
        rows = [f"{self.device.arch:<7} {variant}" for variant in self.tried]
        reasons = Counter(entry.reason for entry in self.rejected)
        rows += [f"{'':<7} {count} {reason}{self._runner_up(reason)}" for reason, count in reasons.items()]
        return "\n".join(rows)

    @property
    def details(self) -> str:
        """The same, and every candidate that was rejected."""
        rejected = (f"{'':<7} not {entry.tile}: {entry.reason}" for entry in self.rejected)
        return "\n".join((str(self), *rejected))

    def _runner_up(self, reason: str) -> str:
        """Of the tiles that are taken for no number of rows, the one that comes nearest to the best for some."""
        slower = {entry.tile for entry in self.rejected if entry.reason == reason == SLOWER}
        behind = [
            (time, each.tile, entry) for entry in self.ranked for time, each in entry.tiles if each.tile in slower
        ]
        if not behind:
            return ""
        time, tile, entry = min(behind, key=lambda each: each[0] / each[2].tiles[0][0])
        return f"; next {tile}, at {entry.problem.by} {entry.size} {time:.1f} us against {entry.tiles[0][0]:.1f}"


ProductVariant = Variant[KernelSpec]
PointwiseVariant = Variant[PointwiseSpec]
NormVariant = Variant[NormSpec]
LibraryVariant = Variant[LibrarySpec]
AttentionVariant = Variant[AttentionSpec]
CachedVariant = Variant[CachedAttentionSpec]
ProductPlan = Plan[KernelSpec, Widths]
PointwisePlan = Plan[PointwiseSpec, EpilogueWidths]
NormPlan = Plan[NormSpec, EpilogueWidths]
AttentionPlan = Plan[AttentionSpec, Widths]
CachedPlan = Plan[CachedAttentionSpec, EpilogueWidths]
AnyVariant = ProductVariant | PointwiseVariant | LibraryVariant | AttentionVariant | CachedVariant | NormVariant
AnyPlan = ProductPlan | PointwisePlan | AttentionPlan | CachedPlan | NormPlan
