"""The library's product inside of a fused node, by range of rows: where no kernel of ours is as fast.

The bridge has cuBLASLt multiply into scratch memory, and the epilogue-only kernel does what follows. Unlike the
strategy of that name it is a way of some numbers of rows, beside the tiles of the others, and the tiles that a plan
would have without it stay behind it: they run where a process holds no cuBLASLt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onnxfuse.analysis.axis_mapping import AxisMapping, static_size
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import Fusion, RhsPart, Tensor
from onnxfuse.limits import MAX_M
from onnxfuse.schedule import cost_model, library_cost
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, KernelFamily, Launch, Problem, Sizes
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.library_tile import LibrarySpec, LibraryTile
from onnxfuse.schedule.pointwise import POINTWISE
from onnxfuse.schedule.pointwise_plan import make_pointwise_plan
from onnxfuse.schedule.row_ranges import SAME, at_both_ends, range_ends, range_lows
from onnxfuse.schedule.variant import LibraryVariant, Rows

LABEL = "cuBLASLt + epilogue"
MATH = ("f16", "bf16", "tf32")  # exact products are this project's own
GAIN = 1.05  # a kernel that needs no library is kept


class LibraryFamily(KernelFamily):
    """The library's product, then the epilogue-only kernel."""

    name = "library"
    label = LABEL
    tile_type = LibraryTile

    def launch(self, spec: LibrarySpec, tile: LibraryTile, device: DeviceSpec) -> Launch:
        """As the epilogue-only kernel is."""
        return POINTWISE.launch(spec.epilogue, tile.pointwise, device)

    def access_path(self, role: str, access: Access) -> str:
        """As the epilogue-only kernel's."""
        return POINTWISE.access_path(role, access)


LIBRARY = LibraryFamily()


def library_way(
    fusion: Fusion, mapping: AxisMapping, base: KernelSpec, sizes: Sizes, device: DeviceSpec
) -> tuple[LibraryVariant, ...]:
    """The kernels behind the library's product, for every size; none where the library does not make it."""
    in_levels = base.quantization or base.lhs_run or base.lhs_batch_runs or base.rhs_batch_runs
    if base.math not in MATH or in_levels or static_size(fusion, mapping.k) == 0:
        return ()
    rows = tuple((axis,) for axis in (*mapping.batch, *mapping.m, *mapping.n))
    products = (Tensor("", base.dtype, rows),) * base.parts  # no value of a model is called so
    own = replace(fusion, parts=tuple(RhsPart(part) for part in range(base.parts)))
    try:
        pointwise = epilogue_of(own, products)
    except NotFusable:  # more loads than a kernel takes
        return ()
    plan = make_pointwise_plan(pointwise, replace(mapping, k=()), device)
    ways = (
        LibraryVariant(LIBRARY, LibrarySpec(base, each.spec), LibraryTile(each.tile), each.min_m, each.max_m)
        for each in plan.variants
    )
    if sizes.by == "m":
        return tuple(ways)
    fitting = (way for way in ways if way.min_m <= (sizes.m or 0) <= way.max_m)  # its own ranges are of rows
    return tuple(replace(way, min_m=0, max_m=MAX_M, by=sizes.label) for way in fitting)


def library_time(base: KernelSpec, problem: Problem, products: int, device: DeviceSpec) -> Amount:
    """Microseconds of the product and what follows; infinite where nothing is known of the library.

    Args:
        base: the kernel that would multiply by itself.
        problem: its sizes.
        products: that the library makes one after the other.
        device: to plan for.
    """
    multiplying = library_cost.library(base, problem, products, device)
    if multiplying is None:
        return math.inf
    moved = problem.n * base.parts * base.dtype.bytes
    moved += problem.n * sum(way.dtype.bytes for way in (*base.loads, *base.outs) if way.kind == "tile")
    rows, known = problem.m * problem.batch, calibration(device)
    steps = sum(known.library_behind.get(step.op, 0.0) for step in base.steps)
    behind = cost_model.from_memory(rows * moved, device) + rows * problem.n * steps / device.multiprocessors
    return multiplying + known.launch + behind


def library_rows(
    tiles: Callable[[NDArray[np.int64]], Amount], library: Callable[[NDArray[np.int64]], Amount]
) -> tuple[Rows, ...]:
    """The ranges of rows where the library is faster.

    A range goes to the library for GAIN and more, as a mean over its ends, and comes back for SAME: both ways are near
    each other where a tile more begins, and a model need not carry a record for each time that they change places.

    Args:
        tiles: microseconds of the plan's own kernels at numbers of rows.
        library: of the library's way.
    """
    lows, ends = map(int, range_lows()), [*map(int, range_ends())]
    gains = np.sqrt((at_both_ends(tiles) / at_both_ends(library)).prod(axis=0))
    found: list[Rows] = []
    for low, high, gain in zip(lows, ends, gains, strict=True):
        joins = bool(found) and found[-1][1] == low - 1
        if gain >= (1 - SAME if joins else GAIN):
            found = [*found[:-1], (found[-1][0], high)] if joins else [*found, (low, high)]
    return tuple((0 if low == 1 else low, MAX_M if high == ends[-1] else high) for low, high in found)


def rows_text(rows: Iterable[Rows], by: str) -> str:
    """`m 257..320, 513..`."""
    return f"{by} " + ", ".join(f"{low}..{high if high < MAX_M else ''}" for low, high in rows)
