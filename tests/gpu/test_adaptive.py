"""Ranges of one product that shift, scale and gate rows, in CUDA sessions: every kind of kernel reads them in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.strategy import Strategy
from tests.gpu.test_padded_rows import of_family
from tests.gpu.test_rotation import check
from tests.helpers.adaptive_models import PLACES, RANGES, Ranges, adaptive, unsqueezed_behind
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16

pytestmark = pytest.mark.gpu

WIDTHS = [64, 88, 1152]
DTYPES = [FLOAT16, BFLOAT16, FLOAT]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranges", [*RANGES, *PLACES])
def test_planned_kernels(ranges: Ranges, dtype: int, width: int, tmp_path: Path) -> None:
    model = adaptive(ranges, dtype, width)
    fused, report = onnxfuse.optimize(model, arch="native")
    assert len(report.fused) == len(fused.graph.node)
    check(tmp_path, model, fused)


@pytest.mark.parametrize("rows", [(64, 8), (300, 1), (5, 31), (3, 32), (8, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_few_and_of_many_in_a_batch(dtype: int, rows: tuple[int, int], tmp_path: Path) -> None:
    model = adaptive(unsqueezed_behind, dtype, 320, rows=rows)
    check(tmp_path, model, onnxfuse.optimize(model, arch="native")[0])


@pytest.mark.parametrize("rows", [("batch", "rows"), (64, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [family.name for family in PRODUCTS if "quantized" not in family.name])
def test_every_family_of_kernels(family: str, dtype: int, rows: tuple[int | str, int | str], tmp_path: Path) -> None:
    taken = 0
    for width in WIDTHS[:2]:
        model = adaptive(unsqueezed_behind, dtype, width, count=3, rows=rows)
        analysis = analyse_model(model, resolve("native", local_architectures))
        sites = [
            replace(site, strategy=Strategy.ONE_KERNEL, plans=(plan,))
            for site in analysis.sites
            if site.match.passed and site.match.products and (plan := of_family(site.plans[0], family)) is not None
        ]
        if sites:
            check(tmp_path, model, optimize_model(replace(analysis, sites=tuple(sites)))[0])
            taken += 1
    if not taken:
        pytest.skip("no kernel of this family")


@pytest.mark.parametrize("dtype", DTYPES)
def test_behind_the_product(dtype: int, tmp_path: Path) -> None:
    model = adaptive(unsqueezed_behind, dtype, 64)
    analysis = analyse_model(model, resolve("native", local_architectures))
    behind = [replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites if site.epilogue_only]
    assert any(site.match.passed for site in behind)
    check(tmp_path, model, optimize_model(replace(analysis, sites=tuple(behind)))[0])
