"""One run of a session as a CUDA graph of our own: how many kernels it launches, and how long they take on the GPU.

The session works on a stream of ours, and after it is warm one ordinary run of it is captured. The graph's kernel nodes
are the launches, and CUDA events around its replays tell the GPU's time: from the first kernel's start to the last
one's end, the gaps inside the graph with it, the host's work not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxfuse.errors import ModelError
from onnxfuse.runtime import driver
from onnxfuse.runtime.cupy_folder import give_cupy_a_folder

REPLAYS = 5  # between two events, so that the first launch's own latency is shared


class Capture:
    """A captured run, which can be replayed; it holds on to the session whose memory it uses.

    Attributes:
        launches: its kernels; None where the driver does not say.
    """

    def __init__(self, stream: Any, graph: Any, run: Callable[[], None]) -> None:
        self._stream, self._graph, self._run = stream, graph, run
        self.launches = driver.kernel_nodes(graph.graph)

    def seconds(self) -> float:
        """GPU time of one replay."""
        import cupy

        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self._stream)
        for _ in range(REPLAYS):
            self._graph.launch(self._stream)
        end.record(self._stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / REPLAYS


def new_stream() -> Any:
    """A stream to open a session on, as `user_compute_stream`."""
    give_cupy_a_folder()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def capture(stream: Any, run: Callable[[], None]) -> Capture:
    """Capture what `run` submits to the stream; it must be warm, and must not wait for the GPU.

    Raises:
        Exception: CUDA's or ONNX Runtime's, where a run cannot be captured: it copies to the host, or allocates.
    """
    import cupy

    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        run()
    finally:
        graph = stream.end_capture()
    if driver.copies_to_host(graph.graph):
        raise ModelError("a run copies to the host in its middle, which a CUDA graph cannot wait for")
    return Capture(stream, graph, run)
