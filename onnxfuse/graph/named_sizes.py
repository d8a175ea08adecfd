"""Models' own names of dimensions as symbols: exporters write one as arithmetic on others."""

from __future__ import annotations

import re
from functools import reduce
from itertools import accumulate

from onnxfuse.graph.symbolic import Size, add, at_most, atom, multiply, quotient, subtract

MAX_DEPTH = 64  # of parentheses
MAX_DIGITS = 18

_MINIMUM = re.compile(r"(?:Min\((\d+), |(\d+) - Max\(0, \2 - )(\w+)\)")
_TOKEN = re.compile(r" *(//|[()*+]|-(?= )|\d+(?![\w.:-])|\w(?:[\w.:-]|/(?!/))*)")


def canonical(name: str) -> str:
    """A model's own name of a dimension as a symbol.

    Exporters write `s1*s2`, `s1//4`, `s2*((s1//s2))`, `(((s1//80)) - 3)//2 + 1`, `past_length + length`, and of the
    first or last `s1` rows of a table `Min(64, s1)` and `64 - Max(0, 64 - s1)`. The symbol is the one that the same
    arithmetic has where a graph computes it; what is no such arithmetic is a name as it stands.
    """
    minimum = _MINIMUM.fullmatch(name)
    if minimum is not None:
        return str(at_most(canonical(minimum[3]), int(minimum[1] or minimum[2])))
    tokens = _tokens(name)
    size = _sum(tokens) if tokens else None
    return size if isinstance(size, str) and not tokens else atom(name)


def _tokens(name: str) -> list[str]:
    """A name in pieces, the last one first; none where some are none of arithmetic."""
    pieces = [found[1] for found in _TOKEN.finditer(name)]
    depths = accumulate((piece == "(") - (piece == ")") for piece in pieces)
    is_all = _TOKEN.sub("", name).strip() == "" and max(depths, default=0) <= MAX_DEPTH
    return pieces[::-1] if is_all else []


def _sum(tokens: list[str]) -> Size:
    """A sum, whose tokens are taken; None where it is none. Terms stand in an order that does not depend on theirs."""
    terms, less = [_product(tokens)], list[Size]()
    while tokens and tokens[-1] in ("+", "-"):
        (terms if tokens.pop() == "+" else less).append(_product(tokens))
    terms.sort(key=lambda term: (isinstance(term, int), str(term)))
    return reduce(subtract, less, reduce(add, terms))


def _product(tokens: list[str]) -> Size:
    """The same of a product; a quotient is of all that stands before it."""
    product = _factor(tokens)
    while tokens and tokens[-1] in ("*", "//"):
        is_quotient, factor = tokens.pop() == "//", _factor(tokens)
        product = quotient(product, factor) if is_quotient else multiply((product, factor))
    return product


def _factor(tokens: list[str]) -> Size:
    """The same of a number, a name, or a sum in parentheses."""
    token = tokens.pop() if tokens else ""
    if token == "(":
        inner = _sum(tokens)
        return inner if tokens and tokens.pop() == ")" else None
    if token.isdecimal():
        return int(token) if len(token) <= MAX_DIGITS else None
    return token if re.match(r"\w", token) else None
