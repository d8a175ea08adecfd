"""The way of a model, one line a stage, from a file to a fused model and its report."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable, SettingError
from onnxfuse.graph.cycles import place_in_a_cycle
from onnxfuse.graph.fallback_body import fallback_body
from onnxfuse.graph.functions import count_fused
from onnxfuse.graph.graph import Graph, Model, ModelProto, all_graphs, load_model, node_label, reached_functions
from onnxfuse.graph.load import data_bytes
from onnxfuse.graph.op_names import POOL_SIZE, named
from onnxfuse.graph.padded_rows import PaddedRows
from onnxfuse.graph.rewrite import rewrite
from onnxfuse.graph.scopes import count_nodes, skeleton_of
from onnxfuse.graph.shared_batch import shared_batches
from onnxfuse.graph.single_batch import batches_of_one
from onnxfuse.graph.transposed_data import put_in_order
from onnxfuse.graph.weight_readers import biases, block_weights, product_weights
from onnxfuse.lowering.compile_kernels import compile_implementations
from onnxfuse.lowering.fused_node import replacement
from onnxfuse.lowering.kernel_description import describe
from onnxfuse.lowering.pack import pack_implementations
from onnxfuse.lowering.plan_site import Planner, is_profitable_together, plan_site, slower
from onnxfuse.lowering.site import Site
from onnxfuse.lowering.stored_weights import settle
from onnxfuse.patterns import PATTERNS, match_sites
from onnxfuse.progress import Progress
from onnxfuse.report.site_report import FusedSite, Report, SkippedSite, fused_site, skipped_site
from onnxfuse.report.stage_dump import write_stages
from onnxfuse.runtime.timing import require_gpu
from onnxfuse.selection import FoundFusion, Selection
from onnxfuse.settings import cache_dir
from onnxfuse.tune.search import Timer, decide, measure
from onnxfuse.tune.session_timer import SessionTimer, group_sites

Fp32 = Literal["tf32", "exact"]
Rounding = Literal["fp32", "onnx"]
FP32_MODES: tuple[Fp32, ...] = get_args(Fp32)
ROUNDING_MODES: tuple[Rounding, ...] = get_args(Rounding)
EVERYTHING = Selection()


@dataclass(frozen=True)
class Analysis:
    """Everything that is decided without a compiler: what `explain` shows.

    Attributes:
        graphs: the model's scopes, the main graph first.
        devices: that it is planned for.
    """

    model: Model
    devices: tuple[DeviceSpec, ...]
    graphs: tuple[Graph, ...]
    sites: tuple[Site, ...]
    skipped: tuple[SkippedSite, ...]

    @property
    def transposed(self) -> frozenset[str]:
        """The weights that the written model has in another order."""
        return frozenset(name for site in self.sites for name in site.implementation.transposed)


def analyse_model(
    source: str | Path | ModelProto | Model,
    devices: Sequence[DeviceSpec],
    fp32: Fp32 = "tf32",
    selection: Selection = EVERYTHING,
    rounding: Rounding = "fp32",
    keep_weights: bool = False,
    attention: bool = True,
) -> Analysis:
    """Find and plan the fusions of a model that are selected; nothing is compiled or changed.

    Args:
        source: the model.
        devices: to plan for.
        fp32: how fp32 products are computed, one of FP32_MODES.
        selection: which fusions.
        rounding: whether what a kernel keeps to itself stays in `fp32`, or is rounded as `onnx` nodes do.
        keep_weights: whether every weight stays in the order in which the model has it.
        attention: whether two products and the softmax between them become one fusion.

    Raises:
        ModelError: the model cannot be read or is invalid.
        SettingError: an unknown fp32 or rounding mode, or a selection that means nothing in this model.
    """
    if fp32 not in FP32_MODES:
        raise SettingError(f"unknown fp32 mode {fp32!r}; known: {', '.join(FP32_MODES)}")
    if rounding not in ROUNDING_MODES:
        raise SettingError(f"unknown rounding {rounding!r}; known: {', '.join(ROUNDING_MODES)}")
    model = source if isinstance(source, Model) else load_model(source)
    graphs = all_graphs(model)
    sizes: dict[str, int | str] = {**shared_batches(graphs[0]), **dict.fromkeys(batches_of_one(graphs[0]), 1)}
    graphs = all_graphs(model, sizes=sizes) if sizes else graphs
    planner = Planner(tuple(devices), fp32 == "exact", rounding == "onnx", frozenset(), attention)
    find = functools.partial(_find_sites, model, planner, keep_weights)
    sites, skipped = _selected(*find(graphs), selection)
    reached = reached_functions(
        (site.graph, (*site.match.shared, *site.match.nodes, *site.match.told)) for site in sites
    )
    if reached != graphs[0].scope.inlined:  # functions that no fusion reaches into stay functions
        graphs = all_graphs(model, reached, graphs[0].scope.branches, sizes)
        sites, _ = _selected(*find(graphs), selection)
    return _settled(Analysis(model, tuple(devices), graphs, sites, skipped))


def _find_sites(
    model: Model, planner: Planner, keep_weights: bool, graphs: Sequence[Graph]
) -> tuple[tuple[Site, ...], tuple[SkippedSite, ...]]:
    """The sites, and what is left alone; found again where one needs a weight otherwise than somebody else has it."""
    stored = (product_weights, block_weights, biases)
    transposable = frozenset[str]().union(*(names(model, graphs) for names in stored if not keep_weights))
    while True:
        sites, skipped = _sites_with(replace(planner, transposable=transposable), graphs)
        _, refused = settle(graphs, sites)
        disputed = {name for site, _ in refused for name in site.implementation.transposed}
        if not disputed:
            return sites, skipped
        transposable -= disputed


def _sites_with(planner: Planner, graphs: Sequence[Graph]) -> tuple[tuple[Site, ...], tuple[SkippedSite, ...]]:
    sites: list[Site] = []
    skipped: list[SkippedSite] = []
    for graph in graphs:
        make_site = functools.partial(plan_site, planner, graph)
        found = match_sites(graph, make_site, is_profitable_together, planner.rounds, planner.attention, True)
        skipped += (skipped_site(node_label(node), refusal) for node, refusal in found.skipped)
        for site in found.fused:
            if site.is_left_alone:  # only now: several such sites may be worth one kernel together
                labels = [product.label for product in site.match.products]
                skipped += (skipped_site(label, slower(site, label)) for label in labels)
            else:
                sites.append(site)
    return tuple(sites), tuple(skipped)


def _selected(
    sites: tuple[Site, ...], skipped: tuple[SkippedSite, ...], selection: Selection
) -> tuple[tuple[Site, ...], tuple[SkippedSite, ...]]:
    """The sites that the user wants; the others are left alone like those that no kernel computes."""
    found = [_found(site) for site in sites]
    selection.check(found, PATTERNS)
    refusals = [selection.refusal(each) for each in found]
    left = tuple(
        skipped_site(label, NotFusable("not_selected", label, refusal))
        for site, refusal in zip(sites, refusals, strict=True)
        for label in _labels(site)
        if refusal
    )
    kept = tuple(site for site, refusal in zip(sites, refusals, strict=True) if not refusal)
    return _without_whole_ops(kept), skipped + left


def _without_whole_ops(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The same but for the normalisations of ops that no product's kernel takes sums of: those stay whole, and add."""
    taken = {(id(site.graph), index) for site in sites for index in site.match.nodes}
    return tuple(
        site
        for site in sites
        if not (sums := site.graph.sums_before(site.match.nodes)) or {(id(site.graph), each) for each in sums} & taken
    )


def _labels(site: Site) -> list[str]:
    """What it is called where it is left alone: each of its products, or itself."""
    products = [] if site.match.shared else [product.label for product in site.match.products]
    return products or [site.match.name]


def _found(site: Site) -> FoundFusion:
    names = _node_names(site, (*site.match.shared, *site.match.nodes))
    return FoundFusion(site.fusion.anchor, site.fusion.pattern, names)


def check_budget(tune: bool, budget: float | None) -> None:
    """Refuse a budget that nothing would keep.

    Raises:
        SettingError: there is one without tuning, or it is no number of seconds.
    """
    if budget is not None and not tune:
        raise SettingError("a budget is how long tuning may measure; ask for both (--tune, tune=True)")
    if budget is not None and not budget >= 0:
        raise SettingError(f"a budget of {budget} is no number of seconds")


def tune_model(
    analysis: Analysis,
    device: DeviceSpec,
    *,
    timer: Timer | None = None,
    budget: float | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Choose again by measuring on the GPU at hand.

    Args:
        analysis: with plans for the GPU's architecture among others.
        device: that architecture.
        timer: what measures; by default sessions of ONNX Runtime on the GPU.
        budget: seconds of measuring; what does not fit stays as the cost model chose. None means no limit.
        progress: called after each measurement.

    Returns:
        The analysis with measured plans; sites whose own nodes are faster are left alone.

    Raises:
        DeviceError: there is no GPU to measure on.
    """
    if timer is None:
        require_gpu()
        timer = SessionTimer(cache_dir())
    groups = group_sites(analysis.sites)
    measured = measure(groups, device, timer, budget, progress)
    times = {id(site): each for group, each in zip(groups, measured, strict=True) for site in group}
    sites, skipped = [], list(analysis.skipped)
    for site in analysis.sites:
        try:
            sites.append(decide(site, device, times[id(site)]))
        except NotFusable as refusal:
            skipped.append(skipped_site(site.fusion.anchor, refusal))
    return _settled(replace(analysis, sites=tuple(sites), skipped=tuple(skipped)))


def _settled(analysis: Analysis) -> Analysis:
    """The analysis of sites that can all be written: each has a name, and all agree on how weights are stored."""
    named = _named_sites(analysis)
    sites, refused = settle(named.graphs, named.sites)
    if sites == named.sites:
        sites, refused = _in_order(named)
    if sites == named.sites:
        return named
    skipped = (skipped_site(site.fusion.anchor, refusal) for site, refusal in refused)
    return _settled(replace(named, sites=sites, skipped=(*named.skipped, *skipped)))


def _in_order(analysis: Analysis) -> tuple[tuple[Site, ...], tuple[tuple[Site, NotFusable], ...]]:
    """The sites without one that would close a cycle, and that."""
    for graph in analysis.graphs:
        own = [site for site in analysis.sites if site.graph is graph]
        place = place_in_a_cycle([replacement(site.implementation, "") for site in own])
        if place is not None:
            closing = own[place]
            detail = "an operand is computed from a value of the fusion, by way of other fusions"
            refusal = NotFusable("needs_its_own_result", closing.fusion.anchor, detail)
            return tuple(site for site in analysis.sites if site is not closing), ((closing, refusal),)
    return analysis.sites, ()


def _named_sites(analysis: Analysis) -> Analysis:
    """The analysis without the sites whose bodies get no name; few models have more fused nodes than names."""
    functions, sites = analysis.model.proto.functions, analysis.sites
    if len(functions) + len(sites) <= POOL_SIZE:
        return analysis
    has_name = named(functions, [fallback_body(replacement(site.implementation, ""))[0] for site in sites])
    detail = f"the model has more different fusions than onnxfuse has names for their nodes, {POOL_SIZE}"
    left = (site.fusion.anchor for site, has in zip(sites, has_name, strict=True) if not has)
    skipped = (skipped_site(anchor, NotFusable("too_many_bodies", anchor, detail)) for anchor in left)
    kept = tuple(site for site, has in zip(sites, has_name, strict=True) if has)
    return replace(analysis, sites=kept, skipped=(*analysis.skipped, *skipped))


def optimize_model(
    analysis: Analysis, *, dump: Path | None = None, progress: Progress | None = None, to_save: bool = False
) -> tuple[ModelProto, Report]:
    """Compile the kernels of an analysis and rewrite its model, in place.

    Args:
        analysis: of the model.
        dump: a folder that gets a file for each stage.
        progress: called after each kernel.
        to_save: whether `save_model` is all that reads the result: then it moves the bytes of transposed weights.

    Raises:
        CompileError: NVRTC refused a kernel.
    """
    implementations = [site.implementation for site in analysis.sites]
    kernels = compile_implementations(implementations, progress)
    archive, names = pack_implementations(implementations, kernels)
    if dump is not None:
        for number, (site, name) in enumerate(zip(analysis.sites, names, strict=True)):
            write_stages(site, _report_site(site), name, kernels, dump / f"{number:03d}-{name}")
    replacements = [
        replacement(implementation, name) for implementation, name in zip(implementations, names, strict=True)
    ]
    before, weights = count_nodes(analysis.model.proto), _bytes_of_transposed(analysis)
    own = count_fused(analysis.model.proto)
    proto = rewrite(analysis.model.proto, replacements, archive, describe(implementations, names))
    if not to_save:
        put_in_order(proto)
    return proto, _report(analysis, before, count_nodes(proto), weights, own)


def make_report(analysis: Analysis) -> Report:
    """The report of an analysis alone, with the nodes that a rewrite leaves: it is done on a copy without weights."""
    replacements = [replacement(site.implementation, str(number)) for number, site in enumerate(analysis.sites)]
    fused = rewrite(skeleton_of(analysis.model.proto), replacements, b"")
    before = count_nodes(analysis.model.proto)
    own = count_fused(analysis.model.proto)
    return _report(analysis, before, count_nodes(fused), _bytes_of_transposed(analysis), own)


def _report(
    analysis: Analysis, nodes_before: int, nodes_after: int, weights: Mapping[str, int], already_fused: int
) -> Report:
    path, architectures = analysis.model.path, tuple(device.arch for device in analysis.devices)
    return Report(
        None if path is None else str(path),
        architectures,
        tuple(map(_report_site, analysis.sites)),
        analysis.skipped,
        nodes_before,
        nodes_after,
        weights,
        _padding(analysis, weights),
        already_fused,
    )


def _bytes_of_transposed(analysis: Analysis) -> dict[str, int]:
    """The weights that the written model has in another order, each with its size."""
    wanted = analysis.transposed
    return {each.name: data_bytes(each) for each in analysis.model.proto.graph.initializer if each.name in wanted}


def _padding(analysis: Analysis, weights: Mapping[str, int]) -> dict[str, int]:
    """Bytes of zeros that the written model has behind the rows of some of them."""
    orders = {name: order for site in analysis.sites for name, order in site.implementation.transposed.items()}
    return {
        name: weights[name] // order.row * (order.whole - order.row)
        for name, order in orders.items()
        if isinstance(order, PaddedRows)
    }


def _node_names(site: Site, indices: Iterable[int]) -> tuple[str, ...]:
    return tuple(node_label(site.graph.nodes[index]) for index in indices)


def _report_site(site: Site) -> FusedSite:
    return fused_site(site, _node_names(site, site.implementation.replaced))
