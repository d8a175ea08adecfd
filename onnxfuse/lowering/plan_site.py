"""A match -> a site with every decision that needs no measurement: simplified, mapped, planned, its strategy chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ParamSpec

from onnxfuse.analysis.attention_mapping import map_attention
from onnxfuse.analysis.axis_mapping import (
    AxisMapping,
    broadcast_product_axes,
    map_axes,
    map_broadcast_product,
    map_pointwise,
    map_rows,
    static_size,
)
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.analysis.weight_order import (
    has_columns_in_turn,
    has_runs_in_turn,
    in_another_order,
    part_by_part,
    with_padded_rows,
)
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import F32, FLOATS_BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.op_names import FUSED_ATTENTION, FUSED_CACHE, FUSED_GEMM_ON, FUSED_POINTWISE
from onnxfuse.graph.operators import is_copy, qualified_op
from onnxfuse.graph.padded_rows import PaddedRows
from onnxfuse.graph.rows_in_turn import RowsInTurn
from onnxfuse.graph.skip_norms import OPTIMISED, is_added_and_normalised, is_bias_of_it
from onnxfuse.graph.transposed_data import Order
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.cached_attention import CachedAttention
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import NONLINEAR, PART_AXIS, Fusion, Pointwise, Tensor, acc_name, load_name
from onnxfuse.ir.group_normalisation import GroupNormalisation
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.ir.simplify import simplify
from onnxfuse.lowering.kept_plans import (
    in_first_window,
    kept_attention_plan,
    kept_attention_times,
    kept_norm_plan,
    kept_normalisation_times,
    kept_plan,
    kept_pointwise_plan,
    kept_stock_times,
    kept_times,
    nameless,
    refusals_of,
)
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.patterns import Match, match_epilogue
from onnxfuse.schedule.cached_attention import ONLY, make_cached_plan, mapping_of
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.group_norm import make_group_norm_plan, map_groups
from onnxfuse.schedule.strategy import (
    CONVOLUTION,
    Normalising,
    Strategy,
    Times,
    Traffic,
    choose,
    is_faster,
    is_nowhere_slower,
    least_loss,
    named,
    saves,
)
from onnxfuse.schedule.variant import ProductPlan

P = ParamSpec("P")
NOTHING: Mapping[str, Order] = MappingProxyType({})
SLICE_OF_INPUTS = 10  # the operator set from which its bounds are inputs
FREE_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape"})  # that move no data
RANGES = frozenset({"Gather", "Slice", "Split"})  # that copy some columns


@dataclass(frozen=True)
class Planner:
    """What all sites of a model are planned by.

    Attributes:
        devices: to plan for.
        exact_fp32: whether fp32 products are computed in full precision.
        rounds: whether fusions round every intermediate as the model does; then their steps stay as written.
        transposable: weights that may be stored otherwise than the model has them.
        attention: whether two products and the softmax between them become one kernel.
    """

    devices: tuple[DeviceSpec, ...]
    exact_fp32: bool
    rounds: bool
    transposable: Collection[str]
    attention: bool = False


def plan_site(planner: Planner, graph: Graph, match: Match, fusion: Pointwise | CachedAttention) -> Site:
    """Decide everything about a match that can be decided without a measurement.

    Args:
        planner: for what, and how.
        graph: the scope that the match lies in.
        match: the nodes.
        fusion: what they compute.

    Raises:
        NotFusable: no kernel computes it, or what it computes is faster without one.
    """
    if isinstance(fusion, Attention):
        return _plan_attention(planner, graph, match, fusion)
    if isinstance(fusion, GroupNormalisation):
        return _plan_group_normalisation(planner, graph, match, fusion)
    if isinstance(fusion, Normalisation):
        return _plan_normalisation(planner, graph, match, fusion)
    if isinstance(fusion, CachedAttention):
        return _plan_cached(planner, graph, match, fusion)
    if not isinstance(fusion, Fusion):
        return _plan_rotation(planner, graph, match, fusion)
    fusion = fusion if planner.rounds else simplify(fusion)
    if broadcast_product_axes(fusion):
        return _plan_broadcast_product(planner, graph, match, fusion)
    plan = functools.partial(_planned, planner, graph, match)
    orders = _orders(match)
    if orders:
        return _plan_stored_anew(planner, graph, match, fusion, orders)
    if has_runs_in_turn(fusion):
        return _plan_columns_in_turn(planner, graph, match, fusion, _part_by_part(planner, match, fusion))
    other = in_another_order(fusion, planner.transposable)
    if has_columns_in_turn(fusion):
        return _plan_columns_in_turn(planner, graph, match, fusion, other)
    anew = _padded(planner, graph, fusion) or other
    if anew is None:
        return accepted(plan(fusion))
    kept, transposed = _attempt(plan, fusion), _attempt(plan, *anew)
    if isinstance(transposed, Site) and transposed.strategy is Strategy.ONE_KERNEL and _is_worth_it(transposed, kept):
        return replace(transposed, as_stored=kept)
    return accepted(kept)


def _padded(planner: Planner, graph: Graph, fusion: Fusion) -> tuple[Fusion, Mapping[str, Order]] | None:
    """The fusion of weights with zeros behind their rows, which the body cuts off; None where there are none such."""
    found = with_padded_rows(fusion, planner.transposable)
    if found is None or graph.scope.opsets.get("", 1) < SLICE_OF_INPUTS:
        return None
    padded, perms = found
    orders = {
        tensor.name: PaddedRows(perms[tensor.name], padded.size(tensor.dims[-1][0]) or 0, tensor.wide[1])
        for tensor in padded.rhs
        if tensor.wide is not None
    }
    return padded, orders


def _part_by_part(planner: Planner, match: Match, fusion: Fusion) -> tuple[Fusion, Mapping[str, Order]] | None:
    """The fusion of weights stored part by part, where the model has halves of heads in turn; None where they stay."""
    found = part_by_part(fusion, planner.transposable)
    if found is None:
        return None
    anew, turned = found
    first = match.products[0]
    turns = {product.rhs: (product.turns, product.run) for product in match.products}
    dims = {tensor.name: tuple(static_size(fusion, dim) or 0 for dim in tensor.dims) for tensor in anew.inputs}
    return anew, {
        name: RowsInTurn(*turns.get(name, turns[first.rhs]), dims[name][0], dims[name], is_turned)
        for name, is_turned in turned.items()
    }


def _orders(match: Match) -> Mapping[str, Order]:
    """How the quantised weights of a match are to be stored, where they lie otherwise."""
    weights = [product.quantized for product in match.products if product.quantized is not None]
    return {name: order for weight in weights for name, order in weight.orders}


def _plan_stored_anew(
    planner: Planner, graph: Graph, match: Match, fusion: Fusion, orders: Mapping[str, Order]
) -> Site:
    """A site of quantised weights that are stored otherwise; with columns in turn the product can stay a node.

    Raises:
        NotFusable: a weight may not be stored otherwise, no kernel computes it, or the library is faster.
    """
    kept = next((name for name in orders if name not in planner.transposable), None)
    if any(isinstance(order, RowsInTurn) for order in orders.values()):
        other = _attempt(_behind_product, planner, graph, match, fusion)
    else:
        detail = "others read its weight as the model stores it"
        if kept is not None:
            detail = f"{kept!r} may not be stored otherwise: --keep-weights, or others read it"
        other = NotFusable("quantized_form", match.label, detail)
    if kept is not None:
        return accepted(other)
    return replace(_planned(planner, graph, match, fusion, orders), as_stored=other)


def _attempt(plan: Callable[P, Site], *args: P.args, **kwargs: P.kwargs) -> Site | NotFusable:
    try:
        return plan(*args, **kwargs)
    except NotFusable as refusal:
        return refusal


def _is_worth_it(transposed: Site, kept: Site | NotFusable) -> bool:
    """Whether a site is faster with its weights in another order; by the estimates, as the model gets it."""
    if isinstance(kept, NotFusable):
        return True
    devices = kept.estimates
    return is_faster(*({device: _in_models(site, device) for device in devices} for site in (transposed, kept)))


def _in_models(site: Site, device: DeviceSpec) -> list[float]:
    """Microseconds of a site among others: what a weight [k, n] costs there, kernels by themselves do not show."""
    plan = next((plan for plan in site.plans if plan.device == device), None)
    as_kn = site.strategy is Strategy.ONE_KERNEL and plan is not None and plan.variants[0].spec.rhs_order == "kn"
    return [us * (calibration(device).kn_in_models if as_kn else 1.0) for us in _chosen(site, device)]


def accepted(site: Site | NotFusable) -> Site:
    """The site, if it is one; it may be one to leave alone, which joins others of the same input, or is skipped.

    Raises:
        NotFusable: it is none.
    """
    if isinstance(site, NotFusable):
        raise site
    return site


def slower(site: Site, anchor: str) -> NotFusable:
    """Why a site is left alone, as a reason for one of its products."""
    devices, winning = named(site.estimates), _winning(site)
    lost = [device for device in devices if device not in winning]
    chips = ", ".join(device.arch for device in lost or devices)
    won = ",".join(device.arch for device in winning) if lost else ""
    detail = f"by the cost model the library's own kernels are faster on {chips}"
    if won:
        return NotFusable("slower_elsewhere", anchor, f"{detail}; --arch {won} fuses it")
    return NotFusable("slower", anchor, detail)


def _planned(
    planner: Planner, graph: Graph, match: Match, fusion: Fusion, transposed: Mapping[str, Order] = NOTHING
) -> Site:
    """The site with its strategy, which may be to leave it alone.

    Raises:
        NotFusable: no kernel computes it.
    """
    # What is spelled out as Mul and ReduceSum is no matrix product to the runtime, which computes it in full precision.
    exact_fp32 = planner.exact_fp32 or any(product.is_spelled_out for product in match.products)
    mapping = map_axes(fusion)
    _check_resolved(fusion)
    widths = analyse(fusion, mapping)
    alike = in_first_window(nameless(fusion))
    plans = tuple(kept_plan(alike, mapping, widths, device, exact_fp32) for device in planner.devices)
    # Exact products are this project's promise; the library multiplies in TF32 unless a session forbids it.
    library_will_do = not (exact_fp32 and fusion.lhs.dtype == F32)
    epilogue_only = _epilogue_only(planner, graph, match, mapping) if library_will_do else None
    estimates = _estimates(graph, match, fusion, mapping, plans, epilogue_only)
    if match.shared:  # a product that stays would do all columns, for each of the matches that share it
        epilogue_only, estimates = None, {device: _without_epilogue_only(times) for device, times in estimates.items()}
    others = fusion.quantization is not None or match.is_bare or _convolves_alone(graph, match)
    disagreed = Strategy.LEFT_ALONE if others else Strategy.ONE_KERNEL
    strategy = choose(estimates, disagreed) if estimates else Strategy.ONE_KERNEL
    site = Site(graph, match, fusion, mapping, plans, epilogue_only, strategy, estimates, transposed=transposed)
    if fusion.quantization is not None and site.is_left_alone:
        site = _on_one_architecture(site)
    if site.opens_ops and strategy is not Strategy.ONE_KERNEL:  # a smaller one may leave the op as it is
        raise slower(site, fusion.anchor)
    return site


def _on_one_architecture(site: Site) -> Site:
    """The site with its kernel for the one architecture where it wins, if there is one.

    On all others its body runs, which must take no longer than the model's own nodes.
    """
    won = [device.arch for device in _winning(site)]
    is_longer = site.opens_ops or site.packs_integers or bool(site.match.shared)
    if len(won) != 1 or won[0] not in FUSED_GEMM_ON or is_longer:
        return site
    return replace(site, strategy=Strategy.ONE_KERNEL, only=won[0])


def _winning(site: Site) -> list[DeviceSpec]:
    """The architectures on which one kernel is best."""
    return [device for device in named(site.estimates) if least_loss(site.estimates[device]) is Strategy.ONE_KERNEL]


def _plan_attention(planner: Planner, graph: Graph, match: Match, attention: Attention) -> Site:
    """The site of an attention, which is one kernel or none.

    Raises:
        NotFusable: some architecture has no kernel for it, or the model's own nodes are faster.
    """
    _check_not_exact(planner, match)
    mapping = _mapped_attention(attention)
    alike = nameless(attention)
    with refusals_of(attention.anchor):
        plans = tuple(kept_attention_plan(alike, mapping, device) for device in planner.devices)
    whole = Implementation(graph, match, FUSED_ATTENTION, (), attention, mapping, plans)
    moves = sum(is_copy(graph.nodes[index]) for index in {*match.nodes, *match.copied})
    expanded = tuple(
        own for own, tensor in zip(alike.operands, attention.operands, strict=True) if tensor.name in match.expanded
    )
    steps = len(attention.steps) + sum(graph.nodes[index].op.startswith("Reduce") for index in match.nodes)
    times = {plan.device: kept_attention_times(alike, mapping, plan, steps, moves, expanded) for plan in plans}
    site = Site(graph, match, attention, mapping, (), None, choose(times), times, whole=whole)
    if site.is_left_alone:  # its products may still be parts of other fusions
        raise slower(site, attention.anchor)
    return site


def _plan_normalisation(planner: Planner, graph: Graph, match: Match, fusion: Normalisation) -> Site:
    """The site of a normalisation, which is one kernel or none.

    Raises:
        NotFusable: ONNX Runtime's own kernel is faster.
    """
    mapping, alike = map_rows(fusion, fusion.rows, fusion.along), nameless(fusion)
    plans = tuple(kept_norm_plan(alike, mapping, device) for device in planner.devices)
    whole = Implementation(graph, match, FUSED_POINTWISE, (), fusion, mapping, plans)
    times = {device: kept_normalisation_times(alike, mapping, device, match.passes) for device in planner.devices}
    site = Site(graph, match, fusion, mapping, (), None, choose(times), times, whole=whole)
    if site.is_left_alone:
        raise slower(site, fusion.anchor)
    return site


def _plan_group_normalisation(planner: Planner, graph: Graph, match: Match, fusion: GroupNormalisation) -> Site:
    """The site of a normalisation of groups of channels: one kernel, where ONNX Runtime has one for each node."""
    mapping = map_groups(fusion)
    plans = tuple(make_group_norm_plan(fusion, mapping, device) for device in planner.devices)
    whole = Implementation(graph, match, FUSED_POINTWISE, (), fusion, mapping, plans)
    return Site(graph, match, fusion, mapping, (), None, whole=whole)


def _plan_rotation(planner: Planner, graph: Graph, match: Match, fusion: Pointwise) -> Site:
    """The site of a rotation: one kernel, where ONNX Runtime has one for each of some seven nodes."""
    x = fusion.operands[0]
    columns = tuple(axis for axis in x.dims[-1] if axis != PART_AXIS)
    rows = tuple(axis for dim in x.dims[:-1] for axis in dim)
    mapping, alike = map_rows(fusion, rows, columns), nameless(fusion)
    plans = tuple(kept_pointwise_plan(alike, mapping, device) for device in planner.devices)
    whole = Implementation(graph, match, FUSED_POINTWISE, (), fusion, mapping, plans)
    return Site(graph, match, fusion, mapping, (), None, whole=whole)


def _plan_cached(planner: Planner, graph: Graph, match: Match, fusion: CachedAttention) -> Site:
    """The site of one token over a cache: one kernel on the architecture that has it, the model's op on all others.

    Raises:
        NotFusable: none of the architectures has it.
    """
    devices = [device for device in planner.devices if device.arch == ONLY]
    if not devices:
        raise NotFusable("no_attention_kernel", fusion.anchor, f"there is one for {ONLY} alone")
    plans = tuple(make_cached_plan(fusion, device) for device in devices)
    whole = Implementation(graph, match, FUSED_CACHE, (), fusion, mapping_of(), plans)
    return Site(graph, match, fusion, mapping_of(), (), None, whole=whole, only=ONLY)


def _mapped_attention(attention: Attention) -> AxisMapping:
    mapping = map_attention(attention)
    _check_resolved(attention)
    return mapping


def _check_not_exact(planner: Planner, match: Match) -> None:
    if planner.exact_fp32 and any(product.dtype == F32 for product in match.products):
        raise NotFusable("no_attention_kernel", match.label, "no kernel of attention computes fp32 exactly")


def _check_resolved(fusion: Fusion) -> None:
    if fusion.unresolved:
        detail = f"no input tells the sizes of {', '.join(sorted(fusion.unresolved))}"
        raise NotFusable("unknown_shape", fusion.anchor, detail)


def _plan_broadcast_product(planner: Planner, graph: Graph, match: Match, fusion: Fusion) -> Site:
    """A site whose operands repeat its product: the product stays with the library, whatever the architecture.

    Raises:
        NotFusable: `broadcasts_the_product`, where that is not possible, would repeat an activation, or has several
            outputs, of which one may not be repeated and would be written once for each repetition.
    """
    mapping = map_broadcast_product(fusion)
    exact = planner.exact_fp32 and fusion.lhs.dtype == F32
    refused = exact or match.shared or len(fusion.outs) > 1 or _repeats_an_activation(fusion)
    epilogue_only = None if refused else _epilogue_only(planner, graph, match, mapping)
    if epilogue_only is None:
        raise NotFusable("broadcasts_the_product", fusion.anchor, "an operand is longer than the product")
    return Site(graph, match, fusion, mapping, (), epilogue_only, Strategy.EPILOGUE_ONLY)


def _plan_columns_in_turn(
    planner: Planner, graph: Graph, match: Match, fusion: Fusion, other: tuple[Fusion, Mapping[str, Order]] | None
) -> Site:
    """A site of parts whose columns take turns in a row of its weight, where no kernel reads neighbours of one part.

    So the weight is stored with k innermost, or the product stays with the library.

    Raises:
        NotFusable: neither is possible, or the product's own nodes are faster.
    """
    kept = _attempt(_behind_product, planner, graph, match, fusion)
    stored = _attempt(_planned, planner, graph, match, *other) if other is not None else kept
    if isinstance(stored, NotFusable) or stored is kept:
        return accepted(kept)
    return replace(stored, as_stored=kept)


def _behind_product(planner: Planner, graph: Graph, match: Match, fusion: Fusion) -> Site:
    """The site of a product that stays a node, whatever the architecture.

    Raises:
        NotFusable: the library would multiply in TF32 where exact products were asked for, others share the product,
            or no kernel computes what follows.
    """
    mapping = map_axes(fusion)
    refused = (planner.exact_fp32 and fusion.lhs.dtype == F32) or match.shared
    epilogue_only = None if refused else _epilogue_only(planner, graph, match, mapping)
    if epilogue_only is None:
        detail = f"{fusion.rhs[0].name!r} has the columns of its parts in turn, and is not to be stored [n, k]"
        raise NotFusable("strided_slice", fusion.anchor, detail)
    return Site(graph, match, fusion, mapping, (), epilogue_only, Strategy.EPILOGUE_ONLY)


def _repeats_an_activation(fusion: Fusion) -> bool:
    """Whether a function of the product alone would be computed again for each repetition."""
    alone = {acc_name(part) for part in range(len(fusion.parts))}
    long = {axis for axis in broadcast_product_axes(fusion) if fusion.size(axis) != 1}
    alone |= {
        load_name(index) for index, load in enumerate(fusion.loads) if not long & {*fusion.operands[load.operand].axes}
    }
    for step in fusion.steps:
        if all(isinstance(value, float) or value in alone for value in step.inputs):
            alone.add(step.result)
            if step.op in NONLINEAR:
                return True
    return False


def _without_epilogue_only(times: Iterable[Times]) -> tuple[Times, ...]:
    return tuple(
        {strategy: each[strategy] for strategy in each if strategy is not Strategy.EPILOGUE_ONLY} for each in times
    )


def is_profitable_together(joint: Site, alone: Sequence[Site]) -> bool:
    """Whether one site is estimated to be faster than several that compute the same, or than its nodes where none do.

    Beside bare products, which the library makes at its best, it has to be one kernel that is slower at no size.
    """
    if not alone:
        return not joint.is_left_alone
    if not all(site.estimates for site in (joint, *alone)):  # one whose product stays a node anyway
        return False
    devices = joint.estimates
    several = {device: [_chosen(site, device) for site in alone] for device in devices}
    one = {device: _chosen(joint, device) for device in devices}
    if any(site.match.is_bare for site in alone):
        return joint.strategy is Strategy.ONE_KERNEL and is_nowhere_slower(one, several)
    return saves(one, several)


def _chosen(site: Site, device: DeviceSpec) -> list[float]:
    """Microseconds of a site as the model gets it, at every number of rows; one bare product stays with the library."""
    is_alone = (site.match.is_bare and len(site.match.products) == 1) or site.only not in (None, device.arch)
    strategy = Strategy.LEFT_ALONE if is_alone else site.strategy
    return [times[strategy] for times in site.estimates[device]]


def _epilogue_only(planner: Planner, graph: Graph, match: Match, mapping: AxisMapping) -> Implementation | None:
    if _has_biases_alone(graph, match):
        return None
    shapes = (shape for index, shape in match.shapes.items() if index in match.nodes)
    if not all(shape.is_constant for shape in shapes):  # the product's input is no input of the kernel
        return None
    try:
        fusion, products = match_epilogue(graph, match)
        pointwise = epilogue_of(fusion if planner.rounds else simplify(fusion), products)
        own = map_pointwise(pointwise, mapping)
    except NotFusable:
        return None
    if pointwise.unresolved:  # the product flattened what only its own input holds apart
        return None
    retained = tuple(sorted(graph.index(product.node) for product in match.products))
    alike = nameless(pointwise)
    plans = tuple(kept_pointwise_plan(alike, own, device) for device in planner.devices)
    return Implementation(graph, match, FUSED_POINTWISE, retained, pointwise, own, plans)


def _estimates(
    graph: Graph,
    match: Match,
    fusion: Fusion,
    mapping: AxisMapping,
    plans: Sequence[ProductPlan],
    epilogue_only: Implementation | None,
) -> dict[DeviceSpec, tuple[Times, ...]]:
    if epilogue_only is None and fusion.quantization is not None:
        between = len(_behind_products(graph, match))
        return {plan.device: kept_stock_times(plan, len(fusion.rhs), between) for plan in plans}
    if match.is_bare:
        return {plan.device: _beside_products(plan, fusion, mapping) for plan in plans}
    by = next((entry.problem.by for plan in plans for entry in plan.ranked), "m")
    if epilogue_only is not None:
        traffic = _traffic(graph, fusion, mapping, by, epilogue_only)
        return {plan.device: kept_times(plan, traffic) for plan in plans}
    copies = _stores_ranges_alone(graph, match)
    if copies or _has_biases_alone(graph, match):
        traffic = _traffic_of_biased(match, fusion, mapping, by)
        traffic = _with_copies(match, traffic) if copies else traffic
        times = {plan.device: kept_times(plan, traffic) for plan in plans}
        return {device: _without_epilogue_only(each) for device, each in times.items()}
    return {plan.device: tuple({Strategy.ONE_KERNEL: each.one_kernel} for each in plan.ranked) for plan in plans}


def _has_biases_alone(graph: Graph, match: Match) -> bool:
    """Whether nothing follows products and their own biases but views that move nothing.

    So it is with a range by itself: the runtime copies it out of the product, which is as long as to add a bias.
    """
    return all(qualified_op(graph.nodes[index]) in FREE_VIEWS for index in _behind_products(graph, match))


def _behind_products(graph: Graph, match: Match) -> set[int]:
    """The indices of a match's nodes that are no products."""
    return {*match.nodes} - {graph.index(product.node) for product in match.products}


def _stores_ranges_alone(graph: Graph, match: Match) -> bool:
    """Whether nothing follows a product but what takes its columns apart, which the runtime copies."""
    behind = (graph.nodes[index] for index in _behind_products(graph, match))
    ops = {qualified_op(node) for node in behind if graph.dtype(node.outputs[0].name) in FLOATS_BY_ONNX} - FREE_VIEWS
    return bool(ops) and ops <= RANGES and not match.shared


def _with_copies(match: Match, traffic: Traffic) -> Traffic:
    """The same with a pass that copies ranges of a product, beside that of a bias if there is one."""
    is_biased = any(product.is_biased_gemm for product in match.products)
    return replace(traffic, passes=1 + is_biased, biased=traffic.biased if is_biased else "")


def _convolves_alone(graph: Graph, match: Match) -> bool:
    """The same of convolutions: the library adds their biases, but turns images round before it multiplies."""
    return match.convolves and _has_biases_alone(graph, match)


def _traffic_of_biased(match: Match, fusion: Fusion, mapping: AxisMapping, by: str) -> Traffic:
    """Products whose bias is a pass of its own to the runtime: for a Gemm it writes what a product then adds to."""
    gemms = all(product.is_biased_gemm for product in match.products)
    shared, walked, across = _walks(fusion, mapping, by)
    made = sum(_row_bytes(fusion, tensor, across) for tensor in fusion.outputs)
    return Traffic(
        weights=sum(_row_bytes(fusion, factor, factor.axes) for factor in shared),
        lhs=sum(_row_bytes(fusion, factor, (PART_AXIS, *mapping.k)) for factor in walked),
        product=made,
        rest=made,
        passes=0 if match.convolves else len(fusion.rhs),
        products=len(fusion.rhs),
        biased=CONVOLUTION if match.convolves else "Gemm" if gemms else "",
    )


def _walks(fusion: Fusion, mapping: AxisMapping, by: str) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
    """The factor that all rows share, the one that is walked with them, and the axes of a row; or of a column."""
    rhs, lhs = [held for group in fusion.stored_rhs for held in group], [fusion.lhs]
    shared, walked, across = (rhs, lhs, mapping.n) if by == "m" else (lhs, rhs, mapping.m)
    return shared, walked, (PART_AXIS, *across)


def _beside_products(plan: ProductPlan, fusion: Fusion, mapping: AxisMapping) -> tuple[Times, ...]:
    """Microseconds of one kernel and of the library's products, at each number of rows."""
    by = plan.ranked[0].problem.by if plan.ranked else "m"
    shared, walked, across = _walks(fusion, mapping, by)
    traffic = Traffic(
        weights=sum(_row_bytes(fusion, factor, factor.axes) for factor in shared),
        lhs=sum(_row_bytes(fusion, factor, (PART_AXIS, *mapping.k)) for factor in walked),
        product=sum(_row_bytes(fusion, out, across) for out in fusion.outputs),
        rest=0,
        passes=0,
        products=len(fusion.rhs),
    )
    return _without_epilogue_only(kept_times(plan, traffic))


def _traffic(graph: Graph, fusion: Fusion, mapping: AxisMapping, by: str, epilogue_only: Implementation) -> Traffic:
    shared, walked, across = _walks(fusion, mapping, by)
    products = epilogue_only.fusion.operands[: len(fusion.rhs)]
    others = (*fusion.operands, *fusion.outputs)
    own = sum((product.activation is not None) + product.is_biased_gemm for product in epilogue_only.match.products)
    opened = {graph.opened_sums[index] for index in epilogue_only.replaced if index in graph.opened_sums}
    one_node = frozenset[int]().union(*opened)
    return Traffic(
        weights=sum(_row_bytes(fusion, factor, factor.axes) for factor in shared),
        lhs=sum(_row_bytes(fusion, factor, (PART_AXIS, *mapping.k)) for factor in walked),
        product=sum(_row_bytes(fusion, product, across) for product in products),
        rest=sum(_row_bytes(fusion, tensor, across) for tensor in others if mapping.kind(tensor) == "tile"),
        passes=sum(
            graph.dtype(graph.nodes[index].outputs[0].name) in FLOATS_BY_ONNX
            for index in epilogue_only.replaced
            if index not in one_node and not _is_made_by_a_norm(graph, index)
        )
        + own,
        own_passes=own,
        biased=_biased(graph, fusion, mapping, epilogue_only),
        products=len(products),
        normalised=tuple(_normalised(graph, max(sums), _row_bytes(fusion, products[0], across)) for sums in opened),
        added=tuple(_added(graph, epilogue_only.replaced, _row_bytes(fusion, products[0], across))),
    )


def _biased(graph: Graph, fusion: Fusion, mapping: AxisMapping, epilogue_only: Implementation) -> str:
    """The only product and the Add behind it, where that adds a bias and nothing else follows; empty otherwise."""
    ops = [graph.nodes[index].op for index in epilogue_only.replaced]
    product, *others = epilogue_only.match.products
    of_rows = all(mapping.kind(operand) != "tile" for operand in fusion.operands)
    return f"{product.node.op}, Add" if ops == ["Add"] and not others and of_rows else ""


def _is_made_by_a_norm(graph: Graph, index: int) -> bool:
    """Whether the runtime's kernel for a normalisation adds as well what a node adds."""
    node = graph.nodes[index]
    return is_bias_of_it(graph, node) or is_added_and_normalised(graph, node)


def _added(graph: Graph, nodes: Iterable[int], size: int) -> Iterator[Normalising]:
    """The ops that the runtime's optimiser makes of sums and what normalises them, of rows of so many bytes."""
    for index in nodes:
        if is_added_and_normalised(graph, graph.nodes[index]):
            yield Normalising(OPTIMISED, 3 * size, 2 * size)


def _normalised(graph: Graph, last: int, size: int) -> Normalising:
    """An op that was taken apart, of rows of so many bytes.

    It reads the product and the skip, and writes its result and the sum where somebody wants it; what stays of it reads
    the sum and writes the result.
    """
    node = graph.nodes[last]
    (total,), ((_, op, _), *_) = node.outputs, graph.opened(node)
    is_wanted = len(total.outputs) > 1 or graph.is_escaping(total.name)
    return Normalising(op, (4 if is_wanted else 3) * size, 2 * size)


def _row_bytes(fusion: Fusion, tensor: Tensor, along: Sequence[str]) -> int:
    return tensor.dtype.bytes * math.prod(fusion.size(axis) or 1 for axis in tensor.axes if axis in along)
