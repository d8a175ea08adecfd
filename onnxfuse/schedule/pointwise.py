"""The epilogue-only kernel among the families: how it is launched, and its way to each tensor."""

from __future__ import annotations

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.kernel_family import KernelFamily, Launch, any_depth
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.pointwise_tile import PointwiseSpec, PointwiseTile

PATHS = {
    "scalar": "once per tile into registers",
    "row": "once per tile into registers",
    "column": "once per row into registers",
    "tile": "along n into registers",
    "narrow tile": "element by element along n",
    "out": "direct store along n",
}


class PointwiseFamily(KernelFamily):
    """What follows a product that another kernel makes."""

    name = "pointwise"
    label = "behind the product"  # a key of reports
    tile_type = PointwiseTile

    def launch(self, spec: PointwiseSpec, tile: PointwiseTile, device: DeviceSpec) -> Launch:
        """One block a tile, without shared memory."""
        return Launch(tile.block_m, tile.block_n, tile.threads, 0, early_depth=any_depth(device))

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path(PATHS, role, access)


POINTWISE = PointwiseFamily()
