"""Sizes that only the run knows, as text: products of named atoms. Equal sizes have equal text, as far as it is known.

A size is an int, a symbol such as `4*B*S`, or None where nothing is known. Products and exact quotients of symbols stay
symbols; any other function of sizes is an atom of its own, `(S + 1)`, which equals itself and nothing else.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from operator import mul

Size = int | str | None
MAX_LENGTH = 4096  # of a symbol

_AT_MOST = re.compile(r"\(at_most (\d+) .*\)")
_NEGATIVE = re.compile(r"\(- 0 (.*)\)")
_SUM = re.compile(r"\(\+ ([\w.:/-]+|\([^*]+\)) (-?\d+)\)")  # of an atom, which has no * inside
_NAME = re.compile(r"[\w.:/]+")  # of a size; no function, which may be negative
_TWO_TERMS = re.compile(r"\(([+-]) ([\w.:/-]+) ([\w.:/-]+)\)")


@dataclass(frozen=True)
class Monomial:
    """A size that is known, as a product.

    Attributes:
        factor: the number in it.
        atoms: the names and functions in it, each as often as it is a factor.
    """

    factor: int = 1
    atoms: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(size: int | str) -> Monomial:
        """A number, or a symbol read as what `str` writes."""
        if isinstance(size, int):
            return Monomial(size)
        numbers, atoms = [], Counter[str]()
        for text in size.split("*"):
            if text.isdecimal():
                numbers.append(int(text))
            else:
                atoms[text] += 1
        return Monomial(math.prod(numbers), atoms)

    def __mul__(self, other: Monomial) -> Monomial:
        return Monomial(self.factor * other.factor, self.atoms + other.atoms)

    def over(self, other: Monomial) -> Monomial | None:
        """The quotient where it is exact for all values of the atoms, None where it is not."""
        if other.factor == 0 or self.factor % other.factor or other.atoms - self.atoms:
            return None
        return Monomial(self.factor // other.factor, self.atoms - other.atoms)

    def __str__(self) -> str:
        return "*".join(([] if self.factor == 1 else [str(self.factor)]) + sorted(self.atoms.elements()))

    @property
    def size(self) -> Size:
        """The size: a number where there are no atoms, else a symbol."""
        return _short(str(self)) if self.atoms and self.factor else self.factor


def function(name: str, *arguments: object) -> Size:
    """A size that is some other function of sizes and numbers; None where one of them is unknown."""
    if any(argument is None for argument in arguments):
        return None
    return _short(atom(f"{name} {' '.join(map(str, arguments))}"))


def multiply(sizes: Iterable[Size]) -> Size:
    """The product of sizes."""
    number, symbols = 1, []
    for size in sizes:
        if size is None:
            return None
        if isinstance(size, int):
            number *= size
        else:
            symbols.append(Monomial.of(size))
    return reduce(mul, symbols, Monomial(number)).size


def divide(size: Size, divisor: Size) -> Size:
    """The quotient of sizes where it is exact for all values of the atoms, None where it is not."""
    if size is None or divisor is None:
        return None
    quotient = Monomial.of(size).over(Monomial.of(divisor))
    return None if quotient is None else quotient.size


def add(first: Size, second: Size) -> Size:
    """The sum of sizes, in either order; numbers that are added to a symbol one after another are one."""
    if isinstance(first, int) and isinstance(second, int):
        return first + second
    if isinstance(first, int) or (isinstance(first, str) and isinstance(second, str) and second < first):
        first, second = second, first
    found = _SUM.fullmatch(first) if isinstance(first, str) and isinstance(second, int) else None
    if found is not None and isinstance(second, int):
        return add(found[1], int(found[2]) + second)
    return second if first == 0 else first if second == 0 else function("+", first, second)


def subtract(first: Size, second: Size) -> Size:
    """The difference of sizes, which may be negative."""
    if isinstance(second, int):
        return add(first, -second)
    return 0 if first == second is not None else function("-", first, second)


def quotient(first: Size, second: Size) -> Size:
    """The whole part of a quotient of sizes; None where it is not known."""
    if isinstance(first, int) and isinstance(second, int):
        return first // second if first >= 0 < second else None
    exact = divide(first, second)
    return function("/", first, second) if exact is None else exact


def rest(whole: Size, part: Size) -> Size:
    """What is left of a sum without one of its terms, or of a size without what a rest of it left; else None."""
    if part == 0:
        return whole
    total = _TWO_TERMS.fullmatch(whole) if isinstance(whole, str) else None
    left = _TWO_TERMS.fullmatch(part) if isinstance(part, str) else None
    term = None
    if total is not None and total[1] == "+" and str(part) in (total[2], total[3]):
        term = total[3] if total[2] == str(part) else total[2]
    elif left is not None and left[1] == "-" and left[2] == str(whole):
        term = left[3]
    if term is None or term.startswith("-"):
        return None
    return int(term) if term.isdecimal() else term


def negative(size: Size) -> Size:
    """What an exporter writes for the last `size` of a dimension."""
    return -size if isinstance(size, int) else function("-", 0, size)


def before_the_end(start: Size) -> Size:
    """How many elements before the end a Slice begins that starts at `negative` of a size; None for any other start."""
    found = _NEGATIVE.fullmatch(start) if isinstance(start, str) else None
    return found[1] if found is not None and negative(found[1]) == start else None


def window(size: Size, start: int, end: Size) -> Size:
    """How many of `size` elements lie from `start` to `end` where all sizes are one and numbers added to it; else None.

    A padded sequence has a size such as `(+ S 2)`, and windows of it from 0 to S, from 1 to `(+ S 1)`, ...; of one that
    is joined with 2 others, those 2 are a window.
    """
    if isinstance(end, int) and 0 <= start <= end and is_less(size, end) is False:
        return end - start
    (whole, added), (bound, further) = _terms(size), _terms(end)
    length = min(added, further) - start
    return add(whole, length) if isinstance(whole, str) and whole == bound and start >= 0 <= length else None


def from_the_end(size: Size, end: Size) -> Size:
    """Where a negative end lies in a size that at least as many were added to; another end as it is.

    Convolutions of an even kernel leave an element that the model cuts off by `[:-1]`.
    """
    whole, added = _terms(size)
    is_counted_back = isinstance(end, int) and end < 0 <= added + end and is_never_negative(whole)
    return add(size, end) if is_counted_back else end


def _terms(size: Size) -> tuple[Size, int]:
    """A size and the number that is added to it."""
    found = _SUM.fullmatch(size) if isinstance(size, str) else None
    return (size, 0) if found is None else (found[1], int(found[2]))


def is_less(first: Size, second: Size) -> bool | None:
    """Whether one size is less than another in every run, or in none; None where that is not known."""
    (name, added), (other, further) = _terms(first), _terms(second)
    if first is None or second is None:
        return None
    if name == other:
        return added < further
    if isinstance(first, int) and isinstance(second, int):
        return first < second
    if isinstance(second, int) and is_never_negative(name) and added >= second:
        return False
    return True if isinstance(first, int) and is_never_negative(other) and further > first else None


def is_never_negative(size: Size) -> bool:
    """Whether a size is known to be 0 or more in every run: a dimension is, a difference of dimensions may not be."""
    if not isinstance(size, str):
        return size is not None and size >= 0
    return all(map(_is_factor_never_negative, _outside_of_functions(size, "*·")))


def _is_factor_never_negative(text: str) -> bool:
    if not text.startswith("("):
        return not text.startswith("-")
    name, *arguments = _outside_of_functions(text[1:-1], " ")
    if name in ("+", "/", "at_most"):
        return all(map(is_never_negative, arguments))
    return name != "-"  # else the length of what a node makes, or a name that a model gives a dimension


def _outside_of_functions(text: str, separators: str) -> list[str]:
    """A text in pieces at the separators, but for those between parentheses."""
    depths = accumulate((char == "(") - (char == ")") for char in text)
    breaks = [place for place, depth in enumerate(depths) if not depth and text[place] in separators]
    return [text[start + 1 : end] for start, end in pairwise((-1, *breaks, len(text)))]


def at_most(size: Size, limit: int) -> Size:
    """The smaller of a size and a number: how much of a table of positions a sequence takes."""
    return min(size, limit) if isinstance(size, int) else function("at_most", limit, size)


def broadcast(first: Size, second: Size) -> Size:
    """The size that two dimensions broadcast to; None where it depends on which of them is 1."""
    if first == second or second == 1:
        return first
    if first == 1:
        return second
    for bounded, whole in ((first, second), (second, first)):
        if is_bounded(bounded, whole):
            return whole
    fixed = (size for size in (first, second) if isinstance(size, int) and size > 1)
    return next(fixed, next(filter(is_never_one, (first, second)), None))


def is_never_one(size: Size) -> bool:
    """Whether a size is 1 in no run: a multiple, or a sequence that 2 or more were added to."""
    if not isinstance(size, str):
        return isinstance(size, int) and size != 1
    name, added = _terms(size)
    return Monomial.of(size).factor > 1 or (added > 1 and isinstance(name, str) and _NAME.fullmatch(name) is not None)


def is_bounded(bounded: Size, whole: Size) -> bool:
    """Whether one dimension is `at_most` of the other: where it is less, it is its limit, and does not broadcast."""
    found = _AT_MOST.fullmatch(bounded) if isinstance(bounded, str) else None
    return found is not None and int(found[1]) > 1 and at_most(whole, int(found[1])) == bounded


def is_one_or_none(size: Size) -> bool:
    """Whether a size is 1 wherever there is anything."""
    return isinstance(size, str) and size.startswith("(at_most 1 ")


def atom(text: str) -> str:
    """What equals itself and nothing else."""
    return f"({text.replace('*', '·')})"


def _short(text: str) -> str | None:
    """What takes more than a page to say is not known: arithmetic on a size by itself would double it at each step."""
    return text if len(text) <= MAX_LENGTH else None
