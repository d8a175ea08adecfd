"""The kernel that normalises groups of channels among the families, and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnxfuse.analysis.axis_mapping import AxisMapping, static_size
from onnxfuse.analysis.vector_width import EpilogueWidths, Width
from onnxfuse.device import DeviceSpec
from onnxfuse.ir.group_normalisation import GROUP, IMAGE, GroupNormalisation
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.access import access
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.group_norm_tile import GroupNormSpec, GroupNormTile, shared_bytes
from onnxfuse.schedule.kernel_family import KernelFamily, Launch, any_depth
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.pointwise import PATHS
from onnxfuse.schedule.variant import NormPlan, NormVariant

CLUSTERED = "sm_90a"
# Blocks of a cluster, and groups of all images up to which each block has a multiprocessor of its own.
CLUSTERS = ((8, 16), (4, 33), (2, 66))
FEWEST = 1 << 11  # elements of a block: fewer are not worth meeting for
THREADS = ((1 << 12, 128), (1 << 14, 256))  # of a block, by the elements of a group up to which there are so many
MOST_THREADS = 512
HELD = 4
ACCESS_BYTES = 16
_CHANNELS = "each time that a thread comes to another channel"


class GroupNormFamily(KernelFamily):
    """What normalises groups of channels."""

    name = "group_norm"
    label = "normalisation of groups"  # a key of reports
    tile_type = GroupNormTile

    def launch(self, spec: GroupNormSpec, tile: GroupNormTile, device: DeviceSpec) -> Launch:
        """A cluster for each group, or a block."""
        cluster = tile.splits if tile.splits > 1 else 0
        depth = any_depth(device)
        return Launch(tile.block_m, tile.block_n, tile.threads, shared_bytes(tile), cluster, early_depth=depth)

    def access_path(self, role: str, access: Access) -> str:
        """Channels have numbers of their own; all else lies dense."""
        return path({**PATHS, "scalar": _CHANNELS, "row": _CHANNELS, "narrow tile": _CHANNELS}, role, access)


GROUP_NORM = GroupNormFamily()


def map_groups(fusion: GroupNormalisation) -> AxisMapping:
    """Rows are the groups of all images, columns the pixels of all channels of one."""
    return AxisMapping((), (IMAGE, GROUP), fusion.along, ())


def make_group_norm_plan(fusion: GroupNormalisation, mapping: AxisMapping, device: DeviceSpec) -> NormPlan:
    """Choose the kernels for one architecture, each for some numbers of groups."""
    widths = _widths(fusion)
    loads = tuple(
        access(fusion, operand, mapping, width) for operand, width in zip(fusion.operands, widths.operands, strict=True)
    )
    outs = tuple(
        replace(access(fusion, out.tensor, mapping, width), kind="tile")
        for out, width in zip(fusion.outs, widths.outs, strict=True)
    )
    values = tuple(out.value for out in fusion.outs)
    spec = GroupNormSpec(loads, outs, fusion.steps, values, centred=True, epsilon=fusion.epsilon)
    elements = static_size(fusion, mapping.n)
    variants = (NormVariant(GROUP_NORM, spec, *each) for each in _tiles(elements, device))
    return NormPlan(device, tuple(variants), widths)


def _tiles(elements: int | None, device: DeviceSpec) -> Iterator[tuple[GroupNormTile, int, int]]:
    """Tiles, and the numbers of groups that have them; for groups of so many elements, or of any."""
    threads = MOST_THREADS
    if elements is not None:
        threads = next((count for most, count in THREADS if elements <= most), MOST_THREADS)
    first = 0
    for splits, last in CLUSTERS if device.arch == CLUSTERED else ():
        if elements is None or elements // splits >= FEWEST:
            yield GroupNormTile(threads, HELD, splits), first, last
            first = last + 1
    yield GroupNormTile(threads, HELD, 1), first, MAX_M


def _widths(fusion: GroupNormalisation) -> EpilogueWidths:
    """What lies dense goes by whole accesses where the pixels of a channel do; the kernel sees to it."""
    x, out = fusion.operands[0].dtype.bytes, fusion.outs[0].tensor.dtype.bytes
    dense = Width(ACCESS_BYTES // max(x, out), "the pixels of a channel")
    return EpilogueWidths((dense, *(Width(1, "a channel") for _ in fusion.operands[1:])), (dense,))
