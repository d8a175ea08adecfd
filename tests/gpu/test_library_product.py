"""The library's product inside of fused nodes, in CUDA sessions: in and out of captured graphs, on several threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.schedule.plan import by_library
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import ProductPlan
from tests.gpu.sessions import check_replays, check_threads
from tests.gpu.test_ort_session import BF16, EPSILON, F16, F32, TF32_EPSILON, ULPS, as_float64, gate_model, session
from tests.gpu.test_tune import check
from tests.helpers.matching import run_values
from tests.helpers.onnx_build import Builder

pytestmark = pytest.mark.gpu

# (k, columns of one part): odd ones, multiples of 2 and of 8; and tiny ones, which the library may refuse.
SIZES = [(33, 41), (64, 24), (1282, 330)]
# In fp32 a product of less than 8 is exact, which is no library's.
TINY = {F16: [(1, 1), (7, 5), (2, 3), (1, 8)], F32: [(8, 1), (15, 5), (10, 3), (8, 8)]}


def alone(plan: ProductPlan) -> ProductPlan:
    """The library at any number of rows, with nothing behind it: what the library does not compute is an error."""
    return replace(by_library(plan), variants=(replace(plan.variants[-1], min_m=0, max_m=0),))


def before_one_kernel(plan: ProductPlan) -> ProductPlan:
    """The library at any number of rows, and one kernel that takes anything behind it."""
    return replace(by_library(plan), variants=plan.variants[-1:])


def optimized(
    model: onnx.ModelProto, way: Callable[[ProductPlan], ProductPlan] = alone, sites: int | None = 1
) -> onnx.ModelProto:
    analysis = analyse_model(model, resolve("native", local_architectures))
    assert sites is None or len(analysis.sites) == sites, analysis.skipped
    assert all(plan.library for site in analysis.sites for plan in site.plans)
    forced = tuple(
        replace(site, strategy=Strategy.ONE_KERNEL, plans=tuple(map(way, site.plans))) for site in analysis.sites
    )
    fused, report = optimize_model(replace(analysis, sites=forced))
    assert all("cuBLASLt + epilogue" in site.kernel for site in report.fused)
    return fused


def live_session(fused: onnx.ModelProto, folder: Path, **options: str):
    path = folder / "fused.onnx"
    onnx.save(fused, path)
    return onnxfuse.InferenceSession(path, providers=[("CUDAExecutionProvider", options)])


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_it_computes_every_type_and_order(tmp_path: Path, dtype: int, order: str, parts: int) -> None:
    for k, n in SIZES:
        model = gate_model(dtype, order, parts, k, n)
        check(tmp_path, model, optimized(model), dtype, (k, n))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("order", ["kn", "nk"])
def test_what_it_refuses_the_kernels_behind_compute(tmp_path: Path, dtype: int, order: str) -> None:
    for k, n in TINY[dtype]:
        model = gate_model(dtype, order, 2, k, n)
        check(tmp_path, model, optimized(model, before_one_kernel), dtype, (k, n))


def dual_model(dtype: int, k: int, n: int) -> onnx.ModelProto:
    """SwiGLU of two weights, with a residual, of [batch, tokens]."""
    rng = np.random.default_rng([k, n])
    b = Builder(dtype)
    x, residual = b.input("x", ("b", "t", k)), b.input("residual", ("b", "t", n))
    gate, up = (b("MatMul", x, b.array(rng.standard_normal((k, n)) / np.sqrt(k), name)) for name in ("gate", "up"))
    return b.model(b("Add", b("Mul", b("Mul", gate, b("Sigmoid", gate)), up), residual))


def scores_model(dtype: int, depth: int) -> onnx.ModelProto:
    """Attention's scores: an rhs of each batch and head, behind it a scale and a mask."""
    b = Builder(dtype)
    q, k = b.input("q", ("b", 3, "m", depth)), b.input("keys", ("b", 3, "n", depth))
    scores = b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2)))
    return b.model(b("Add", b("Mul", scores, b.array(0.125)), b.input("mask", ("b", 1, "m", "n"))))


def transposed_model(dtype: int, k: int, n: int) -> onnx.ModelProto:
    """Lhs [k, m]."""
    b = Builder(dtype)
    weight = b.array(np.random.default_rng([k, n]).standard_normal((k, n)) / np.sqrt(k), "weight")
    return b.model(b("Tanh", b("MatMul", b("Transpose", b.input("x", (k, "m")), perm=(1, 0)), weight)))


MODELS = {
    "dual 72 x 136": (lambda dtype: dual_model(dtype, 72, 136), ({"b": 2, "t": 77}, {"b": 1, "t": 1})),
    "dual 321 x 1283": (lambda dtype: dual_model(dtype, 321, 1283), ({"b": 2, "t": 77}, {"b": 1, "t": 514})),
    "scores of 64": (lambda dtype: scores_model(dtype, 64), ({"b": 2, "m": 77, "n": 77}, {"b": 1, "m": 130, "n": 65})),
    "scores of 33": (lambda dtype: scores_model(dtype, 33), ({"b": 2, "m": 5, "n": 1}, {"b": 5, "m": 1, "n": 200})),
    "transposed": (lambda dtype: transposed_model(dtype, 72, 40), ({"m": 77}, {"m": 128}, {"m": 1})),
}  # fmt: skip


def feed_of(model: onnx.ModelProto, sizes: dict[str, int], dtype: type) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(model.graph.node))
    made: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        made[value.name] = rng.standard_normal(shape).astype(dtype)
    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_it_computes_dual_weights_batches_and_transposed_inputs(tmp_path: Path, dtype: int, name: str) -> None:
    """The reference is the same model in fp32 on the CPU, of inputs and weights of the model's type."""
    build, all_sizes = MODELS[name]
    model, exact = build(dtype), build(F32)
    for given, wide in zip(model.graph.initializer, exact.graph.initializer, strict=True):
        wide.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(given).astype(np.float32), wide.name))
    live = live_session(optimized(model), tmp_path)
    for sizes in all_sizes:
        feed = feed_of(model, sizes, np.float16 if dtype == F16 else np.float32)
        (expected,) = run_values(
            exact, [exact.graph.output[0].name], {key: value.astype(np.float32) for key, value in feed.items()}
        )
        (actual,) = live.run(None, feed)
        assert actual.shape == expected.shape
        epsilon = EPSILON[F16] if dtype == F16 else TF32_EPSILON
        bound = 2 * ULPS * epsilon * max(1.0, np.abs(expected).max())
        assert np.abs(as_float64(actual) - expected).max() <= bound, sizes


def chain(dtype: int, sites: int, k: int) -> onnx.ModelProto:
    """Gates one behind the other, of odd width: the scratch memory of one is that of the next."""
    rng = np.random.default_rng(k)
    b = Builder(dtype)
    t = b.input("x", ("m", k))
    for index in range(sites):
        h = b("MatMul", t, b.array(rng.standard_normal((k, 2 * k)) / np.sqrt(k), f"w{index}"))
        h = b("Add", h, b.array(rng.standard_normal(2 * k), f"b{index}"))
        first, second = b("Split", h, outputs=2, axis=1, num_outputs=2)
        t = b("Mul", first, b("Sigmoid", second))
    return b.model(t)


@pytest.mark.parametrize("k", [136, 331])
def test_captured_graphs_replay_it(tmp_path: Path, k: int) -> None:
    fused = optimized(chain(F16, 6, k), sites=6)
    inputs = [np.random.default_rng(seed).standard_normal((154, k)).astype(np.float16) for seed in range(4)]
    check_replays(live_session(fused, tmp_path), live_session(fused, tmp_path, enable_cuda_graph="1"), inputs)


def test_a_captured_graph_and_plain_runs_of_other_sizes_take_turns(tmp_path: Path) -> None:
    """Scratch memory that a graph has captured is the arena's again: what runs between replays may lie there."""
    import onnxruntime

    fused = optimized(chain(F16, 3, 136), sites=3)
    live = live_session(fused, tmp_path, enable_cuda_graph="1")
    plain = live_session(fused, tmp_path)
    options = {}
    for graph, rows in ((1, 154), (2, 300), (3, 77)):
        x = np.random.default_rng(rows).standard_normal((rows, 136)).astype(np.float16)
        binding = live.io_binding()
        binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
        out = onnxruntime.OrtValue.ortvalue_from_shape_and_type([rows, 136], np.float16, "cuda", 0)
        binding.bind_ortvalue_output(live.get_outputs()[0].name, out)
        run = onnxruntime.RunOptions()
        run.add_run_config_entry("gpu_graph_id", str(graph))
        options[graph] = (binding, run, out, plain.run(None, {"x": x})[0])
    for graph in (1, 2, 3, 1, 1, 2, 3, 3, 2, 1):
        binding, run, out, expected = options[graph]
        live.run_with_iobinding(binding, run)
        np.testing.assert_array_equal(out.numpy(), expected)


def test_threads_share_a_session_and_a_library(tmp_path: Path) -> None:
    """Runs at the same time have streams of their own, and no scratch memory in common."""
    first = live_session(optimized(chain(F16, 4, 331), sites=4), tmp_path)
    second = live_session(optimized(chain(F16, 3, 264), sites=3), tmp_path)
    problems = [(live, k, m) for live, k in ((first, 331), (second, 264)) for m in (1, 17, 64, 300, 1000)]
    inputs = [np.random.default_rng(m * k).standard_normal((m, k)).astype(np.float16) for _, k, m in problems]
    check_threads([(live, x) for (live, _, _), x in zip(problems, inputs, strict=True)])


def test_it_runs_on_the_users_stream(tmp_path: Path) -> None:
    import cupy

    fused = optimized(chain(F16, 3, 331), sites=3)
    x = np.random.default_rng(0).standard_normal((154, 331)).astype(np.float16)
    expected = live_session(fused, tmp_path).run(None, {"x": x})[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    live = live_session(fused, tmp_path, user_compute_stream=str(stream.ptr))
    for _ in range(3):
        np.testing.assert_array_equal(live.run(None, {"x": x})[0], expected)


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_it_is_told_of_misaligned_pointers(tmp_path: Path, dtype: int, offset: int) -> None:
    import cupy

    kind = np.float16 if dtype == F16 else np.float32
    live = live_session(optimized(gate_model(dtype, "kn", 2, 320, 640), before_one_kernel), tmp_path)
    x = cupy.random.standard_normal(64 * 320 + offset).astype(kind)[offset:].reshape(64, 320)
    expected = live.run(None, {"x": x.get()})[0]
    binding = live.io_binding()
    binding.bind_input("x", "cuda", 0, kind, [64, 320], x.data.ptr)
    binding.bind_output(live.get_outputs()[0].name, "cpu")
    live.run_with_iobinding(binding)
    actual = binding.get_outputs()[0].numpy()
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), rtol=4e-3, atol=4e-3)


def test_scratch_memory_goes_back(tmp_path: Path) -> None:
    """More runs take no more of the device, whatever their sizes.

    Other processes may use the same device: what leaks here grows from each time to the next, and what they take comes
    once.
    """
    import cupy

    live = live_session(optimized(chain(F16, 4, 331), sites=4), tmp_path)
    inputs = [np.ones((m, 331), np.float16) for m in (1000, 1, 77, 300, 640)]

    def free_after(rounds: int) -> int:
        for _ in range(rounds):
            for x in inputs:
                live.run(None, {"x": x})
        return int(cupy.cuda.runtime.memGetInfo()[0])

    free = [free_after(rounds) for rounds in (3, 40, 40, 40)]
    assert min(before - after for before, after in itertools.pairwise(free)) < 8 << 20


def test_every_gpu_has_a_library_of_its_own(tmp_path: Path) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    fused = optimized(chain(F16, 3, 331), sites=3)
    x = np.random.default_rng(0).standard_normal((154, 331)).astype(np.float16)
    sessions = [live_session(fused, tmp_path, device_id=str(device)) for device in (0, 1)]
    expected = sessions[0].run(None, {"x": x})[0].tobytes()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda index: sessions[index % 2].run(None, {"x": x})[0].tobytes() == expected, range(100)))


def test_a_plan_that_mixes_ways_agrees_with_stock_at_their_borders(tmp_path: Path) -> None:
    """As the cost model plans an odd width, with the rows on either side of each range's ends."""
    model = gate_model(F16, "kn", 2, 771, 1283)
    analysis = analyse_model(model, resolve("native", local_architectures))
    (site,) = analysis.sites
    (plan,) = site.plans
    if not plan.library_rows:
        pytest.skip("nothing is known of the library on this GPU")
    chosen = replace(analysis, sites=(replace(site, strategy=Strategy.ONE_KERNEL),))
    live, stock = (
        live_session(optimize_model(chosen)[0], tmp_path),
        session(model, tmp_path / "stock.onnx", fused=False),
    )
    rows = {m for low, high in plan.library_rows for m in (low - 1, low, low + 1, high - 1, high, high + 1)}
    for m in sorted(each for each in rows if 1 <= each <= 5000):
        x = np.random.default_rng(m).standard_normal((m, 771)).astype(np.float16)
        (actual,), (expected,) = live.run(None, {"x": x}), stock.run(None, {"x": x})
        np.testing.assert_allclose(as_float64(actual), as_float64(expected), rtol=1e-2, atol=1e-2)
