"""Problem -> candidates -> cost -> best: which kernel, tile and access widths compute a fusion on one architecture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.axes import Axes, AxisMapping, flatten, levels, static_size
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import F32, DType
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Pointwise, Tensor
from onnxfuse.hopper_tile import HopperTile
from onnxfuse.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.tile_candidates import CANDIDATES, Candidate, candidates_for, obstacle, tile_text
from onnxfuse.tile_cost import Problem, copying, cost, flow
from onnxfuse.vector_width import Width, Widths, is_turned, lhs_order, rhs_order


@dataclass(frozen=True)
class Variant:
    """A kernel and the rows that it is for, `min_m <= m <= max_m`.

    Attributes:
        hopper: the tile of the sm_90a kernel; None for the portable kernel, whose tile is the spec's own.
    """

    spec: KernelSpec
    min_m: int
    max_m: int
    hopper: HopperTile | None = None

    @property
    def tile(self) -> Tile | HopperTile:
        """The tile that the kernel computes with."""
        return self.hopper or self.spec.tile


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not taken, and why."""

    tile: Tile | HopperTile
    reason: str


@dataclass(frozen=True)
class Ranked:
    """Every legal tile at one number of rows, and n columns, with its estimated microseconds, the fastest first.

    Attributes:
        copying: of the fastest tile's microseconds, those for copies through registers.
        risk: microseconds to expect beside them, where only the run knows whether wider copies are legal.
    """

    m: int
    n: int
    tiles: tuple[tuple[float, Tile | HopperTile], ...]
    copying: float = 0.0
    risk: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The kernels of one fusion on one architecture, in the order in which a launch tries them.

    The first variants use the widest accesses; the last looks at every tensor by itself and fits any pointer.
    """

    device: DeviceSpec
    variants: tuple[Variant, ...]
    rejected: tuple[Rejected, ...]
    ranked: tuple[Ranked, ...]

    def __str__(self) -> str:
        rows = [
            f"{self.device.arch:<7} m {variant.min_m}..{variant.max_m if variant.max_m < MAX_M else ''}  "
            f"{tile_text(variant.tile)}  lhs x{variant.spec.lhs_width} rhs x{variant.spec.rhs_width}"
            f"{', where a tensor lies so' if variant.spec.checked else ''}"
            for variant in self.variants
        ]
        rows += [f"{'':<7} not {tile_text(entry.tile)}: {entry.reason}" for entry in self.rejected]
        return "\n".join(rows)


MAX_M = 2**31 - 1
SAMPLED_M = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # where a dynamic m is planned for
FALLBACK_M = (64, 16384)  # the same for what takes over where wide accesses are not legal: every tile is compiled
UNKNOWN = 1024  # an n or k that only the run knows: a sequence like m, but not a short one
# Exact fp32 where the tensor cores multiply TF32 more than three times as fast as the fp32 units multiply: by the
# vendor's peaks 8 times on sm_80, 7.4 on sm_90a. On sm_86, sm_89 and sm_120 it is 1 to 2 times; sm_100 is not known.
EXACT_ON = {"sm_80": "3xtf32", "sm_90a": "3xtf32"}
SHALLOW = 8  # a product of a smaller depth fills no step of the tensor cores
# Of a length that only the run knows being one that wide copies do not fit: texts have any, images even ones.
ODDS = 0.5


def make_plan(fusion: Fusion, mapping: AxisMapping, widths: Widths, device: DeviceSpec, exact_fp32: bool) -> Plan:
    """Choose the kernels of a fusion for one architecture.

    Raises:
        NotFusable: no tile fits the architecture's shared memory.
    """
    columns, depth = static_size(fusion, mapping.n), static_size(fusion, mapping.k)
    base = _spec(fusion, mapping, widths, arithmetic(fusion.lhs.dtype, device, depth, exact_fp32))
    # Batches that share rhs count as rows: the launch rule adds them up as well.
    shared = not any(axis in fusion.rhs[0].axes for axis in mapping.batch)
    m = static_size(fusion, (*mapping.batch, *mapping.m) if shared else mapping.m)
    batch = 1 if shared else math.prod(fusion.size(axis) or 1 for axis in mapping.batch)
    guessed = columns is None or (not shared and static_size(fusion, mapping.batch) is None)
    problems = [
        Problem(size, columns or max(size, UNKNOWN), depth or max(size, UNKNOWN), batch, guessed)
        for size in ([m] if m else SAMPLED_M)
    ]
    deepest = problems[-1].k
    fitting, rejected = _fitting(base, device, deepest)
    if not fitting:
        raise NotFusable("no_tile_fits", fusion.anchor, f"every tile needs more shared memory than {device.arch} has")
    ranked = _rank(base, fitting, problems, device)
    if widths.lhs.guarded:
        slowest, exposed = fitting[-1].tile, replace(base, lhs_width=1)
        risks = [ODDS * copying(slowest, exposed, problem, device) for problem in problems]
        ranked = tuple(replace(entry, risk=risk) for entry, risk in zip(ranked, risks, strict=True))
    variants = _fastest(base, ranked)
    taken = {variant.tile for variant in variants}
    rejected += [Rejected(entry.tile, "slower by the cost model") for entry in fitting if entry.tile not in taken]
    unguarded = _unguarded(base, widths, fusion)
    if unguarded != base:
        few = [problem for problem in problems if problem.m in FALLBACK_M] or problems
        variants += _fastest(unguarded, _rank(unguarded, _fitting(unguarded, device, deepest)[0], few, device))
    last = _variant(_checked(base), fitting[-1].tile, 0, MAX_M)
    if all(variant.spec != last.spec for variant in variants):
        variants.append(last)
    return Plan(device, tuple(variants), tuple(rejected), ranked)


def replan(plan: Plan, best: Sequence[tuple[int, Tile | HopperTile]]) -> Plan:
    """The plan with other tiles, at some numbers of rows in ascending order; what takes over from them stays."""
    base = plan.variants[0].spec
    rest = [variant for variant in plan.variants if replace(variant.spec, tile=base.tile) != base]
    return replace(plan, variants=(*_variants(base, best), *rest))


def _rank(
    base: KernelSpec,
    fitting: list[Candidate[Tile | HopperTile]],
    problems: Sequence[Problem],
    device: DeviceSpec,
) -> tuple[Ranked, ...]:
    """The tiles by their estimated time, at each of some sizes."""
    priced = [(entry, flow(base, entry.tile, device)) for entry in fitting]

    def rank(problem: Problem) -> Ranked:
        costs = [(cost(entry, reads, base, problem, device), entry.tile) for entry, reads in priced]
        costs.sort(key=lambda pair: pair[0])
        return Ranked(problem.m, problem.n, tuple(costs), copying(costs[0][1], base, problem, device))

    return tuple(map(rank, problems))


def _fastest(base: KernelSpec, ranked: Sequence[Ranked]) -> list[Variant]:
    """The fastest tile for each range of m."""
    return _variants(base, [(entry.m, entry.tiles[0][1]) for entry in ranked])


def _variants(base: KernelSpec, best: Sequence[tuple[int, Tile | HopperTile]]) -> list[Variant]:
    return [_variant(base, tile, low, high) for tile, low, high in _ranges(best)]


def _variant(base: KernelSpec, tile: Tile | HopperTile, min_m: int, max_m: int) -> Variant:
    if isinstance(tile, HopperTile):
        return Variant(base, min_m, max_m, tile)
    return Variant(replace(base, tile=tile), min_m, max_m)


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
    if not exact_fp32:
        return "tf32"
    return "fp32" if depth is not None and depth < SHALLOW else EXACT_ON.get(device.arch, "fp32")


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
        tile=CANDIDATES["f16"][0].tile,  # stands in until a candidate is chosen
        lhs_run=_run(fusion, fusion.lhs, mapping.k) or 0,
        lhs_order=lhs_order(fusion, mapping),
        lhs_batch_runs=levels(fusion, fusion.lhs, mapping.batch) > 1,
        rhs_batch_runs=levels(fusion, fusion.rhs[0], mapping.batch) > 1,
    )


def access(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping, width: Width) -> Access:
    """How a kernel reaches a tensor of the epilogue."""
    kind = mapping.kind(tensor)
    loops = (("m", mapping.m), ("n", mapping.n), ("batch", mapping.batch))
    two_levels = tuple(name for name, loop in loops if levels(fusion, tensor, loop) > 1)
    elements = width.elements if kind in ("row", "tile") else 1
    turned = kind == "tile" and is_turned(fusion, tensor, mapping)
    run = _run(fusion, tensor, mapping.n) if "n" in two_levels else None
    return Access(kind, tensor.dtype, elements, turned, two_levels, run or 0)


def _run(fusion: Pointwise, tensor: Tensor, loop: Axes) -> int | None:
    """Steps of one run of a loop that two strides walk; None where one does, or only the run knows."""
    groups = flatten(fusion, (tensor,), loop)
    return static_size(fusion, groups[-1]) if len(groups) > 1 else None


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


def _fitting(base: KernelSpec, device: DeviceSpec, k: int) -> tuple[list[Candidate[Tile | HopperTile]], list[Rejected]]:
    fitting: list[Candidate[Tile | HopperTile]] = []
    rejected: list[Rejected] = []
    for candidate in candidates_for(base, device, k):
        reason = obstacle(base, candidate.tile, device)
        if reason is None:
            fitting.append(candidate)
        else:
            rejected.append(Rejected(candidate.tile, reason))
    return fitting, rejected


def _ranges(best: Sequence[tuple[int, Tile | HopperTile]]) -> list[tuple[Tile | HopperTile, int, int]]:
    """Neighbouring sizes with the same choice become one range; the last one has no end."""
    ranges: list[tuple[Tile | HopperTile, int, int]] = []
    for index, (size, tile) in enumerate(best):
        low = 0 if index == 0 else best[index - 1][0] + 1
        high = MAX_M if index == len(best) - 1 else size
        if ranges and ranges[-1][0] == tile:
            ranges[-1] = (tile, ranges[-1][1], high)
        else:
            ranges.append((tile, low, high))
    return ranges
