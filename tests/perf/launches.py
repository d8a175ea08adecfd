"""How many kernels one run of a model launches, counted by the profiler of torch, which sees all of the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxfuse.runtime.feeds import input_specs, make_feeds
from onnxfuse.runtime.session import CPU, CUDA, open_session


def launches(path: Path, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Kernels of one run on the GPU, copies not counted; None where torch is not installed."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return None
    session = open_session(path, [CUDA, CPU])
    feeds = make_feeds(input_specs(session), shapes=shapes)
    session.run(None, feeds)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        session.run(None, feeds)
    copies = ("Memcpy", "Memset")
    return sum(str(event.device_type()) == "DeviceType.CUDA" and not event.name().startswith(copies)
               for event in seen.profiler.kineto_results.events())  # fmt: skip
