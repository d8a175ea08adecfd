"""A pytest plugin: the tests of one shard of several, `SHARD=2/15 pytest -p tests.helpers.shard ...`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

Item = TypeVar("Item")


def shard(items: Sequence[Item], part: int, count: int) -> list[Item]:
    """Every `count`-th item from the one numbered `part` on: neighbours, which cost alike, go to different shards."""
    return list(items[part::count])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of the shard that the environment names."""
    part, count = map(int, os.environ["SHARD"].split("/"))
    items[:] = shard(items, part, count)
