"""One model on one device, ready to be timed in several ways; inputs and outputs stay on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxfuse.bench.cuda_graph import Capture, capture, new_stream
from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.runtime.feeds import STRING, Array, input_specs, make_feeds
from onnxfuse.runtime.ort_values import BFLOAT16, to_ort_value
from onnxfuse.runtime.session import CPU, CUDA, Provider, onnxruntime, open_session

CAPTURE_RUNS = 3  # before a graph is used: to be warm, and to capture

Clock = Callable[[], float]
Timed = Callable[[], float]
"""Runs a model once and tells how long that took, in seconds."""


class Contender:
    """A model in a session, its inputs bound.

    Args:
        path: the model.
        feeds: an array for each input; those of the other model, checked again.
        device: `cuda` or `cpu`.
        options: of the CUDA provider.
        session_options: an `onnxruntime.SessionOptions`.

    Raises:
        DeviceError: ONNX Runtime does not start its CUDA provider.
        ModelError: ONNX Runtime refuses the model, or the inputs do not fit it.
    """

    def __init__(
        self,
        path: Path,
        feeds: Mapping[str, Array],
        device: str,
        options: Mapping[str, str] | None = None,
        session_options: Any = None,
    ) -> None:
        self.path, self.device = path, device
        self.session = open_on(path, device, options, session_options)
        self.specs = specs = input_specs(self.session)
        checked = make_feeds(specs, feeds)
        # Text cannot be bound: a model that reads some is given all inputs run by run.
        self.unbound = checked if any(spec.element == STRING for spec in specs) else {}
        self.inputs = {
            spec: onnxruntime().OrtValue.ortvalue_from_numpy(checked[spec.name], device, 0)
            for spec in specs
            if not self.unbound
        }
        self.binding = self._bound()
        self._quick = onnxruntime().RunOptions()
        self._quick.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def _bound(self) -> Any:
        """Inputs where they are, outputs wherever ONNX Runtime puts them on the device."""
        binding = self.session.io_binding()
        for spec, value in self.inputs.items():
            # NumPy has no bfloat16: the value holds its bits.
            element = BFLOAT16 if spec.element == "bfloat16" else spec.dtype
            binding.bind_input(spec.name, self.device, 0, element, value.shape(), value.data_ptr())
        for output in self.session.get_outputs():
            binding.bind_output(output.name, self.device)
        binding.synchronize_inputs()
        return binding

    def run(self) -> None:
        """One run, until the results are there.

        Raises:
            ModelError: the model fails.
        """
        try:
            if self.unbound:
                self.session.run(None, {spec.name: to_ort_value(spec, self.unbound[spec.name]) for spec in self.specs})
                return
            self.session.run_with_iobinding(self.binding)
            self.binding.synchronize_outputs()
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ModelError(f"{self.path}: the model fails to run; --shape gives other sizes: {error}") from error

    def _check_bound(self) -> None:
        if self.unbound:
            raise ModelError(f"{self.path}: the model reads text, which ONNX Runtime takes run by run alone")

    def submit(self) -> None:
        """One run, until the call returns; the GPU may still work.

        Raises:
            ModelError: the model reads text, which cannot be bound.
        """
        self._check_bound()
        self.session.run_with_iobinding(self.binding, self._quick)

    def pin_outputs(self) -> None:
        """Use the last run's outputs for all later ones: a graph writes where it wrote when captured."""
        self.write_to(self.outputs())

    def outputs(self) -> dict[str, Any]:
        """What the last run made, by name.

        Raises:
            ModelError: the model reads text, which cannot be bound.
        """
        self._check_bound()
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.binding.get_outputs(), strict=True))

    def write_to(self, values: Mapping[str, Any]) -> None:
        """Use these values' memory for the outputs of all later runs."""
        for name, value in values.items():
            self.binding.bind_ortvalue_output(name, value)


def open_on(path: Path, device: str, options: Mapping[str, str] | None = None, session_options: Any = None) -> Any:
    """A session on one device.

    Raises:
        DeviceError: ONNX Runtime does not start its CUDA provider.
        ModelError: the file is missing, or ONNX Runtime refuses it.
    """
    providers: list[Provider] = [(CUDA, dict(options or {})), CPU] if device == "cuda" else [CPU]
    session = open_session(path, providers, session_options)
    if device == "cuda" and CUDA not in session.get_providers():
        raise DeviceError("ONNX Runtime did not start its CUDA provider; its libraries (CUDA, cuDNN) may be missing")
    return session


def timed(run: Callable[[], None], clock: Clock = time.perf_counter) -> Timed:
    """From a call to its end."""

    def seconds() -> float:
        start = clock()
        run()
        return clock() - start

    return seconds


def host_part(contender: Contender, clock: Clock = time.perf_counter) -> Timed:
    """From the call to its return, with an idle GPU before it."""
    submit = timed(contender.submit, clock)

    def seconds() -> float:
        took = submit()
        contender.binding.synchronize_outputs()
        return took

    return seconds


def graph_run(path: Path, feeds: Mapping[str, Array], device: str, session_options: Any = None) -> Timed:
    """A replay of ONNX Runtime's own CUDA graph, from the call to the results.

    Raises:
        Exception: ONNX Runtime's, where the model cannot be captured.
    """
    plain = Contender(path, feeds, device, session_options=session_options)
    plain.run()
    graph = Contender(path, feeds, device, {"enable_cuda_graph": "1"}, session_options)
    graph.write_to(plain.outputs())
    for _ in range(CAPTURE_RUNS):
        graph.run()

    def replay(owner: Contender = plain) -> None:  # whose memory the graph writes to
        graph.run()

    return timed(replay)


def captured(path: Path, feeds: Mapping[str, Array], device: str, session_options: Any = None) -> Capture:
    """One ordinary run as a CUDA graph of our own.

    Raises:
        Exception: CUDA's or ONNX Runtime's, where the model cannot be captured.
    """
    contender, stream = warm(path, feeds, device, session_options)
    return capture(stream, contender.submit)


def warm(path: Path, feeds: Mapping[str, Array], device: str, session_options: Any = None) -> tuple[Contender, Any]:
    """A model that ran a few times and writes where it wrote last, and the stream of its own that it works on.

    Raises:
        ModelError: the model fails.
    """
    stream = new_stream()
    contender = Contender(path, feeds, device, {"user_compute_stream": str(stream.ptr)}, session_options)
    for _ in range(CAPTURE_RUNS):
        contender.run()
    contender.pin_outputs()
    contender.run()
    return contender, stream
