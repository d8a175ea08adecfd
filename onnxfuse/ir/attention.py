"""The IR of one attention: two products joined by a softmax over the columns of the first. No ONNX in it.

scores = steps(acc0),  acc0[batch, m, n] = sum over k of query[batch, m, k] * keys[batch, n, k]
p      = softmax over n of scale * scores; where a whole row is NaN then, 0 if the model looks for it
out    = result_steps(acc1),  acc1[batch, m, o] = sum over n of p[batch, m, n] * values[batch, n, o]
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.fusion import Dim, Fusion, Step, Tensor, Value, part_text, step_text, value_text


@dataclass(frozen=True)
class Diagonal:
    """Where the scores of a row are as good as none: key > row + offset, and key < row + first.

    Attributes:
        offset: of the last key that counts, from the row's own number.
        from_end: rows are counted from the end: `keys - rows` more.
        fill: what a mask makes of the scores there, or less: minus infinity or a number that is very low.
        first: of a window, the first key that counts, from the row's own number; None where all do.
    """

    offset: int
    from_end: bool
    fill: float
    first: int | None = None

    def __str__(self) -> str:
        row = "row + n - m" if self.from_end else "row"
        first, last = (f"{row} {offset:+}" if offset else row for offset in (self.first, self.offset))
        return f"keys up to {last}" if self.first is None else f"keys from {first} to {last}"


@dataclass(frozen=True)
class Attention(Fusion):
    """A fusion whose lhs is the query and whose rhs are the keys and the values; its steps make the scores.

    Attributes:
        scores: dimensions of the first product, `[..., m, n]`, which no tensor has.
        score: the value that the softmax is of.
        scale: a positive number that it is multiplied by.
        guarded: a row of NaN becomes 0.
        result_steps: what follows the second product, `acc1`; the out stores its last value.
        diagonal: of a causal mask, whose empty blocks of keys a kernel need not look at; None where none is known.
    """

    scores: tuple[Dim, ...]
    score: Value
    scale: float
    guarded: bool
    result_steps: tuple[Step, ...]
    diagonal: Diagonal | None = None

    @property
    def query(self) -> Tensor:
        """`[..., m, k]`."""
        return self.lhs

    @property
    def keys(self) -> Tensor:
        """`[..., n, k]`."""
        return self.rhs[0]

    @property
    def values(self) -> Tensor:
        """`[..., n, o]`."""
        return self.rhs[1]

    def __str__(self) -> str:
        sizes = "  ".join(f"{axis.name}={'?' if axis.size is None else axis.size}" for axis in self.axes)
        rows = [("fusion", f"{self.anchor}  attention"), ("axes", sizes)]
        rows += [("query", str(self.query)), ("keys", str(self.keys)), ("values", str(self.values))]
        rows += [(f"in{index}", f"{operand}  {operand.name}") for index, operand in enumerate(self.operands)]
        rows += [("", f"{step.result} = {step_text(step, self)}") for step in self.steps]
        rows.append(("", f"p = {self._softmax_text()}"))
        rows.append(("", "acc1 = p * values"))
        rows += [("", f"{step.result} = {step_text(step, self)}") for step in self.result_steps]
        rows += [("out", f"{out.tensor}{part_text(out.part)} <- {value_text(out.value, self)}") for out in self.outs]
        return "\n".join(f"{label:<7} {text}".rstrip() for label, text in rows)

    def _softmax_text(self) -> str:
        score = value_text(self.score, self)
        text = f"softmax({score})" if self.scale == 1.0 else f"softmax({score} * {self.scale:.6g})"
        text = f"{text}, 0 where a row is NaN" if self.guarded else text
        return text if self.diagonal is None else f"{text}, {self.diagonal}"
