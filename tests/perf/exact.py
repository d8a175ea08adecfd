"""Exact fp32 by three TF32 products, FFMA and cuBLAS: `python -m tests.perf.exact --out results/h200-exact.json`.

Every tile of either arithmetic, with both orders of the weight, measured as `tests.perf.kernels` does, all kernels of a
problem in turn. cuBLAS computes the plain product of the full width in fp32, TF32 off. Every output is checked against
float64.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy

from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.limits import MAX_M
from onnxfuse.runtime import driver
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.kernel_family import Candidate
from onnxfuse.schedule.kernel_family import Problem as Sizes
from onnxfuse.schedule.kernel_spec import EXACT, KernelSpec
from onnxfuse.schedule.variant import ProductPlan, ProductVariant
from tests.helpers.onnx_build import FLOAT
from tests.perf.compare import origin
from tests.perf.kernels import REPLAYS, Buffers, Row, cublas_graph, timed_replay
from tests.perf.result_file import write_result
from tests.perf.splits import Problem, Timed, compile_all, prepare, problems

MOST_ULP = 16.0  # of the output's magnitude; TF32 makes thousands
SITES = [
    Row(8192, 320, 1280, "geglu"),
    Row(4096, 768, 3072, "gelu"),
    Row(4096, 4096, 4096, "residual"),
    Row(128, 1280, 5120, "geglu"),
    Row(1, 4096, 4096, "residual"),
]


def choices(plan: ProductPlan, row: Row) -> list[Timed]:
    """Every tile of every exact arithmetic, whichever the plan would take."""
    base = plan.variants[0].spec
    found = [(replace(base, math=kind), plan.device) for kind in EXACT]
    return [pair for spec, device in found for pair in tiles(spec, device, row)]


def tiles(spec: KernelSpec, device: DeviceSpec, row: Row) -> list[Timed]:
    """The legal tiles of one arithmetic, with the plan's estimates."""
    legal = [
        entry
        for family in PRODUCTS
        for entry in family.candidates(spec, device, row.k)
        if family.why_not(spec, entry.tile, device) is None
    ]
    sizes = Sizes(row.m, row.n, row.k)

    def timed(entry: Candidate) -> Timed:
        estimate = entry.family.cost(entry, entry.family.flow(spec, entry.tile, device), spec, sizes, device)
        return estimate, ProductVariant(entry.family, spec, entry.tile, 0, MAX_M)

    return list(map(timed, legal))


def measure(site: Problem, device: DeviceSpec, folder: Path, most_ulp: float = MOST_ULP) -> list[dict[str, Any]]:
    """One row for each kernel."""
    buffers = Buffers(site.row, site.fusion, site.stored)
    stream = cupy.cuda.Stream(non_blocking=True)
    peer, peer_time = cublas_graph(buffers, site.order == "nk", site.row.tf32)
    peer()
    replays, errors = prepare(site, buffers, stream, device, folder, most_ulp)
    rounds = [(peer_time(), *(timed_replay(replay, stream) for replay in replays)) for _ in range(REPLAYS)]
    cublas, *times = (statistics.median(times) for times in zip(*rounds, strict=True))
    return [
        {
            "problem": str(site.row), "order": site.order, "math": variant.spec.math, "tile": str(variant.tile),
            "us": us, "estimated_us": estimated, "cublas_us": cublas, "ratio": us / cublas, "error_ulp": error,
        }
        for us, error, (estimated, variant) in zip(times, errors, site.timed, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="only problems whose text contains this")
    options = parser.parse_args()
    device = spec_of(driver.local_architectures()[0])
    timed = [row for row in SITES if options.only in str(row)]
    rows = measure_all(problems(timed, device, choices, FLOAT), device)
    result = {**origin("python -m tests.perf.exact --out results/h200-exact.json"), "rows": rows}
    write_result(options.out, result)


def measure_all(everything: list[Problem], device: DeviceSpec, most_ulp: float = MOST_ULP) -> list[dict[str, Any]]:
    """One row for each kernel of each problem, printed as it comes."""
    print(f"{'problem':26} order  math         us  estimate    cuBLAS  ratio    ulp  tile", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        compile_all(everything, device, Path(folder))
        for site in everything:
            for made in measure(site, device, Path(folder), most_ulp):
                rows.append(made)
                times = (
                    f"{made['us']:8.1f}  {made['estimated_us']:8.1f}  {made['cublas_us']:8.1f}  {made['ratio']:5.2f}"
                )
                print(
                    f"{made['problem']:26} {made['order']:5}  {made['math']:7} {times}  {made['error_ulp']:5.2f}  "
                    f"{made['tile']}",
                    flush=True,
                )
            cupy.get_default_memory_pool().free_all_blocks()
    return rows


if __name__ == "__main__":
    main()
