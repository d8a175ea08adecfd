"""The way of a model, one line a stage, from a file to a fused model and its report."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfuse import hopper_tile
from onnxfuse.artifact import MAX_LOADS, Mapped, Record, TensorMap, pack
from onnxfuse.axes import AxisMapping, map_axes
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable, SettingError
from onnxfuse.fusion import Fusion, part_text
from onnxfuse.graph import Graph, Model, ModelProto, all_graphs, load_model, node_label, reached_functions
from onnxfuse.kernel_spec import KernelSpec
from onnxfuse.kernels.emit import ENTRY, emit
from onnxfuse.kernels.hopper import emit as emit_hopper
from onnxfuse.patterns import PATTERNS, Match, match_sites
from onnxfuse.plan import Plan, Variant, make_plan
from onnxfuse.report import FusedSite, Report, SkippedSite, axes_text, fused_site, skipped_site
from onnxfuse.rewrite import Replacement, rewrite
from onnxfuse.runtime.compile import CompiledImage, compile_cached
from onnxfuse.scopes import count_nodes
from onnxfuse.selection import Candidate, Selection
from onnxfuse.settings import cache_dir, compile_jobs
from onnxfuse.simplify import simplify
from onnxfuse.tile_footprint import shared_bytes
from onnxfuse.vector_width import Widths, analyse

FP32_MODES = ("tf32", "exact")
EVERYTHING = Selection()

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Site:
    """One fusion with every decision about it."""

    graph: Graph
    match: Match
    fusion: Fusion
    mapping: AxisMapping
    widths: Widths
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Analysis:
    """Everything that is decided without a compiler: what `explain` shows.

    Attributes:
        graphs: the model's scopes, the main graph first.
    """

    model: Model
    graphs: tuple[Graph, ...]
    sites: tuple[Site, ...]
    skipped: tuple[SkippedSite, ...]


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels by source and architecture."""

    images: dict[tuple[str, str], CompiledImage]


def analyse_model(
    source: str | Path | ModelProto,
    devices: Sequence[DeviceSpec],
    fp32: str = "tf32",
    selection: Selection = EVERYTHING,
) -> Analysis:
    """Find and plan the fusions of a model that are selected; nothing is compiled or changed.

    Raises:
        ModelError: the model cannot be read or is invalid.
        SettingError: an unknown fp32 mode, or a selection that means nothing in this model.
    """
    if fp32 not in FP32_MODES:
        raise SettingError(f"unknown fp32 mode {fp32!r}; known: {', '.join(FP32_MODES)}")
    model = load_model(source)
    graphs = all_graphs(model)
    sites, skipped = _selected(*_find_sites(graphs, devices, fp32 == "exact"), selection)
    reached = reached_functions((site.graph, site.match.nodes) for site in sites)
    if reached != graphs[0].scope.inlined:  # functions that no fusion reaches into stay functions
        graphs = all_graphs(model, reached)
        sites, _ = _selected(*_find_sites(graphs, devices, fp32 == "exact"), selection)
    return Analysis(model, graphs, sites, skipped)


def _find_sites(
    graphs: Iterable[Graph], devices: Sequence[DeviceSpec], exact_fp32: bool
) -> tuple[tuple[Site, ...], tuple[SkippedSite, ...]]:
    sites: list[Site] = []
    skipped: list[SkippedSite] = []
    for graph in graphs:
        plan_site = functools.partial(_plan_site, graph, devices, exact_fp32)
        found = match_sites(graph, plan_site)
        sites += found.fused
        skipped += (skipped_site(node_label(node), refusal) for node, refusal in found.skipped)
    return tuple(sites), tuple(skipped)


def _selected(
    sites: tuple[Site, ...], skipped: tuple[SkippedSite, ...], selection: Selection
) -> tuple[tuple[Site, ...], tuple[SkippedSite, ...]]:
    """The sites that the user wants; the others are left alone like those that no kernel computes."""
    candidates = [Candidate(site.fusion.anchor, site.fusion.pattern, _node_names(site)) for site in sites]
    selection.check(candidates, PATTERNS)
    refusals = [selection.refusal(candidate) for candidate in candidates]
    left = tuple(
        skipped_site(product.label, NotFusable("not_selected", product.label, refusal))
        for site, refusal in zip(sites, refusals, strict=True)
        for product in site.match.products
        if refusal
    )
    return tuple(site for site, refusal in zip(sites, refusals, strict=True) if not refusal), skipped + left


def optimize_model(
    analysis: Analysis, *, dump: Path | None = None, progress: Progress | None = None
) -> tuple[ModelProto, Report]:
    """Compile the kernels of an analysis and rewrite its model, in place.

    Raises:
        CompileError: NVRTC refused a kernel.
    """
    kernels = _compile(analysis.sites, progress)
    archive, names = _pack(analysis.sites, kernels)
    if dump is not None:
        _dump(analysis, names, dump)
    replacements = [_replacement(site, name) for site, name in zip(analysis.sites, names, strict=True)]
    before = count_nodes(analysis.model.proto)
    proto = rewrite(analysis.model.proto, replacements, archive)
    return proto, _report(analysis, before, count_nodes(proto))


def make_report(analysis: Analysis) -> Report:
    """The report of an analysis alone; a rewrite also drops nodes that only fed what it fused, such as constants."""
    nodes = count_nodes(analysis.model.proto)
    return _report(analysis, nodes, nodes - sum(len(site.match.nodes) - 1 for site in analysis.sites))


def _report(analysis: Analysis, nodes_before: int, nodes_after: int) -> Report:
    return Report(tuple(map(_report_site, analysis.sites)), analysis.skipped, nodes_before, nodes_after)


def _plan_site(graph: Graph, devices: Sequence[DeviceSpec], exact_fp32: bool, match: Match, fusion: Fusion) -> Site:
    fusion = simplify(fusion)
    mapping = map_axes(fusion)
    widths = analyse(fusion, mapping)
    plans = tuple(make_plan(fusion, mapping, widths, device, exact_fp32) for device in devices)
    return Site(graph, match, fusion, mapping, widths, plans)


def _node_names(site: Site) -> tuple[str, ...]:
    return tuple(node_label(site.graph.nodes[index]) for index in site.match.nodes)


def _report_site(site: Site) -> FusedSite:
    nodes = _node_names(site)
    return fused_site(site.fusion, site.mapping, site.widths, site.plans, nodes)


def _variants(sites: Iterable[Site]) -> Iterator[tuple[DeviceSpec, Variant]]:
    for site in sites:
        for plan in site.plans:
            for variant in plan.variants:
                yield plan.device, variant


def _compile(sites: Sequence[Site], progress: Progress | None) -> Kernels:
    """Compile each distinct kernel once."""
    wanted = {(kernel_source(variant, device), device.arch): device for device, variant in _variants(sites)}
    images: dict[tuple[str, str], CompiledImage] = {}
    folder = cache_dir()
    with ThreadPoolExecutor(compile_jobs()) as pool:
        jobs = [pool.submit(compile_cached, source, device, folder) for (source, _), device in wanted.items()]
        for key, job in zip(wanted, jobs, strict=True):
            images[key] = job.result()
            if progress is not None:
                progress("compiling kernels", len(images), len(wanted))
    return Kernels(images)


def _pack(sites: Sequence[Site], kernels: Kernels) -> tuple[bytes, list[str]]:
    """The archive, and each site's kernel id: sites with equal launch rules share one."""
    names = [_kernel_name(site) for site in sites]
    records: dict[str, list[Record]] = {}
    for site, name in zip(sites, names, strict=True):
        if name not in records:
            records[name] = [_record(name, device, variant, kernels) for device, variant in _variants([site])]
    return pack([record for group in records.values() for record in group]), names


def _kernel_name(site: Site) -> str:
    parts = [
        (device.arch, kernel_source(variant, device), str(variant.min_m), str(variant.max_m))
        for device, variant in _variants([site])
    ]
    return hashlib.sha256("\0".join(text for part in parts for text in part).encode()).hexdigest()[:16]


def kernel_source(variant: Variant, device: DeviceSpec) -> str:
    """The CUDA source of a variant."""
    if variant.hopper is None:
        return emit(variant.spec)
    return emit_hopper(variant.spec, variant.hopper, device.shared_bytes)


def _record(name: str, device: DeviceSpec, variant: Variant, kernels: Kernels) -> Record:
    spec = variant.spec
    element = spec.dtype.bytes
    return Record(
        kernel=name,
        entry=ENTRY,
        capability=device.capability,
        flavour=device.flavour,
        min_m=variant.min_m,
        max_m=variant.max_m,
        lhs_alignment=spec.lhs_width * element,
        rhs_alignment=spec.rhs_width * element,
        load_alignments=tuple(load.width * load.dtype.bytes for load in spec.loads),
        out_alignments=tuple(out.width * out.dtype.bytes for out in spec.outs),
        image=kernels.images[kernel_source(variant, device), device.arch].data,
        two_levels=_two_levels(spec),
        **launch_rule(variant, device),
    )


def _two_levels(spec: KernelSpec) -> int:
    """The record's bits: which loops of which tensors the kernel walks in two levels."""
    lhs = {0: ("n",) if spec.lhs_two_levels else ()}  # its columns are k
    loads = {2 + index: load.two_levels for index, load in enumerate(spec.loads)}
    outs = {2 + MAX_LOADS + index: out.two_levels for index, out in enumerate(spec.outs)}
    walked = (lhs | loads | outs).items()
    return sum(1 << 2 * tensor + "mn".index(loop) for tensor, loops in walked for loop in loops)


def launch_rule(variant: Variant, device: DeviceSpec) -> dict[str, Any]:
    """The fields of a record that depend on which kernel a variant is of."""
    spec, hopper = variant.spec, variant.hopper
    if hopper is None:
        tile = spec.tile
        sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "threads": tile.threads}
        return {**sizes, "shared_bytes": shared_bytes(spec)}
    return {
        "block_m": hopper.block_m * hopper.cluster_m,
        "block_n": hopper.block_n * hopper.cluster_n,
        "threads": hopper.threads,
        "shared_bytes": hopper_tile.footprint(spec, hopper, device.shared_bytes).total,
        "cluster": hopper.cluster_m * hopper.cluster_n,
        "maps": tuple(map(_tensor_map, hopper_tile.map_rules(spec, hopper, device.shared_bytes))),
    }


def _tensor_map(rule: hopper_tile.MapRule | None) -> TensorMap:
    if rule is None:
        return TensorMap(Mapped.NOTHING)
    tensor = Mapped[rule.tensor.upper()]
    return TensorMap(tensor, rule.index, rule.rows_contiguous, rule.swizzle, rule.box_inner, rule.box_outer)


def _replacement(site: Site, kernel: str) -> Replacement:
    fusion = site.fusion
    return Replacement(
        graph=site.graph,
        nodes=site.match.nodes,
        copied=site.match.copied,
        place=site.match.place,
        folded=site.match.folded,
        constants=site.match.constants,
        inputs=tuple(tensor.name for tensor in fusion.inputs),
        outputs=tuple(tensor.name for tensor in fusion.outputs),
        name=f"{fusion.anchor}/FusedGemm",
        attributes=node_attributes(fusion, site.mapping, kernel),
    )


def node_attributes(fusion: Fusion, mapping: AxisMapping, kernel: str) -> dict[str, str]:
    """The fused node's attributes; their grammar is in artifact.py."""
    return {
        "kernel": kernel,
        "axes": axes_text(fusion),
        "sizes": " ".join(f"{axis.name}={axis.size}" for axis in fusion.axes if axis.size is not None),
        "problem": str(mapping),
        "arguments": _arguments(fusion),
        "in_types": ",".join(tensor.dtype.name for tensor in fusion.inputs),
        "out_types": ",".join(tensor.dtype.name for tensor in fusion.outputs),
        "fusion": str(fusion),
    }


def _arguments(fusion: Fusion) -> str:
    """Which input is what: `lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0`."""
    first_operand = 1 + len(fusion.rhs)
    groups = {
        "lhs": ["0"],
        "rhs": [_indexed(1 + part.tensor, part.part) for part in fusion.parts],
        "loads": [_indexed(first_operand + load.operand, load.part) for load in fusion.loads],
        "outs": [_indexed(fusion.outputs.index(out.tensor), out.part) for out in fusion.outs],
    }
    return " ".join(f"{name}={','.join(entries)}" for name, entries in groups.items() if entries)


def _indexed(index: int, part: int | None) -> str:
    return f"{index}{part_text(part)}"


def _dump(analysis: Analysis, names: Sequence[str], folder: Path) -> None:
    """One numbered file a stage, one folder a site."""
    for number, (site, name) in enumerate(zip(analysis.sites, names, strict=True)):
        place = folder / f"{number:03d}-{name}"
        place.mkdir(parents=True, exist_ok=True)
        report = _report_site(site)
        widths = "\n".join(f"{row.kind:<7} x{row.width}  {row.name}  {row.reason}" for row in report.operands)
        files = {
            "0-match.txt": "\n".join((*report.nodes, *(f"-> {out.name}" for out in site.match.exits))),
            "1-fusion.txt": str(site.fusion),
            "2-axes.txt": f"{report.axes}\n{site.mapping}",
            "3-widths.txt": widths,
            "4-plan.txt": "\n".join(str(plan) for plan in site.plans),
            "5-node.txt": "\n".join(
                f"{key}: {value}" for key, value in node_attributes(site.fusion, site.mapping, name).items()
            ),
        }
        for file, text in files.items():
            (place / file).write_text(text + "\n")
        sources = dict.fromkeys(kernel_source(variant, device) for device, variant in _variants([site]))
        for index, source in enumerate(sources):
            suffix = f"-{index}" if index else ""
            (place / f"6-kernel{suffix}.cu").write_text(source)
