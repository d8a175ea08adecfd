"""Which way a kernel takes to each tensor: one table of the hand-written kernels' data paths, by what a spec says.

A path names the instructions where they have a name (`TMA`, `cp.async`); a test finds them in the machine code.
"""

from __future__ import annotations

from onnxfuse.hopper_tile import HopperTile, boxed
from onnxfuse.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.pointwise_tile import PointwiseTile

CP_ASYNC_BYTES = 4  # the narrowest

_VECTOR = "once per tile through shared memory"
_SINGLE = "element by element"
# Kernel -> way -> path. A `narrow` way is one of fewer bytes than cp.async moves.
PATHS = {
    "portable": {
        "product": "cp.async along {axis}",
        "narrow product": "words shifted in registers along {axis}",
        "scalar": _VECTOR,
        "row": _VECTOR,
        "column": _VECTOR,
        "tile": "cp.async along n",
        "narrow tile": "element by element along n",
        "turned tile": "cp.async along m, turned in shared memory",
        "narrow turned tile": "element by element along m, turned in shared memory",
        "out": "direct store along n",
        "turned out": "turned in shared memory, direct store along m",
    },
    "sm_90a": {
        "product": "TMA",
        "scalar": f"{_VECTOR}, ahead of the main loop",
        "row": f"{_VECTOR}, ahead of the main loop",
        "column": f"{_VECTOR}, ahead of the main loop",
        "tile": "cp.async along n, beside the main loop",
        "narrow tile": "element by element along n, beside the main loop",
        "turned tile": "cp.async along m, beside the main loop, turned in shared memory",
        "narrow turned tile": "element by element along m, beside the main loop, turned in shared memory",
        "boxed out": "TMA store",
        "out": "direct store along n",
        "turned out": "turned in shared memory, direct store along m",
    },
    "few rows": {
        "product": "along {axis} into registers",
        **dict.fromkeys(("scalar", "row", "column", "tile", "narrow tile"), _SINGLE),
        **dict.fromkeys(("turned tile", "narrow turned tile", "out", "turned out"), _SINGLE),
    },
    "behind the product": {
        "scalar": "once per tile into registers",
        "row": "once per tile into registers",
        "column": "once per row into registers",
        "tile": "along n into registers",
        "narrow tile": "element by element along n",
        "out": "direct store along n",
    },
}


def kernel_name(tile: Tile | HopperTile | PointwiseTile) -> str:
    """The kernel that a tile is of, as `PATHS` calls it."""
    if isinstance(tile, HopperTile):
        return "sm_90a"
    if isinstance(tile, PointwiseTile):
        return "behind the product"
    return "few rows" if tile.kernel == "small_m" else "portable"


def lhs_path(kernel: str, spec: KernelSpec) -> str:
    """The way to lhs."""
    runs = f" in runs of {spec.lhs_run}" if spec.lhs_run else ""
    return _product(kernel, spec.lhs_width * spec.dtype.bytes, "m" if spec.lhs_order == "km" else "k") + runs


def rhs_path(kernel: str, spec: KernelSpec) -> str:
    """The way to every part of rhs."""
    return _product(kernel, spec.rhs_width * spec.dtype.bytes, "k" if spec.rhs_order == "nk" else "n")


def load_path(kernel: str, load: Access) -> str:
    """The way to an operand of the epilogue."""
    narrow = "narrow " if load.width * load.dtype.bytes < CP_ASYNC_BYTES else ""
    turned = "turned " if load.turned else ""
    return PATHS[kernel][f"{narrow}{turned}tile" if load.kind == "tile" else load.kind] + _runs(load)


def out_path(kernel: str, out: Access) -> str:
    """The way to an output."""
    way = "turned out" if out.turned else "boxed out" if kernel == "sm_90a" and boxed(out) else "out"
    return PATHS[kernel][way] + _runs(out)


def _product(kernel: str, access_bytes: int, axis: str) -> str:
    return PATHS[kernel]["product" if access_bytes >= CP_ASYNC_BYTES else "narrow product"].format(axis=axis)


def _runs(access: Access) -> str:
    length = f" of {access.run}" if access.run else ""
    return "".join(f", {loop} in runs{length if loop == 'n' else ''}" for loop in access.two_levels)
