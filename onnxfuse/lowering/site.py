"""One site with every decision about it: the fusion, its axes, the plans of both tiers, and the tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.device import DeviceSpec
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.op_names import FUSED_GEMM
from onnxfuse.ir.fusion import Fusion, Pointwise
from onnxfuse.patterns import Match
from onnxfuse.schedule.strategy import Tier, Times
from onnxfuse.schedule.variant import AnyPlan, AnyVariant, ProductPlan


@dataclass(frozen=True)
class Form:
    """One way to write a site into the model.

    Attributes:
        graph: the scope that it lies in.
        match: the nodes.
        kind: of the fused node, FUSED_GEMM or FUSED_POINTWISE.
        kept: indices of the nodes that stay, right before the fused node: the products that it is behind.
        fusion: what it computes.
        mapping: the axes of its loops.
        plans: of each architecture.
    """

    graph: Graph
    match: Match
    kind: str
    kept: tuple[int, ...]
    fusion: Pointwise
    mapping: AxisMapping
    plans: tuple[AnyPlan, ...]

    @property
    def replaced(self) -> tuple[int, ...]:
        """The nodes that the fused node stands for."""
        return tuple(index for index in self.match.nodes if index not in self.kept)

    @property
    def variants(self) -> Iterator[tuple[DeviceSpec, AnyVariant]]:
        """Every kernel, in the order in which a launch tries them."""
        for plan in self.plans:
            for variant in plan.variants:
                yield plan.device, variant


@dataclass(frozen=True)
class Site:
    """One fusion with every decision about it.

    Attributes:
        plans: of the form with the product in the kernel; none where there is no such kernel.
        behind: the form that leaves the product an ordinary node; None where there is no such form.
        tier: which form the model gets.
        estimates: the tiers' times on each architecture, at every number of rows that its plan was made for.
        timings: the measured times, in words.
    """

    graph: Graph
    match: Match
    fusion: Fusion
    mapping: AxisMapping
    plans: tuple[ProductPlan, ...]
    behind: Form | None = None
    tier: Tier = Tier.ONE_KERNEL
    estimates: Mapping[DeviceSpec, tuple[Times, ...]] = field(default_factory=dict)
    timings: str = ""

    @property
    def form(self) -> Form:
        """What the model gets."""
        return self.behind if self.tier is Tier.BEHIND and self.behind is not None else self.whole

    @property
    def whole(self) -> Form:
        """The form with the product in the kernel."""
        return Form(self.graph, self.match, FUSED_GEMM, (), self.fusion, self.mapping, self.plans)
