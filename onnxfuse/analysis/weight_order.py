"""Weights the other way round: rhs with k innermost where the model stores it with n innermost, or the reverse.

Kernels read an rhs whose contiguous axis is k faster than one whose contiguous axis is n: `k (p n)` becomes `(p n) k`.
But rows of k that begin at no sector of memory are read three times as slowly, and those of odd k one by one: they get
zeros behind them, or, where rows of n begin at rounder places, `(p n) k` becomes `k (p n)`. Whether a model may
store a weight so is for others to say; here is what its fusion is then. Where the columns of parts take turns,
`k (n p)`, neighbours in a row are of different parts; `(n p) k` has rows of k like any other. Where they take turns
several at a time, `k (n1 p n2)`, no stride walks those of a part: they are stored part by part, `(p n1 n2) k`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from onnxfuse.analysis.axis_mapping import stepped
from onnxfuse.device import CACHE_LINE, SECTOR
from onnxfuse.ir.fusion import PART_AXIS, Fusion, Tensor
from onnxfuse.limits import WIDEST_BYTES

PADDED = 32  # a weight may grow by one part in so many: of 2730 elements of 16 bits by 22
BOUNDARIES = (CACHE_LINE, CACHE_LINE // 2, SECTOR, WIDEST_BYTES)  # bytes; the first is the fastest for TMA

Perm = tuple[int, ...]
"""As numpy.transpose has it: dimension i of the stored tensor is dimension `perm[i]` of the model's."""
Reordered = tuple[Fusion, Mapping[str, Perm]]
"""A fusion of weights that are stored otherwise, and how each of them is transposed."""


def in_another_order(fusion: Fusion, allowed: Collection[str]) -> Reordered | None:
    """The fusion of the same weights in the one other order that may be faster.

    Args:
        fusion: as the model stores its weights.
        allowed: names of tensors that may be stored otherwise.

    Returns:
        None where there is none, or a weight may not be stored so.
    """
    return with_k_innermost(fusion, allowed) or _with_n_innermost(fusion, allowed)


def with_k_innermost(fusion: Fusion, allowed: Collection[str]) -> Reordered | None:
    """The fusion of the same weights stored with k innermost, and how each that lies otherwise is transposed.

    Args:
        fusion: as the model stores its weights.
        allowed: names of tensors that may be stored otherwise.

    Returns:
        None where nothing would change, where a weight may not be stored otherwise, or has k and n in one dimension.
    """
    return _reordered(fusion, allowed, _contracted(fusion))


def with_padded_rows(fusion: Fusion, allowed: Collection[str]) -> Reordered | None:
    """The same with zeros behind each row of k, so that all begin on a boundary that is as large as the zeros allow.

    Returns:
        None where they do already, where zeros would be more than one part in PADDED of a row, k is not known, or a
        weight may not be stored otherwise, is a window, or has k and something else in one dimension.
    """
    fusion, perms = with_k_innermost(fusion, allowed) or (fusion, {})
    if fusion.quantization is not None or any(tensor.wide is not None for tensor in fusion.rhs):
        return None
    names = [tensor.name for tensor in fusion.inputs]
    if any(tensor.name not in allowed or names.count(tensor.name) > 1 for tensor in fusion.rhs):
        return None
    wholes = [_whole_row(fusion, tensor) for tensor in fusion.rhs]
    if not all(wholes):
        return None
    pairs = zip(fusion.rhs, wholes, strict=True)
    rhs = tuple(replace(tensor, wide=(len(tensor.dims) - 1, whole)) for tensor, whole in pairs)
    identity = {tensor.name: tuple(range(len(tensor.dims))) for tensor in rhs}
    return replace(fusion, rhs=rhs), {**identity, **perms}


def _whole_row(fusion: Fusion, tensor: Tensor) -> int:
    """Elements of a row of k with zeros behind it; 0 where there are to be none."""
    inner = tensor.dims[-1]
    size = fusion.size(inner[0]) if len(inner) == 1 and inner[0] in _contracted(fusion) else None
    whole = 0 if size is None else padded_size(size, tensor.dtype.bytes)
    return whole if whole != size else 0


def padded_size(size: int, element_bytes: int) -> int:
    """Elements of a row that ends on the largest boundary for which it grows by one part in PADDED at most."""
    elements = (boundary // element_bytes for boundary in BOUNDARIES)
    wholes = (-(-size // each) * each for each in elements)
    return next((whole for whole in wholes if (whole - size) * PADDED <= size), size)


def _with_n_innermost(fusion: Fusion, allowed: Collection[str]) -> Reordered | None:
    """The same with n innermost, where rows of n are more aligned than rows of k: to a sector at most."""
    if fusion.quantization is not None or any(tensor.has_parts_in_turn for tensor in fusion.rhs):
        return None
    columns = {axis for tensor in fusion.rhs for axis in tensor.axes if axis not in fusion.lhs.axes}
    if _alignment(fusion, columns) <= _alignment(fusion, _contracted(fusion)):
        return None
    found = _reordered(fusion, allowed, columns)
    return None if found is None or has_columns_in_turn(found[0]) else found


def _contracted(fusion: Fusion) -> set[str]:
    return {axis for axis in fusion.lhs.axes if axis not in fusion.outs[0].tensor.axes}


def _alignment(fusion: Fusion, row: Collection[str]) -> int:
    """Bytes on whose multiples every row of every rhs begins, if such axes are innermost; a sector's at most."""
    sizes = (math.prod(fusion.size(axis) or 0 for axis in rhs.axes if axis in row) for rhs in fusion.rhs)
    return math.gcd(SECTOR, *(size * fusion.lhs.dtype.bytes for size in sizes))


def _reordered(fusion: Fusion, allowed: Collection[str], inner: set[str]) -> Reordered | None:
    """The fusion with some axes of every rhs behind the others; None where that is not possible, or is so."""
    names = [tensor.name for tensor in fusion.inputs]
    perms: dict[str, Perm] = {}
    for tensor in fusion.rhs:
        perm = _behind_others(tensor, inner)
        if perm is None:
            return None
        if not _is_same_order(fusion, tensor, perm):
            if tensor.name not in allowed or names.count(tensor.name) > 1:
                return None
            perms[tensor.name] = perm
    if not perms:
        return None
    rhs = tuple(_transposed(tensor, perms[tensor.name]) if tensor.name in perms else tensor for tensor in fusion.rhs)
    return replace(fusion, rhs=rhs), perms


def has_columns_in_turn(fusion: Fusion) -> bool:
    """Whether neighbours in a row of some rhs are columns of different parts, `k (n p)`; not parts of one column."""
    in_turn = (tensor for tensor in fusion.rhs if tensor.has_parts_in_turn)
    rows = (stepped(fusion, tensor.axes) for tensor in in_turn)
    return any(row and row[-1] == PART_AXIS for row in rows)


def has_runs_in_turn(fusion: Fusion) -> bool:
    """Whether the columns of parts take turns several at a time, `(n1 p n2)`, in some rhs."""
    return any(_has_runs(fusion, tensor) for tensor in fusion.rhs)


def _has_runs(fusion: Fusion, tensor: Tensor) -> bool:
    return any(PART_AXIS in stepped(fusion, dim)[1:-1] for dim in tensor.dims)


def part_by_part(fusion: Fusion, allowed: Collection[str]) -> tuple[Fusion, Mapping[str, bool]] | None:
    """The fusion of weights whose columns take turns several at a time, stored part by part with k innermost.

    So is a bias of these columns where it may be: no kernel of sm_90a reads runs of one beside each other.

    Args:
        fusion: as the model stores its weights.
        allowed: names of tensors that may be stored otherwise.

    Returns:
        The fusion, and of each tensor whether the model has n innermost and k; None where a weight may not be stored
        otherwise, has more dimensions than k and n, or is quantised.
    """
    names = [tensor.name for tensor in fusion.inputs]
    inner = _contracted(fusion)
    rhs: list[Tensor] = []
    turned: dict[str, bool] = {}
    for tensor in fusion.rhs:
        columns = [dim for dim in tensor.dims if PART_AXIS in dim]
        depth = [dim for dim in tensor.dims if {*dim} <= inner]
        if len(tensor.dims) != 2 or len(columns) != 1 or len(depth) != 1 or tensor.wide is not None:
            return None
        if tensor.name not in allowed or names.count(tensor.name) > 1 or fusion.quantization is not None:
            return None
        turned[tensor.name] = tensor.dims == (depth[0], columns[0])
        rhs.append(replace(tensor, dims=(_parts_first(columns[0]), depth[0])))
    anew = [tensor for tensor in fusion.operands if tensor.name in allowed and names.count(tensor.name) == 1]
    anew = [tensor for tensor in anew if len(tensor.dims) == 1 and _has_runs(fusion, tensor) and tensor.wide is None]
    operands = (replace(each, dims=(_parts_first(each.dims[0]),)) if each in anew else each for each in fusion.operands)
    turned |= dict.fromkeys((tensor.name for tensor in anew), False)
    return replace(fusion, rhs=tuple(rhs), operands=tuple(operands)), turned


def _parts_first(dim: tuple[str, ...]) -> tuple[str, ...]:
    return (PART_AXIS, *(axis for axis in dim if axis != PART_AXIS))


def _behind_others(tensor: Tensor, inner: set[str]) -> Perm | None:
    """The dimensions of some axes behind the others; None where one has axes of both."""
    if any({*dim} & inner and {*dim} - inner for dim in tensor.dims):
        return None
    places = range(len(tensor.dims))
    behind = [place for place in places if {*tensor.dims[place]} & inner]
    return (*(place for place in places if place not in behind), *behind)


def _is_same_order(fusion: Fusion, tensor: Tensor, perm: Perm) -> bool:
    """Whether a permutation moves no bytes: dimensions of size 1 lie anywhere."""
    stepped = [place for place in perm if any(fusion.size(axis) != 1 for axis in tensor.dims[place])]
    return stepped == sorted(stepped)


def _transposed(tensor: Tensor, perm: Perm) -> Tensor:
    wide = None if tensor.wide is None else (perm.index(tensor.wide[0]), tensor.wide[1])
    return replace(tensor, dims=tuple(tensor.dims[place] for place in perm), wide=wide)
