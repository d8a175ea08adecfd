"""Tiles priced together cost what each costs by itself, at each size by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import F16
from onnxfuse.ir.quantization import Quantization
from onnxfuse.schedule.families import PRODUCTS
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED
from onnxfuse.schedule.kernel_family import Candidate, Problem, costs
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.perf.calibrate import planned_spec

DRAWS, ROWS, LARGEST = 5, 4, 5000
FORMS = [None, Quantization(4, 32, False, F16), Quantization(8, 128, True, F16)]


def legal(spec: KernelSpec, device: DeviceSpec, k: int) -> list[Candidate]:
    every = [entry for family in PRODUCTS for entry in family.candidates(spec, device, k)]
    return [entry for entry in every if entry.family.why_not(spec, entry.tile, device) is None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["nk", "kn"])
def test_together_they_cost_what_each_costs(arch: str, form: Quantization | None, order: str) -> None:
    """Drawn sizes, of every epilogue and type; the sums are the same but for the last bits of roots."""
    device, rng = ARCHITECTURES[arch], np.random.default_rng([len(arch), FORMS.index(form), len(order)])
    for _ in range(DRAWS):
        n, k = (int(size) for size in 64 * rng.integers(1, 80, 2))
        dtype = str(rng.choice(["f16", "bf16", "f32"])) if form is None else "f16"
        spec = planned_spec(k, n, int(rng.integers(1, 3)), order, str(rng.choice(["bias", "residual"])), dtype, device)
        spec = replace(spec, quantization=form, rhs_width=16, scales_width=8, depth=k, columns=n) if form else spec
        entries = legal(spec, device, k)
        assert ({entry.family for entry in entries} >= {HOPPER_QUANTIZED}) == (form is not None and arch == "sm_90a")
        flows = [entry.family.flow(spec, entry.tile, device) for entry in entries]
        rows = rng.integers(1, LARGEST, ROWS)
        together = costs(entries, flows, spec, Problem(rows, n, k), device)
        alone = [
            [float(entry.family.cost(entry, reads, spec, Problem(int(m), n, k), device)) for m in rows]
            for entry, reads in zip(entries, flows, strict=True)
        ]
        np.testing.assert_allclose(together, alone, rtol=1e-13)
