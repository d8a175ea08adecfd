"""Models that compute the same, timed side by side on the GPU: what a site costs in each of its implementations.

All sessions read and write the same buffers: one set for each copy of the site in the models, so that copies together
miss the L2 cache. Each session replays one CUDA graph, so that kernels are timed and not the host; the models take
turns, so that a change of the clock rate meets all of them. The figure is the median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnxfuse.dtypes import BF16, BOOL, FED_BY_ONNX, U8
from onnxfuse.errors import DeviceError, OnnxfuseError
from onnxfuse.runtime.feeds import to_bfloat16
from onnxfuse.runtime.session import CPU, CUDA, InferenceSession, Provider, cuda_usable, onnxruntime

ROTATED_BYTES = 200e6  # more than three times the largest L2 cache of a GPU today
MAX_COPIES = 24
BATCH_SECONDS = 2e-3  # of one timed batch of replays; shorter ones measure the clock
MAX_REPLAYS = 200
ROUNDS = 9
RANDOM_ELEMENTS = 1 << 20  # drawn once and repeated: to draw a whole weight would take longer than to time it
WEIGHT_SCALE = 0.05  # of random weights: sums stay in the range where activations bend
_FATAL = 4

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Port:
    """An input or output of every copy of the site; copy i of it is called `name_i`.

    Attributes:
        element: ONNX element type: float, float16, bfloat16 or, of an input, bool or uint8.
        scale: of the random values of an input, a standard deviation.
        value: of all elements of an input, where random ones mean nothing.
    """

    name: str
    element: int
    shape: tuple[int, ...]
    scale: float = 1.0
    value: int | None = None

    @property
    def bytes(self) -> int:
        """Size of one copy."""
        return math.prod(self.shape) * FED_BY_ONNX[self.element].bytes


def require_gpu() -> None:
    """Raises DeviceError where nothing can be measured."""
    if not cuda_usable():
        raise DeviceError("no CUDA device is usable by ONNX Runtime; tuning measures on one, with onnxruntime-gpu")


def copies_for(ports: Sequence[Port]) -> int:
    """How many copies of the site miss the cache."""
    return min(max(2, math.ceil(ROTATED_BYTES / max(sum(port.bytes for port in ports), 1))), MAX_COPIES)


def time_models(
    models: Mapping[str, bytes], inputs: Sequence[Port], outputs: Sequence[Port], copies: int, device: str = "cuda"
) -> dict[str, float]:
    """Microseconds of one copy of the site in each model; a model that fails to run has none.

    Where not even the inputs and outputs fit into memory, no model has one.

    Args:
        models: serialised models by name, with `copies` copies of the site each, of static shapes.
        inputs: of one copy; a model may have the same bytes in another shape.
        outputs: of one copy.
        copies: `copies_for(...)`.
        device: `cuda`; `cpu` runs the same without graphs.

    Raises:
        DeviceError: ONNX Runtime is missing, or the bridge does not load.
    """
    buffers = _unless_it_fails(_Buffers, inputs, outputs, copies, device)
    if buffers is None:
        return {}
    made = {name: _unless_it_fails(_runner, data, buffers, device) for name, data in models.items()}
    times = side_by_side({name: run for name, run in made.items() if run is not None})
    return {name: statistics.median(each) / copies * 1e6 for name, each in times.items()}


def _unless_it_fails(attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What an attempt gives, or None where it fails: other models are still worth timing."""
    try:
        return attempt(*args, **kwargs)
    except OnnxfuseError:
        raise
    except Exception:  # onnxruntime's exceptions share no base class
        return None


def side_by_side(
    runners: Mapping[str, Callable[[int], None]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of one replay of each runner, once a round, in turn; a runner that fails on the way has none."""

    def seconds(run: Callable[[int], None], replays: int) -> float:
        start = clock()
        run(replays)
        return (clock() - start) / replays

    first = {name: _unless_it_fails(seconds, run, 3) for name, run in runners.items()}
    replays = {name: _replays(each) for name, each in first.items() if each is not None}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name in list(times):
            each = _unless_it_fails(seconds, runners[name], replays[name])
            if each is None:
                del times[name]
            else:
                times[name].append(each)
    return times


def _replays(seconds: float) -> int:
    return min(max(2, math.ceil(BATCH_SECONDS / max(seconds, 1e-9))), MAX_REPLAYS)


class _Buffers:
    """Memory on the device for every copy of every port, as ONNX Runtime's values that own it."""

    def __init__(self, inputs: Sequence[Port], outputs: Sequence[Port], copies: int, device: str) -> None:
        runtime = onnxruntime()
        drawn = np.random.default_rng(0).standard_normal(RANDOM_ELEMENTS, np.float32)
        self.inputs: list[tuple[str, Port, Any]] = []
        self.outputs: list[tuple[str, Port, Any]] = []
        for port in inputs:
            values = drawn * port.scale if port.value is None else np.full(1, port.value, np.float32)
            host = np.resize(_bits(values, port.element), port.shape)
            for name in _names(port, copies):
                self.inputs.append((name, port, runtime.OrtValue.ortvalue_from_numpy(host, device, 0)))
        for port in outputs:
            for name in _names(port, copies):
                memory = runtime.OrtValue.ortvalue_from_shape_and_type([port.bytes], np.uint8, device, 0)
                self.outputs.append((name, port, memory))


def _names(port: Port, copies: int) -> Iterator[str]:
    return (f"{port.name}_{copy}" for copy in range(copies))


def _bits(values: np.ndarray[Any, Any], element: int) -> np.ndarray[Any, Any]:
    """The values rounded to an element type, as unsigned integers: not every type has a NumPy name."""
    dtype = FED_BY_ONNX[element]
    if dtype == BF16:
        return to_bfloat16(values)
    if dtype == U8:  # integers of few bits, packed: any byte is as good as another
        return values.view(np.uint8)
    numbers = values > 0 if dtype == BOOL else values.astype(dtype.numpy)
    return numbers.view(f"u{dtype.bytes}")


def _runner(data: bytes, buffers: _Buffers, device: str) -> Callable[[int], None]:
    """A function that runs a model some times and waits for the last."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = _FATAL
    providers: list[Provider] = [(CUDA, {"enable_cuda_graph": "1"}), CPU] if device == "cuda" else [CPU]
    session = InferenceSession(data, options, providers)
    binding = session.io_binding()
    shapes = {each.name: tuple(each.shape) for each in session.get_inputs()}  # a weight in this model's own order
    for name, port, value in buffers.inputs:
        binding.bind_input(name, device, 0, port.element, shapes[name], value.data_ptr())
    for name, port, value in buffers.outputs:
        binding.bind_output(name, device, 0, port.element, port.shape, value.data_ptr())
    quick = runtime.RunOptions()
    quick.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(replays: int) -> None:
        for _ in range(replays):
            session.run_with_iobinding(binding, quick)
        binding.synchronize_outputs()

    session.run_with_iobinding(binding)  # captures the graph
    return run
