"""The kernel that normalises rows among the families: how it is launched, and its way to each tensor."""

from __future__ import annotations

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule.access_path import path
from onnxfuse.schedule.kernel_family import KernelFamily, Launch, any_depth
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.norm_tile import NormSpec, NormTile
from onnxfuse.schedule.pointwise import PATHS

EARLY_TILES = 4  # of more, those multiprocessors that are free first would get most; 16 are slower than not early
_PARAMETER = "once per row into registers"


class NormFamily(KernelFamily):
    """What normalises rows."""

    name = "norm"
    label = "normalisation"  # a key of reports
    tile_type = NormTile

    def launch(self, spec: NormSpec, tile: NormTile, device: DeviceSpec) -> Launch:
        """One block a tile: small ones keep memory busier than a grid that persists."""
        depth = min(any_depth(device), EARLY_TILES)
        return Launch(tile.block_m, tile.block_n, tile.threads, tile.shared_bytes, early_depth=depth)

    def access_path(self, role: str, access: Access) -> str:
        """As the table says."""
        return path({**PATHS, "scalar": _PARAMETER, "row": _PARAMETER}, role, access)


NORM = NormFamily()
