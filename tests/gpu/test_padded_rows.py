"""Weights with zeros behind their rows, in CUDA sessions: every family of kernels reads them as they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.lowering import plan_site
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.plan import replan
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import ProductPlan
from onnxfuse.verify.verify import verify
from tests.gpu.test_copied_rows import check_tf32
from tests.gpu.test_ort_session import BF16, F16, F32, gate_model
from tests.gpu.test_tune import check
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.helpers.padded_models import WAYS, Build, built

pytestmark = pytest.mark.gpu

SIZES = [(331, 136), (1138, 72), (2730, 24)]  # k, columns of one part
ROWS = (1, 16, 17, 130, 600)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels like every weight better so."""
    monkeypatch.setattr(plan_site, "is_faster", lambda other, kept: True)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT])
@pytest.mark.parametrize("build", WAYS)
def test_planned_kernels(build: Build, dtype: int, tmp_path: Path) -> None:
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(built(build, dtype), before)
    assert onnxfuse.optimize_file(before, after, arch="native").padding
    assert verify(before, after, sizes={"rows": ROWS}, per_site=True, require_gpu=True).passed


def of_family(plan: ProductPlan, family: str) -> ProductPlan | None:
    """Its best tile at any number of rows; None where it has none."""
    entry = next((entry for _, entry in plan.ranked[0].tiles if entry.family.name == family), None)
    return None if entry is None else replace(replan(plan, entry), variants=replan(plan, entry).variants[:1])


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("family", [family.name for family in PRODUCTS if "quantized" not in family.name])
def test_every_family_of_kernels(tmp_path: Path, family: str, dtype: int, order: str, parts: int) -> None:
    taken = 0
    for k, n in SIZES:
        model = gate_model(dtype, order, parts, k, n)
        analysis = analyse_model(model, resolve("native", local_architectures))
        (site,) = analysis.sites
        assert site.transposed
        plan = of_family(site.plans[0], family)
        if plan is None:
            continue
        assert plan.variants[0].spec.rhs_width * plan.variants[0].spec.dtype.bytes == 16
        forced = replace(site, strategy=Strategy.ONE_KERNEL, plans=(plan,))
        fused, taken = optimize_model(replace(analysis, sites=(forced,)))[0], taken + 1
        if dtype == F32:
            check_tf32(tmp_path, model, fused, k)
        else:
            check(tmp_path, model, fused, dtype, (k, n))
    if not taken:
        pytest.skip("no kernel of this family")
