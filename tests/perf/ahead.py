"""Work that others do beside the problem that is timed, few at a time: what is ready is large."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


def in_order(pool: Executor, ahead: int, calls: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """What calls return, in their order; so many are under way beside the one that is waited for."""
    waiting: deque[Future[T]] = deque()
    with pool:
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
