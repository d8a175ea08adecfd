"""Which way a kernel takes to each tensor, in words: a family's table of them, read by what a spec says.

A path names the instructions where they have a name (`TMA`, `cp.async`); a test finds them in the machine code.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.schedule.kernel_spec import Access

CP_ASYNC_BYTES = 4  # the narrowest
LHS_AXES, RHS_AXES = ("k", "m"), ("n", "k")  # along which a factor is read, or where it lies transposed


def path(table: Mapping[str, str], role: str, access: Access) -> str:
    """The way to a tensor.

    Args:
        table: paths by way; a `narrow` way is one of fewer bytes than cp.async moves.
        role: `lhs`, `rhs`, `load` or `out`; or `scales` or `zeros` of an rhs, which are reached as it is.
        access: how the kernel reaches it.
    """
    ways = {"lhs": _lhs, "rhs": _rhs, "scales": _rhs, "zeros": _rhs, "load": _load, "out": _out}
    return ways[role](table, access)


def _lhs(table: Mapping[str, str], access: Access) -> str:
    return _product(table, access, LHS_AXES) + (f" in runs of {access.run}" if access.run else "")


def _rhs(table: Mapping[str, str], access: Access) -> str:
    return _product(table, access, RHS_AXES)


def _product(table: Mapping[str, str], access: Access, axes: tuple[str, str]) -> str:
    copied = "copied to rows on 16-byte boundaries, then " if access.copied else ""
    return copied + table[f"{_narrow(access)}product"].format(axis=axes[access.transposed])


def _load(table: Mapping[str, str], load: Access) -> str:
    transposed = "transposed " if load.transposed else ""
    return table[f"{_narrow(load)}{transposed}tile" if load.kind == "tile" else load.kind] + _runs(load)


def _out(table: Mapping[str, str], out: Access) -> str:
    return table["transposed out" if out.transposed else "out"] + _runs(out)


def _narrow(access: Access) -> str:
    return "narrow " if is_narrow(access) else ""


def is_narrow(access: Access) -> bool:
    """Whether cp.async cannot move one access."""
    return access.width * access.dtype.bytes < CP_ASYNC_BYTES


def _runs(access: Access) -> str:
    length = f" of {access.run}" if access.run else ""
    return "".join(f", {loop} in runs{length if loop == 'n' else ''}" for loop in access.two_levels)
