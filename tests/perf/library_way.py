"""The library's product inside of a fused node beside the other ways: `python -m tests.perf.library_way`.

Odd problems, whose rows TMA cannot take, and rows just beyond a tile: the node with cuBLASLt's product, the node with
its best own kernels, the epilogue behind the runtime's product, and the nodes as they were. Times are those of
`--tune`: sessions of ONNX Runtime in turn, over cold buffers, microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.ir.fusion import Fusion
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime import driver
from onnxfuse.schedule.library import LABEL, library_time
from onnxfuse.schedule.plan import by_library, replan
from onnxfuse.tune.search import EPILOGUE_ONLY, LEFT_ALONE, Trial, contenders
from onnxfuse.tune.session_timer import SessionTimer
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder


@dataclass(frozen=True)
class Case:
    """A gate [m, k] -> [m, n], its two halves in one weight; or a plain product with its bias and a residual."""

    m: int
    k: int
    n: int
    kind: str = "gate"
    dtype: int = FLOAT16

    def __str__(self) -> str:
        return f"{self.m}, {self.k}, {self.n} {self.kind} {'f16' if self.dtype == FLOAT16 else 'tf32'}"


CASES = (
    Case(1024, 771, 1283), Case(154, 4095, 4097, "residual"), Case(2048, 770, 3074), Case(300, 1283, 771, "residual"),
    Case(154, 4096, 14336), Case(2048, 1280, 5120, dtype=FLOAT), Case(514, 321, 1283, dtype=FLOAT),
)  # fmt: skip


def site_of(case: Case, device: DeviceSpec) -> Site:
    rng = np.random.default_rng(case.m)
    b = Builder(case.dtype)
    columns = case.n * (2 if case.kind == "gate" else 1)
    t = b("MatMul", b.input("x", (case.m, case.k)), b.array(rng.standard_normal((case.k, columns)) / case.k, "w"))
    t = b("Add", t, b.array(rng.standard_normal(columns), "bias"))
    if case.kind == "gate":
        first, second = b("Split", t, outputs=2, axis=1, num_outputs=2)
        t = b("Mul", first, b("Sigmoid", second))
    else:
        t = b("Add", t, b.input("residual", (case.m, case.n)))
    (site,) = analyse_model(b.model(t), [device]).sites
    return site


def trial_of(site: Site, m: int) -> Trial:
    (plan,) = site.plans
    (ranked,) = plan.ranked
    ways: dict[str, Implementation | None] = {
        str(entry.tile): replace(site.one_kernel, plans=(replan(plan, entry),)) for entry in contenders(ranked)
    }
    ways[LABEL] = replace(site.one_kernel, plans=(by_library(plan),))
    if site.epilogue_only is not None:
        ways[EPILOGUE_ONLY] = site.epilogue_only
    return Trial(site, m, {**ways, LEFT_ALONE: None})


def report(cases: Iterable[Case], device: DeviceSpec) -> None:
    print(f"{'problem':<34}{'library':>9}{'own':>9}{'behind':>9}{'stock':>9}{'estimate':>10}  taken; fastest own tile")
    for case in cases:
        site = site_of(case, device)
        (plan,) = site.plans
        times = SessionTimer(None)(trial_of(site, case.m))
        ways = (LABEL, EPILOGUE_ONLY, LEFT_ALONE)
        tile = min((name for name in times if name not in ways), key=lambda name: times[name])
        figures = [times.get(name, float("nan")) for name in (LABEL, tile, EPILOGUE_ONLY, LEFT_ALONE)]
        assert isinstance(site.fusion, Fusion), "of a product"
        expected = library_time(plan.variants[0].spec, plan.ranked[0].problem, len(site.fusion.rhs), device)
        taken = f"{site.strategy.value}{', by the library' if plan.library_rows else ''}"
        print(f"{case!s:<34}" + "".join(f"{each:9.1f}" for each in figures) + f"{expected:10.1f}  {taken}; {tile}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only problems whose text contains this")
    options = parser.parse_args()
    device = spec_of(driver.local_architectures()[0])
    report((case for case in CASES if options.only in str(case)), device)


if __name__ == "__main__":
    main()
