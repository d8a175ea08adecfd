"""Faults at run time in a CUDA session: an error names the node, the session still runs, nothing is out of bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxfuse
from onnxfuse.graph.archive import pack, unpack
from tests.gpu.test_ort_session import F16, F32, gate_model, run_cuda, session

pytestmark = pytest.mark.gpu

K, N = 72, 136  # neither fills its last tile
NUMPY = {F32: np.float32, F16: np.float16}


def fused(dtype: int, k: int, n: int, parts: int = 2, order: str = "kn") -> onnx.ModelProto:
    model, report = onnxfuse.optimize(gate_model(dtype, order, parts, k, n), arch="native", keep_weights=True)
    assert report.fused
    return model


def rows(m: int, k: int, dtype: int) -> np.ndarray:
    return np.random.default_rng(m).standard_normal((m, k)).astype(NUMPY[dtype])


@pytest.mark.parametrize("m", [1, 7, 16, 17, 100, 500])
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("order", ["kn", "nk"])
def test_a_nan_stays_in_its_row(tmp_path: Path, order: str, dtype: int, m: int) -> None:
    live = session(fused(dtype, K, N, order=order), tmp_path / "fused.onnx", fused=True)
    x = rows(m, K, dtype)
    clean = run_cuda(live, x, dtype)
    assert np.isfinite(clean).all()
    bad = m // 2
    x[bad, K - 1] = np.nan
    result = run_cuda(live, x, dtype)
    assert np.isnan(result[bad]).all()
    others = np.arange(m) != bad
    np.testing.assert_array_equal(result[others], clean[others])


@pytest.mark.parametrize("m", [1, 16, 17, 100])
def test_an_infinity_gives_what_the_arithmetic_of_floats_gives(tmp_path: Path, m: int) -> None:
    """`inf * w` is an infinity of w's sign; behind the gate `-inf` closes it: `inf * 0` is a NaN."""
    model = gate_model(F32, "kn", 2, K, N)
    weight = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "weight")
    live = session(onnxfuse.optimize(model, arch="native")[0], tmp_path / "fused.onnx", fused=True)
    x = rows(m, K, F32)
    x[m - 1, 3] = np.inf
    product = np.where(weight[3] > 0, np.inf, -np.inf)
    with np.errstate(all="ignore"):
        expected = product[:N] * (product[N:] > 0)
    np.testing.assert_array_equal(run_cuda(live, x, F32)[m - 1], expected)


def test_an_empty_input_makes_an_empty_output(tmp_path: Path) -> None:
    live = session(fused(F16, K, N), tmp_path / "fused.onnx", fused=True)
    (out,) = live.run(None, {"x": np.zeros((0, K), np.float16)})
    assert out.shape == (0, N)
    assert np.isfinite(run_cuda(live, rows(5, K, F16), F16)).all()


def test_memory_that_runs_out_is_an_error_of_the_node(tmp_path: Path) -> None:
    """64 MiB of arena hold the model and a small run, and not an output of 512 MiB."""
    import onnxruntime

    path = tmp_path / "fused.onnx"
    onnx.save(fused(F16, 8, 4096), path)
    options = {"gpu_mem_limit": str(64 << 20), "arena_extend_strategy": "kSameAsRequested"}
    live = onnxfuse.InferenceSession(path, providers=[("CUDAExecutionProvider", options)])

    def run(m: int) -> np.ndarray:
        binding = live.io_binding()
        binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(rows(m, 8, F16), "cuda", 0))
        binding.bind_output(live.get_outputs()[0].name, "cuda")
        live.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    before = run(100)
    for _ in range(3):
        with pytest.raises(Exception, match=r"FusedGemm"):
            run(65536)
        np.testing.assert_array_equal(run(100), before)


@pytest.mark.parametrize("n", [32768, 32760, 32767])
def test_outputs_of_more_than_two_to_the_31_elements(tmp_path: Path, n: int) -> None:
    """The first and the last rows are those of a run of their own: offsets have 64 bits in every kernel."""
    m, k = 70_000, 8
    assert m * n > 2**31
    live = session(fused(F16, k, n, parts=1), tmp_path / "fused.onnx", fused=True)
    x = rows(m, k, F16)
    whole = live.run(None, {"x": x})[0]
    for part in (slice(0, 300), slice(m // 2, m // 2 + 300), slice(m - 300, m)):
        alone = live.run(None, {"x": x[part]})[0]
        np.testing.assert_allclose(whole[part].astype(np.float32), alone.astype(np.float32), rtol=4e-3, atol=4e-3)


def cut(image: bytes) -> bytes:
    return image[: len(image) // 2]


def emptied(image: bytes) -> bytes:
    return bytes(len(image))


@pytest.mark.parametrize("damage", [cut, emptied])
def test_an_altered_image_behind_a_right_checksum_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    model = fused(F16, K, N)
    (archive,) = (tensor for tensor in model.graph.initializer if tensor.raw_data.startswith(b"onnxfuse"))
    intact = archive.raw_data
    live = session(model, tmp_path / "intact.onnx", fused=True)
    expected = run_cuda(live, rows(5, K, F16), F16)
    records = [dataclasses.replace(record, image=damage(record.image)) for record in unpack(intact)]
    archive.raw_data = pack(records)
    archive.dims[0] = len(archive.raw_data)
    with pytest.raises(Exception, match=r"FusedGemm|node '"):
        session(model, tmp_path / "altered.onnx", fused=True).run(None, {"x": rows(5, K, F16)})
    np.testing.assert_array_equal(run_cuda(live, rows(5, K, F16), F16), expected)


@pytest.mark.parametrize("columns", [K - 1, K + 1, 0])
def test_an_input_that_does_not_fit_leaves_the_session_usable(tmp_path: Path, columns: int) -> None:
    model = onnxfuse.optimize(gate_model(F16, "kn", 2, K, N), arch="native")[0]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "any"
    live = session(model, tmp_path / "fused.onnx", fused=True)
    expected = run_cuda(live, rows(5, K, F16), F16)
    with pytest.raises(Exception, match="FusedGemm"):
        live.run(None, {"x": np.zeros((5, columns), np.float16)})
    np.testing.assert_array_equal(run_cuda(live, rows(5, K, F16), F16), expected)
