"""What is known of a model's inputs before a run: graph/input_facts.py reads it, runtime/feeds.py uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InputSizes:
    """What is known of the symbols of a model's inputs.

    Attributes:
        fixed: sizes by symbol.
        sums: a symbol, and the symbols and numbers whose sum it is.
        values: by input, the symbol or sum whose size the input's value is, and what is added to it.
        one_of: pairs of symbols, one of which is 1: GroupQueryAttention with a past takes one row, or one token.
        multiples: a symbol, and the number and the symbol whose product it is.
    """

    fixed: Mapping[str, int]
    sums: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[tuple[str, ...], int]]
    one_of: frozenset[tuple[str, str]] = frozenset()
    multiples: Mapping[str, tuple[int, str]] = field(default_factory=dict)


NOTHING = InputSizes({}, {}, {})


@dataclass(frozen=True)
class InputFacts:
    """What is known of a model's inputs.

    Attributes:
        unranked: inputs whose number of dimensions the model does not say.
        words: text that the model's encoders know.
        sizes: what the model's operators say of its symbols.
    """

    unranked: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    sizes: InputSizes = NOTHING
