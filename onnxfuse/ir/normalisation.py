"""The IR of a normalisation: rows less their mean, over their deviation, and a straight line of pointwise steps."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.fusion import Pointwise, acc_name, load_name

NORMAL = acc_name(0)  # what steps call an element of a normalised row
ROW = load_name(0)  # what is normalised


@dataclass(frozen=True)
class Normalisation(Pointwise):
    """`normal[m, n] = (x[m, n] - mean[m]) / (sqrt(max(variance[m], least) + epsilon) + added)`, and steps over it.

    The first operand is x, whose mean and variance along n they are; all others are of columns, and of a batch, as the
    scale and the shift `[b, n]` of adaptive ones behind x[b, m, n]. Layer normalisation (Ba, Kiros and Hinton, 2016) is
    centred; RMSNorm (Zhang and Sennrich, 2019) takes the mean for 0.

    Attributes:
        centred: whether the mean is subtracted.
        epsilon: what is added to the variance.
        least: that the variance counts for; 0 where nothing bounds it.
        added: what is added to the deviation.
    """

    centred: bool
    epsilon: float
    least: float = 0.0
    added: float = 0.0

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes of rows that parameters have."""
        *rows, _ = (axis.name for axis in self.axes)
        return tuple(axis for axis in rows if any(axis in operand.axes for operand in self.operands[1:]))

    def __str__(self) -> str:
        moments = "mean and variance" if self.centred else "mean square"
        least = f", at least {self.least:.6g}" if self.least else ""
        added = f", {self.added:.6g} added to the deviation" if self.added else ""
        text = f"{NORMAL} = in0, normalised by {moments} along n{least}, epsilon {self.epsilon:.6g}{added}"
        head, *rows = super().__str__().split("\n")
        place = next(index for index, row in enumerate(rows) if not row.startswith(("in", "axes")))
        return "\n".join([head, *rows[:place], f"{'':<7} {text}", *rows[place:]])
