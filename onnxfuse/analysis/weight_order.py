"""Weights the other way round: rhs with k innermost, where the model stores it with n innermost.

Kernels read an rhs whose contiguous axis is k faster than one whose contiguous axis is n: `k (p n)` becomes `(p n) k`.
Whether a model may store a weight so is for others to say; here is what its fusion is then. Where the columns of parts
take turns, `k (n p)`, neighbours in a row are of different parts; `(n p) k` has rows of k like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from onnxfuse.ir.fusion import PART_AXIS, Fusion, Tensor

Perm = tuple[int, ...]
"""As numpy.transpose has it: dimension i of the stored tensor is dimension `perm[i]` of the model's."""


def with_k_innermost(fusion: Fusion, allowed: Collection[str]) -> tuple[Fusion, Mapping[str, Perm]] | None:
    """The fusion of the same weights stored with k innermost, and how each that lies otherwise is transposed.

    Args:
        fusion: as the model stores its weights.
        allowed: names of tensors that may be stored otherwise.

    Returns:
        None where nothing would change, where a weight may not be stored otherwise, or has k and n in one dimension.
    """
    contracted = {axis for axis in fusion.lhs.axes if axis not in fusion.outs[0].tensor.axes}
    names = [tensor.name for tensor in fusion.inputs]
    perms: dict[str, Perm] = {}
    for tensor in fusion.rhs:
        perm = _k_last(tensor, contracted)
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
    rows = ([axis for axis in tensor.axes if fusion.size(axis) != 1] for tensor in in_turn)
    return any(row and row[-1] == PART_AXIS for row in rows)


def _k_last(tensor: Tensor, contracted: Collection[str]) -> Perm | None:
    """The dimensions of k behind the others; None where one has axes of both."""
    if any(set(dim) & {*contracted} and set(dim) - {*contracted} for dim in tensor.dims):
        return None
    behind = [any(axis in contracted for axis in dim) for dim in tensor.dims]
    places = range(len(tensor.dims))
    return (*(place for place in places if not behind[place]), *(place for place in places if behind[place]))


def _is_same_order(fusion: Fusion, tensor: Tensor, perm: Perm) -> bool:
    """Whether a permutation moves no bytes: dimensions of size 1 lie anywhere."""
    stepped = [place for place in perm if any(fusion.size(axis) != 1 for axis in tensor.dims[place])]
    return stepped == sorted(stepped)


def _transposed(tensor: Tensor, perm: Perm) -> Tensor:
    wide = None if tensor.wide is None else (perm.index(tensor.wide[0]), tensor.wide[1])
    return replace(tensor, dims=tuple(tensor.dims[place] for place in perm), wide=wide)
