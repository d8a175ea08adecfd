"""Run a model in double precision on the CPU; an operator that refuses double when it runs is kept in its own type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxfuse.errors import ModelError
from onnxfuse.progress import Progress, counted
from onnxfuse.runtime.accuracy import Value
from onnxfuse.runtime.feeds import Array
from onnxfuse.runtime.ort_values import run
from onnxfuse.runtime.session import CPU, adjusted, onnxruntime, open_session, quiet_options
from onnxfuse.staging import scratch_folder
from onnxfuse.verify.float64_model import write_float64
from onnxfuse.verify.node_types import node_types

# How ONNX Runtime names the operator at fault, as a session opens and as it runs.
_FAULTS = (re.compile(r"implementation for (\w+)\(\d+\)"), re.compile(r"while running (\w+) node"))


class ReferenceRuns:
    """The runs of a model in float64, and of the same with TF32's rounding.

    Args:
        model: the file that is read.
        label: what errors call it.
        session_options: an `onnxruntime.SessionOptions` that knows the model's custom operators.

    Attributes:
        kept: how many nodes do not run in double, by operator and type.
    """

    def __init__(self, model: Path, label: Path, session_options: Any = None) -> None:
        self.model, self.label = model, label
        self.options = quiet_options(session_options)
        self.types_of = node_types(self.options)
        self.refused: set[str] = set()
        self.kept: dict[str, int] = {}

    def both(
        self, feeds: Sequence[Mapping[str, Array]], progress: Progress, tf32: bool
    ) -> tuple[list[dict[str, Value]], list[dict[str, Value]]]:
        """The values of each run, and where `tf32` asks for them the same with TF32's rounding, else nothing.

        Raises:
            ModelError: the model cannot be computed in float64.
        """
        return self.run(feeds, progress), self.run(feeds, progress, tf32) if tf32 else [{} for _ in feeds]

    def run(
        self, feeds: Sequence[Mapping[str, Array]], progress: Progress, tf32: bool = False
    ) -> list[dict[str, Value]]:
        """The values of each run.

        Raises:
            ModelError: the model cannot be computed in float64.
        """
        what = "computing what TF32 makes of the original" if tf32 else "computing the reference"
        with scratch_folder() as folder:
            return self._until_none_refuses(lambda: self._run(feeds, progress, tf32, what, folder))

    def _run(
        self, feeds: Sequence[Mapping[str, Array]], progress: Progress, tf32: bool, what: str, folder: Path
    ) -> list[dict[str, Value]]:
        """Unoptimised: constant folding would hold every weight in double at once."""
        path, self.kept = write_float64(self.model, folder, self.types_of, tf32, self.refused)
        level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
        with adjusted(self.options, graph_optimization_level=level, enable_cpu_mem_arena=False):
            session = open_session(path, [CPU], self.options, f"{self.label} in float64")
        return [run(session, self.label, feed) for feed in counted(what, feeds, progress)]

    def _until_none_refuses(self, attempt: Callable[[], list[dict[str, Value]]]) -> list[dict[str, Value]]:
        while True:
            try:
                return attempt()
            except ModelError as error:
                named = [found for fault in _FAULTS for found in fault.findall(str(error))]
                if not named or named[-1] in self.refused:
                    raise ModelError(f"{self.label}: the float64 reference cannot be computed: {error}") from error
                self.refused.add(named[-1])
