"""Kernels that start beside the end of the one before, and not: `python -m tests.perf.early_start --seed 77 --out F`.

Problems in fp16 are drawn, and those kept of whose chosen tile a multiprocessor loads 0.7 to 4.5 MB in all: around
`hopper_early_bytes` and `hopper_full_early_bytes` of the calibration. Each kernel of sm_90a is launched behind itself
in CUDA graphs with rotated buffers, both ways in random order; medians of microseconds. Outputs are compared with
float64.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from onnx import numpy_helper

from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.ir.fusion import Fusion
from onnxfuse.runtime import driver
from onnxfuse.schedule.variant import ProductVariant
from tests.perf.compare import origin
from tests.perf.kernels import Buffers, Row, check, graph_of, image, launcher, planned, site_model, timed_replay
from tests.perf.result_file import write_result

WIDTHS = (
    256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 4608, 5120,
    6144, 8192, 11008, 14336,
)  # fmt: skip
KINDS = ("geglu", "gelu", "residual", "swiglu")
ROWS = (6.5, 13.2)  # logarithms of their least and largest number
PRODUCTS = (1.2e9, 3e10)  # multiplications
MOST_WEIGHT = 4e7  # elements of one part
LOADED = (0.7e6, 4.5e6)  # bytes of a multiprocessor
FAMILIES = ("hopper", "hopper_swapped")
REPLAYS = 11


@dataclass(frozen=True)
class Chosen:
    """A problem and the kernel of its plan; `loaded` are bytes of a multiprocessor."""

    row: Row
    order: str
    fusion: Fusion
    variant: ProductVariant
    loaded: float


def draw(seed: int) -> Iterator[tuple[Row, str]]:
    """Problems without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        m, k, n = int(2 ** rng.uniform(*ROWS)), rng.choice(WIDTHS), rng.choice(WIDTHS)
        row = Row(m, k, n, rng.choice(KINDS))
        if PRODUCTS[0] < m * k * n * row.parts < PRODUCTS[1] and k * n < MOST_WEIGHT:
            yield row, rng.choice(("nk", "kn"))


def choose(row: Row, order: str, device: DeviceSpec) -> Chosen | None:
    """The kernel of a problem, where as much is loaded as is looked for: work for a process that sees no GPU."""
    fusion, plan, _ = planned(row, order, device)
    variant = next(variant for variant in plan.variants if variant.min_m <= row.m <= variant.max_m)
    if variant.family.name not in FAMILIES:
        return None
    rule = variant.family.launch(variant.spec, variant.tile, device)
    tiles = -(-row.m // rule.block_m) * -(-row.n // rule.block_n)
    turns, of_k = -(-tiles // (device.multiprocessors // rule.cluster)), row.k * variant.spec.dtype.bytes / rule.cluster
    turns_of_rhs = 1 if getattr(variant.tile, "kept_k", 0) else turns
    loaded = (turns * rule.block_m + turns_of_rhs * rule.block_n * row.parts) * of_k
    return Chosen(row, order, fusion, variant, loaded) if LOADED[0] < loaded < LOADED[1] else None


def measure(chosen: Chosen, device: DeviceSpec, folder: Path) -> dict[str, Any]:
    """Microseconds of both ways."""
    stored = {each.name: numpy_helper.to_array(each) for each in site_model(chosen.row, chosen.order).graph.initializer}
    buffers, stream = Buffers(chosen.row, chosen.fusion, stored), cupy.cuda.Stream(non_blocking=True)
    ways = {"late_us": False, "early_us": True}
    replays = {
        name: graph_of(launcher(chosen.variant, device, buffers, folder, early), buffers.copies, stream)
        for name, early in ways.items()
    }
    for replay in replays.values():
        replay()
    cupy.cuda.Device().synchronize()
    check(buffers, stored)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(REPLAYS):
        for name in random.sample(list(replays), len(replays)):
            times[name].append(timed_replay(replays[name], stream))
    return {
        "problem": str(chosen.row), "order": chosen.order, "tile": str(chosen.variant.tile),
        "loaded_mb": chosen.loaded / 1e6, **{name: statistics.median(each) for name, each in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the problems")
    parser.add_argument("--count", type=int, default=170, help="of problems that are timed")
    parser.add_argument("--seconds", type=float, default=200, help="after so many no problem is begun")
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    device, deadline = spec_of(driver.local_architectures()[0]), time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        drawn = list(itertools.islice(draw(options.seed), 3 * options.count))
        found = pool.map(choose, *zip(*drawn, strict=True), itertools.repeat(device))
        kept = list(itertools.islice((each for each in found if each is not None), options.count))
        list(pool.map(image, [each.variant for each in kept], itertools.repeat(device), itertools.repeat(Path(name))))
        for chosen in kept:
            if time.monotonic() > deadline:
                break
            rows.append(measure(chosen, device, Path(name)))
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in rows[-1].values()), flush=True)
            cupy.get_default_memory_pool().free_all_blocks()
    write_result(options.out, {**origin(f"python -m tests.perf.early_start --seed {options.seed}"), "rows": rows})
    print(f"{len(rows)} problems, early over late {np.mean([row['early_us'] / row['late_us'] for row in rows]):.3f}")


if __name__ == "__main__":
    main()
