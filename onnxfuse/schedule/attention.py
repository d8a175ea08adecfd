"""The attention kernels among the families: how they are launched, and their way to each tensor."""

from __future__ import annotations

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.attention_tile import (
    GROUP_ROWS,
    ROW_BYTES,
    AttentionSpec,
    AttentionTile,
    PortableAttentionTile,
    is_mapped,
    least_rows,
    portable_shared_bytes,
    shared_bytes,
)
from onnxfuse.schedule.kernel_family import KernelFamily, Launch, MapRule, any_depth
from onnxfuse.schedule.kernel_spec import Access

ALL_COLUMNS = 1 << 16  # a block walks them all: tiles are counted along the rows only
PATHS = {
    "product": "TMA along {axis}",
    "scalar": "once per 16 columns into registers",
    "row": "direct loads along n",
    "tile": "TMA along n, beside the keys",
    "narrow tile": "element by element",
    "out": "direct store along o",
}
PORTABLE_PATHS = PATHS | {
    "product": "cp.async along {axis}",
    "narrow product": "element by element",
    "scalar": "once per 16 keys into registers",
    "row": "direct loads along n",
    "tile": "direct loads of pairs along n",
}


class AttentionFamily(KernelFamily):
    """Two products with a softmax between, on sm_90a."""

    name = "attention"
    label = "attention"
    tile_type = AttentionTile

    def launch(self, spec: AttentionSpec, tile: AttentionTile, device: DeviceSpec) -> Launch:
        """A persistent grid; TMA brings q, keys, values and wide masks."""
        atom = ROW_BYTES // spec.dtype.bytes
        maps = [
            MapRule("lhs", 0, False, ROW_BYTES, atom, GROUP_ROWS),
            MapRule("rhs", 0, True, ROW_BYTES, atom, tile.block_n),
            MapRule("rhs", 1, False, ROW_BYTES, atom, tile.block_n),
        ]
        maps += [
            MapRule("load", index, False, ROW_BYTES, ROW_BYTES // load.dtype.bytes, tile.block_m)
            for index, load in enumerate(spec.loads)
            if is_mapped(load)
        ]
        shared = shared_bytes(spec, tile)
        rows = least_rows(spec, tile)
        return Launch(rows, ALL_COLUMNS, tile.threads, shared, tile.splits, tuple(maps), any_depth(device))

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)


class PortableAttentionFamily(KernelFamily):
    """The same on sm_80 and later, in TF32 as well, and of tensors that lie anyhow."""

    name = "portable_attention"
    label = "attention, portable"
    tile_type = PortableAttentionTile

    def launch(self, spec: AttentionSpec, tile: PortableAttentionTile, device: DeviceSpec) -> Launch:
        """A block for each tile of rows of each head, or a persistent grid of clusters."""
        cluster = tile.cluster if tile.cluster > 1 else 0
        shared = portable_shared_bytes(spec, tile)
        return Launch(tile.block_m, ALL_COLUMNS, tile.threads, shared, cluster, early_depth=any_depth(device))

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PORTABLE_PATHS, role, access)


ATTENTION = AttentionFamily()
PORTABLE_ATTENTION = PortableAttentionFamily()
