"""The fusions of two products -> one attention: the second multiplies the softmax of what the first makes.

What lies between is one tensor, whose dimensions both fusions name. So the axes of the second get the names of the
first, dimension by dimension; an axis that one of them holds together and the other apart is apart in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxfuse.errors import NotFusable
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Axis, Dim, Fusion, Out, RhsPart, Step, Tensor, Value, acc_name, step_name

OTHER = "v_"  # begins the names of the second fusion's axes, until they have their own
Names = Mapping[str, Dim]


def join(first: Fusion, second: Fusion, guarded: bool) -> Attention:
    """The attention of two fusions.

    Args:
        first: makes the scores, its only out.
        second: its lhs is what the softmax makes of them; nothing else is read but its rhs.
        guarded: whether rows of NaN become 0 between.

    Raises:
        NotFusable: one regroups dimensions in a way that the other cannot have.
    """
    second = _renamed(second, {axis.name: (OTHER + axis.name,) for axis in second.axes})
    own, other = _unified(first, second)
    first, second = _renamed(first, own), _renamed(second, other)
    final = _final_names(first, second)
    first, second = _renamed(first, final), _renamed(second, final)
    sizes = {axis.name: axis.size for axis in second.axes}
    axes = [Axis(axis.name, sizes.get(axis.name) if axis.size is None else axis.size) for axis in first.axes]
    known = {axis.name for axis in axes}
    steps, score, scale = _without_scale(first)
    moved = {acc_name(0): acc_name(1)} | {
        step.result: step_name(len(steps) + index) for index, step in enumerate(second.steps)
    }
    (out,) = second.outs
    return Attention(
        anchor=first.anchor,
        pattern="attention",
        features=tuple(sorted({*first.features, *second.features})),
        axes=(*axes, *(axis for axis in second.axes if axis.name not in known)),
        lhs=first.lhs,
        rhs=(first.rhs[0], second.rhs[0]),
        parts=(RhsPart(0), RhsPart(1)),
        operands=first.operands,
        loads=first.loads,
        steps=steps,
        outs=(Out(out.tensor, moved[out.value]),),
        scores=first.outs[0].tensor.dims,
        score=score,
        scale=scale,
        guarded=guarded,
        result_steps=tuple(
            Step(moved[step.result], step.op, tuple(_moved(value, moved) for value in step.inputs))
            for step in second.steps
        ),
    )


def _moved(value: Value, names: Mapping[str, str]) -> Value:
    return names.get(value, value) if isinstance(value, str) else value


def _without_scale(fusion: Fusion) -> tuple[tuple[Step, ...], Value, float]:
    """The steps, their value, and a positive factor at the end, which the softmax takes for nothing."""
    steps, value, scale = fusion.steps, fusion.outs[0].value, 1.0
    while steps and steps[-1].result == value and steps[-1].op == "mul":
        factors = [each for each in steps[-1].inputs if isinstance(each, float)]
        values = [each for each in steps[-1].inputs if isinstance(each, str)]
        if len(factors) != 1 or not 1e-6 < factors[0] * scale < 1e6:
            break
        steps, value, scale = steps[:-1], values[0], scale * factors[0]
    return steps, value, scale


def _unified(first: Fusion, second: Fusion) -> tuple[dict[str, Dim], dict[str, Dim]]:
    """What the axes of both become: those of the dimensions of what lies between."""
    own: dict[str, Dim] = {}
    other: dict[str, Dim] = {}
    for left, right in _pairs(first, second):
        if len(left) == len(right):
            _check_sizes(first, second, left, right)
            other |= {name: (wanted,) for name, wanted in zip(right, left, strict=True)}
        elif len(right) == 1:
            other[right[0]] = left
        elif len(left) == 1:
            own[left[0]] = right
        else:
            raise _refusal(first, f"({' '.join(left)}) and ({' '.join(right)}) are one dimension, grouped in two ways")
    return own, other


def _pairs(first: Fusion, second: Fusion) -> list[tuple[Dim, Dim]]:
    scores, probabilities = first.outs[0].tensor.dims, second.lhs.dims
    if len(scores) != len(probabilities):
        raise _refusal(first, "the second product sees other dimensions than the first makes")
    return list(zip(scores, probabilities, strict=True))


def _check_sizes(first: Fusion, second: Fusion, left: Dim, right: Dim) -> None:
    for one, two in zip(left, right, strict=True):
        sizes = {first.size(one), second.size(two)} - {None}
        if len(sizes) > 1:
            raise _refusal(first, f"an axis of {first.size(one)} in one product has {second.size(two)} in the other")


def _refusal(fusion: Fusion, detail: str) -> NotFusable:
    return NotFusable("no_attention_kernel", fusion.anchor, detail)


def _final_names(first: Fusion, second: Fusion) -> dict[str, Dim]:
    """Columns of the second product are o; what it alone holds apart is called as nothing else is."""
    taken = {axis.name for axis in (*first.axes, *second.axes) if not axis.name.startswith(OTHER)}
    columns = {axis for tensor in second.rhs for axis in tensor.axes}
    final: dict[str, Dim] = {}
    for axis in dict.fromkeys(axis.name for axis in (*first.axes, *second.axes)):
        if axis.startswith(OTHER):
            wanted = axis.removeprefix(OTHER)
            if axis in columns and wanted.startswith("n"):
                wanted = "o" + wanted[1:]
            while wanted in taken:
                wanted += "_"
            taken.add(wanted)
            final[axis] = (wanted,)
    return final


def _renamed_axis(axis: Axis, names: Names) -> list[Axis]:
    """Of several that one becomes, only the other fusion knows the sizes."""
    new = names.get(axis.name, (axis.name,))
    return [Axis(name, axis.size if len(new) == 1 else None) for name in new]


def _renamed(fusion: Fusion, names: Names) -> Fusion:
    """The same over other axes; one may become several."""
    axes = {new.name: new for axis in fusion.axes for new in _renamed_axis(axis, names)}
    return replace(
        fusion,
        axes=tuple(axes.values()),
        lhs=_renamed_tensor(fusion.lhs, names),
        rhs=tuple(_renamed_tensor(tensor, names) for tensor in fusion.rhs),
        operands=tuple(_renamed_tensor(tensor, names) for tensor in fusion.operands),
        outs=tuple(replace(out, tensor=_renamed_tensor(out.tensor, names)) for out in fusion.outs),
    )


def _renamed_tensor(tensor: Tensor, names: Names) -> Tensor:
    dims = tuple(tuple(new for axis in dim for new in names.get(axis, (axis,))) for dim in tensor.dims)
    return replace(tensor, dims=dims)
