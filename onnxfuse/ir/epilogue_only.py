"""A fusion without its product: the product stays an ordinary node, and one pointwise kernel does all that follows it.

What a `Fusion` accumulates as `acc0`, `acc1`, ... a `Pointwise` loads from the product's output, a column range each;
its other loads come after them:

    t0 = in0[p=0] + acc0        ->        t0 = in1[p=0] + in0[p=0]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnxfuse.errors import NotFusable
from onnxfuse.ir.fusion import Fusion, Load, Pointwise, Step, Tensor, Value, acc_name, load_name
from onnxfuse.limits import MAX_LOADS


def epilogue_of(fusion: Fusion, products: tuple[Tensor, ...], name_of: Callable[[int], str] = load_name) -> Pointwise:
    """The fusion's steps over the product's outputs, `[..., m, (p n)]` one for each tensor of `fusion.rhs`.

    Args:
        fusion: the product with its steps.
        products: what is loaded in its place.
        name_of: what steps call each part of it; as loads, or as sums where something is done to them first.

    Raises:
        NotFusable: the parts and the operands are more than a kernel takes.
    """
    loads = tuple(Load(part.tensor, part.part, part.start) for part in fusion.parts)
    loads += tuple(replace(load, operand=load.operand + len(products)) for load in fusion.loads)
    if len(loads) > MAX_LOADS:
        raise NotFusable("too_many_operands", fusion.anchor, f"{len(loads)} operands; a kernel takes {MAX_LOADS}")
    first = len(fusion.parts)
    names: dict[Value, Value] = {acc_name(part): name_of(part) for part in range(first)}
    names |= {load_name(index): load_name(index + first) for index in range(len(fusion.loads))}
    stored = {product.name for product in products}
    return Pointwise(
        anchor=fusion.anchor,
        pattern=fusion.pattern,
        features=fusion.features,
        axes=tuple(axis for axis in fusion.axes if axis.name in _axes_of(fusion, products)),
        operands=(*products, *fusion.operands),
        loads=loads,
        steps=tuple(
            Step(step.result, step.op, tuple(names.get(value, value) for value in step.inputs)) for step in fusion.steps
        ),
        outs=tuple(
            replace(out, value=str(names.get(out.value, out.value)))
            for out in fusion.outs
            if out.tensor.name not in stored
        ),
    )


def _axes_of(fusion: Fusion, products: tuple[Tensor, ...]) -> set[str]:
    tensors = (*products, *fusion.operands, *(out.tensor for out in fusion.outs))
    return {axis for tensor in tensors for axis in tensor.axes}
