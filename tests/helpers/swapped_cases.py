"""Kernels for tests of sm_90a with the weight as the M side: every schedule, both orders, parts, operand kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F32, DType
from onnxfuse.kernels.hopper_swapped import emit
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile
from onnxfuse.schedule.kernel_family import Launch
from onnxfuse.schedule.kernel_spec import Tile
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec

DEVICE = ARCHITECTURES["sm_90a"]
PORTABLE = Tile(128, 16, 32, 2, 1, 2)  # a test's spec carries one; this kernel does not look at it

TILES = (
    SwappedTile(80, 128), SwappedTile(160, 128, splits=2), SwappedTile(16, 128), SwappedTile(48, 256),
    SwappedTile(112, 128), SwappedTile(64, 128, splits=4), SwappedTile(80, 256, splits=2), SwappedTile(144, 128),
    SwappedTile(72, 128), SwappedTile(104, 128, splits=2), SwappedTile(136, 128), SwappedTile(88, 128, splits=4),
    SwappedTile(88, 64, pingpong=True, cluster_n=4), SwappedTile(56, 64, pingpong=True, cluster_m=2),
    SwappedTile(104, 128, cluster_m=2), SwappedTile(72, 64, pingpong=True, cluster_m=2, cluster_n=4),
    SwappedTile(120, 64, pingpong=True), SwappedTile(152, 64, group_rows=1, pingpong=True, last_wave_splits=2),
    SwappedTile(72, 64, group_rows=1, pingpong=True, last_wave_splits=2),
)  # fmt: skip
# Rows below, at and behind a tile's, and far more; columns and depths that are no multiples of a tile's.
SIZES = (
    (1, 8, 8), (77, 136, 256), (161, 264, 200), (300, 40, 104), (130, 200, 72), (64, 392, 328), (100, 16, 40),
    (154, 328, 136),
)  # fmt: skip
TYPES = (("f16", "nk"), ("f16", "kn"), ("bf16", "kn"), ("bf16", "nk"), ("tf32", "nk"), ("tf32", "kn"))


@dataclass(frozen=True)
class SwappedCase:
    """One kernel and the sizes that it runs at: all allow the widths of the first."""

    name: str
    spec: TiledSpec
    tile: SwappedTile
    sizes: tuple[Size, ...]

    @property
    def source(self) -> str:
        """The kernel's text."""
        return emit(self.spec, self.tile, DEVICE.shared_bytes)

    @property
    def launch(self) -> Launch:
        """How it is launched."""
        return HOPPER_SWAPPED.launch(self.spec, self.tile, DEVICE)


def swapped_cases() -> Iterator[SwappedCase]:
    """Every type and order with one part and with two; tiles, sizes and operand kinds take turns."""
    turn = 0
    for dtype, order in TYPES:
        for parts in (1, 2):
            for tile in TILES:
                turn += 1
                kind = ("plain", "residual", "mixed")[turn % 3]
                outs: tuple[DType | None, ...] = ((None,), (None, F32))[turn % 5 == 0]
                m, n, k = SIZES[turn * 3 % len(SIZES)]
                sizes = (Size(m, n, k, batch=1 + turn % 2), Size(m + 31, n + 64, k, pad=8))
                spec = make_spec(dtype, parts, order, PORTABLE, sizes[0], kind, outs)
                if HOPPER_SWAPPED.why_not(spec, tile, DEVICE) is None:
                    name = f"{dtype}-{order}-{parts}x-{tile}-{kind}-{m}-{n}-{k}".replace(" ", "-")
                    yield SwappedCase(name, spec, tile, sizes)
