"""Kernels that read copies of factors, because their own rows begin where TMA cannot read, in CUDA sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.plan import SHALLOW, replan
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import ProductPlan
from tests.gpu.sessions import check_replays, check_threads
from tests.gpu.test_library_product import live_session
from tests.gpu.test_ort_session import BF16, F16, F32, TF32_EPSILON, ULPS, as_float64, gate_model
from tests.gpu.test_tune import check
from tests.helpers.matching import run_values
from tests.helpers.onnx_build import Builder

pytestmark = pytest.mark.gpu

# (k, columns of one part): rows of odd elements, of words of 4 bytes, of less than 16 bytes, of a cache line and more.
SIZES = [(331, 136), (1282, 72), (7, 64), (65, 24)]
ODD = [(k, n + 1) for k, n in SIZES]
TILES = ["64x64 ping-pong", "128x128 cooperative", "128x64 cooperative k split by 4", "72x128 swapped",
         "64x64 swapped ping-pong last wave's k split by 2"]  # fmt: skip


def copying(plan: ProductPlan, tile: str) -> ProductPlan:
    """That tile at any number of rows, or the first that reads a copy; nothing else runs."""
    entries = [entry for _, entry in plan.ranked[0].tiles if entry.family.copied(plan.variants[-1].spec)]
    entry = next((each for each in entries if str(each.tile) == tile), entries[0])
    return replace(replan(plan, entry), variants=replan(plan, entry).variants[:1])


def optimized(model: onnx.ModelProto, tile: str, sites: int = 1, others: int = 0) -> onnx.ModelProto:
    """With so many sites that copy lhs, and others as they are planned."""
    analysis = analyse_model(model, resolve("native", local_architectures), keep_weights=True)
    assert len(analysis.sites) == sites + others, analysis.skipped
    forced = [
        replace(site, strategy=Strategy.ONE_KERNEL, plans=tuple(copying(plan, tile) for plan in site.plans))
        for site in analysis.sites
        if any(HOPPER.copied(plan.variants[-1].spec) for plan in site.plans)
    ]
    assert len(forced) == sites
    assert all(variant.spec.copied for site in forced for plan in site.plans for variant in plan.variants)
    chosen = {site.fusion.anchor: site for site in forced}
    whole = tuple(chosen.get(site.fusion.anchor, site) for site in analysis.sites)
    return optimize_model(replace(analysis, sites=whole))[0]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("dtype", "order"), [(F16, "kn"), (BF16, "kn"), (F16, "nk"), (F32, "nk")])
def test_it_computes_rows_on_any_boundary(tmp_path: Path, dtype: int, order: str, tile: str, parts: int) -> None:
    """Of a weight [n, k] its rows are copied as well, and n may be odd."""
    check_sizes(tmp_path, dtype, order, tile, parts, SIZES if order == "kn" else ODD)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("tile", TILES[:3])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_it_computes_rows_of_rhs_along_n(tmp_path: Path, dtype: int, tile: str, parts: int) -> None:
    """Alone, and behind those of lhs; each part is copied to rows of its own."""
    check_sizes(tmp_path, dtype, "kn", tile, parts, [*ODD, (64, 49), (320, 196), (8, 3)])


def check_sizes(folder: Path, dtype: int, order: str, tile: str, parts: int, sizes: list[tuple[int, int]]) -> None:
    for k, n in sizes:
        if dtype == F32 and k < SHALLOW:
            continue
        model = gate_model(dtype, order, parts, k, n)
        fused = optimized(model, tile)
        if dtype == F32:
            check_tf32(folder, model, fused, k)
        else:
            check(folder, model, fused, dtype, (k, n))


def check_tf32(folder: Path, model: onnx.ModelProto, fused: onnx.ModelProto, k: int) -> None:
    """One row ONNX Runtime multiplies in full precision, which kernels of the tensor cores do not."""
    live = live_session(fused, folder)
    for m in (1, 17, 130):
        x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
        (expected,) = run_values(model, [model.graph.output[0].name], {"x": x})
        (actual,) = live.run(None, {"x": x})
        assert np.abs(actual - expected).max() <= 2 * ULPS * TF32_EPSILON * max(1.0, np.abs(expected).max()), m


def batched_model(dtype: int, batches: int | str, order: str, n: int) -> onnx.ModelProto:
    """A product of each batch with an rhs of its own; one lhs for all where `batches` is 1."""
    b = Builder(dtype)
    x, y = b.input("x", (batches, "m", 333)), b.input("y", ("b", 333, n) if order == "kn" else ("b", n, 333))
    return b.model(b("Tanh", b("MatMul", x, y if order == "kn" else b("Transpose", y, perm=(0, 2, 1)))))


@pytest.mark.parametrize(("order", "n"), [("kn", 72), ("kn", 49), ("nk", 72)])
@pytest.mark.parametrize("batches", [1, "b"])
def test_it_copies_batches_and_one_that_all_share(tmp_path: Path, batches: int | str, order: str, n: int) -> None:
    live = live_session(optimized(batched_model(F16, batches, order, n), TILES[0]), tmp_path)
    exact = batched_model(F32, batches, order, n)
    for count, rows in ((3, 77), (1, 1), (5, 130)):
        rng = np.random.default_rng(rows)
        shapes = {
            "x": (count if batches == "b" else 1, rows, 333),
            "y": (count, *((333, n) if order == "kn" else (n, 333))),
        }
        feed = {name: (rng.standard_normal(shape) / 4).astype(np.float16) for name, shape in shapes.items()}
        wide = {name: value.astype(np.float32) for name, value in feed.items()}
        (expected,) = run_values(exact, [exact.graph.output[0].name], wide)
        (actual,) = live.run(None, feed)
        assert np.abs(as_float64(actual) - expected).max() <= 2.0**-10


def chain(pairs: int) -> onnx.ModelProto:
    """Products of a width that TMA does not read and of one that it does, in turn: copies lie in the same memory."""
    rng = np.random.default_rng(pairs)
    b = Builder(F16)
    t = b.input("x", ("m", 332))
    for index in range(pairs):
        narrow, wide = (b.array(rng.standard_normal((332, 136)) / 16, f"{name}{index}") for name in ("narrow", "wide"))
        t = b("Tanh", b("Gemm", t, narrow))
        t = b("Tanh", b("Gemm", t, wide, transB=1))
    return b.model(t)


def test_captured_graphs_replay_it(tmp_path: Path) -> None:
    fused = optimized(chain(3), TILES[0], sites=3, others=3)
    inputs = [np.random.default_rng(seed).standard_normal((154, 332)).astype(np.float16) for seed in range(4)]
    check_replays(live_session(fused, tmp_path), live_session(fused, tmp_path, enable_cuda_graph="1"), inputs)


def test_threads_share_a_session(tmp_path: Path) -> None:
    """Runs at the same time have streams of their own, and no copy in common."""
    live = live_session(optimized(chain(2), TILES[0], sites=2, others=2), tmp_path)
    inputs = [np.random.default_rng(m).standard_normal((m, 332)).astype(np.float16) for m in (1, 17, 64, 300, 1000)]
    check_threads([(live, x) for x in inputs])
