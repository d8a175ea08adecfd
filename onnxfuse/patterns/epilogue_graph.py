"""Epilogue values while a match grows: a graph of IR ops in which equal expressions are one node.

Leaves are `acc` (a column of a product, `offset` columns to the right of the value's own), `load` (an operand,
likewise) and `constant`. A slice of a value moves every leaf by the slice's start: that is all that Split and Slice do
to an epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.dtypes import F32, DType
from onnxfuse.ir.fusion import ROUNDS, Step, Value, step_name

ACC = "acc"
LOAD = "load"
CONSTANT = "constant"
NO_STEPS = ROUNDS | {ACC, LOAD, CONSTANT}

Ref = int  # index of an expression in its EpilogueGraph


@dataclass(frozen=True)
class Expression:
    """An op over earlier expressions, or a leaf.

    Attributes:
        op: IR op, `acc`, `load` or `constant`.
        inputs: the expressions that it reads, all of them earlier ones.
        operand: for `load`, the value's name; for `acc`, that of the product.
        offset: for a leaf with columns, the first column; None for an operand without columns.
        columns: for a `load` with columns, how many the value has that reads it; values of several widths may read it.
        hexadecimal: for `constant`, the value as `float.hex` writes it, so that 0.0 and -0.0 stay apart.
    """

    op: str
    inputs: tuple[Ref, ...] = ()
    operand: str = ""
    offset: int | None = None
    columns: int | str | None = None
    hexadecimal: str = ""


class EpilogueGraph:
    """Hash-consed expressions, in an order in which every expression follows its inputs.

    Args:
        rounds: whether what a node of the model makes is rounded to the type in which the model stores it.
    """

    def __init__(self, rounds: bool = False) -> None:
        self.rounds = rounds
        self.expressions: list[Expression] = []
        self._refs: dict[Expression, Ref] = {}

    def _intern(self, expression: Expression) -> Ref:
        if expression not in self._refs:
            self._refs[expression] = len(self.expressions)
            self.expressions.append(expression)
        return self._refs[expression]

    def acc(self, product: str) -> Ref:
        """A column of a product."""
        return self._intern(Expression(ACC, operand=product, offset=0))

    def load(self, operand: str, columns: int | str | None = None) -> Ref:
        """An operand's value, of as many columns if it has any."""
        offset = None if columns is None else 0
        return self._intern(Expression(LOAD, operand=operand, offset=offset, columns=columns))

    def constant(self, value: float) -> Ref:
        """A number."""
        return self._intern(Expression(CONSTANT, hexadecimal=float(value).hex()))

    def apply(self, op: str, *inputs: Ref) -> Ref:
        """An IR op."""
        return self._intern(Expression(op, inputs))

    def stored(self, ref: Ref, dtype: DType) -> Ref:
        """What a node makes, as the next one reads it."""
        op = f"round_{dtype}"
        if not self.rounds or self.expressions[ref].op in (op, *(ROUNDS if dtype == F32 else ())):
            return ref
        return self.apply(op, ref)

    def copied(self, expression: Expression, names: Mapping[Ref, Ref]) -> Ref:
        """An expression of another graph, over what its inputs are called here."""
        return self._intern(replace(expression, inputs=tuple(names[argument] for argument in expression.inputs)))

    def moved(self, ref: Ref, start: int) -> Ref:
        """The same value, `start` columns further right."""
        if not start:
            return ref
        moved: dict[Ref, Ref] = {}
        for index in self.reachable((ref,)):
            expression = self.expressions[index]
            offset = None if expression.offset is None else expression.offset + start
            inputs = tuple(moved[argument] for argument in expression.inputs)
            moved[index] = self._intern(replace(expression, inputs=inputs, offset=offset))
        return moved[ref]

    def leaves(self, op: str, roots: Iterable[Ref]) -> list[Expression]:
        """The leaves of one kind that the roots need, each once."""
        return [self.expressions[ref] for ref in self.reachable(roots) if self.expressions[ref].op == op]

    def count_steps(self, roots: Iterable[Ref]) -> int:
        """How many ops the roots need, but for rounding to the type of a store."""
        return sum(self.expressions[ref].op not in NO_STEPS for ref in self.reachable(roots))

    def straight_line(
        self, roots: Iterable[Ref], name_of: Callable[[Expression], str]
    ) -> tuple[tuple[Step, ...], dict[Ref, Value]]:
        """What the roots need as steps in order, and the name of every expression.

        Args:
            roots: what is computed.
            name_of: what an `acc` or a `load` is called; asked once for each, in order.
        """
        steps: list[Step] = []
        names: dict[Ref, Value] = {}
        for ref in self.reachable(roots):
            expression = self.expressions[ref]
            if expression.op == CONSTANT:
                names[ref] = float.fromhex(expression.hexadecimal)
            elif expression.op in (ACC, LOAD):
                names[ref] = name_of(expression)
            else:
                name = names[ref] = step_name(len(steps))
                steps.append(Step(name, expression.op, tuple(names[each] for each in expression.inputs)))
        return tuple(steps), names

    def reachable(self, roots: Iterable[Ref]) -> list[Ref]:
        """Every expression that the roots need, inputs before users."""
        seen: set[Ref] = set()
        stack = list(roots)
        while stack:
            ref = stack.pop()
            if ref not in seen:
                seen.add(ref)
                stack.extend(self.expressions[ref].inputs)
        return sorted(seen)
