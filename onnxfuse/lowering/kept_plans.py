"""What was planned before: equal sites, as the layers of a model are, differ in names alone and have equal plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import PART_AXIS, Fusion, Load, Pointwise, RhsPart, StoredRhs, Tensor
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.schedule.attention_plan import estimates, make_attention_plan
from onnxfuse.schedule.calibration import kept
from onnxfuse.schedule.norm_plan import make_norm_plan, own_time, rows_of, stock_time
from onnxfuse.schedule.plan import make_plan
from onnxfuse.schedule.pointwise_plan import make_pointwise_plan
from onnxfuse.schedule.strategy import Strategy, Times, Traffic, beside_stock, estimated_times
from onnxfuse.schedule.variant import AttentionPlan, ProductPlan

KEPT_PLANS = 1024  # some 10 kB each, of all models that a process fuses: few sites differ in more than names
ALIKE = 256  # columns between windows that are reached alike: no access or line of memory is longer
AnyFusion = TypeVar("AnyFusion", bound=Pointwise)
Range = TypeVar("Range", RhsPart, Load)


def nameless(fusion: AnyFusion) -> AnyFusion:
    """The same of values that are called by position: equal for sites with equal plans."""
    tensors = (*fusion.inputs, *fusion.outputs)
    names = {tensor.name: str(index) for index, tensor in enumerate(tensors)}
    called = {tensor: replace(tensor, name=names[tensor.name]) for tensor in tensors}
    return replace(
        fusion,
        anchor="",
        operands=tuple(called[tensor] for tensor in fusion.operands),
        outs=tuple(replace(out, tensor=called[out.tensor]) for out in fusion.outs),
        **(_nameless_factors(fusion, called) if isinstance(fusion, Fusion) else {}),
    )


def in_first_window(fusion: Fusion) -> Fusion:
    """The same of the first columns that lie as its own do: equal for ranges of one product that have equal plans."""
    parts = _moved(fusion, [(fusion.rhs[part.tensor], part) for part in fusion.parts])
    loads = _moved(fusion, [(fusion.operands[load.operand], load) for load in fusion.loads])
    return replace(fusion, parts=parts, loads=loads)


def _moved(fusion: Fusion, ranges: Sequence[tuple[Tensor, Range]]) -> tuple[Range, ...]:
    """All by the same number of columns, and of parts."""
    start = min((each.start for _, each in ranges if each.start is not None), default=0) // ALIKE * ALIKE
    first = min((each.part for _, each in ranges if each.part is not None), default=0)
    together = max((_parts_alike(fusion, tensor) for tensor, each in ranges if each.part is not None), default=1)
    part = first // together * together
    return tuple(
        replace(
            each,
            start=None if each.start is None else each.start - start,
            part=None if each.part is None else each.part - part,
        )
        for _, each in ranges
    )


def _parts_alike(fusion: Fusion, tensor: Tensor) -> int:
    """How many parts of a tensor lie before the next one that begins as they do: a power of two."""
    dim = next(dim for dim in tensor.dims if PART_AXIS in dim)
    columns = math.prod(fusion.size(axis) or 1 for axis in dim[dim.index(PART_AXIS) + 1 :])
    return ALIKE // math.gcd(columns, ALIKE)


def _nameless_factors(fusion: Fusion, called: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    stored = tuple(_called(each, called) for each in fusion.stored)
    rhs = {tensor: replace(tensor, name=held.weight.name) for tensor, held in zip(fusion.rhs, stored, strict=False)}
    factors = tuple({**called, **rhs}[tensor] for tensor in fusion.rhs)
    return {"lhs": called[fusion.lhs], "rhs": factors, "stored": stored}


def _called(held: StoredRhs, called: Mapping[Tensor, Tensor]) -> StoredRhs:
    zero_points = None if held.zero_points is None else called[held.zero_points]
    return StoredRhs(called[held.weight], called[held.scales], zero_points)


@contextmanager
def refusals_of(anchor: str) -> Iterator[None]:
    """What is refused of a nameless fusion is refused of the site that it stands for."""
    try:
        yield
    except NotFusable as refusal:
        raise NotFusable(refusal.reason, anchor, refusal.detail) from refusal


def _times(plan: ProductPlan, traffic: Traffic) -> tuple[Times, ...]:
    return tuple(estimated_times(plan, traffic))


def _stock_times(plan: ProductPlan, products: int, passes: int) -> tuple[Times, ...]:
    return tuple(beside_stock(plan, products, passes))


def _attention_times(
    attention: Attention, mapping: AxisMapping, plan: AttentionPlan, steps: int, moves: int, expanded: Sequence[Tensor]
) -> tuple[Times, ...]:
    """Microseconds of the kernel and of the nodes.

    Each of its steps is a node between the products; of a maximum or a sum of rows that is written down, what reads it
    is one more.
    """
    pairs = estimates(attention, mapping, plan, steps, moves, expanded)
    return tuple({Strategy.ONE_KERNEL: own, Strategy.LEFT_ALONE: stock} for own, stock in pairs)


def _normalisation_times(
    fusion: Normalisation, mapping: AxisMapping, device: DeviceSpec, passes: int
) -> tuple[Times, ...]:
    times = []
    for rows in rows_of(fusion, mapping):
        stock = stock_time(fusion, mapping, rows, device, passes)
        own = {Strategy.ONE_KERNEL: own_time(fusion, mapping, rows, device)}
        times.append(own if stock is None else {**own, Strategy.LEFT_ALONE: stock})
    return tuple(times)


# Asked with nameless fusions, or with plans of such.
kept_plan = kept(make_plan, KEPT_PLANS)
kept_pointwise_plan = kept(make_pointwise_plan, KEPT_PLANS)
kept_attention_plan = kept(make_attention_plan, KEPT_PLANS)
kept_norm_plan = kept(make_norm_plan, KEPT_PLANS)
kept_times = kept(_times, KEPT_PLANS)
kept_stock_times = kept(_stock_times, KEPT_PLANS)
kept_attention_times = kept(_attention_times, KEPT_PLANS)
kept_normalisation_times = kept(_normalisation_times, KEPT_PLANS)
