"""What every run does.

GPU tests are skipped, visibly, where there is no GPU; of tests with many dear cases a run takes some, all with
`--thorough`; no run sees kernels that another run compiled.
"""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.thinning import Taken, is_taken

# How long an example takes says how busy the machine is, not that something is wrong. Every run has the same ones: what
# fails is of the change that is tested. The nightly profile draws new ones.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
settings.register_profile("nightly", settings.get_profile("any machine"), max_examples=2000, derandomize=False)
settings.load_profile("any machine")


@functools.cache
def has_gpu() -> bool:
    from onnxfuse.runtime.driver import local_architectures

    return bool(local_architectures())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="all cases of tests that are marked `one_in`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("thorough"):
        leave_out(config, items)
    skip_without_gpu(items)


def pytest_collection_finish() -> None:
    """Ten thousand tests live to the end of a run: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(n)`, a part of its cases alone."""
    met: Counter[str] = Counter()
    left_out = {}
    for item in items:
        marker = item.get_closest_marker("one_in")
        name = item.nodeid.split("[")[0]
        if marker and not is_taken(met[name], *marker.args):
            left_out[item] = None
        met[name] += 1
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def skip_without_gpu(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items) or has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def taken(request: pytest.FixtureRequest) -> Taken:
    """`taken(cases, n)`: one in n of a test's own cases, or all with --thorough."""

    def of(cases: Sequence[Any], one_in: int) -> list[Any]:
        every = request.config.getoption("thorough")
        return [case for index, case in enumerate(cases) if every or is_taken(index, one_in)]

    return of


@pytest.fixture(scope="session", autouse=True)
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that an earlier version compiled must not answer for this one's; the workers of one run share theirs."""
    own = tmp_path_factory.getbasetemp()
    of_the_run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXFUSE_CACHE_DIR", str(of_the_run / "kernels"))
        yield
