"""What torch submits as a CUDA graph: its peers are timed with it where it is installed, and no package needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPLAYS = 5  # between two events


def captured_by_torch(run: Callable[[], None]) -> Any:
    """What `run` submits as a `torch.cuda.CUDAGraph`, after it has run once."""
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_seconds(graph: Any, replays: int = REPLAYS) -> float:
    """GPU time of one replay, of so many in turn."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / replays
