"""What was fused, what was not, and why: the answer of `optimize` and `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnxfuse.access_path import kernel_name, lhs_path, load_path, out_path, rhs_path
from onnxfuse.axes import AxisMapping, static_size
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Pointwise, Tensor
from onnxfuse.kernel_spec import KernelSpec
from onnxfuse.pointwise_plan import PointwisePlan
from onnxfuse.pointwise_tile import PointwiseSpec
from onnxfuse.site import AnyPlan, AnyVariant, Form, Site
from onnxfuse.tile_candidates import tile_text
from onnxfuse.vector_width import Width, analyse, is_turned, operand_widths, out_widths

LOOPS = ("batch", "m", "n", "k")  # fields of an AxisMapping


@dataclass(frozen=True)
class OperandReport:
    """One tensor of a fusion: how it is reached and what limits the width of an access.

    Attributes:
        kind: `lhs`, `rhs`, `out`, or what an operand is to the tile: `scalar`, `row`, `column` or `tile`.
        width: elements of one access.
        bytes: of one access.
        path: the way that each kernel of the plans takes, by the kernel's name.
        reason: what limits the width.
    """

    name: str
    kind: str
    width: int
    bytes: int
    path: Mapping[str, str]
    reason: str

    def __str__(self) -> str:
        kernels: dict[str, list[str]] = {}
        for kernel, path in self.path.items():
            kernels.setdefault(path, []).append(kernel)
        ways = "; ".join(f"{', '.join(names)}: {path}" for path, names in kernels.items())
        return f"{self.kind:<7} x{self.width:<2} {self.bytes:>2} B  {self.name}: {self.reason}; {ways}"


@dataclass(frozen=True)
class FusedSite:
    """One fused product.

    Attributes:
        nodes: names of the original nodes that the kernel replaces.
        axes: the axis mapping in einops notation.
        sizes: of the product's loops `batch`, `m`, `n` and `k`: 1 for one without axes, None where only the run knows.
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
    sizes: Mapping[str, int | None]
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
            "sizes": dict(self.sizes),
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
        sizes={name: static_size(fusion, getattr(site.mapping, name)) for name in LOOPS},
        operands=_operands(site.form),
        tier=site.tier.value,
        kernel="; ".join(_one_line(plan) for plan in site.form.plans),
        timings=site.timings,
        text=str(fusion),
    )


def axes_text(fusion: Pointwise) -> str:
    """The fusion as an einops equation, `b m k, k (p n), (p n) -> b m n`."""
    inputs = ", ".join(tensor.einops for tensor in fusion.inputs)
    return f"{inputs} -> {', '.join(tensor.einops for tensor in fusion.outputs)}"


def _operands(form: Form) -> tuple[OperandReport, ...]:
    """Every tensor with its access in the widest variants of the plans."""
    specs: dict[str, KernelSpec | PointwiseSpec] = {}
    for plan in form.plans:
        for variant in _widest(plan):
            specs.setdefault(kernel_name(variant.tile), variant.spec)
    fusion, mapping, spec = form.fusion, form.mapping, next(iter(specs.values()))
    rows = _product_rows(fusion, mapping, specs) if isinstance(fusion, Fusion) else []
    for index, (operand, width) in enumerate(zip(fusion.operands, operand_widths(fusion, mapping), strict=True)):
        load = next(place for place, load in enumerate(fusion.loads) if load.operand == index)
        path = {kernel: load_path(kernel, each.loads[load]) for kernel, each in specs.items()}
        taken = spec.loads[load].width
        reason = _why_less(form, operand, width, taken)
        rows.append(_row(mapping.kind(operand), operand, width, taken, path, reason))
    for index, (out, width) in enumerate(zip(fusion.outs, out_widths(fusion, mapping), strict=True)):
        path = {kernel: out_path(kernel, each.outs[index]) for kernel, each in specs.items()}
        taken = spec.outs[index].width
        rows.append(_row("out", out.tensor, width, taken, path, _why_less(form, out.tensor, width, taken)))
    return tuple(rows)


def _product_rows(
    fusion: Fusion, mapping: AxisMapping, specs: Mapping[str, KernelSpec | PointwiseSpec]
) -> list[OperandReport]:
    widths = analyse(fusion, mapping)
    products = {kernel: spec for kernel, spec in specs.items() if isinstance(spec, KernelSpec)}
    lhs = {kernel: lhs_path(kernel, spec) for kernel, spec in products.items()}
    rhs = {kernel: rhs_path(kernel, spec) for kernel, spec in products.items()}
    rows = [_row("lhs", fusion.lhs, widths.lhs, widths.lhs.elements, lhs)]
    return [*rows, *(_row("rhs", each, widths.rhs, widths.rhs.elements, rhs) for each in fusion.rhs)]


def _widest(plan: AnyPlan) -> Iterator[AnyVariant]:
    """The variants that read and write as the first does; those behind them take over where they may not."""
    first = plan.variants[0].spec
    for variant in plan.variants:
        same = (variant.spec.loads, variant.spec.outs) == (first.loads, first.outs)
        if same and not variant.spec.checked and _product_widths(variant.spec) == _product_widths(first):
            yield variant


def _product_widths(spec: KernelSpec | PointwiseSpec) -> tuple[int, ...]:
    return (spec.lhs_width, spec.rhs_width) if isinstance(spec, KernelSpec) else ()


def _row(
    kind: str, tensor: Tensor, width: Width, taken: int, path: Mapping[str, str], reason: str = ""
) -> OperandReport:
    return OperandReport(tensor.name, kind, taken, taken * tensor.dtype.bytes, path, reason or width.reason)


def _why_less(form: Form, tensor: Tensor, width: Width, taken: int) -> str:
    """Why the kernel behind a product takes fewer elements than it may; empty where a kernel takes them all."""
    if taken == width.elements:
        return ""
    if is_turned(form.fusion, tensor, form.mapping):
        return "m is its contiguous axis, and the kernel goes along n"
    return "a thread owns no more columns"


def _one_line(plan: AnyPlan) -> str:
    if isinstance(plan, PointwisePlan):
        return f"{plan.device.arch}: {', '.join(dict.fromkeys(str(variant.tile) for variant in plan.variants))}"
    tiles = dict.fromkeys(tile_text(variant.tile) for variant in plan.variants)
    return f"{plan.device.arch}: {plan.variants[0].spec.math} {', '.join(tiles)}"
