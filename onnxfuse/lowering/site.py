"""One site with every decision about it: the fusion, its axes, the plans of both strategies, and which is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.op_names import FUSED_GEMM, FUSED_GEMM_ON
from onnxfuse.graph.packed_data import Packing
from onnxfuse.graph.transposed_data import Order
from onnxfuse.ir.fusion import Pointwise
from onnxfuse.patterns import Match
from onnxfuse.schedule.strategy import Strategy, Times
from onnxfuse.schedule.variant import AnyPlan, AnyVariant, ProductPlan


@dataclass(frozen=True)
class Implementation:
    """One way to write a site into the model.

    Attributes:
        graph: the scope that it lies in.
        match: the nodes.
        kind: of the fused node, FUSED_GEMM, FUSED_POINTWISE, FUSED_ATTENTION or FUSED_CACHE.
        retained: indices of the nodes that stay, right before the fused node: the products that it reads.
        fusion: what it computes.
        mapping: the axes of its loops.
        plans: of each architecture.
        transposed: the weights that are stored otherwise than the model has them, and how.
    """

    graph: Graph
    match: Match
    kind: str
    retained: tuple[int, ...]
    fusion: Pointwise
    mapping: AxisMapping
    plans: tuple[AnyPlan, ...]
    transposed: Mapping[str, Order] = field(default_factory=dict)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The nodes that the fused node stands for."""
        return tuple(index for index in self.match.nodes if index not in self.retained)

    @property
    def variants(self) -> Iterator[tuple[DeviceSpec, AnyVariant]]:
        """Every kernel, in the order in which a launch tries them."""
        for plan in self.plans:
            for variant in plan.tried:
                yield plan.device, variant


@dataclass(frozen=True)
class Site:
    """One fusion with every decision about it.

    Attributes:
        plans: of the implementation with the product in the kernel; none where there is no such kernel.
        epilogue_only: the implementation that leaves the product an ordinary node; None where there is none.
        strategy: which implementation the model gets.
        estimates: the strategies' times on each architecture, at every number of rows that its plan was made for.
        timings: the measured times, in words.
        transposed: the weights that the fusion reads otherwise than the model stores them, and how.
        as_stored: the same site of weights as the model stores them, of any strategy, or why there is none; None where
            all are so.
        whole: the only implementation of a site of two products and a softmax, or of none; None for all others.
        only: the architecture whose GPUs run the kernel, where the nodes that it stands for run on all others.
    """

    graph: Graph
    match: Match
    fusion: Pointwise
    mapping: AxisMapping
    plans: tuple[ProductPlan, ...]
    epilogue_only: Implementation | None = None
    strategy: Strategy = Strategy.ONE_KERNEL
    estimates: Mapping[DeviceSpec, tuple[Times, ...]] = field(default_factory=dict)
    timings: str = ""
    transposed: Mapping[str, Order] = field(default_factory=dict)
    as_stored: Site | NotFusable | None = None
    whole: Implementation | None = None
    only: str | None = None

    @property
    def is_left_alone(self) -> bool:
        """Whether the library is faster than every kernel."""
        return self.strategy is Strategy.LEFT_ALONE

    @property
    def opens_ops(self) -> bool:
        """Whether it holds the sums of an op that was taken apart: its own nodes are not those of the model."""
        return any(index in self.graph.opened_sums for index in self.match.nodes)

    @property
    def packs_integers(self) -> bool:
        """Whether it reads integers of a DequantizeLinear otherwise than the model stores them."""
        return any(isinstance(order, Packing) for order in self.transposed.values())

    @property
    def implementation(self) -> Implementation:
        """What the model gets."""
        return (
            self.epilogue_only
            if self.strategy is Strategy.EPILOGUE_ONLY and self.epilogue_only is not None
            else self.one_kernel
        )

    @property
    def one_kernel(self) -> Implementation:
        """The implementation with the product in the kernel."""
        if self.whole is not None:
            return self.whole
        kind = FUSED_GEMM if self.only is None else FUSED_GEMM_ON[self.only]
        plans = tuple(plan for plan in self.plans if self.only in (None, plan.device.arch))
        return Implementation(self.graph, self.match, kind, (), self.fusion, self.mapping, plans, self.transposed)
