"""The kernels for small M side by side: `python -m tests.perf.few_rows --out results/h200-few-rows.json`.

With 1 to 512 rows a plan chooses between the kernel for small M, tiles of 64 or 128 rows in the sm_90a kernel with lhs
in boxes of some heights and k split or not, and the portable kernel. Here the best tiles of each, by the plan's
estimate, are measured as `tests.perf.kernels` does, all of a problem in turn with cuBLAS. Every output is checked
against float64.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from onnxfuse.schedule.kernel_family import Candidate
from onnxfuse.schedule.plan import replan
from onnxfuse.schedule.variant import ProductPlan
from tests.perf.compare import origin
from tests.perf.exact import measure_all
from tests.perf.kernels import Row
from tests.perf.result_file import write_result
from tests.perf.splits import Timed, problems

EACH = {"small_m": 1, "hopper": 5, "portable": 1}  # tiles of a kernel
MOST_ULP = 2.0  # of the arithmetic at the output's magnitude
# Rows by k, n and epilogue.
HALF = {
    (4096, 4096, "residual"): (1, 16, 32, 64, 96, 128),
    (14336, 4096, "residual"): (32, 64),
    (4096, 14336, "swiglu"): (16, 64),
    (1280, 5120, "geglu"): (1, 16, 64, 128),
    (5120, 1280, "residual"): (32, 128, 512),
    (1280, 1280, "residual"): (128, 512),
}
TF32 = {(4096, 4096, "residual"): (1, 16, 64, 128), (1280, 5120, "geglu"): (1, 64)}
SITES = [
    Row(m, k, n, epilogue, tf32=tf32)
    for tf32, problems in ((False, HALF), (True, TF32))
    for (k, n, epilogue), rows in problems.items()
    for m in rows
]


def choices(plan: ProductPlan, row: Row) -> list[Timed]:
    """The best tiles of each kernel, by the plan's estimate, with that estimate."""
    ranked = next(entry for entry in plan.ranked if row.m <= entry.size)
    kernels: dict[str, list[tuple[float, Candidate]]] = {}
    for us, entry in ranked.tiles:
        if math.isfinite(us):
            kernels.setdefault(entry.family.name, []).append((us, entry))
    best = [pair for kernel, tiles in kernels.items() for pair in tiles[: EACH[kernel]]]
    return [(us, replan(plan, entry).variants[0]) for us, entry in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="only problems whose text contains this")
    options = parser.parse_args()
    device = spec_of(driver.local_architectures()[0])
    timed = [row for row in SITES if options.only in str(row)]
    rows = measure_all(problems(timed, device, choices), device, MOST_ULP)
    result = {**origin("python -m tests.perf.few_rows --out results/h200-few-rows.json"), "rows": rows}
    write_result(options.out, result)


if __name__ == "__main__":
    main()
