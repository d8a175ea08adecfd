"""Fit the networks of `schedule/library_cost.py`: `python -m tests.perf.learn_library results/h200-library.json.xz`.

A result of `tests.perf.library`. First on some of the products at a time, to tell of the others by how much they are
off, with what was learnt and without it; rows of one weight are learnt together. Then on all of them, and writes the
networks. They are trained as those of kernels are (tests/perf/learn.py). Needs no GPU; OMP_NUM_THREADS=1 is fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.device import DeviceSpec
from onnxfuse.schedule import library_cost
from onnxfuse.schedule.calibration import FOLDER
from onnxfuse.schedule.kernel_family import Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.perf.calibrate import planned_spec
from tests.perf.learn import DEVICE, Timings, fit, predicted_apart, write
from tests.perf.result_file import read_result

DTYPES: dict[int, str] = {FLOAT16: "f16", BFLOAT16: "bf16", FLOAT: "f32"}


def timings(rows: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Timings:
    """The products of a result, each a problem of its own."""
    terms, seen = zip(*(_seen(row, device) for row in rows), strict=True)
    table = np.concatenate([np.stack([*each.values()], axis=-1) for each in seen]).astype(np.float32)
    times = np.array([us for row in rows for us in row["us"].values()])
    sites = np.repeat(np.arange(len(rows)), [len(row["us"]) for row in rows])
    known = Timings((*seen[0],), table, np.concatenate(terms), times, sites, np.arange(len(times)))
    return known.of(known.estimates <= library_cost.LONGEST)


def _seen(row: Mapping[str, Any], device: DeviceSpec) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What the terms say of a weight's products, and what networks see of them."""
    k, n, order, element = row["weight"]
    spec, m = _spec(order, element), np.array([*row["us"]], np.int64)
    problem = Problem(m, np.full_like(m, n), np.full_like(m, k))
    terms = np.asarray(library_cost.of_floats(spec, problem, device), float)
    return terms, library_cost.features(spec, problem, terms, device)


@cache
def _spec(order: str, element: int) -> KernelSpec:
    """A kernel whose operands have these types and lie so, of whatever size."""
    return planned_spec(64, 64, 1, order, "bias", DTYPES[element], DEVICE)


def report(known: Timings, said: np.ndarray) -> None:
    for what, factors in (("terms", np.zeros_like(said)), ("with the factor, unseen", said)):
        off = np.abs(known.left - factors)
        late, latest = np.quantile(off, [0.5, 0.95])
        print(f"{what}: off by {np.sqrt(np.mean(off**2)):.3f}; median {late:.1%}, 95th percentile {latest:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files of tests.perf.library")
    parser.add_argument("--out", type=Path, default=FOLDER / f"{library_cost.learnt(DEVICE.arch)}.npz")
    options = parser.parse_args()
    known = timings([row for path in options.results for row in read_result(path)["rows"]], DEVICE)
    print(f"{len(known.times)} products of {len({*known.sites})} weights")
    report(known, predicted_apart(known))
    write(options.out, fit(known))


if __name__ == "__main__":
    main()
