"""What ONNX Runtime's CPU provider makes of a model of one node: which types it computes an operator in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onnxfuse.runtime.session import CPU, adjusted, onnxruntime, quiet_options


def node_types(session_options: Any = None) -> Callable[[bytes], tuple[str, ...] | None]:
    """A function that opens a serialised model: the types of its outputs, or None where ONNX Runtime refuses it.

    It remembers what it has seen. Nothing runs.

    Args:
        session_options: an `onnxruntime.SessionOptions` that knows the model's custom operators.

    Raises:
        DeviceError: onnxruntime is not installed.
    """
    runtime = onnxruntime()
    options = quiet_options(session_options)
    level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL

    @functools.cache
    def types_of(model: bytes) -> tuple[str, ...] | None:
        with adjusted(options, graph_optimization_level=level, intra_op_num_threads=1):
            try:
                session = runtime.InferenceSession(model, options, providers=[CPU])
            except Exception:  # onnxruntime's exceptions share no base class
                return None
        return tuple(output.type for output in session.get_outputs())

    return types_of
