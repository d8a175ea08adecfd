"""Models that nobody here wrote, stock ONNX Runtime against fused: `python -m tests.perf.strangers FOLDER --out F`.

FOLDER holds models, with their weights or without (tests/helpers/corpus.py), and `shapes.json`: of each file that is
timed, the shape of each input. Other processes draw weights and optimise while one model is timed: both sessions, each
run captured in a CUDA graph, are replayed in turn. Where one cannot be captured, whole runs are timed in the end, when
nothing else takes the host's time. The outputs of both are compared. It prints the geometric mean and what is slower,
and exits with 1 where an output differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import onnx

import onnxfuse
from onnxfuse.bench.contender import Contender, timed, warm
from onnxfuse.bench.cuda_graph import Capture, capture
from onnxfuse.device import spec_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import Array, from_bfloat16, input_specs, make_feeds
from onnxfuse.runtime.session import open_session
from tests.helpers import corpus
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

MOST_APART = 2.0**-5  # of the largest element of an output: both sides round, layer by layer
SLOWER = 0.98
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]  # the CPU alone lacks products of bf16
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Ready:
    """A model and what is made of it, with weights, on disk."""

    name: str
    original: Path
    fused: Path
    sites: int
    seconds: float


def prepare(source: Path, folder: Path, arch: str) -> Ready:
    """Draw weights and optimise: work for a process that sees no GPU."""
    original, fused = folder / source.name, folder / f"{source.name}.fused.onnx"
    onnx.save(corpus.with_weights(onnx.load(source)), original)
    start = time.perf_counter()
    report = onnxfuse.optimize_file(original, fused, arch=arch)
    return Ready(source.name, original, fused, len(report.fused), time.perf_counter() - start)


def in_order(sources: Sequence[Path], folder: Path, arch: str, workers: int) -> Iterator[Ready | str]:
    """The models as they get ready, and what kept one from it."""
    waiting: deque[tuple[Path, Future[Ready]]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting.extend((source, pool.submit(prepare, source, folder, arch)) for source in sources)
        try:
            while waiting:
                source, future = waiting.popleft()
                error = future.exception()
                yield future.result() if error is None else f"{source.name}: {error}"
        finally:
            pool.shutdown(cancel_futures=True)


def measure(ready: Ready, shapes: Shapes, seed: int, is_alone: bool) -> dict[str, Any] | None:
    """Microseconds of both, how often they launch a kernel, and how far their outputs are apart.

    None where whole runs have to be timed while other processes are at work.
    """
    specs = input_specs(open_session(ready.original, PROVIDERS))
    feeds = make_feeds(specs, shapes=shapes, seed=seed)
    paths = ready.original, ready.fused
    contenders = [warm(path, feeds, "cuda") for path in paths]
    apart = _apart(*(contender.outputs() for contender, _ in contenders))
    graphs = [_captured(*each) for each in contenders]
    timers = [graph.seconds for graph in graphs if graph is not None]
    if None in graphs and not is_alone:
        return None
    if None in graphs:
        timers = [timed(Contender(path, feeds, "cuda").run) for path in paths]  # a capture that failed leaves its mark
    stock, fused = (seconds * 1e6 for seconds in in_turn(timers))
    return {
        "model": ready.name, "sites": ready.sites, "optimize_s": ready.seconds, "stock_us": stock, "fused_us": fused,
        "ratio": stock / fused, "launches": [graph and graph.launches for graph in graphs],
        "apart": apart,
    }  # fmt: skip


def _captured(contender: Contender, stream: Any) -> Capture | None:
    """One run as a graph; None where it cannot be captured."""
    try:
        return capture(stream, contender.submit)
    except Exception:  # onnxruntime's and CUDA's share no base class
        return None


def _apart(stock: Mapping[str, Any], fused: Mapping[str, Any]) -> float:
    """The largest difference of an output's elements over its largest; infinite where other elements are finite."""
    found = [0.0]
    for name, value in stock.items():
        first, second = _on_host(value), _on_host(fused[name])
        if not np.issubdtype(first.dtype, np.floating):
            continue
        first, second = first.astype(np.float32), second.astype(np.float32)
        finite = np.isfinite(first)
        if not np.array_equal(finite, np.isfinite(second)):
            return float("inf")
        if finite.any():
            largest = max(float(np.abs(first[finite]).max()), 1e-30)
            found.append(float(np.abs(second[finite] - first[finite]).max()) / largest)
    return max(found)


def _on_host(value: Any) -> Array:
    """An output; of bfloat16, which ONNX Runtime does not hand to NumPy, as fp32."""
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        array: Array = value.numpy()
        return array
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), value.tensor_size_in_bytes(), value)
    bits = cupy.ndarray(value.shape(), np.uint16, cupy.cuda.MemoryPointer(memory, 0))
    return from_bfloat16(bits.get())


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures of a result."""
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    slower = [f"  {row['model']}: {row['ratio']:.3f}x" for row in rows if row["ratio"] < SLOWER]
    wrong = [f"  {row['model']}: apart {row['apart']:.2g}" for row in rows if row["apart"] > MOST_APART]
    lines = [f"{len(rows)} models, geometric mean {mean:.3f}x", f"slower by more than 2 %: {len(slower)}", *slower]
    return "\n".join([*lines, f"outputs apart by more than {MOST_APART}: {len(wrong)}", *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of models and shapes.json")
    parser.add_argument("--out", type=Path, help="result file, JSON")
    parser.add_argument("--only", default="*", help="files whose name matches one of these, comma separated")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the order")
    parser.add_argument("--seconds", type=float, default=240, help="after so many no model is begun")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="processes that optimise"
    )
    options = parser.parse_args()
    shapes: dict[str, Shapes] = json.loads((options.folder / "shapes.json").read_text())
    globs = options.only.split(",")
    names = sorted(name for name in shapes if any(fnmatch.fnmatch(name, glob) for glob in globs))
    random.Random(options.seed).shuffle(names)
    arch, deadline = spec_of(driver.local_architectures()[0]).arch, time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    later: list[Ready] = []
    with tempfile.TemporaryDirectory() as name:
        for ready in in_order([options.folder / each for each in names], Path(name), arch, options.workers):
            if time.monotonic() > deadline:
                break
            if isinstance(ready, str):
                print(ready, flush=True)
            elif (row := _measured(ready, shapes[ready.name], options.seed)) is None:
                later.append(ready)
            else:
                rows += row
                ready.original.unlink()
                ready.fused.unlink()
        for ready in later:
            rows += _measured(ready, shapes[ready.name], options.seed, is_alone=True) or []
    print(summary(rows))
    if options.out:
        write_result(options.out, {**origin(f"python -m tests.perf.strangers {options.folder.name}"), "rows": rows})
    sys.exit(any(row["apart"] > MOST_APART for row in rows))


def _measured(ready: Ready, shapes: Shapes, seed: int, is_alone: bool = False) -> list[dict[str, Any]] | None:
    """One row, none of a model that does not run, or None of one whose files are kept to be timed alone."""
    try:
        row = measure(ready, shapes, seed, is_alone)
    except OnnxfuseError as error:
        print(f"{ready.name}: {str(error)[:300]}", flush=True)
        return []
    if row is None:
        return None
    times = f"stock {row['stock_us']:.1f} us, fused {row['fused_us']:.1f} us, {row['ratio']:.3f}x"
    print(f"{ready.name}: {times}, launches {row['launches']}, apart {row['apart']:.2g}", flush=True)
    return [row]


if __name__ == "__main__":
    main()
