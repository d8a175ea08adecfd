"""What was fused, what was not, and why: the answer of `optimize` and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxfuse.axes import AxisMapping
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Pointwise
from onnxfuse.plan import tile_text
from onnxfuse.pointwise_plan import PointwisePlan
from onnxfuse.site import AnyPlan, Site
from onnxfuse.vector_width import Widths


@dataclass(frozen=True)
class OperandReport:
    """One tensor of a fusion: how it is reached and what limits the width of an access."""

    name: str
    kind: str
    width: int
    reason: str


@dataclass(frozen=True)
class FusedSite:
    """One fused product.

    Attributes:
        nodes: names of the original nodes that the kernel replaces.
        axes: the axis mapping in einops notation.
        tier: whether the product is in the kernel or stays a node of its own.
        kernel: the kernels by architecture and range of m, in words.
        timings: what `--tune` measured, in words; empty without it.
        text: the fusion as the IR prints it.
    """

    anchor: str
    pattern: str
    features: tuple[str, ...]
    nodes: tuple[str, ...]
    axes: str
    operands: tuple[OperandReport, ...]
    tier: str
    kernel: str
    timings: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """The report's JSON of one site."""
        return {
            "anchor": self.anchor,
            "pattern": self.pattern,
            "features": list(self.features),
            "nodes": list(self.nodes),
            "axes": self.axes,
            "operands": [vars(operand) for operand in self.operands],
            "tier": self.tier,
            "kernel": self.kernel,
            "timings": self.timings,
        }


@dataclass(frozen=True)
class SkippedSite:
    """One product that was left alone: a stable reason, the node at fault and a sentence."""

    anchor: str
    reason: str
    node: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """The report's JSON of one site."""
        return dict(vars(self))


@dataclass(frozen=True)
class Report:
    """The outcome for a whole model."""

    fused: tuple[FusedSite, ...]
    skipped: tuple[SkippedSite, ...]
    nodes_before: int
    nodes_after: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {
            "fused": [site.to_dict() for site in self.fused],
            "skipped": [site.to_dict() for site in self.skipped],
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
        }


def skipped_site(anchor: str, refusal: NotFusable) -> SkippedSite:
    """The report's line for a refusal."""
    return SkippedSite(anchor, refusal.reason, refusal.node or anchor, refusal.detail)


def fused_site(site: Site, nodes: tuple[str, ...]) -> FusedSite:
    """The report's entry for a fusion; `nodes` are the names of those that its kernel replaces."""
    fusion = site.fusion
    return FusedSite(
        anchor=fusion.anchor,
        pattern=fusion.pattern,
        features=fusion.features,
        nodes=nodes,
        axes=axes_text(fusion),
        operands=_operands(fusion, site.mapping, site.widths),
        tier=site.tier.value,
        kernel="; ".join(_one_line(plan) for plan in site.form.plans),
        timings=site.timings,
        text=str(fusion),
    )


def axes_text(fusion: Pointwise) -> str:
    """The fusion as an einops equation, `b m k, k (p n), (p n) -> b m n`."""
    inputs = ", ".join(tensor.einops for tensor in fusion.inputs)
    return f"{inputs} -> {', '.join(tensor.einops for tensor in fusion.outputs)}"


def _operands(fusion: Fusion, mapping: AxisMapping, widths: Widths) -> tuple[OperandReport, ...]:
    rows = [("lhs", fusion.lhs.name, widths.lhs)]
    rows += [("rhs", rhs.name, widths.rhs) for rhs in fusion.rhs]
    rows += [
        (mapping.kind(operand), operand.name, width)
        for operand, width in zip(fusion.operands, widths.operands, strict=True)
    ]
    rows += [("out", out.tensor.name, width) for out, width in zip(fusion.outs, widths.outs, strict=True)]
    return tuple(OperandReport(name, kind, width.elements, width.reason) for kind, name, width in rows)


def _one_line(plan: AnyPlan) -> str:
    if isinstance(plan, PointwisePlan):
        return f"{plan.device.arch}: {', '.join(dict.fromkeys(str(variant.tile) for variant in plan.variants))}"
    tiles = dict.fromkeys(tile_text(variant.tile) for variant in plan.variants)
    return f"{plan.device.arch}: {plan.variants[0].spec.math} {', '.join(tiles)}"
