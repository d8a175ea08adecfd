"""How work that takes long says how far it is; who shows that, and where, is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; 0 where that is not known."""


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def counted(what: str, items: Sequence[Item], progress: Progress) -> Iterator[Item]:
    """The items, each one told before it is handed out."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
