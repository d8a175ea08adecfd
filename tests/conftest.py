"""GPU tests are skipped, visibly, where there is no GPU; no run sees kernels that another run compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("nightly", max_examples=2000)


@functools.cache
def has_gpu() -> bool:
    from onnxfuse.runtime.driver import local_architectures

    return bool(local_architectures())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items) or has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that an earlier version compiled must not answer for this one's; the workers of one run share theirs."""
    own = tmp_path_factory.getbasetemp()
    of_the_run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXFUSE_CACHE_DIR", str(of_the_run / "kernels"))
        yield
