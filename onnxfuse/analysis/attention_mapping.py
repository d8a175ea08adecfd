"""The axis mapping of an attention: which axes are the kernel's batch, heads, m, n, k and o.

The batch and the heads are the outer dimensions of the scores, cut in two where one stride walks each half in every
tensor, or the tensor lacks it. Keys and values may lack the innermost of the heads: then several heads of the query
share them.
"""

from __future__ import annotations

from onnxfuse.analysis.axis_mapping import Axes, AxisMapping, flatten, levels, static_size, stepped
from onnxfuse.analysis.vector_width import Widths, analyse_epilogue, widest
from onnxfuse.errors import NotFusable
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Tensor


def map_attention(attention: Attention) -> AxisMapping:
    """Give every axis its loop.

    Raises:
        NotFusable: `no_attention_kernel`, where the axes of a loop lie apart in a tensor.
    """
    mappings = _cut_anywhere(attention)
    obstacles = [_obstacles(attention, mapping) for mapping in mappings]
    if [] not in obstacles:
        raise NotFusable("no_attention_kernel", attention.anchor, min(obstacles, key=len)[0])
    return mappings[obstacles.index([])]


def _cut_anywhere(attention: Attention) -> list[AxisMapping]:
    """The outer axes cut into a batch and heads, with as few heads as there can be first."""
    *outer, rows, columns = attention.scores
    around = tuple(axis for dim in outer for axis in dim)
    depth = tuple(axis for axis in attention.query.axes if axis in attention.keys.axes and axis not in around)
    stored = (axis for axis in attention.values.axes if axis in attention.outs[0].tensor.axes)
    values = tuple(axis for axis in stored if axis not in (*around, *rows))
    cuts = range(max(len(around) - 1, 0), -1, -1)
    return [AxisMapping(around[:cut], rows, columns, depth, around[cut:], values) for cut in cuts]


def attention_widths(attention: Attention, mapping: AxisMapping) -> Widths:
    """The widest legal access of every tensor along its contiguous axis."""
    factors = (widest(attention, attention.keys, mapping.k), widest(attention, attention.values, mapping.o))
    own = analyse_epilogue(attention, mapping)
    return Widths(
        lhs=widest(attention, attention.query, mapping.k),
        rhs=min(factors, key=lambda width: width.elements),
        operands=own.operands,
        outs=(widest(attention, attention.outs[0].tensor, mapping.o),),
    )


def _obstacles(attention: Attention, mapping: AxisMapping) -> list[str]:
    """What keeps the kernel from walking the tensors in these loops, in words."""
    out = attention.outs[0].tensor
    factors = ((attention.query, mapping.m, mapping.k), (attention.keys, mapping.n, mapping.k))
    stored = ((attention.values, mapping.n, mapping.o), (out, mapping.m, mapping.o))
    loads = tuple((operand, mapping.m, mapping.n) for operand in attention.operands)
    found = []
    for tensor, rows, columns in (*factors, *stored, *loads):
        walked = {*mapping.batch, *mapping.heads, *rows, *columns}
        if any(axis not in walked for axis in stepped(attention, tensor.axes)):
            found.append(
                f"{tensor.name!r} has other axes than those that it is walked along: ({' '.join(tensor.axes)})"
            )
        loops = [mapping.batch, rows, columns]
        if not (tensor in attention.rhs and _shares_heads(attention, tensor, mapping.heads)):
            loops.append(mapping.heads)
        found += [
            f"{tensor.name!r} has the axes ({' '.join(loop)}) in several groups; the kernel walks one"
            for loop in loops
            if levels(attention, tensor, loop) > 1
        ]
    return found


def lies_by_heads(attention: Attention, mapping: AxisMapping) -> bool:
    """Whether a head's elements are neighbours in q, keys, values and the output."""
    walked = ((attention.query, mapping.k), (attention.keys, mapping.k), (attention.values, mapping.o))
    tensors = (*walked, (attention.outs[0].tensor, mapping.o))
    return all(stepped(attention, tensor.axes)[-1:] == stepped(attention, columns)[-1:] for tensor, columns in tensors)


def _shares_heads(attention: Attention, tensor: Tensor, heads: Axes) -> bool:
    """Whether a tensor lacks the innermost heads, and has the others as one stride walks them."""
    groups = flatten(attention, (tensor,), heads)
    lacks = [not any(axis in tensor.axes for axis in stepped(attention, group)) for group in groups]
    return lacks == [False, True]


def head_size(attention: Attention, loop: Axes) -> int:
    """Elements of a head.

    Raises:
        NotFusable: only the run knows them, or the kernel takes no such head.
    """
    size = static_size(attention, loop)
    if size is None or size % 8 or not 8 <= size <= 256:
        known = "a size that only the run knows" if size is None else f"{size} elements"
        raise NotFusable(
            "no_attention_kernel", attention.anchor, f"a head has {known}; the kernel takes multiples of 8 to 256"
        )
    return size
