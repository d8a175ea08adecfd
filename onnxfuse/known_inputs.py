"""What is known of a model's inputs before a run: graph/input_facts.py reads it, runtime/feeds.py uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


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
MOST_SWITCHES = 3  # that are set independently of each other; each doubles the runs


@dataclass(frozen=True)
class InputFacts:
    """What is known of a model's inputs.

    Attributes:
        unranked: inputs whose number of dimensions the model does not say.
        words: text that the model's encoders know.
        sizes: what the model's operators say of its symbols.
        switches: boolean inputs of one element by which an If of the model chooses, as Optimum's `use_cache_branch`.
        past: symbols of how many tokens a cache has.
    """

    unranked: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    sizes: InputSizes = NOTHING
    switches: tuple[str, ...] = ()
    past: tuple[str, ...] = ()

    @property
    def settings(self) -> int:
        """How many runs set the switches in every way."""
        return 1 << min(len(self.switches), MOST_SWITCHES)

    def setting(self, run: int) -> dict[str, bool]:
        """What the switches are in a run: all of them true in the first."""
        return {name: not run >> place % MOST_SWITCHES & 1 for place, name in enumerate(self.switches)}

    def sizes_of(self, setting: Mapping[str, bool]) -> InputSizes:
        """The sizes for a setting: the branch of a decoder that uses no cache may accept an empty one alone."""
        if all(setting.values()):
            return self.sizes
        return replace(self.sizes, fixed=dict.fromkeys(self.past, 0) | dict(self.sizes.fixed))
