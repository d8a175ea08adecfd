"""Which tile of the attention kernel for how many rows, and how long it and the model's own nodes take.

Microseconds of a launch: what it takes to begin, and for each tile of rows that a multiprocessor makes one after the
other, its blocks of keys at a pace that was measured (H200). A row and a key cost the same whatever the head, as
exponentials and what surrounds them weigh as much as the products, and a little more for each column of the
head. The model's own nodes pass over a tensor of rows x keys several times, and that is all they are charged for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from onnxfuse.analysis.attention_mapping import attention_widths, head_size, lies_by_heads
from onnxfuse.analysis.axis_mapping import AxisMapping, static_size
from onnxfuse.analysis.vector_width import Width, Widths
from onnxfuse.device import DeviceSpec
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.errors import NotFusable
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Step, Tensor, acc_name
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.access import access
from onnxfuse.schedule.attention import ATTENTION, PORTABLE_ATTENTION
from onnxfuse.schedule.attention_tile import (
    GROUP_ROWS,
    VECTOR_BYTES,
    WARP_ROWS,
    AttentionSpec,
    AttentionTile,
    PortableAttentionTile,
    Tile,
    is_mapped,
    is_mixed,
    looks_again,
    portable_shared_bytes,
    shared_bytes,
)
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.cost_model import CLUSTERS_SINCE, clusters_at_once, from_memory
from onnxfuse.schedule.kernel_family import SAMPLED_BATCHES, KernelFamily
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.variant import AttentionPlan, AttentionVariant

ARCHITECTURES = ("sm_90a",)  # of the kernel by wgmma
MOST_MAPPED = 5  # loads that TMA brings, beside q, keys and values
WIDTHS = {2: (48, 64, 80, 96, 128, 176, 208), 4: (32, 64, 96, 128)}  # of a block of keys, by bytes of an element
# Registers of a thread: scores, their probabilities, and sums; by groups. With more, wgmma waits or spills.
REGISTERS = {3: 130, 2: 210, 1: 210}
TURNERS_TAKE = 8  # registers of each thread of a group: what turns fp32 values needs more than TMA's thread alone
LANDED = (2, 1)  # blocks of fp32 values that are loaded and not yet turned, where they fit
MOST_HEAD = {3: 96, 2: 256, 1: 256}  # three groups with narrow blocks of keys were slower than two with wide ones
LAZY = 8  # `rescale_above` where rescaling less often was measured to be faster
# Warps and keys by bytes of an element, the faster first; of those that a multiprocessor has two of if it can.
PORTABLE_TILES = {2: ((4, 128), (4, 64), (4, 32), (2, 16)), 4: ((8, 64), (8, 32), (4, 32), (4, 16), (2, 16))}
FULL_WARPS = {2: 4, 4: 8}  # with which the portable kernel's pace was measured
ALONE = 1.5  # power of how many fewer there are: two took 8 times as long (128 rows, 4 heads of 256, fp32: 37 us)
MOST_PORTABLE_VALUES = 128  # columns of a head beside blocks of as many keys; with more, registers spill
PORTABLE_SPLITS = ((4, 32), (4, 16), (2, 16))  # warps that share 16 rows, and keys of a step
FEW_ROWS = 64  # that four warps have
ROWS = (WARP_ROWS, 64, 256, 1024, 4096)  # of a query whose number only the run knows
SPLITS = (2, 4, 8)  # blocks of a cluster that share the keys of few rows
MOST_ALONE = 4  # blocks of a cluster that have a multiprocessor each
MOST_BESIDE = 128  # keys, and columns of a head, of a block that has half of the registers
OVERLAP = 0.1  # of reading and multiplying, the part of the faster that the slower does not hide
FEW_OVERLAP = 0.4  # the same of few rows, whose first keys nothing hides
UNKNOWN_BATCHES = (1, 2, 8, 32)  # where only the run knows: no tile may be slow for one, or for many
SAME = 0.02  # a tile is not changed for less


def attention_spec(attention: Attention, mapping: AxisMapping, widths: Widths) -> AttentionSpec:
    """The kernel of an attention but for its tile.

    Raises:
        NotFusable: `no_attention_kernel`, for types and heads that it does not take.
    """
    dtypes = {tensor.dtype for tensor in (attention.query, attention.keys, attention.values)}
    out = attention.outs[0].tensor.dtype
    if len(dtypes) > 1 or not dtypes <= {F16, BF16, F32} or out not in {*dtypes, F32}:
        names = ", ".join(sorted(dtype.name for dtype in {*dtypes, out}))
        raise _refusal(attention, f"its tensors are of {names}; a kernel takes one type throughout")
    head, value_head = head_size(attention, mapping.k), head_size(attention, mapping.o)
    loads = [
        _load(attention, operand, mapping, width)
        for operand, width in zip(attention.operands, widths.operands, strict=True)
    ]
    if sum(map(is_mapped, loads)) > MOST_MAPPED:
        raise _refusal(attention, f"more than {MOST_MAPPED} operands vary along rows and keys")
    return AttentionSpec(
        dtype=attention.query.dtype,
        head=head,
        value_head=value_head,
        loads=tuple(loads[load.operand] for load in attention.loads),
        score=attention.steps,
        score_value=attention.score,
        scale=attention.scale,
        guarded=attention.guarded,
        result=tuple(_of_one_product(step) for step in attention.result_steps),
        result_value=attention.outs[0].value.replace(acc_name(1), acc_name(0)),
        out_width=VECTOR_BYTES // out.bytes,
        out_dtype=out,
        diagonal=attention.diagonal,
    )


def _of_one_product(step: Step) -> Step:
    """A step of the result, which knows no scores: its sums are `acc0`."""
    inputs = (acc_name(0) if value == acc_name(1) else value for value in step.inputs)
    return replace(step, inputs=tuple(inputs))


def _refusal(attention: Attention, detail: str) -> NotFusable:
    return NotFusable("no_attention_kernel", attention.anchor, detail)


def _load(attention: Attention, operand: Tensor, mapping: AxisMapping, width: Width) -> Access:
    """TMA brings whole vectors; a row is read in pairs; all else comes element by element."""
    way = replace(access(attention, operand, mapping, width), two_levels=("batch",), transposed=False)
    whole = width.elements * operand.dtype.bytes == VECTOR_BYTES
    if way.kind == "row":
        return replace(way, width=min(width.elements, 2))
    if way.kind == "tile" and whole:
        return replace(way, width=width.elements)
    return replace(way, kind="tile" if way.kind == "column" else way.kind, width=1)


def make_attention_plan(attention: Attention, mapping: AxisMapping, device: DeviceSpec) -> AttentionPlan:
    """Choose the tiles of an attention for one architecture.

    Raises:
        NotFusable: `no_attention_kernel`, where no kernel computes it.
    """
    widths = attention_widths(attention, mapping)
    spec = attention_spec(attention, mapping, widths)
    ways = [spec, replace(spec, loads=tuple(map(_narrow, spec.loads)))] if lies_by_heads(attention, mapping) else []
    checked = replace(spec, loads=tuple(map(_narrow, spec.loads)), out_width=1, checked=True)
    first, *others = dict.fromkeys([*ways, checked])
    variants = _variants(attention, mapping, first, device)
    for way in others:
        variants += (replace(each, min_m=0) for each in _variants(attention, mapping, way, device)[-1:])
    return AttentionPlan(device, tuple(variants), widths)


def _narrow(load: Access) -> Access:
    """The same element by element, wherever it lies."""
    return replace(load, width=1)


def _variants(
    attention: Attention, mapping: AxisMapping, spec: AttentionSpec, device: DeviceSpec
) -> list[AttentionVariant]:
    """The fastest tile of a known number of rows, of some ranges, or of some ranges of batches."""
    found: list[AttentionVariant] = []
    for size, sizes in _problems(attention, mapping, device):
        own = _of_few_rows(spec) if sizes[0].rows <= WARP_ROWS else spec
        last = found[-1].tile if found and found[-1].spec == own else None
        family, tile = _best(own, attention, sizes, device, last)
        if last is not None and tile == last:
            found[-1] = replace(found[-1], max_m=size)
        else:
            low = found[-1].max_m + 1 if found else 0
            found.append(AttentionVariant(family, own, tile, low, size, _by(attention, mapping)))
    found[-1] = replace(found[-1], max_m=MAX_M)
    return found


def _by(attention: Attention, mapping: AxisMapping) -> str:
    """What kernels are chosen by."""
    return "batch" if _is_by_batches(attention, mapping) else "m"


def _is_by_batches(attention: Attention, mapping: AxisMapping) -> bool:
    """Whether the batches alone are open, as of vision models and of decoders of one token."""
    return static_size(attention, mapping.m) is not None and len(_batches(attention, mapping)) > 1


def _problems(attention: Attention, mapping: AxisMapping, device: DeviceSpec) -> Iterator[tuple[int, list[_Sizes]]]:
    """The sizes that kernels are chosen by, and the problems that each may be of."""
    for rows in _rows(attention, mapping):
        if _is_by_batches(attention, mapping):
            yield from ((count, [_sizes(attention, mapping, rows, count, device)]) for count in SAMPLED_BATCHES)
        else:
            counts = _batches(attention, mapping)
            yield rows, [_sizes(attention, mapping, rows, count, device) for count in counts]


def _of_few_rows(spec: AttentionSpec) -> AttentionSpec:
    """They see nearly all keys, which are split: a diagonal is forgotten where a row may have to look behind it."""
    if looks_again(spec) and spec.diagonal is not None and spec.diagonal.first is None:
        return replace(spec, diagonal=None)
    return spec


def _has_wgmma(spec: AttentionSpec, device: DeviceSpec) -> bool:
    return device.arch in ARCHITECTURES and not spec.checked


def tiles(spec: AttentionSpec, rows: int, device: DeviceSpec) -> list[AttentionTile]:
    """Those that the kernel by wgmma runs well with: registers and shared memory hold them."""
    few = rows <= WARP_ROWS and not looks_again(spec)
    if spec.dtype == F32 and few:  # whose keys the warps of the portable kernel share
        return []
    whole = [
        _landing(spec, AttentionTile(groups, width, rescale_above=_rescale_above(spec, groups)), device)
        for groups in REGISTERS
        for width in WIDTHS[spec.dtype.bytes]
        if _has_registers(spec, groups, width)
    ]
    split = [each for tile in whole if few and tile.consumers == 1 for each in _splits(spec, tile, device)]
    return [tile for tile in (*whole, *split) if shared_bytes(spec, tile) <= device.shared_bytes]


def _has_registers(spec: AttentionSpec, groups: int, width: int) -> bool:
    """Whether as many groups hold their sums and what they have of so many keys."""
    taken = width * (4 + spec.dtype.bytes) // 8 + spec.value_head // 2
    taken += TURNERS_TAKE if spec.dtype == F32 else 0
    if groups == 3 and looks_again(spec):  # what is noted of a tile takes registers as well
        return False
    return taken <= REGISTERS[groups] and spec.head <= MOST_HEAD[groups]


def _rescale_above(spec: AttentionSpec, groups: int) -> int:
    return LAZY if groups == 3 or (groups == 2 and spec.head >= 128) else 0


def _landing(spec: AttentionSpec, tile: AttentionTile, device: DeviceSpec) -> AttentionTile:
    """With as many blocks of values that are still to be turned as fit; those of 16 bits are not turned."""
    if spec.dtype != F32:
        return tile
    most, least = (replace(tile, landed=count) for count in LANDED)
    return most if shared_bytes(spec, most) <= device.shared_bytes else least


def _splits(spec: AttentionSpec, tile: AttentionTile, device: DeviceSpec) -> Iterator[AttentionTile]:
    """Two blocks of a multiprocessor where they fit: the chip has not room for as many clusters of one each."""
    for splits in SPLITS:
        alone = replace(tile, splits=splits)
        fits = max(tile.block_n, spec.value_head) <= MOST_BESIDE
        if fits and 2 * shared_bytes(spec, alone) <= device.shared_bytes:
            yield replace(alone, residents=2)
        elif splits <= MOST_ALONE:
            yield alone


def portable_tiles(spec: AttentionSpec, rows: int, device: DeviceSpec) -> list[PortableAttentionTile]:
    """Those of the portable kernel that shared memory holds, the one to take first."""
    known = (PortableAttentionTile(*each) for each in PORTABLE_TILES[spec.dtype.bytes])
    every = [
        tile
        for tile in known
        if (tile.block_n <= MOST_PORTABLE_VALUES // 2 or spec.value_head <= MOST_PORTABLE_VALUES)
        and (tile.block_m <= FEW_ROWS or rows > FEW_ROWS)
    ]
    sizes = {tile: portable_shared_bytes(spec, tile) for tile in every}
    room = (device.shared_bytes // 2, device.shared_bytes)
    return list(dict.fromkeys(tile for most_bytes in room for tile in every if sizes[tile] <= most_bytes))


def portable_splits(spec: AttentionSpec, rows: int, device: DeviceSpec) -> list[PortableAttentionTile]:
    """Those of the portable kernel whose warps share few rows, of a block or a cluster, that shared memory holds."""
    if rows > WARP_ROWS or looks_again(spec):
        return []
    clusters = (1, *SPLITS) if device.capability >= CLUSTERS_SINCE else (1,)
    every = [PortableAttentionTile(*each, each[0] * cluster) for cluster in clusters for each in PORTABLE_SPLITS]
    return [tile for tile in every if portable_shared_bytes(spec, tile) <= device.shared_bytes]


def _best(
    spec: AttentionSpec, attention: Attention, every: Sequence[_Sizes], device: DeviceSpec, last: Tile | None
) -> tuple[KernelFamily, Tile]:
    """The tile that is fastest in the mean of several problems, or one that is nearly so."""
    rows = every[0].rows
    by_wgmma = tiles(spec, rows, device) if _has_wgmma(spec, device) else []
    fitting: Sequence[Tile] = by_wgmma or portable_splits(spec, rows, device) or portable_tiles(spec, rows, device)[:1]
    if not fitting:
        raise _refusal(attention, f"every tile needs more shared memory than {device.arch} has")
    times = {tile: fmean(math.log(_time(spec, tile, sizes, device)) for sizes in every) for tile in fitting}
    best = min(fitting, key=lambda tile: times[tile])
    if last in times and times[last] <= times[best] + SAME:
        best = last
    return ATTENTION if by_wgmma else PORTABLE_ATTENTION, best


class _Sizes(NamedTuple):
    """Of one problem: rows and keys of a head, and heads of all batches."""

    rows: int
    keys: int
    heads: int


def _batches(attention: Attention, mapping: AxisMapping) -> tuple[int, ...]:
    """Batches that there may be, where only the run knows; else one."""
    axes = (*mapping.batch, *mapping.heads)
    return UNKNOWN_BATCHES if any(attention.size(axis) is None for axis in axes) else (1,)


def _sizes(attention: Attention, mapping: AxisMapping, rows: int, batches: int, device: DeviceSpec) -> _Sizes:
    known = math.prod(attention.size(axis) or 1 for axis in (*mapping.batch, *mapping.heads))
    keys = static_size(attention, mapping.n) or max(rows, calibration(device).unknown_size)
    return _Sizes(rows, keys, known * batches)


def _time(spec: AttentionSpec, tile: Tile, sizes: _Sizes, device: DeviceSpec) -> float:
    """Microseconds of a launch."""
    rows, keys, batch = sizes
    blocks = math.ceil(math.ceil(keys / tile.block_n) / tile.splits) * _looked_at(spec, tile, rows)
    multiplying = sum(
        turns * (_tile_time(spec, tile, device) + blocks * _block_time(spec, tile, groups, device))
        for groups, turns in _turns(spec, tile, sizes, device)
    )
    reading = float(from_memory(batch * (rows + keys) * (spec.head + spec.value_head) * spec.dtype.bytes, device))
    few = rows <= WARP_ROWS
    beginning = (calibration(device).attention_shares if few else _launch(tile, device))["beginning"]
    return beginning + max(multiplying, reading) + (FEW_OVERLAP if few else OVERLAP) * min(multiplying, reading)


def _launch(tile: Tile, device: DeviceSpec) -> Mapping[str, float]:
    """What a launch and a block of keys take beside their rows and keys."""
    is_turned = isinstance(tile, AttentionTile) and tile.landed > 0
    return calibration(device).attention_turned if is_turned else calibration(device).attention_launch


def _turns(spec: AttentionSpec, tile: Tile, sizes: _Sizes, device: DeviceSpec) -> list[tuple[int, int]]:
    """Groups of the tiles that a multiprocessor makes one after the other, and how many: the kernel's `Tiling`."""
    at_once = _at_once(spec, tile, device)
    turns = math.ceil(math.ceil(sizes.rows / tile.block_m) * sizes.heads / at_once)
    if not isinstance(tile, AttentionTile) or not is_mixed(spec, tile):
        return [(_groups(tile), turns)]
    groups = math.ceil(sizes.rows / GROUP_ROWS)
    tall = min((turns - 1) * at_once // sizes.heads, groups // tile.consumers)
    fitting = (
        low
        for low in range(1, tile.consumers + 1)
        if (tall + math.ceil((groups - tile.consumers * tall) / low)) * sizes.heads <= turns * at_once
    )
    return [(tile.consumers, turns - 1), (next(fitting), 1)]


def _groups(tile: Tile) -> int:
    """Of 64 rows; of the portable kernel the one of all its warps."""
    return tile.consumers if isinstance(tile, AttentionTile) else 1


def _block_time(spec: AttentionSpec, tile: Tile, groups: int, device: DeviceSpec) -> float:
    """Microseconds of a block of keys for so many groups; wgmma multiplies 64 rows, however few there are."""
    if isinstance(tile, PortableAttentionTile) and tile.splits > 1:
        slower = calibration(device).attention_by_elements if spec.checked else 1.0
        return slower * calibration(device).attention_shares["element"] * tile.block_n * (spec.head + spec.value_head)
    rows = groups * GROUP_ROWS if isinstance(tile, AttentionTile) else tile.block_m
    return _launch(tile, device)["block"] + rows * tile.block_n * _pace(spec, tile, groups, device) * 1e-6


def _tile_time(spec: AttentionSpec, tile: Tile, device: DeviceSpec) -> float:
    """Microseconds of a tile of rows beside its blocks of keys, and in which the shares of its keys become one."""
    launch, shares = calibration(device).attention_launch, calibration(device).attention_shares
    if tile.splits == 1:
        return launch["tile"]
    if isinstance(tile, AttentionTile):
        return launch["tile"] + launch["share"]
    return shares["tile"] + (tile.cluster - 1) * shares["added"] * spec.value_head


def _at_once(spec: AttentionSpec, tile: Tile, device: DeviceSpec) -> int:
    """Tiles that a chip has room for, of those that are launched."""
    if isinstance(tile, AttentionTile):
        return clusters_at_once(tile.splits, tile.residents, device)
    residents = device.shared_bytes // portable_shared_bytes(spec, tile) if tile.splits > 1 else 1
    if tile.cluster > 1:
        return clusters_at_once(tile.cluster, residents, device)
    return device.multiprocessors * residents


def _looked_at(spec: AttentionSpec, tile: Tile, rows: int) -> float:
    """The part of all keys that is in sight."""
    if spec.diagonal is None:
        return 1.0
    part = min(1.0, (1 + tile.block_m / rows) / 2)
    if spec.diagonal.first is None:
        return part
    return min(part, (spec.diagonal.offset - spec.diagonal.first + tile.block_m + tile.block_n) / max(rows, 1))


def _pace(spec: AttentionSpec, tile: Tile, groups: int, device: DeviceSpec) -> float:
    """Picoseconds of a row and a key, where so many groups of a tile have rows."""
    known, kernel = calibration(device), tile.pace(spec.dtype)
    kernel = kernel if groups == _groups(tile) else f"{groups} of {kernel}"
    base = known.attention_pace[kernel] + known.attention_column[kernel] * (spec.head + spec.value_head) / 2
    operands = ("vectors" if load.width > 1 else "elements" for load in spec.loads if load.kind == "tile")
    base += sum(known.attention_operand[each] for each in operands)
    if isinstance(tile, PortableAttentionTile):  # fewer warps leave the multiprocessor waiting
        base *= max(1.0, FULL_WARPS[spec.dtype.bytes] / tile.warps) ** ALONE
    return base * (known.attention_by_elements if spec.checked else 1.0)


def estimates(
    attention: Attention,
    mapping: AxisMapping,
    plan: AttentionPlan,
    nodes: int,
    moves: int = 0,
    expanded: Sequence[Tensor] = (),
) -> list[tuple[float, float]]:
    """Microseconds of the kernel and of the model's own nodes, at every number of rows and batches that it is made for.

    Args:
        attention: what is computed.
        mapping: its loops.
        plan: the kernels.
        nodes: of the model between the products that each read and write rows x keys, beside the softmax.
        moves: of the model that each write q, keys, values or the result in another order.
        expanded: operands that are written in front of the kernel.
    """
    found = []
    for rows, batches in itertools.product(_rows(attention, mapping), _batches(attention, mapping)):
        size = batches if _is_by_batches(attention, mapping) else rows
        first = next(variant for variant in plan.variants if variant.min_m <= size <= variant.max_m)
        sizes = _sizes(attention, mapping, rows, batches, plan.device)
        own = _time(first.spec, first.tile, sizes, plan.device)
        own += sum(_expand(attention, mapping, sizes, batches, tensor, plan.device) for tensor in expanded)
        moving = moves * _move(attention, mapping, sizes, plan.device)
        found.append((own, _stock(attention, mapping, sizes, nodes, plan.device) + moving))
    return found


def _rows(attention: Attention, mapping: AxisMapping) -> tuple[int, ...]:
    m = static_size(attention, mapping.m)
    return (m,) if m else ROWS


def _move(attention: Attention, mapping: AxisMapping, sizes: _Sizes, device: DeviceSpec) -> float:
    """Microseconds of a copy of as many rows as there are queries and keys on the mean."""
    rows, keys, batch = sizes
    head = math.isqrt(math.prod(attention.size(axis) or 1 for axis in (*mapping.k, *mapping.o)))
    size = batch * (rows + keys) / 2 * head * attention.query.dtype.bytes
    return float(calibration(device).launch + from_memory(2 * size, device))


def _expand(
    attention: Attention, mapping: AxisMapping, sizes: _Sizes, batches: int, tensor: Tensor, device: DeviceSpec
) -> float:
    """Microseconds in which an operand is written, and read again."""
    unknown = dict.fromkeys(mapping.m, sizes.rows) | dict.fromkeys(mapping.n, sizes.keys)
    size = math.prod(attention.size(axis) or unknown.get(axis, batches) for axis in tensor.axes)
    return float(calibration(device).launch + from_memory(2 * size * tensor.dtype.bytes, device))


def _stock(attention: Attention, mapping: AxisMapping, sizes: _Sizes, nodes: int, device: DeviceSpec) -> float:
    """Microseconds of a product, a softmax, a product, and what lies between: what they move, or that they begin."""
    rows, keys, batch = sizes
    scores = batch * rows * keys * attention.query.dtype.bytes
    head = math.prod(attention.size(axis) or 1 for axis in (*mapping.k, *mapping.o))
    factors = batch * (rows + keys) * math.isqrt(head) * attention.query.dtype.bytes
    if rows <= WARP_ROWS:
        return _stock_of_few_rows(scores, factors, keys, nodes, device)
    launch = calibration(device).launch
    product = max(calibration(device).attention_product, from_memory(scores + factors, device))
    a_pass = max(launch, from_memory(2 * scores, device)) + launch
    return float(2 * product + (1 + nodes) * a_pass)


def _stock_of_few_rows(scores: int, factors: int, keys: int, nodes: int, device: DeviceSpec) -> float:
    """The same of few rows, whose products wait for one block's keys as much as for memory; of sizes in bytes."""
    known = calibration(device).attention_few_rows
    reading = known["reading"] * float(from_memory(2 * factors, device))
    waiting = known["key"] * min(keys, known["most_keys"])
    passes = nodes * max(calibration(device).launch, float(from_memory(2 * scores, device)))
    return known["beginning"] + reading + waiting + known["score"] * float(from_memory(scores, device)) + passes
