"""The way of a model, one line a stage, from a file to a fused model and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.device import DeviceSpec
from onnxfuse.errors import SettingError
from onnxfuse.graph import Graph, ModelProto, load_model, node_label
from onnxfuse.packing import Progress, compile_forms, kernel_source, node_attributes, pack_forms
from onnxfuse.patterns import match_sites
from onnxfuse.report import FusedSite, Report, SkippedSite, fused_site, skipped_site
from onnxfuse.rewrite import Replacement, rewrite
from onnxfuse.site import Form, Site, plan_site

FP32_MODES = ("tf32", "exact")


@dataclass(frozen=True)
class Analysis:
    """Everything that is decided without a compiler: what `explain` shows."""

    graph: Graph
    sites: tuple[Site, ...]
    skipped: tuple[SkippedSite, ...]


def analyse_model(source: str | Path | ModelProto, devices: Sequence[DeviceSpec], fp32: str = "tf32") -> Analysis:
    """Find and plan every fusion of a model; nothing is compiled or changed.

    Raises:
        ModelError: the model cannot be read or is invalid.
        SettingError: an unknown fp32 mode.
    """
    if fp32 not in FP32_MODES:
        raise SettingError(f"unknown fp32 mode {fp32!r}; known: {', '.join(FP32_MODES)}")
    exact_fp32 = fp32 == "exact"
    graph = Graph(load_model(source))
    found = match_sites(graph, lambda match, fusion: plan_site(graph, match, fusion, devices, exact_fp32))
    skipped = tuple(skipped_site(node_label(node), refusal) for node, refusal in found.skipped)
    return Analysis(graph, found.fused, skipped)


def optimize_model(
    analysis: Analysis, *, dump: Path | None = None, progress: Progress | None = None
) -> tuple[ModelProto, Report]:
    """Compile the kernels of an analysis and rewrite its model, in place.

    Raises:
        CompileError: NVRTC refused a kernel.
    """
    before = len(analysis.graph.nodes)
    forms = [site.form for site in analysis.sites]
    archive, names = pack_forms(forms, compile_forms(forms, progress))
    if dump is not None:
        _dump(analysis, names, dump)
    replacements = [_replacement(form, name) for form, name in zip(forms, names, strict=True)]
    proto = rewrite(analysis.graph, replacements, archive)
    return proto, make_report(analysis, before, len(proto.graph.node))


def make_report(analysis: Analysis, nodes_before: int, nodes_after: int) -> Report:
    """The report of an analysis."""
    fused = tuple(_report_site(analysis.graph, site) for site in analysis.sites)
    return Report(fused, analysis.skipped, nodes_before, nodes_after)


def _report_site(graph: Graph, site: Site) -> FusedSite:
    form = site.form
    nodes = tuple(node_label(graph.nodes[index]) for index in form.replaced)
    return fused_site(site.fusion, site.mapping, site.widths, site.tier, form.plans, nodes)


def _replacement(form: Form, kernel: str) -> Replacement:
    fusion = form.fusion
    return Replacement(
        nodes=form.nodes,
        place=form.place,
        kept=form.kept,
        inputs=tuple(tensor.name for tensor in fusion.inputs),
        outputs=tuple(tensor.name for tensor in fusion.outputs),
        name=f"{fusion.anchor}/{form.op_type}",
        attributes=node_attributes(form, kernel),
        op_type=form.op_type,
    )


def _dump(analysis: Analysis, names: Sequence[str], folder: Path) -> None:
    """One numbered file a stage, one folder a site."""
    for number, (site, name) in enumerate(zip(analysis.sites, names, strict=True)):
        place = folder / f"{number:03d}-{name}"
        place.mkdir(parents=True, exist_ok=True)
        report = _report_site(analysis.graph, site)
        widths = "\n".join(f"{row.kind:<7} x{row.width}  {row.name}  {row.reason}" for row in report.operands)
        files = {
            "0-match.txt": "\n".join((*report.nodes, *(f"-> {out.name}" for out in site.match.exits))),
            "1-fusion.txt": str(site.fusion),
            "2-axes.txt": f"{report.axes}\n{site.mapping}",
            "3-widths.txt": widths,
            "4-plan.txt": "\n".join((site.tier.value, *(str(plan) for plan in site.form.plans))),
            "5-node.txt": "\n".join(f"{key}: {value}" for key, value in node_attributes(site.form, name).items()),
        }
        for file, text in files.items():
            (place / file).write_text(text + "\n")
        sources = dict.fromkeys(kernel_source(variant, device) for device, variant in site.form.variants)
        for index, source in enumerate(sources):
            suffix = f"-{index}" if index else ""
            (place / f"6-kernel{suffix}.cu").write_text(source)
