"""The fused kernels inside an ONNX Runtime CUDA session: right for every dtype, layout, number of parts and shape.

The bound is derived: an output's error against float64 may be twice what the unfused model's own kernels make of the
same input, or four units in the last place of the output's type at the output's magnitude, whichever is larger.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.patterns import is_anchor, match_site
from onnxfuse.pipeline import Fp32
from tests.gpu.sessions import check_replays, check_threads
from tests.helpers.onnx_build import Builder
from tests.helpers.reference_fusion import evaluate

pytestmark = pytest.mark.gpu

F32, F16, BF16 = 1, 10, 16
ULPS = 4
EPSILON = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}
TF32_EPSILON = 2.0**-10

# (k, columns of one part): odd and tiny ones, and those of the SD1.5 UNet.
SIZES = [
    (1, 1), (1, 8), (2, 3), (3, 7), (7, 5), (8, 8), (13, 17), (16, 16), (31, 33), (32, 32), (64, 24), (65, 64),
    (72, 40), (96, 136), (127, 129), (128, 128), (130, 66), (248, 136), (249, 136), (248, 137), (320, 1280), (640, 60),
    (1280, 328),
]  # fmt: skip
ROWS = [1, 2, 3, 5, 16, 17, 63, 64, 100, 128, 129, 505, 1000]  # m changes from run to run


def as_float64(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).astype(np.float64)


def gate_model(dtype: int, order: str, parts: int, k: int, n: int) -> onnx.ModelProto:
    rng = np.random.default_rng([dtype, parts, k, n])
    b = Builder(dtype)
    x = b.input("x", ("m", k))
    weight = rng.standard_normal((k, parts * n)) / np.sqrt(k)
    bias = b.array(rng.standard_normal(parts * n), "bias")
    if order == "kn":
        t = b("Add", b("MatMul", x, b.array(weight, "weight")), bias)
    else:
        t = b("Gemm", x, b.array(weight.T, "weight"), bias, transB=1)
    if parts == 1:
        return b.model(b("Mul", t, b("Sigmoid", t)))
    ranges = b("Split", t, outputs=parts, axis=1, num_outputs=parts)
    value = b("Mul", ranges[0], b("Sigmoid", ranges[1]))
    return b.model(value if parts == 2 else b("Add", value, b("Tanh", ranges[2])))


def session(model: onnx.ModelProto, path: Path, fused: bool):
    import onnxruntime

    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    if fused:
        return onnxfuse.InferenceSession(path, options, providers=providers)
    return onnxruntime.InferenceSession(path, options, providers=providers)


def run_cuda(live, x: np.ndarray, dtype: int, **beside: np.ndarray) -> np.ndarray:
    """Run through IO binding, with inputs beside x by name: bfloat16 arrays have no other way in and out."""
    import onnxruntime

    binding = live.io_binding()
    for name, array in {"x": x, **beside}.items():
        raw = np.ascontiguousarray(array.view(np.uint16) if dtype == BF16 else array)
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, dtype)
        binding.bind_ortvalue_input(name, value)
    out = live.get_outputs()[0].name
    binding.bind_output(out, "cpu")
    live.run_with_iobinding(binding)
    result = binding.get_outputs()[0]
    if dtype != BF16:
        return as_float64(result.numpy())
    shape = result.shape()
    bits = memoryview((ctypes.c_uint16 * int(np.prod(shape))).from_address(result.data_ptr()))
    return as_float64(np.frombuffer(bits, ml_dtypes.bfloat16).reshape(shape).copy())


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("fp32", ["tf32", "exact"])
def test_every_shape_in_a_session(tmp_path: Path, dtype: int, order: str, parts: int, fp32: Fp32) -> None:
    if fp32 == "exact" and dtype != F32:
        pytest.skip("the fp32 mode concerns fp32 models only")
    for k, n in SIZES:
        check_sizes(tmp_path, dtype, order, parts, fp32, k, n)


def check_sizes(tmp_path: Path, dtype: int, order: str, parts: int, fp32: Fp32, k: int, n: int) -> None:
    model = gate_model(dtype, order, parts, k, n)
    fused, report = onnxfuse.optimize(model, arch="native", fp32=fp32, keep_weights=True)
    assert len(report.fused) == 1
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    stock = session(model, tmp_path / "stock.onnx", fused=False) if dtype != BF16 else None
    graph = Graph(load_model(model))
    _, fusion = match_site(graph, next(node for node in graph.nodes if is_anchor(graph, node)))
    stored = {tensor.name: as_float64(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer
              if tensor.name in ("weight", "bias")}  # fmt: skip
    rng = np.random.default_rng(k * n)
    for m in ROWS:
        x = rng.standard_normal((m, k)).astype(helper.tensor_dtype_to_np_dtype(dtype))
        (expected,) = evaluate(fusion, stored | {"x": as_float64(x)})
        error = np.abs(run_cuda(live, x, dtype) - expected)
        assert np.isfinite(error).all(), f"m={m} k={k} n={n}: {np.isnan(error).sum()} outputs are not numbers"
        bound = ULPS * EPSILON[dtype] * max(1.0, np.abs(expected).max())
        if stock is not None:
            own = np.abs(run_cuda(stock, x, dtype) - expected)
            bound = max(bound, 2 * own.max())
        if dtype == F32 and fp32 == "tf32":
            # ONNX Runtime takes fp32 paths of its own for tiny shapes; TF32's rounding of both factors bounds ours.
            bound = max(bound, ULPS * TF32_EPSILON * max(1.0, np.abs(expected).max()))
        assert error.max() <= bound, f"m={m} k={k} n={n}: error {error.max():.3g} over {bound:.3g}"


# Batches that lie apart in an input, or that it lacks: heads as Flax leaves them, keys and queries of all batches, a
# weight of each head. Then the shapes of both inputs.
BATCHES: dict[str, tuple[tuple[int | str, ...], tuple[int | str, ...]]] = {
    "bqhd,bkhd->bhqk": (("b", "q", 3, 64), ("b", "k", 3, 64)),
    "bhqk,bkhd->bqhd": (("b", 3, "q", "k"), ("b", "k", 3, 64)),
    "bhqd,hkd->bhqk": (("b", 3, "q", 64), (3, "k", 64)),
    "hqd,bhkd->bhqk": ((3, "q", 64), ("b", 3, "k", 64)),
    "bthd,hde->bthe": (("b", "q", 3, 64), (3, 64, 72)),
}


@pytest.mark.parametrize("equation", BATCHES)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_batches_that_lie_apart(tmp_path: Path, dtype: int, equation: str) -> None:
    b = Builder(dtype)
    lhs, rhs = (b.input(name, shape) for name, shape in zip("xy", BATCHES[equation], strict=True))
    model = b.model(b("Tanh", b("Mul", b("Einsum", lhs, rhs, equation=equation), b.array(0.125))))
    fused, report = onnxfuse.optimize(model, arch="native", fp32="exact")
    assert len(report.fused) == 1, report
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    rng = np.random.default_rng(0)
    for sizes in (
        {"b": 2, "q": 130, "k": 72},
        {"b": 1, "q": 16, "k": 8},
        {"b": 5, "q": 1, "k": 200},
        {"b": 3, "q": 77, "k": 77},
    ):
        x, y = (
            rng.standard_normal([size if isinstance(size, int) else sizes[size] for size in shape]).astype(b.numpy)
            for shape in BATCHES[equation]
        )
        expected = np.tanh(0.125 * np.einsum(equation, as_float64(x), as_float64(y)))
        (result,) = live.run(None, {"x": x, "y": y})
        error = np.abs(as_float64(result) - expected).max()
        # Exact fp32 errs by units of the sum of magnitudes, sixteen bits by units of the result.
        magnitude = 0.125 * np.einsum(equation, np.abs(as_float64(x)), np.abs(as_float64(y))).max()
        assert error <= ULPS * (EPSILON[F32] * magnitude + EPSILON[dtype]), (sizes, error)


def test_eight_threads_share_a_session(tmp_path: Path) -> None:
    model = gate_model(F16, "kn", 2, 320, 640)
    fused, _ = onnxfuse.optimize(model, arch="native")
    live = session(fused, tmp_path / "fused.onnx", fused=True)
    inputs = [np.random.default_rng(m).standard_normal((m, 320)).astype(np.float16) for m in (1, 17, 64, 300, 1000)]
    check_threads([(live, x) for x in inputs], 200)


def test_cuda_graph_capture_and_replay(tmp_path: Path) -> None:
    model = gate_model(F16, "kn", 2, 320, 640)
    fused, _ = onnxfuse.optimize(model, arch="native")
    path = tmp_path / "fused.onnx"
    onnx.save(fused, path)
    live = onnxfuse.InferenceSession(path, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])
    plain = onnxfuse.InferenceSession(path, providers=["CUDAExecutionProvider"])
    rng = np.random.default_rng(0)
    check_replays(plain, live, [rng.standard_normal((128, 320)).astype(np.float16) for _ in range(2)], (0, 0, 1))


def test_a_misaligned_pointer_takes_the_narrow_kernel(tmp_path: Path) -> None:
    import cupy

    model = gate_model(F16, "kn", 2, 320, 640)
    fused, _ = onnxfuse.optimize(model, arch="native")
    path = tmp_path / "fused.onnx"
    onnx.save(fused, path)
    live = onnxfuse.InferenceSession(path, providers=["CUDAExecutionProvider"])
    x = cupy.random.standard_normal(64 * 320 + 1).astype(cupy.float16)[1:].reshape(64, 320)
    expected = live.run(None, {"x": x.get()})[0]
    binding = live.io_binding()
    binding.bind_input("x", "cuda", 0, np.float16, [64, 320], x.data.ptr)
    binding.bind_output(live.get_outputs()[0].name, "cpu")
    live.run_with_iobinding(binding)
    actual = binding.get_outputs()[0].numpy()
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=2e-3)


def test_a_model_without_this_gpus_kernels_says_what_to_do(tmp_path: Path) -> None:
    fused, _ = onnxfuse.optimize(gate_model(F16, "kn", 2, 64, 64), arch="sm_120")
    onnx.save(fused, tmp_path / "fused.onnx")
    with pytest.raises(Exception, match=r"sm_120.*--arch") as caught:
        onnxfuse.InferenceSession(tmp_path / "fused.onnx", providers=["CUDAExecutionProvider"])
    assert "FusedGemm" in str(caught.value)
