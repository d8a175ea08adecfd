"""Tables on a terminal: cells wrap between words; where a line is too short for that, each row becomes a list."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

BETWEEN = 3  # characters from column to column: a rule, and a space on each side of it
INDENT = 2


def show_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print a table in which no word is broken.

    Args:
        console: where, and how wide it is.
        title: above it.
        headings: of the columns; all but the first may be empty.
        rows: a text for each column.
        right: headings of the columns that hold figures.
    """
    columns = list(zip(headings, *rows, strict=True))
    widths = _widths(
        [max(map(_longest_word, column)) for column in columns],
        [max(map(cell_len, column)) for column in columns],
        console.width - BETWEEN * len(columns) - 1,
    )
    if widths is None:
        _show_list(console, title, headings, rows)
        return
    table = Table(title=Text(title), title_justify="left")
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(Text(heading), width=width, justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int] | None:
    """The width of each column, taken from the widest where room is short; None where words would be broken."""
    if sum(least) > room:
        return None
    widths = list(most)
    while sum(widths) > room:
        slack = [width if width > low else 0 for width, low in zip(widths, least, strict=True)]
        widths[slack.index(max(slack))] -= 1
    return widths


def _show_list(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(Text(title), soft_wrap=True)
    named = max(map(cell_len, headings)) + 1
    for head, *cells in rows:
        console.print(Text(head), soft_wrap=True)
        for heading, cell in zip(headings[1:], cells, strict=True):
            if not cell:
                continue
            room = max(console.width - INDENT - named, 1)
            lines = textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False)
            for name, line in zip((heading, *[""] * len(lines)), lines, strict=False):
                console.print(Text(f"{'':{INDENT}}{name:<{named}}{line}"), soft_wrap=True)
