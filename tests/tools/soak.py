"""Fused models under load for minutes: `python -m tests.tools.soak --seconds 600 --out results/h200-soak.json`.

Threads share one session of each of two models and run them with shapes that change from run to run. Every hundredth
run's outputs are judged by the rule of `onnxfuse verify`, against float64 and the original's own error. The memory of
the process and of the device is sampled all the while: what it is worth in the last quarter of the time may be no more
than in the third, within the limits below. It ends with 1 if an output is wrong, a run fails or memory grows.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxfuse
from onnxfuse.runtime import driver
from onnxfuse.runtime.accuracy import Value, check_output
from onnxfuse.runtime.session import CPU, CUDA, cuda_usable, open_session
from onnxfuse.verify.float64_model import write_float64
from onnxfuse.verify.node_types import node_types
from tests.gpu.test_ort_session import F16, gate_model
from tests.perf.result_file import write_result

CHECK_EVERY = 100
HOST_LIMIT = 16 << 20  # bytes from one quarter of the time to the next; allocators move by a few
DEVICE_LIMIT = 2 << 20  # what a driver allocates at once
BLOCK = Path(__file__).parents[2] / "models" / "unet_block.onnx"
BLOCK_SHAPES = [
    {"hidden_states": (batch, rows, 96), "encoder_hidden_states": (batch, text, 64)}
    for batch, rows, text in [(1, 1, 1), (2, 16, 7), (1, 77, 77), (3, 100, 5), (2, 256, 77), (4, 333, 3)]
]
GATE_SHAPES = [{"x": (rows, 320)} for rows in (1, 2, 16, 17, 64, 100, 257, 1000, 2048)]

Feed = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Expected:
    """One feed, and what the original and float64 make of it."""

    feed: Feed
    original: Sequence[np.ndarray]
    exact: Sequence[np.ndarray]

    def why_wrong(self, names: Sequence[str], outputs: Sequence[np.ndarray]) -> str:
        """Why outputs are not as good as the original's; empty where they are."""
        for name, original, exact, output in zip(names, self.original, self.exact, outputs, strict=True):
            values = (Value(array, array.dtype.name) for array in (original, output, exact))
            check = check_output(name, *values)
            if not check.passed:
                return f"{name}{list(output.shape)}: {check.reason}"
        return ""


@dataclass(frozen=True)
class Subject:
    """A fused model in the session that all threads share, and what may be asked of it."""

    name: str
    session: Any
    outputs: tuple[str, ...]
    cases: tuple[Expected, ...]


@dataclass
class Memory:
    """Samples of bytes in use: seconds since the start, of the process, of the device."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def growth(self, column: int) -> int:
        """Bytes by which the last quarter's median is above the third quarter's."""
        quarter = len(self.samples) // 4
        third, last = self.samples[2 * quarter : 3 * quarter], self.samples[3 * quarter :]
        if not third:
            return 0
        return round(statistics.median(row[column] for row in last) - statistics.median(row[column] for row in third))


@dataclass
class Outcome:
    """What a soak found.

    Attributes:
        runs: of all models together.
        checked: outputs that were compared.
        wrong: what was wrong with some.
        failures: of runs.
        host_growth: bytes.
        device_growth: bytes.
    """

    seconds: float
    threads: int
    runs: dict[str, int]
    checked: int
    wrong: list[str]
    failures: list[str]
    host_growth: int
    device_growth: int
    samples: list[tuple[float, int, int]]

    @property
    def passed(self) -> bool:
        grown = self.host_growth > HOST_LIMIT or self.device_growth > DEVICE_LIMIT
        return not (self.wrong or self.failures or grown)


def host_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def device_bytes(device: str) -> int:
    """Memory of the GPU that is in use, by whomever; 0 on the CPU."""
    if device == "cpu":
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def subjects(folder: Path, device: str) -> list[Subject]:
    """Two models, fused for the device, with what to expect of them."""
    onnx.save(gate_model(F16, "kn", 2, 320, 1280), folder / "gate.onnx")
    return [
        subject(BLOCK, BLOCK_SHAPES, folder, device),
        subject(folder / "gate.onnx", GATE_SHAPES, folder, device),
    ]


def subject(model: Path, shapes: Sequence[Mapping[str, tuple[int, ...]]], folder: Path, device: str) -> Subject:
    providers = [CUDA, CPU] if device == "cuda" else [CPU]
    fused = folder / f"{model.stem}.fused.onnx"
    onnx.save(onnxfuse.optimize(model, arch="native" if device == "cuda" else "ptx")[0], fused)
    feeds = [
        {name: np.random.default_rng(seed).standard_normal(shape).astype(np.float16) for name, shape in case.items()}
        for seed, case in enumerate(shapes)
    ]
    original = open_session(model, providers)
    exact = open_session(write_float64(model, folder, node_types())[0], [CPU])
    cases = tuple(Expected(feed, original.run(None, feed), exact.run(None, feed)) for feed in feeds)
    session = open_session(fused, providers)
    return Subject(model.stem, session, tuple(output.name for output in session.get_outputs()), cases)


def soak(
    models: Sequence[Subject],
    seconds: float,
    threads: int,
    device: str,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run models from several threads for some time."""
    start = clock()
    counter = itertools.count(1)  # its next() is one step for all threads
    runs = [dict.fromkeys((model.name for model in models), 0) for _ in range(threads)]
    wrong: list[str] = []
    failures: list[str] = []
    checked = [0] * threads

    def work(thread: int) -> None:
        choose = random.Random(thread)
        while clock() - start < seconds and not failures:
            model = choose.choice(models)
            case = choose.choice(model.cases)
            try:
                outputs = model.session.run(None, case.feed)
            except Exception as error:  # onnxruntime's exceptions share no base class
                failures.append(f"{model.name}: {error}")
                return
            runs[thread][model.name] += 1
            if next(counter) % CHECK_EVERY == 0:
                checked[thread] += 1
                fault = case.why_wrong(model.outputs, outputs)
                wrong.extend([f"{model.name}: {fault}"] if fault else [])

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    memory = Memory()

    def sample() -> None:
        gc.collect()
        memory.samples.append((clock() - start, host_bytes(), device_bytes(device)))

    sample()
    for worker in workers:
        worker.start()
    while alive := [worker for worker in workers if worker.is_alive()]:
        alive[0].join(min(1.0, seconds / 20))
        sample()
    return Outcome(
        seconds=clock() - start,
        threads=threads,
        runs={model.name: sum(each[model.name] for each in runs) for model in models},
        checked=sum(checked),
        wrong=wrong[:20],
        failures=failures,
        host_growth=memory.growth(1),
        device_growth=memory.growth(2),
        samples=memory.samples[:: max(len(memory.samples) // 60, 1)],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda_usable() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(subjects(Path(folder), options.device), options.seconds, options.threads, options.device)
    result = {
        "command": f"python -m tests.tools.soak --seconds {options.seconds:g} --threads {options.threads}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": driver.device_name() if options.device == "cuda" else None,
        "driver": driver.driver_version(),
        "onnxruntime": onnxruntime.__version__,
        "passed": outcome.passed,
        **asdict(outcome),
    }
    write_result(options.out, result)
    grown = f"host {outcome.host_growth / 2**20:+.1f} MiB, device {outcome.device_growth / 2**20:+.1f} MiB"
    print(f"{outcome.runs} runs, {outcome.checked} checked, {len(outcome.wrong)} wrong, {grown}")
    print("\n".join([*outcome.wrong, *outcome.failures, "passed" if outcome.passed else "FAILED"]))
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
