"""The IR of a normalisation: rows less their mean, over their deviation, and a straight line of pointwise steps.

A row may be equal parts, of which a step gets one element each: `acc0`, `acc1`, as of a product's.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.fusion import PART_AXIS, Pointwise, acc_name, part_text

NORMAL = acc_name(0)  # what steps call an element of a normalised row, of its first part
COLUMNS = "n"


@dataclass(frozen=True)
class Normalisation(Pointwise):
    """`normal[m, n] = (x[m, n] - mean[m]) / (sqrt(max(variance[m], least) + epsilon) + added)`, and steps over it.

    The first operand is x, whose mean and variance along n they are, over all parts; its parts are the first loads.
    Layer normalisation (Ba, Kiros and Hinton, 2016) is centred; RMSNorm (Zhang and Sennrich, 2019) has no mean.

    Attributes:
        centred: whether the mean is subtracted.
        epsilon: what is added to the variance.
        least: that the variance counts for; 0 where nothing bounds it.
        added: what is added to the deviation.
        along: the axes of x that are normalised, of each part.
    """

    centred: bool
    epsilon: float
    least: float = 0.0
    added: float = 0.0
    along: tuple[str, ...] = (COLUMNS,)

    @property
    def parts(self) -> int:
        """How many there are in a row."""
        return sum(load.operand == 0 for load in self.loads)

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes of x beside those that are normalised."""
        return tuple(axis for axis in self.operands[0].axes if axis not in (PART_AXIS, *self.along))

    def __str__(self) -> str:
        moments = "mean and variance" if self.centred else "mean square"
        least = f", at least {self.least:.6g}" if self.least else ""
        added = f", {self.added:.6g} added to the deviation" if self.added else ""
        names = ", ".join(acc_name(part) for part in range(self.parts))
        read = ", ".join(f"in0{part_text(load.part)}" for load in self.loads[: self.parts])
        axes = " ".join(self.along)
        text = f"{names} = {read}, normalised by {moments} along {axes}{least}, epsilon {self.epsilon:.6g}{added}"
        head, *rows = super().__str__().split("\n")
        place = next(index for index, row in enumerate(rows) if not row.startswith(("in", "axes")))
        return "\n".join([head, *rows[:place], f"{'':<7} {text}", *rows[place:]])
