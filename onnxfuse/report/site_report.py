"""What was fused, what was not, and why: the answer of `optimize` and `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from onnxfuse.analysis.axis_mapping import static_size
from onnxfuse.analysis.vector_width import Width, is_transposed
from onnxfuse.errors import NotFusable, SettingError
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Fusion, Pointwise, StoredRhs, Tensor
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.report.document import document
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.library import LABEL as LIBRARY
from onnxfuse.schedule.library import rows_text
from onnxfuse.schedule.variant import AnyPlan, AnySpec, AnyVariant

LOOPS = ("batch", "heads", "m", "n", "k", "o")  # fields of an AxisMapping

ROLES = ("lhs", "rhs", "scales", "zeros")  # of what a product reads
OF_ATTENTION = ("heads", "o")  # alone


@dataclass(frozen=True)
class OperandReport:
    """One tensor of a fusion: how it is reached and what limits the width of an access.

    Attributes:
        kind: `lhs`, `rhs`, `out`, `scales` or `zeros` of a quantized rhs, or what an operand is to the tile: `scalar`,
            `row`, `column` or `tile`.
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
        sizes: of the product's loops `batch`, `m`, `n` and `k`, of an attention `heads` and `o` as well: 1 for one
            without axes, None where only the run knows.
        strategy: whether the product is in the kernel or stays a node of its own.
        kernel: the kernels by architecture and range of m, in words.
        timings: what `--tune` measured, in words; empty without it.
        transposed: the weights that are stored in another order than the model has them.
        text: the fusion as the IR prints it.
        nameless: the same without the names of this site, by which equal ones are known.
        only: the architecture whose GPUs run the kernel, of several; None where all do.
    """

    anchor: str
    pattern: str
    features: tuple[str, ...]
    nodes: tuple[str, ...]
    axes: str
    sizes: Mapping[str, int | None]
    operands: tuple[OperandReport, ...]
    strategy: str
    kernel: str
    timings: str
    transposed: tuple[str, ...]
    text: str
    nameless: str
    only: str | None = None

    @property
    def strategy_text(self) -> str:
        """The strategy, and where it holds if not on all architectures."""
        return self.strategy if self.only is None else f"{self.strategy} on {self.only}, left alone elsewhere"

    def fits(self, glob: str) -> bool:
        """Whether a glob is of the product or of one of the nodes."""
        return any(fnmatchcase(name, glob) for name in (self.anchor, *self.nodes))

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
            "tier": self.strategy,
            "only": self.only,
            "kernel": self.kernel,
            "timings": self.timings,
            "transposed": list(self.transposed),
        }


@dataclass(frozen=True)
class SkippedSite:
    """One product that was left alone: a stable reason, the node at fault and a sentence."""

    anchor: str
    reason: str
    node: str
    detail: str

    def fits(self, glob: str) -> bool:
        """Whether a glob is of the product."""
        return fnmatchcase(self.anchor, glob)

    def to_dict(self) -> dict[str, Any]:
        """The report's JSON of one site."""
        return dict(vars(self))


@dataclass(frozen=True)
class Report:
    """The outcome for a whole model.

    Attributes:
        model: the path as it was given; None for a model that was no file.
        architectures: that it was planned for.
        fused: one entry for each fusion.
        skipped: one for each product that was left alone.
        nodes_before: nodes of the model at all depths.
        nodes_after: the same once it is rewritten.
        transposed: the weights that the written model has in another order, by name, and their bytes.
        padding: of those, bytes of zeros that it has behind their rows beside.
        already_fused: fused nodes that the model had before, which stay as they are.
    """

    model: str | None
    architectures: tuple[str, ...]
    fused: tuple[FusedSite, ...]
    skipped: tuple[SkippedSite, ...]
    nodes_before: int
    nodes_after: int
    transposed: Mapping[str, int] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)
    already_fused: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        body = {
            "fused": [site.to_dict() for site in self.fused],
            "skipped": [site.to_dict() for site in self.skipped],
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "already_fused": self.already_fused,
            "transposed": [
                {"name": name, "bytes": size, "padding": self.padding.get(name, 0)}
                for name, size in self.transposed.items()
            ],
        }
        return document("report", self.model, self.architectures, body)

    @property
    def distinct(self) -> list[list[FusedSite]]:
        """Fusions that differ in nothing but names, together; those that are most often first."""
        groups: dict[object, list[FusedSite]] = {}
        for site in self.fused:
            groups.setdefault((site.nameless, site.strategy, site.kernel, site.timings), []).append(site)
        return sorted(groups.values(), key=len, reverse=True)

    def only(self, name: str) -> Report:
        """The same report of the products that a name or a glob is of: an anchor, or a node of a fusion.

        Raises:
            SettingError: there is none.
        """
        anchors = [*(site.anchor for site in self.fused), *(site.anchor for site in self.skipped)]
        exact = name in anchors  # it may hold what means something in a glob
        fused = [site for site in self.fused if (site.anchor == name if exact else site.fits(name))]
        skipped = [site for site in self.skipped if (site.anchor == name if exact else site.fits(name))]
        if not fused and not skipped:
            near = get_close_matches(name, anchors, 3, 0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise SettingError(f"{name!r} is no product of the model, nor a node of a fusion{hint}")
        return replace(self, fused=tuple(fused), skipped=tuple(skipped))


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
        axes=fusion.einops,
        sizes={
            name: static_size(fusion, getattr(site.mapping, name))
            for name in LOOPS
            if name not in OF_ATTENTION or isinstance(fusion, Attention)
        },
        operands=_operands(site.implementation),
        strategy=site.strategy.value,
        kernel="; ".join(_one_line(plan) for plan in site.implementation.plans),
        timings=site.timings,
        transposed=tuple(site.implementation.transposed),
        text=str(fusion),
        nameless=str(_without_names(fusion)),
        only=site.only,
    )


def _without_names(fusion: Pointwise) -> Pointwise:
    """The same fusion of tensors without names."""
    outs = tuple(replace(out, tensor=replace(out.tensor, name="")) for out in fusion.outs)
    fusion = replace(fusion, anchor="", operands=_nameless(fusion.operands), outs=outs)
    if isinstance(fusion, Fusion):
        stored = tuple(
            StoredRhs(*_nameless((each.weight, each.scales)), *_nameless(tuple(filter(None, (each.zero_points,)))))
            for each in fusion.stored
        )
        return replace(fusion, lhs=replace(fusion.lhs, name=""), rhs=_nameless(fusion.rhs), stored=stored)
    return fusion


def _nameless(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, name="") for tensor in tensors)


def _operands(implementation: Implementation) -> tuple[OperandReport, ...]:
    """Every tensor with its access in the widest variants of the plans; none of an implementation without kernels."""
    kernels: dict[str, AnyVariant] = {}
    for plan in implementation.plans:
        for variant in _widest(plan):
            kernels.setdefault(variant.family.label, variant)
    if not kernels:
        return ()
    fusion, mapping = implementation.fusion, implementation.mapping
    widths, spec = implementation.plans[0].widths, next(iter(kernels.values())).spec
    rows = _product_rows(implementation.plans[0], fusion, kernels)
    for index, (operand, width) in enumerate(zip(fusion.operands, widths.operands, strict=True)):
        load = next(place for place, load in enumerate(fusion.loads) if load.operand == index)
        path = _paths("load", kernels, [variant.spec.loads[load] for variant in kernels.values()])
        taken = spec.loads[load].width
        reason = _why_less(implementation, operand, width, taken)
        rows.append(_row(mapping.kind(operand), operand, width, taken, path, reason))
    for index, (out, width) in enumerate(zip(fusion.outs, widths.outs, strict=True)):
        path = _paths("out", kernels, [variant.spec.outs[index] for variant in kernels.values()])
        taken = spec.outs[index].width
        rows.append(_row("out", out.tensor, width, taken, path, _why_less(implementation, out.tensor, width, taken)))
    return tuple(rows)


def _product_rows(plan: AnyPlan, fusion: Pointwise, kernels: Mapping[str, AnyVariant]) -> list[OperandReport]:
    """The factors; none where another kernel multiplies."""
    if not isinstance(fusion, Fusion):
        return []
    groups = ((fusion.lhs,), *fusion.stored_rhs)
    widths = (*plan.widths.factors, *plan.widths.beside)
    rows = []
    for place, (group, width) in enumerate(zip(groups, widths, strict=False)):
        role = ROLES[place]
        path = _paths(role, kernels, [variant.spec.factors[min(place, 1)] for variant in kernels.values()])
        rows += [_row(role, tensor, width, width.elements, path) for tensor in group]  # all parts of rhs alike
    return rows


def _paths(role: str, kernels: Mapping[str, AnyVariant], accesses: Iterable[Access]) -> dict[str, str]:
    """The way of each kernel to a tensor."""
    pairs = zip(kernels.items(), accesses, strict=True)
    return {label: variant.family.access_path(role, access) for (label, variant), access in pairs}


def _widest(plan: AnyPlan) -> Iterator[AnyVariant]:
    """The variants that read and write as the first does; those behind them take over where they may not."""
    first = _as_they_lie(plan.variants[0].spec)
    for variant in plan.variants:
        spec = _as_they_lie(variant.spec)
        same = (spec.factors, spec.loads, spec.outs) == (first.factors, first.loads, first.outs)
        if same and not spec.checked:
            yield variant


def _as_they_lie(spec: AnySpec) -> AnySpec:
    """A kernel's spec, whether it reads factors as they lie or copies of them."""
    return spec.without_copies if isinstance(spec, KernelSpec) else spec


def _row(
    kind: str, tensor: Tensor, width: Width, taken: int, path: Mapping[str, str], reason: str = ""
) -> OperandReport:
    return OperandReport(tensor.name, kind, taken, taken * tensor.dtype.bytes, path, reason or width.reason)


def _why_less(implementation: Implementation, tensor: Tensor, width: Width, taken: int) -> str:
    """Why the epilogue-only kernel takes fewer elements than it may; empty where a kernel takes them all."""
    if taken == width.elements:
        return ""
    if is_transposed(implementation.fusion, tensor, implementation.mapping):
        return "m is its contiguous axis, and the kernel goes along n"
    return "a thread owns no more columns"


def _one_line(plan: AnyPlan) -> str:
    tiles = dict.fromkeys(str(variant.tile) for variant in plan.variants)
    library = [f"{LIBRARY} ({rows_text(plan.library_rows, plan.library[0].by)})"] if plan.library_rows else []
    return " ".join(filter(None, (f"{plan.device.arch}:", plan.variants[0].spec.math, ", ".join((*library, *tiles)))))
