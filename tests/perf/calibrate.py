"""Fit the cost model's constants: `python -m tests.perf.calibrate results/h200-tiles.json`.

Estimates every kernel that a committed result timed, prints how far off the estimates are, and by how much the tile
that they find fastest of a problem is slower than the fastest; then moves each constant that names the file as its
source (`--constants` names others), one after the other, to where the mean square of the logarithms of estimate over
time is smallest. It prints what it found and changes no file: the calibration is edited by hand. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.schedule.calibration import Calibration, calibration, entries, replaced
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.kernel_family import Candidate, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.plan import make_plan
from tests.helpers.fusions import fusion
from tests.perf.drawn import ELEMENT_NAMES, Drawn
from tests.perf.result_file import read_result

DEVICE = ARCHITECTURES["sm_90a"]
STEPS = (0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.4)
ROUNDS = 3
WORST = 5  # rows to print


@dataclass(frozen=True)
class Timed:
    """A kernel that was timed: everything that its estimate needs but the constants."""

    name: str
    us: float
    spec: KernelSpec
    tile: str
    problem: Problem


@dataclass(frozen=True)
class Priced:
    """The same with what a plan knows of the tile, in which none of the constants that are fitted has a part."""

    timed: Timed
    entry: Candidate
    flow: Flow


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, with tiles by name where the file has them by number."""
    rows: list[dict[str, Any]] = found["rows"]
    if "names" not in found:
        return rows
    return [{**row, "us": {found["names"][int(number)]: us for number, us in row["us"].items()}} for row in rows]


def timed(rows: Sequence[dict[str, Any]], device: DeviceSpec) -> list[Timed]:
    """The rows of `tests.perf.anywhere`, `few_rows`, `splits`, `exact` or `kernels`."""
    return [each for row in rows for each in (drawn_kernels(row, device) if "drawn" in row else [kernel(row, device)])]


def drawn_kernels(row: dict[str, Any], device: DeviceSpec) -> list[Timed]:
    """The tiles that were timed of a drawn problem; they were launched without overlap with the kernel before."""
    problem = Drawn(**row["drawn"]) if isinstance(row["drawn"], dict) else Drawn(*row["drawn"])
    spec = planned_spec(
        problem.k, problem.n, problem.parts, problem.order, problem.kind, ELEMENT_NAMES[problem.element], device
    )
    sizes = Problem(problem.m, problem.n, problem.k)
    times = row.get("us") or {tile: us for tile, (us, _) in row["tiles"].items()}
    return [Timed(f"{problem} {tile}", us, spec, tile, sizes) for tile, us in times.items()]


def kernel(row: dict[str, Any], device: DeviceSpec) -> Timed:
    """What the plan of a row's problem multiplies."""
    sizes, epilogue, *tf32 = row["problem"].replace(", ", ",").split(" ")
    m, k, n = map(int, sizes.split(","))
    exact = row.get("math") in ("3xtf32", "fp32")
    parts = 2 if epilogue in ("geglu", "geglu_tanh", "swiglu") else 1
    spec = planned_spec(k, n, parts, row["order"], epilogue, "f32" if tf32 or exact else "f16", device)
    spec = replace(spec, math=row.get("math", spec.math))
    name, us = f"{row['problem']} {row['order']} {row['tile']}", row.get("us") or row["fused_us"]
    return Timed(name, us, spec, row["tile"], Problem(m, n, k))


def planned_spec(k: int, n: int, parts: int, order: str, epilogue: str, dtype: str, device: DeviceSpec) -> KernelSpec:
    """The kernel of a product with bias or, beside it, a residual."""
    of = {"f16": F16, "bf16": BF16, "f32": F32}[dtype]
    columns = "(p n)" if parts > 1 else "n"
    operands = [(columns, of), *((("b m n", of),) if epilogue == "residual" else ())]
    known = {"b": None, "m": None, "n": n, "k": k} | ({"p": parts} if parts > 1 else {})
    rhs = f"k {columns}" if order == "kn" else f"{columns} k"
    built = fusion(known, lhs="b m k", out="b m n", rhs=rhs, operands=operands, parts=parts, dtype=of)
    mapping = map_axes(built)
    return make_plan(built, mapping, analyse(built, mapping), device, exact_fp32=False).variants[0].spec


def priced(kernels: Sequence[Timed], device: DeviceSpec) -> list[Priced]:
    """Those whose tiles are among today's candidates."""
    found = []
    for each in kernels:
        for family in PRODUCTS:
            for entry in family.candidates(each.spec, device, each.problem.k):
                if str(entry.tile) == each.tile and family.why_not(each.spec, entry.tile, device) is None:
                    found.append(Priced(each, entry, family.flow(each.spec, entry.tile, device)))
    return found


def residuals(kernels: Sequence[Priced], device: DeviceSpec) -> list[tuple[float, Timed]]:
    """Logarithm of estimate over time, of each kernel that a plan may take for its problem."""
    found = []
    for each in kernels:
        cost = each.entry.family.cost(each.entry, each.flow, each.timed.spec, each.timed.problem, device)
        found += [(math.log(cost / each.timed.us), each.timed)] if math.isfinite(cost) else []
    return found


def mean_square(kernels: Sequence[Priced], device: DeviceSpec) -> float:
    return fmean(error**2 for error, _ in residuals(kernels, device))


def regrets(errors: Sequence[tuple[float, Timed]]) -> list[float]:
    """Of each problem with several tiles, how much longer the one that is estimated fastest takes than the fastest."""
    problems = defaultdict(list)
    for error, each in errors:
        problems[each.name.removesuffix(each.tile)].append((each.us * math.exp(error), each.us))
    return [min(tiles)[1] / min(us for _, us in tiles) - 1 for tiles in problems.values() if len(tiles) > 1]


def scaled(known: Calibration, name: str, factor: float) -> Calibration:
    """The constants with one of them, or all of its table, times a factor."""
    value = getattr(known, name)
    new = {key: each * factor for key, each in value.items()} if isinstance(value, dict) else value * factor
    changed: dict[str, Any] = {name: new}
    return replace(known, **changed)


def fit(names: Sequence[str], known: Calibration, score: Callable[[Calibration], float]) -> Calibration:
    """Each constant in turn to the best of some steps, a few times over."""
    for _ in range(ROUNDS):
        for name in names:
            known = min((scaled(known, name, step) for step in STEPS), key=score)
    return known


def fitted_to(file: str, arch: str) -> list[str]:
    """The constants that name a result as their source."""
    return [name for name, entry in entries(arch).items() if name != "pace" and entry["source"] == file]


def report(kernels: Sequence[Priced], device: DeviceSpec) -> None:
    errors = sorted(residuals(kernels, device), key=lambda pair: -abs(pair[0]))
    spread = math.exp(math.sqrt(fmean(error**2 for error, _ in errors)))
    print(f"{len(errors)} of {len(kernels)} kernels: estimates off by a factor of {spread:.3f} (root mean square)")
    for error, each in errors[:WORST]:
        print(f"  {math.exp(error):5.2f} of {each.us:8.1f} us  {each.name}")
    found = regrets(errors)
    if found:
        median, last = np.quantile(found, [0.5, 0.95])
        print(f"{len(found)} problems: regret {median:.1%} in the median, {last:.1%} at the 95th percentile")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="result file with estimated kernels, JSON")
    parser.add_argument("--constants", default="", help="names, comma separated; by default those fitted to the file")
    options = parser.parse_args(arguments)
    kernels = priced(timed(rows_of(read_result(options.result)), DEVICE), DEVICE)
    names = [name for name in options.constants.split(",") if name]
    names = names or fitted_to(f"results/{options.result.name}", DEVICE.arch)
    report(kernels, DEVICE)
    if not names:
        return

    def score(known: Calibration) -> float:
        with replaced(DEVICE, known):
            return mean_square(kernels, DEVICE)

    found = fit(names, calibration(DEVICE), score)
    for name in names:
        print(f"{name}: {getattr(calibration(DEVICE), name)} -> {getattr(found, name)}")
    with replaced(DEVICE, found):
        report(kernels, DEVICE)


if __name__ == "__main__":
    main()
