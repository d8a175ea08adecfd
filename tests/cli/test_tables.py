"""Tables keep their words whole at every width, show every cell, and fit the terminal where that can be."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.report.tables import show_table
from onnxfuse.terminal import FUSED_HEADINGS, _fused_row
from tests.cli.test_cli import MODELS

WORDS = st.text("abcdefgh/_[].Größe", min_size=1, max_size=30)
CELLS = st.lists(WORDS, max_size=5).map(" ".join)


def shown(width: int, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_table(console, "title", headings, rows)
    return console.file.getvalue()


@given(st.integers(1, 200), st.lists(st.tuples(WORDS, CELLS, CELLS), min_size=1, max_size=4))
def test_no_word_is_broken_or_lost(width: int, rows: list[tuple[str, ...]]) -> None:
    text = shown(width, ("first", "second one", ""), rows)
    words = text.translate(str.maketrans("│┃", "  ")).split()
    assert set(words) >= {word for row in rows for cell in row for word in cell.split()}
    longest = max(cell_len(word) for row in rows for cell in row for word in cell.split())
    assert max(map(cell_len, text.splitlines())) <= max(width, longest + len("second one") + 3)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_reports_keep_their_words_on_narrow_terminals(width: int) -> None:
    for path in MODELS:
        rows = [_fused_row(group) for group in make_report(analyse_model(path, resolve("sm_80", list))).distinct]
        words = set(shown(width, FUSED_HEADINGS, rows).split())
        assert words >= {word for row in rows for cell in row for word in cell.split()}
