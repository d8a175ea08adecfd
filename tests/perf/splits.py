"""What splitting k is worth where tiles are few: `python -m tests.perf.splits --out results/h200-splits.json`.

Products of the Stable Diffusion UNet with bias and residual, each with the best two tiles, by the plan's estimate, of
every number of blocks that share a tile. Measured as `tests.perf.kernels` does, all tiles of a problem in turn. Every
output is checked against float64.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.ir.fusion import Fusion
from onnxfuse.runtime import driver
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_tile import SPLITS
from onnxfuse.schedule.kernel_family import Candidate
from onnxfuse.schedule.plan import replan
from onnxfuse.schedule.variant import ProductPlan, ProductVariant
from tests.helpers.onnx_build import FLOAT16
from tests.perf.compare import origin
from tests.perf.kernels import REPLAYS, Buffers, Row, check, graph_of, image, launcher, planned, timed_replay
from tests.perf.result_file import write_result

EACH = 2  # tiles of one number of blocks
MOST_ULP = 2.0  # of fp16 at the output's magnitude
SITES = [
    Row(m, k, n, "residual")
    for m, k, n in (
        (512, 5120, 1280), (128, 5120, 1280), (128, 2560, 1280), (2048, 2560, 640), (512, 1280, 1280),
        (128, 1280, 1280), (154, 768, 1280),
    )
]  # fmt: skip


Timed = tuple[float, ProductVariant]  # a kernel, after the plan's estimate of it in microseconds


@dataclass(frozen=True)
class Problem:
    """A site with one order of the weight, and the kernels to time."""

    row: Row
    order: str
    fusion: Fusion
    stored: dict[str, np.ndarray]
    timed: tuple[Timed, ...]


def choices(plan: ProductPlan, row: Row) -> list[Timed]:
    """The tiles to time, with their estimates: the best few of each number of blocks."""
    ranked = next(entry for entry in plan.ranked if row.m <= entry.size)

    def best(splits: int) -> Iterator[tuple[float, Candidate]]:
        tiles = (pair for pair in ranked.tiles if pair[1].family is HOPPER and math.isfinite(pair[0]))
        return ((us, entry) for us, entry in tiles if entry.tile.splits == splits)

    found = [pair for splits in SPLITS for pair, _ in zip(best(splits), range(EACH), strict=False)]
    return [(us, replan(plan, entry).variants[0]) for us, entry in found]


def problems(
    rows: Iterable[Row], device: DeviceSpec, choose: Callable[[ProductPlan, Row], Sequence[Timed]], dtype: int = FLOAT16
) -> list[Problem]:
    """Each row with either order of the weight, and the kernels that `choose` names."""
    made = []
    for row, order in itertools.product(rows, ("kn", "nk")):
        fusion, plan, stored = planned(row, order, device, dtype)
        made.append(Problem(row, order, fusion, stored, tuple(choose(plan, row))))
    return made


def compile_all(all_problems: list[Problem], device: DeviceSpec, folder: Path) -> None:
    kernels = {variant for each in all_problems for _, variant in each.timed}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: image(variant, device, folder), kernels))


def prepare(
    problem: Problem, buffers: Buffers, stream: cupy.cuda.Stream, device: DeviceSpec, folder: Path, most_ulp: float
) -> tuple[list[Callable[[], None]], list[float]]:
    """A CUDA graph of each kernel, and the error of what it made, which may be `most_ulp` at most."""
    replays, errors = [], []
    for _, variant in problem.timed:
        for out in buffers.out:
            out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        replays.append(graph_of(launcher(variant, device, buffers, folder), buffers.copies, stream))
        replays[-1]()
        stream.synchronize()
        errors.append(check(buffers, problem.stored, most_ulp))
    return replays, errors


def measure(problem: Problem, device: DeviceSpec, folder: Path) -> list[dict[str, Any]]:
    """One row for each tile."""
    buffers = Buffers(problem.row, problem.fusion, problem.stored)
    stream = cupy.cuda.Stream(non_blocking=True)
    replays, errors = prepare(problem, buffers, stream, device, folder, MOST_ULP)
    rounds = [[timed_replay(replay, stream) for replay in replays] for _ in range(REPLAYS)]
    times = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return [
        {
            "problem": str(problem.row), "order": problem.order, "tile": str(variant.tile), "us": us,
            "estimated_us": estimated, "error_ulp": error,
        }
        for us, error, (estimated, variant) in zip(times, errors, problem.timed, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    device, rows = spec_of(driver.local_architectures()[0]), []
    print(f"{'problem':24} order       us  estimate  tile", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        everything = problems(SITES, device, choices)
        compile_all(everything, device, Path(folder))
        for problem in everything:
            for made in measure(problem, device, Path(folder)):
                rows.append(made)
                times = f"{made['us']:8.1f}  {made['estimated_us']:8.1f}"
                print(f"{made['problem']:24} {made['order']:5} {times}  {made['tile']}", flush=True)
            cupy.get_default_memory_pool().free_all_blocks()
    result = {**origin("python -m tests.perf.splits --out results/h200-splits.json"), "rows": rows}
    write_result(options.out, result)


if __name__ == "__main__":
    main()
