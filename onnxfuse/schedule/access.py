"""How a kernel reaches the tensors of an epilogue: from the axes of its loops to an `Access` each."""

from __future__ import annotations

from onnxfuse.analysis.axis_mapping import Axes, AxisMapping, flatten, levels, static_size
from onnxfuse.analysis.vector_width import Width, is_transposed
from onnxfuse.ir.fusion import Pointwise, Tensor
from onnxfuse.schedule.kernel_spec import Access


def access(fusion: Pointwise, tensor: Tensor, mapping: AxisMapping, width: Width) -> Access:
    """How a kernel reaches a tensor of the epilogue."""
    kind = mapping.kind(tensor)
    loops = (("m", mapping.m), ("n", mapping.n), ("batch", mapping.batch))
    two_levels = tuple(name for name, loop in loops if levels(fusion, tensor, loop) > 1)
    elements = width.elements if kind in ("row", "tile") else 1
    transposed = kind == "tile" and is_transposed(fusion, tensor, mapping)
    run = run_of(fusion, tensor, mapping.n) if "n" in two_levels else None
    return Access(kind, tensor.dtype, elements, transposed, two_levels, run or 0)


def run_of(fusion: Pointwise, tensor: Tensor, loop: Axes) -> int | None:
    """Steps of one run of a loop that two strides walk; None where one does, or only the run knows."""
    groups = flatten(fusion, (tensor,), loop)
    return static_size(fusion, groups[-1]) if len(groups) > 1 else None
