"""How many kernels one run of a model launches, counted by the profiler of torch.

In a process of its own, `python -m tests.perf.launches MODEL SHAPES`: torch brings CUDA libraries beside those that
ONNX Runtime has loaded, and a process with both sometimes ends in `free(): invalid size`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxfuse.runtime.feeds import input_specs, make_feeds
from onnxfuse.runtime.session import CPU, CUDA, open_session


def launches(path: Path, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Kernels of one run on the GPU, copies not counted; None where torch is not installed."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.perf.launches", str(path), json.dumps(shapes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[0]) if done.stdout else None


def count(path: Path, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The same, in this process."""
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


if __name__ == "__main__":
    print(json.dumps(count(Path(sys.argv[1]), json.loads(sys.argv[2]))), flush=True)
