"""Every way in which a tensor may lie, on each kernel that can compute it, in an ONNX Runtime CUDA session.

A model has one product for each case. Shapes are known, so every tensor is accessed as wide as it allows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import Analysis, analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.plan import replan
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import ProductPlan
from onnxfuse.verify.verify import verify
from tests.helpers.onnx_build import FLOAT16, Builder

pytestmark = pytest.mark.gpu

KERNELS = ("portable", "sm_90a", "few rows")
EPILOGUE_ONLY = "behind the product"
SIZES = [
    (504, 136, 248), (504, 136, 249), (504, 137, 248), (505, 136, 248), (505, 137, 249), (504, 138, 250),
    (136, 136, 136),
]  # fmt: skip


def linear(b: Builder, shape: tuple[int, ...], n: int) -> str:
    """Weight times an input of its own, so that no two join, + bias; stored as [n, k] where TMA cannot read [k, n]."""
    x, k = b.input(f"x{len(b.nodes)}", shape), shape[-1]
    rng = np.random.default_rng([k, n, len(b.nodes)])
    weight = rng.standard_normal((k, n)) / np.sqrt(k)
    stored = b("Transpose", b.array(weight.T), perm=[1, 0]) if n % 8 else b.array(weight)
    t = b("MatMul", x, stored)
    return b("Add", t, b.array(rng.standard_normal(n)))


def every_order() -> onnx.ModelProto:
    """All 24 orders of an output."""
    b = Builder(FLOAT16)
    x = (2, 3, 128, 72)
    outs = [linear(b, x, 40)]
    for order in itertools.islice(itertools.permutations(range(4)), 1, None):
        outs.append(b("Transpose", linear(b, x, 40), perm=list(order)))
    return b.model(*outs)


def every_operand(m: int, n: int, k: int) -> onnx.ModelProto:
    """Rows, columns, scalars, tiles, once for the batch or not, transposed, of another type, and halves."""
    b = Builder(FLOAT16)
    x = (2, m, k)
    shapes = [(1, n), (m, 1), (1, 1), (), (m, n), (2, m, n), (2, 1, n), (2, m, 1), (2, 1, 1)]
    outs = [b("Tanh", b("Add", linear(b, x, n), b.input(f"in{i}", shape))) for i, shape in enumerate(shapes)]
    transposed = b("Transpose", b.input("transposed", (n, m)), perm=[1, 0])
    outs.append(b("Mul", b("Add", linear(b, x, n), transposed), b.input("scale", (m, 1))))
    wide = b("Cast", linear(b, x, n), to=TensorProto.FLOAT)
    scale = b.input("wide scale", (n,), TensorProto.FLOAT)
    outs.append(b("Cast", b("Mul", wide, scale), to=TensorProto.FLOAT16))
    value, gate = b("Split", linear(b, x, 2 * n), outputs=2, axis=-1, num_outputs=2)
    outs.append(b("Mul", value, b("Sigmoid", gate)))
    return b.model(*outs)


def on_kernel(model: onnx.ModelProto, kernel: str) -> tuple[Analysis, int]:
    """The analysis with every site on one kernel where it can be, and how many are."""
    analysis = analyse_model(model, resolve("native", local_architectures), keep_weights=True)
    if kernel == EPILOGUE_ONLY:
        sites = tuple(replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites)
        return replace(analysis, sites=sites), len(sites)
    moved = 0
    made = []
    for site in analysis.sites:
        found = [moved_plan(plan, kernel) for plan in site.plans]
        plans = tuple(plan for plan in found if plan is not None)
        moved += len(plans) == len(found)
        made.append(replace(site, plans=plans) if len(plans) == len(found) else site)
    return replace(analysis, sites=tuple(made)), moved


def moved_plan(plan: ProductPlan, kernel: str) -> ProductPlan | None:
    best = [tile for ranked in plan.ranked for _, tile in ranked.tiles if tile.family.label == kernel]
    return replan(plan, best[0]) if best else None


def check(model: onnx.ModelProto, kernel: str, sites: int, folder: Path) -> None:
    analysis, moved = on_kernel(model, kernel)
    assert len(analysis.sites) == sites
    if not moved:
        pytest.skip(f"no site runs on the kernel for {kernel} here")
    before, after = folder / "before.onnx", folder / "after.onnx"
    onnx.save(model, before)
    fused, _ = optimize_model(analysis)
    onnx.save(fused, after)
    assert verify(before, after).passed


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_order_of_an_output(kernel: str, tmp_path: Path) -> None:
    check(every_order(), kernel, 24, tmp_path)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_operand(sizes: tuple[int, int, int], kernel: str, tmp_path: Path) -> None:
    check(every_operand(*sizes), kernel, 12, tmp_path)


@pytest.mark.parametrize("kernel", [*KERNELS, EPILOGUE_ONLY])
def test_misaligned_pointers_take_a_kernel_that_reads_them(kernel: str, tmp_path: Path) -> None:
    """Through IO binding, each tensor by itself at 1, 2 and 4 elements behind a 16-byte boundary, then all of them."""
    import cupy

    m, k, n = 512, 320, 640
    b = Builder(FLOAT16)
    out = b("Add", linear(b, (m, k), n), b.input("residual", (m, n)))
    analysis, moved = on_kernel(b.model(out), kernel)
    if not moved:
        pytest.skip(f"no site runs on the kernel for {kernel} here")
    fused, _ = optimize_model(analysis)
    onnx.save(fused, tmp_path / "fused.onnx")
    live = onnxfuse.InferenceSession(tmp_path / "fused.onnx", providers=["CUDAExecutionProvider"])
    shapes = {"x0": (m, k), "residual": (m, n), out: (m, n)}
    values = {name: np.random.default_rng(len(name)).standard_normal(shape).astype(np.float16)
              for name, shape in shapes.items()}  # fmt: skip

    def run(offsets: dict[str, int]) -> np.ndarray:
        memory = {name: cupy.zeros(values[name].size + 8, np.float16) for name in shapes}
        views = {
            name: memory[name][offsets.get(name, 0) :][: values[name].size].reshape(shapes[name]) for name in shapes
        }
        binding = live.io_binding()
        for name, view in views.items():
            view[...] = cupy.asarray(values[name])
            bind = binding.bind_output if name == out else binding.bind_input
            bind(name, "cuda", 0, np.float16, list(shapes[name]), view.data.ptr)
        cupy.cuda.Device().synchronize()
        live.run_with_iobinding(binding)
        return views[out].get().astype(np.float32)

    expected = run({})
    cases = [{name: offset} for name in shapes for offset in (1, 2, 4)]
    for offsets in [*cases, dict.fromkeys(shapes, 1)]:
        np.testing.assert_allclose(run(offsets), expected, rtol=2e-3, atol=4e-3, err_msg=str(offsets))
