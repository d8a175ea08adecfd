"""Problem -> candidates -> cost -> best: which kernel, tile and access widths compute a fusion on one architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from onnxfuse.analysis.axis_mapping import AxisMapping, levels, static_size, stepped
from onnxfuse.analysis.vector_width import Widths, lhs_order, padded_row, rhs_order
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import F32, DType
from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import Fusion
from onnxfuse.limits import MAX_M
from onnxfuse.schedule import learned_cost
from onnxfuse.schedule.access import access, run_of
from onnxfuse.schedule.calibration import calibration, kept
from onnxfuse.schedule.cost_model import copying_rows, waves_of, with_rows_copied
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.kernel_family import (
    Amount,
    AnyTile,
    Candidate,
    Count,
    Flow,
    Problem,
    ProductFamily,
    Sizes,
    costs,
)
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.library import LABEL, library_rows, library_time, library_way
from onnxfuse.schedule.row_ranges import FEW_ROWS, MOST_KERNELS, MOST_OF_QUANTIZED, choose_ranges
from onnxfuse.schedule.variant import SLOWER, ProductPlan, ProductVariant, Ranked, Rejected

# Where a dynamic m or n is looked at to choose a strategy, and by reports: texts and images are no powers of two.
FALLBACK = (64, 16384)  # the same for what takes over where wide accesses are not legal: every tile is compiled
Prices = Callable[[Count], Amount]  # microseconds of tiles at a size that plans go by or several, [tiles, sizes]
KEPT_PRICES = 64  # some 200 kB each: of sites of equal sizes whose steps compute other things
KEPT_TILES = 1 << 14  # of some hundred kernels: whether a tile is legal, and its flow, no size of a product changes
SHALLOW = 8  # k of one mma.m16n8k8: no fit but a fact, a product of a smaller depth fills no step of the tensor cores


def make_plan(
    fusion: Fusion, mapping: AxisMapping, widths: Widths, device: DeviceSpec, exact_fp32: bool
) -> ProductPlan:
    """Choose the kernels of a fusion for one architecture.

    Raises:
        NotFusable: no tile fits the architecture's shared memory, or no kernel reads a quantized rhs.
    """
    columns, depth = static_size(fusion, mapping.n), static_size(fusion, mapping.k)
    base = _spec(fusion, mapping, widths, arithmetic(fusion.lhs.dtype, device, depth, exact_fp32))
    # Batches that share rhs count as rows: the launch rule adds them up as well.
    shared = not any(axis in fusion.rhs[0].axes for axis in mapping.batch)
    m = static_size(fusion, (*mapping.batch, *mapping.m) if shared else mapping.m)
    batch = 1 if shared else math.prod(fusion.size(axis) or 1 for axis in mapping.batch)
    guessed = not shared and static_size(fusion, mapping.batch) is None
    one_lhs = not any(axis in fusion.lhs.axes for axis in mapping.batch)
    stored_k = padded_row(fusion, fusion.rhs[0])
    bands, band = _bands(fusion, mapping) if shared else (1, 0)
    sizes = Sizes(m, columns, depth, batch, guessed, calibration(device).unknown_size, one_lhs, stored_k, bands, band)
    problems = [sizes.at(size) for size in sizes.sampled]
    deepest = problems[-1].k
    fitting, rejected = _fitting(base, device, deepest, depth is not None)
    if not fitting and fusion.quantization is not None:
        raise _unread(fusion, device)
    if not fitting:
        raise NotFusable("no_tile_fits", fusion.anchor, f"every tile needs more shared memory than {device.arch} has")
    ranked = _rank(base, fitting, sizes, problems, device)
    prices = _pricing(base, fitting, sizes, device)
    if widths.lhs.guarded:
        odds, exposed = calibration(device).odds, replace(base, lhs_width=1)
        risks = [odds * _copying(fitting[-1], exposed, problem, device) for problem in problems]
        ranked = tuple(replace(entry, risk=risk) for entry, risk in zip(ranked, risks, strict=True))
    variants = _fastest(base, ranked, sizes) if sizes.known else _ranged(base, fitting, prices, sizes, device)
    taken = {variant.tile for variant in variants}
    rejected += [Rejected(entry.tile, SLOWER) for entry in fitting if entry.tile not in taken]
    unguarded = _unguarded(base, widths, fusion)
    if unguarded != base:
        few = problems if sizes.known else [sizes.at(size) for size in FALLBACK]
        others = _fitting(unguarded, device, deepest, depth is not None)[0]
        variants += _fastest(unguarded, _rank(unguarded, others, sizes, few, device), sizes)
    last = _variant(_checked(base), fitting[-1], 0, MAX_M, sizes.label)
    is_among_them = any((each.spec, each.tile) == (last.spec, last.tile) for each in variants)
    if not is_among_them or any(each.spec.copied for each in variants):  # for copies there may be no memory
        variants.append(last)
    plan = ProductPlan(device, tuple(variants), widths, tuple(rejected), ranked, sizes)
    library = library_way(fusion, mapping, base, sizes, device)
    own = [index for index, entry in enumerate(fitting) if entry.tile in taken]
    products = len(fusion.parts if any(rhs.has_parts_in_turn for rhs in fusion.rhs) else fusion.rhs)
    return _with_library(replace(plan, library=library), lambda size: prices(size)[own], products)


def _bands(fusion: Fusion, mapping: AxisMapping) -> tuple[int, int]:
    """Batches of rows that have operands of their own, and rows of each; 0 where only the run knows."""
    batch = stepped(fusion, mapping.batch)
    return (static_size(fusion, batch) or 0, static_size(fusion, mapping.m) or 0) if batch else (1, 0)


def _unread(fusion: Fusion, device: DeviceSpec) -> NotFusable:
    """Why there is no kernel for a quantized rhs."""
    return NotFusable("quantized_form", fusion.anchor, f"no kernel of {device.arch} reads {fusion.quantization}")


def _with_library(plan: ProductPlan, prices: Prices, products: int) -> ProductPlan:
    """The plan with the library's product for the rows where its own tiles are slower.

    Args:
        plan: without it.
        prices: of its tiles.
        products: that the library makes one after the other.
    """
    base, sizes, device = plan.variants[0].spec.without_copies, plan.sizes, plan.device
    if not plan.library or sizes is None:
        return plan

    def tiles(size: Count) -> Amount:
        return prices(sizes.known or size).min(axis=0)

    def with_library(size: Count) -> Amount:
        problems = sizes.guesses(sizes.known or size)
        return _mean([library_time(base, problem, products, device) for problem in problems])

    rows = library_rows(tiles, with_library)
    taken = (any(low <= each.size <= high for low, high in rows) for each in plan.ranked)
    ranked = tuple(
        replace(each, library=float(library_time(base, each.problem, products, device)) if takes else math.inf)
        for each, takes in zip(plan.ranked, taken, strict=True)
    )
    return replace(plan, ranked=ranked, library_rows=rows)


def replan(plan: ProductPlan, entry: Candidate) -> ProductPlan:
    """The plan with one tile for every number of rows; what takes over from it stays."""
    base = plan.variants[0].spec.without_copies
    by = plan.variants[0].by
    return _with(replace(plan, library_rows=()), [_variant(base, entry, 0, MAX_M, by)])


def retuned(plan: ProductPlan, times: Mapping[int, Mapping[str, float]]) -> ProductPlan:
    """The plan with the tiles that measured times speak for; what takes over from them stays.

    Where only the run knows m, the estimate of a tile is corrected by what was measured of it at the nearest number of
    rows; a tile that was not measured there, by the mean of those that were.

    Args:
        plan: with estimates.
        times: microseconds by number of rows, then by tile.
    """
    if not times:
        return plan
    base, sizes = plan.variants[0].spec.without_copies, plan.sizes
    candidates = [entry for _, entry in plan.ranked[0].tiles]
    if sizes is None or sizes.known is not None:
        (measured,) = times.values()
        return replan(plan, min(candidates, key=lambda entry: measured.get(str(entry.tile), math.inf)))
    names = {str(variant.tile) for variant in plan.variants}.union(*times.values())
    worth = [entry for entry in candidates if str(entry.tile) in names]
    estimates = _pricing(base, worth, sizes, plan.device)
    corrections = {
        m: _corrections(worth, measured, estimated(base, worth, sizes.at(m), plan.device)[:, 0])
        for m, measured in times.items()
    }

    def prices(rows: Count) -> Amount:
        return estimates(rows) * _nearest(corrections, rows).T

    return _with(plan, _ranged(base, worth, prices, sizes, plan.device))


def _corrections(
    entries: Sequence[Candidate], measured: Mapping[str, float], estimates: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How many times their estimates tiles took; those that were not measured, as many as the others in the mean."""
    logarithms = np.array([math.log(measured.get(str(entry.tile), math.nan)) for entry in entries]) - np.log(estimates)
    return np.exp(np.where(np.isnan(logarithms), np.nanmean(logarithms), logarithms))


def _nearest(values: Mapping[int, Amount], rows: Count) -> NDArray[np.float64]:
    """The value of the known number of rows that is nearest to each, by ratio."""
    known = np.array([*values])
    distance = np.abs(np.log(np.divide.outer(np.atleast_1d(rows), known)))
    nearest: NDArray[np.float64] = np.array([*values.values()])[distance.argmin(axis=-1)]
    return nearest


def by_library(plan: ProductPlan, times: Mapping[int, Mapping[str, float]] | None = None) -> ProductPlan:
    """The plan with the library's product for the rows that measured times speak for: those nearest to such a time.

    Args:
        plan: with the kernels behind that product.
        times: microseconds by number of rows, then by tile and way; None for all rows.
    """
    if times is None:
        return replace(plan, library_rows=((0, MAX_M),))
    if not times:
        return plan
    tiles = {str(entry.tile) for _, entry in plan.ranked[0].tiles}

    own = {
        m: min((each for name, each in known.items() if name in tiles), default=math.inf) for m, known in times.items()
    }
    library = {m: known[LABEL] for m, known in times.items()}
    return replace(plan, library_rows=library_rows(partial(_nearest, own), partial(_nearest, library)))


def _with(plan: ProductPlan, variants: Sequence[ProductVariant]) -> ProductPlan:
    base = variants[0].spec.without_copies
    rest = [variant for variant in plan.variants if variant.spec.without_copies != base]
    return replace(plan, variants=(*variants, *rest))


def _ranged(
    base: KernelSpec, candidates: Sequence[Candidate], prices: Prices, sizes: Sizes, device: DeviceSpec
) -> list[ProductVariant]:
    """Few tiles of which one is good at any number of rows, or columns."""
    few = 1.0 if sizes.by == "n" else FEW_ROWS
    most = most_kernels(base, sizes)
    ranges = choose_ranges(candidates, prices, calibration(device).regret, few, most=most)
    return [_variant(base, each.entry, each.low, each.high, sizes.label) for each in ranges]


def most_kernels(base: KernelSpec, sizes: Sizes) -> int:
    """How many a site may have, each of which is compiled and stored: more where the weight is large beside them."""
    if base.quantization:
        return MOST_OF_QUANTIZED
    elements = base.parts * (sizes.n or 0) * (sizes.k or 0)
    return next(most for least, most in MOST_KERNELS if elements >= least)


def _pricing(base: KernelSpec, candidates: Sequence[Candidate], sizes: Sizes, device: DeviceSpec) -> Prices:
    """The cost model's microseconds; of a size that may be of several problems, their mean."""
    priced, entries = base.priced, tuple(candidates)

    def prices(size: Count) -> Amount:
        asked = size if isinstance(size, int) else tuple(np.ravel(size).tolist())
        return kept_prices(priced, entries, sizes, asked, device)

    return prices


def _prices(
    base: KernelSpec, candidates: tuple[Candidate, ...], sizes: Sizes, size: int | tuple[int, ...], device: DeviceSpec
) -> Amount:
    problems = sizes.guesses(size if isinstance(size, int) else np.array(size))
    found = _mean([estimated(base, candidates, problem, device) for problem in problems])
    found.setflags(write=False)  # others are given the same
    return found


kept_prices = kept(_prices, KEPT_PRICES)


def _mean(times: Sequence[Amount]) -> Amount:
    """Of several, the geometric mean."""
    return times[0] if len(times) == 1 else np.exp(sum(map(np.log, times)) / len(times))


def estimated(
    base: KernelSpec, candidates: Sequence[Candidate], problem: Problem, device: DeviceSpec
) -> NDArray[np.float64]:
    """Microseconds of tiles, f64[tiles, sizes]: by the terms of their family, and what was learnt beside them.

    Args:
        base: the kernel.
        candidates: its tiles.
        problem: of one size or an array of them.
        device: to plan for.
    """
    if np.all(problem.bands == 1):
        return _estimated(base, candidates, problem, device)
    times = np.full((len(candidates), np.size(problem.size)), math.inf)
    for rows in {entry.tile.block_m for entry in candidates}:
        own = [index for index, entry in enumerate(candidates) if _fits_bands(entry.tile, rows)]
        if own:
            times[own] = _estimated(base, [candidates[index] for index in own], problem.in_tiles(rows), device)
    return times


def _fits_bands(tile: AnyTile, rows: int) -> bool:
    """Whether a tile has so many rows, and no clusters for a last wave, which those of several batches have not."""
    return tile.block_m == rows and getattr(tile, "last_wave_splits", 1) == 1


def _estimated(
    base: KernelSpec, candidates: Sequence[Candidate], problem: Problem, device: DeviceSpec
) -> NDArray[np.float64]:
    copied = {family: family.copied(base) for family in PRODUCTS}
    if not any(copied.values()):
        return _launch_times(base, candidates, problem, device)
    times = np.empty((len(candidates), np.size(problem.size)))
    for factors in {copied[entry.family] for entry in candidates}:
        own = [index for index, entry in enumerate(candidates) if copied[entry.family] == factors]
        spec = replace(base, copied=factors)
        copying, seen = copying_rows(spec, problem, device), with_rows_copied(spec, problem)
        times[own] = _launch_times(spec, [candidates[index] for index in own], seen, device, copying)
    return times


def _launch_times(
    spec: KernelSpec, candidates: Sequence[Candidate], problem: Problem, device: DeviceSpec, copying: Amount = 0.0
) -> NDArray[np.float64]:
    """The same of kernels that all read copies of the same factors, which take so long to make."""
    flows = [kept_flow(entry.family, spec, entry.tile, device) for entry in candidates]
    estimates: NDArray[np.float64] = costs(candidates, flows, spec, problem, device) + copying
    learnt = learned_cost.factors(candidates, flows, estimates, spec, problem, device)
    return estimates * learnt * _early_shares(candidates, flows, spec, problem, device)


def _early_shares(
    candidates: Sequence[Candidate], flows: Sequence[Flow], spec: KernelSpec, problem: Problem, device: DeviceSpec
) -> NDArray[np.float64]:
    """Of their time, what those take that start early, f64[tiles, sizes]."""
    shares = np.ones((len(candidates), np.size(problem.size)))
    for own, entry, reads in zip(shares, candidates, flows, strict=True):
        share = entry.family.early_share(spec, device)
        if share < 1:
            own[...] = np.where(waves_of(entry.tile, problem, device) * problem.k <= reads.early_depth, share, 1.0)
    return shares


def _rank(
    base: KernelSpec,
    candidates: Sequence[Candidate],
    sizes: Sizes,
    problems: Sequence[Problem],
    device: DeviceSpec,
) -> tuple[Ranked, ...]:
    """The tiles by their estimated time, at each of some sizes."""
    every = sizes.at(np.array([problem.size for problem in problems]))
    times = estimated(base.priced, candidates, every, device)

    def rank(index: int, problem: Problem) -> Ranked:
        tiles = sorted(zip(times[:, index].tolist(), candidates, strict=True), key=lambda pair: pair[0])
        return Ranked(problem, tuple(tiles), _copying(tiles[0][1], base, problem, device))

    return tuple(rank(index, problem) for index, problem in enumerate(problems))


def _copying(entry: Candidate, spec: KernelSpec, problem: Problem, device: DeviceSpec) -> float:
    made = copying_rows(entry.family.read_by(spec), problem, device)
    return float(made + entry.family.copying(entry.tile, spec, problem, device))


def _fastest(base: KernelSpec, ranked: Sequence[Ranked], sizes: Sizes) -> list[ProductVariant]:
    """The fastest tile for each range of sizes."""
    best = [(entry.size, entry.tiles[0][1]) for entry in ranked]
    return [_variant(base, entry, low, high, sizes.label) for entry, low, high in _ranges(best)]


def _variant(spec: KernelSpec, entry: Candidate, min_m: int, max_m: int, by: str) -> ProductVariant:
    return ProductVariant(entry.family, entry.family.read_by(spec), entry.tile, min_m, max_m, by)


def arithmetic(dtype: DType, device: DeviceSpec, depth: int | None, exact_fp32: bool) -> str:
    """How products are computed, as `KernelSpec.math` names it.

    Args:
        dtype: of the factors.
        device: to compute on.
        depth: of the product; None where only the run knows.
        exact_fp32: whether fp32 products are computed in full precision.
    """
    if dtype != F32:
        return dtype.name
    if depth is not None and depth < SHALLOW:
        return "fp32"
    return calibration(device).exact if exact_fp32 else "tf32"


def _spec(fusion: Fusion, mapping: AxisMapping, widths: Widths, math_mode: str) -> KernelSpec:
    """The kernel of a fusion but for its tile."""
    operands = [
        access(fusion, operand, mapping, width) for operand, width in zip(fusion.operands, widths.operands, strict=True)
    ]
    outs = [access(fusion, out.tensor, mapping, width) for out, width in zip(fusion.outs, widths.outs, strict=True)]
    return KernelSpec(
        dtype=fusion.lhs.dtype,
        math=math_mode,
        parts=len(fusion.parts),
        rhs_order=rhs_order(fusion, mapping),
        lhs_width=widths.lhs.elements,
        rhs_width=widths.rhs.elements,
        loads=tuple(operands[load.operand] for load in fusion.loads),
        outs=tuple(replace(out, kind="tile") for out in outs),
        steps=fusion.steps,
        out_values=tuple(out.value for out in fusion.outs),
        lhs_run=run_of(fusion, fusion.lhs, mapping.k) or 0,
        lhs_order=lhs_order(fusion, mapping),
        lhs_batch_runs=levels(fusion, fusion.lhs, mapping.batch) > 1,
        rhs_batch_runs=levels(fusion, fusion.rhs[0], mapping.batch) > 1,
        quantization=fusion.quantization,
        scales_width=widths.scales.elements if widths.scales else 1,
        zero_points_width=widths.zero_points.elements if widths.zero_points else 1,
        depth=(static_size(fusion, mapping.k) or 0) if fusion.quantization else 0,
        columns=(static_size(fusion, mapping.n) or 0) if fusion.quantization else 0,
    )


def _unguarded(spec: KernelSpec, widths: Widths, fusion: Fusion) -> KernelSpec:
    """The same kernel with single elements where only the run knows whether a wider access is legal."""
    loads = (
        replace(load, width=1) if widths.operands[index.operand].guarded else load
        for load, index in zip(spec.loads, fusion.loads, strict=True)
    )
    outs = (replace(out, width=1) if width.guarded else out for out, width in zip(spec.outs, widths.outs, strict=True))
    return replace(
        spec,
        lhs_width=1 if widths.lhs.guarded else spec.lhs_width,
        rhs_width=1 if widths.rhs.guarded else spec.rhs_width,
        loads=tuple(loads),
        outs=tuple(outs),
    )


def _checked(spec: KernelSpec) -> KernelSpec:
    """The same kernel, legal for every pointer, pitch and size: it takes single elements of what they do not fit."""
    widths = (spec.lhs_width, spec.rhs_width, *(each.width for each in (*spec.loads, *spec.outs)))
    return replace(spec, checked=max(widths) > 1)


def _fitting(base: KernelSpec, device: DeviceSpec, k: int, is_known: bool) -> tuple[list[Candidate], list[Rejected]]:
    """The legal tiles, and the others, for a product of depth k, or of one that is typical where it is not known."""
    specs = {family: family.read_by(base.priced) for family in PRODUCTS}
    every = [entry for family in PRODUCTS for entry in family.candidates(specs[family], device, k)]
    every = [entry for entry in every if is_known or not entry.family.is_of_one_depth(entry.tile)]
    reasons = [kept_reason(entry.family, specs[entry.family], entry.tile, device) for entry in every]
    fitting = [entry for entry, reason in zip(every, reasons, strict=True) if reason is None]
    return fitting, [Rejected(entry.tile, reason) for entry, reason in zip(every, reasons, strict=True) if reason]


def _reason(family: ProductFamily, spec: KernelSpec, tile: AnyTile, device: DeviceSpec) -> str | None:
    return family.why_not(spec, tile, device)


def _flow(family: ProductFamily, spec: KernelSpec, tile: AnyTile, device: DeviceSpec) -> Flow:
    return family.flow(spec, tile, device)


kept_reason = kept(_reason, KEPT_TILES)
kept_flow = kept(_flow, KEPT_TILES)


def _ranges(best: Sequence[tuple[int, Candidate]]) -> list[tuple[Candidate, int, int]]:
    """Neighbouring sizes with the same choice become one range; the last one has no end."""
    ranges: list[tuple[Candidate, int, int]] = []
    for index, (size, entry) in enumerate(best):
        low = 0 if index == 0 else best[index - 1][0] + 1
        high = MAX_M if index == len(best) - 1 else size
        if ranges and ranges[-1][0].tile == entry.tile:
            ranges[-1] = (entry, ranges[-1][1], high)
        else:
            ranges.append((entry, low, high))
    return ranges
