"""Features of ONNX Runtime with fused nodes in a CUDA session: each gives the bits of an ordinary run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.runtime.driver import device_count
from tests.gpu.test_ort_session import F16, gate_model

pytestmark = pytest.mark.gpu

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
K, N = 320, 640


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "fused.onnx"
    onnx.save(onnxfuse.optimize(gate_model(F16, "kn", 2, K, N), arch="native")[0], path)
    return path


def rows(m: int) -> np.ndarray:
    return np.random.default_rng(m).standard_normal((m, K)).astype(np.float16)


def open_session(path: Path, provider: dict[str, str] | None = None, **options: object):
    import onnxruntime

    made = onnxruntime.SessionOptions()
    made.log_severity_level = 3
    for name, value in options.items():
        setattr(made, name, value)
    session = onnxfuse.InferenceSession(path, made, providers=[(CUDA, provider or {}), CPU])
    assert session.get_providers()[0] == CUDA
    return session


@pytest.fixture(scope="module")
def expected(fused: Path) -> dict[int, bytes]:
    session = open_session(fused)
    return {m: session.run(None, {"x": rows(m)})[0].tobytes() for m in (1, 17, 64, 300, 1000)}


def all_bits(session, sizes) -> dict[int, bytes]:
    return {m: session.run(None, {"x": rows(m)})[0].tobytes() for m in sizes}


def test_bound_inputs_and_outputs_stay_on_the_device(fused: Path, expected: dict[int, bytes]) -> None:
    import onnxruntime

    session = open_session(fused)
    name = session.get_outputs()[0].name
    for m, wanted in expected.items():
        out = onnxruntime.OrtValue.ortvalue_from_shape_and_type([m, N], np.float16, "cuda", 0)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(rows(m), "cuda", 0))
        binding.bind_ortvalue_output(name, out)
        session.run_with_iobinding(binding)
        assert binding.get_outputs()[0].data_ptr() == out.data_ptr()
        assert out.numpy().tobytes() == wanted


def test_several_sessions_and_threads(fused: Path, expected: dict[int, bytes]) -> None:
    sessions = [open_session(fused) for _ in range(3)]
    sizes = list(expected)

    def right(index: int) -> bool:
        m = sizes[index % len(sizes)]
        return sessions[index % 3].run(None, {"x": rows(m)})[0].tobytes() == expected[m]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(120)))


def test_a_stream_of_the_users_carries_the_kernel(fused: Path, expected: dict[int, bytes]) -> None:
    """Work on the same stream before and behind the run needs no wait: it is in the stream's order."""
    import cupy
    import onnxruntime

    stream = cupy.cuda.Stream(non_blocking=True)
    session = open_session(fused, {"user_compute_stream": str(stream.ptr)})
    name = session.get_outputs()[0].name
    quick = onnxruntime.RunOptions()
    quick.add_run_config_entry("disable_synchronize_execution_providers", "1")
    with stream:
        for m, wanted in expected.items():
            source = cupy.asarray(rows(m))
            x, out, copy = (cupy.zeros(shape, cupy.float16) for shape in ((m, K), (m, N), (m, N)))
            binding = session.io_binding()
            binding.bind_input("x", "cuda", 0, np.float16, [m, K], x.data.ptr)
            binding.bind_output(name, "cuda", 0, np.float16, [m, N], out.data.ptr)
            session.run_with_iobinding(binding)
            stream.synchronize()
            out.fill(0)
            x[...] = source
            session.run_with_iobinding(binding, quick)
            copy[...] = out
            stream.synchronize()
            assert copy.get().tobytes() == wanted


def test_the_second_gpu_of_a_process(fused: Path, expected: dict[int, bytes]) -> None:
    if device_count() < 2:
        pytest.skip("one GPU")
    sessions = [open_session(fused, {"device_id": str(index)}) for index in range(2)]

    def right(index: int) -> bool:
        m = list(expected)[index % len(expected)]
        return sessions[index % 2].run(None, {"x": rows(m)})[0].tobytes() == expected[m]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(40)))


@pytest.mark.parametrize("strategy", ["kNextPowerOfTwo", "kSameAsRequested"])
def test_an_arena_with_a_limit(fused: Path, expected: dict[int, bytes], strategy: str) -> None:
    limits = {"gpu_mem_limit": str(64 << 20), "arena_extend_strategy": strategy}
    assert all_bits(open_session(fused, limits), expected) == expected


@pytest.mark.parametrize("on", [True, False])
def test_memory_patterns(fused: Path, expected: dict[int, bytes], on: bool) -> None:
    session = open_session(fused, enable_mem_pattern=on)
    for _ in range(2):
        assert all_bits(session, expected) == expected


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_a_saved_optimised_model_is_still_fused(
    fused: Path, expected: dict[int, bytes], level: str, tmp_path: Path
) -> None:
    import onnxruntime

    saved = tmp_path / "saved.onnx"
    chosen = getattr(onnxruntime.GraphOptimizationLevel, level)
    open_session(fused, optimized_model_filepath=str(saved), graph_optimization_level=chosen)
    assert [node.op_type for node in onnx.load(saved).graph.node if node.domain == "onnxfuse"] == ["FusedGemm_0"]
    assert all_bits(open_session(saved), expected) == expected


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_settings_of_ep_context_are_left_as_they_are(
    fused: Path, expected: dict[int, bytes], enabled: str, tmp_path: Path
) -> None:
    """CUDA compiles nothing into a context, so with it enabled the fused nodes run as ever."""
    import onnxruntime

    entries = {"ep.context_enable": enabled, "ep.context_embed_mode": "1"}
    entries["ep.context_file_path"] = str(tmp_path / "context.onnx")
    options = onnxruntime.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = onnxfuse.InferenceSession(fused, options, providers=[CUDA, CPU])
    assert {key: options.get_session_config_entry(key) for key in entries} == entries
    assert all_bits(session, expected) == expected
