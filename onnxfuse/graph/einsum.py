"""The dimensions of an Einsum: a letter for each."""

from __future__ import annotations

from collections.abc import Sequence

ELLIPSIS = "αβγδεζηθ"  # letters of what an equation calls `...`


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """A letter for each dimension of the inputs and of the result.

    `...` are the dimensions of an input that have no letter, those of all inputs from the last one on. A result that
    is not written down has every letter that is written once.

    Args:
        equation: as the node has it.
        ranks: how many dimensions each input has.

    Returns:
        the inputs' letters and the result's; a term that does not fit its rank stays as it is written,
        and so do those of inputs that there are not.
    """
    written_inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = written_inputs.split(",", len(ranks) - 1)
    terms += [""] * (len(ranks) - len(terms))
    inputs = [_without_ellipsis(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    written = "".join(inputs)
    if not arrow:
        return inputs, "".join(sorted(label for label in written if written.count(label) == 1))
    return inputs, out.replace("...", "".join(label for label in ELLIPSIS if label in written))


def _without_ellipsis(term: str, rank: int) -> str:
    count = rank - len(term.replace("...", ""))
    return term.replace("...", ELLIPSIS[-count:] if count > 0 else "") if 0 <= count <= len(ELLIPSIS) else term
