"""Fusions for pure tests, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.dtypes import F16, DType
from onnxfuse.ir.fusion import Axis, Dim, Fusion, Load, Out, RhsPart, Step, Tensor


def dims(text: str) -> tuple[Dim, ...]:
    """`b m (p n) 1` -> dimensions."""
    found: list[Dim] = []
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group: list[str] = []
            found.append(("(",))
        elif token == ")":
            found[-1] = tuple(group)
        elif found and found[-1] == ("(",):
            group.append(token)
        else:
            found.append(() if token == "1" else (token,))
    return tuple(found)


def fusion(
    sizes: dict[str, int | None],
    *,
    lhs: str = "m k",
    rhs: str = "k n",
    operands: Sequence[tuple[str, DType]] = (),
    out: str = "m n",
    parts: int = 1,
    dtype: DType = F16,
    out_dtype: DType | None = None,
) -> Fusion:
    """A product whose epilogue is tanh(acc0 * acc1 ... + op0 + op1 ...)."""
    packed = "p" in rhs
    loads = [
        Load(index, part if "p" in text else None)
        for index, (text, _) in enumerate(operands)
        for part in (range(parts) if "p" in text else (None,))
    ]
    steps, value = [], "acc0"
    terms = [("mul", f"acc{part}") for part in range(1, parts)] + [("add", f"op{index}") for index in range(len(loads))]
    for op, term in terms:
        steps.append(Step(f"t{len(steps)}", op, (value, term)))
        value = steps[-1].result
    steps.append(Step(f"t{len(steps)}", "tanh", (value,)))
    return Fusion(
        anchor="product",
        pattern="split_gemm" if parts > 1 else "gemm_epilogue",
        features=("activation",),
        axes=tuple(Axis(name, size) for name, size in sizes.items()),
        lhs=Tensor("lhs", dtype, dims(lhs)),
        rhs=(Tensor("rhs", dtype, dims(rhs)),),
        parts=tuple(RhsPart(0, part if packed else None) for part in range(parts)),
        operands=tuple(Tensor(f"operand{index}", kind, dims(text)) for index, (text, kind) in enumerate(operands)),
        loads=tuple(loads),
        steps=tuple(steps),
        outs=(Out(Tensor("out", out_dtype or dtype, dims(out)), steps[-1].result),),
    )
