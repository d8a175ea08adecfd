"""Where every element that a kernel reaches lies, index by index: what widths and launch rules are checked against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from onnxfuse.analysis.axis_mapping import Axes, AxisMapping
from onnxfuse.analysis.vector_width import is_transposed, lhs_order, rhs_order
from onnxfuse.ir.fusion import PART_AXIS, Fusion, Tensor

Sizes = Mapping[str, int]


def lines(tensor: Tensor, along: Axes, loops: Axes, sizes: Sizes, offset: int = 0) -> np.ndarray:
    """Flat elements that loops over `loops` and all parts reach, a row for each run over `along`, [lines, extent]."""
    strides, stride = {}, 1
    for axis in reversed(tensor.axes):
        strides[axis] = stride
        stride *= sizes[axis]
    parts = (PART_AXIS,) if PART_AXIS in tensor.axes else ()
    walked = (*parts, *(axis for axis in loops if axis not in along), *along)
    elements = np.full((1,) * len(walked), offset)
    for place, axis in enumerate(walked):
        shape = [-1 if place == other else 1 for other in range(len(walked))]
        elements = elements + np.arange(sizes[axis]).reshape(shape) * strides.get(axis, 0)
    assert elements.max() - offset < stride, "inside of the tensor"
    return elements.reshape(-1, math.prod(sizes[axis] for axis in along))


def is_legal(elements: np.ndarray, width: int) -> bool:
    """Whether accesses of `width` elements cover every line: contiguous, aligned, none across the end of a line."""
    if elements.shape[1] % width:
        return False
    accesses = elements.reshape(-1, width)
    return bool((accesses[:, 0] % width == 0).all() and (np.diff(accesses) == 1).all())


def accesses(fusion: Fusion, mapping: AxisMapping) -> Iterator[tuple[str, Tensor, Axes, Axes]]:
    """Every tensor by its role, the loop that the kernel's accesses go along, and all loops that reach it."""
    rhs_loop = mapping.k if rhs_order(fusion, mapping) == "nk" else mapping.n
    lhs_loop = mapping.m if lhs_order(fusion, mapping) == "km" else mapping.k
    yield "lhs", fusion.lhs, lhs_loop, (*mapping.batch, *mapping.m, *mapping.k)
    for tensor in fusion.rhs:
        yield "rhs", tensor, rhs_loop, (*mapping.batch, *mapping.k, *mapping.n)
    tile = (*mapping.batch, *mapping.m, *mapping.n)
    for role, tensors in (("operand", fusion.operands), ("out", tuple(out.tensor for out in fusion.outs))):
        for tensor in tensors:
            yield role, tensor, mapping.m if is_transposed(fusion, tensor, mapping) else mapping.n, tile
