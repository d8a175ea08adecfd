"""Features of ONNX Runtime that a fused model must leave as they are, with its fallback functions on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfuse
from onnxfuse.runtime.session import CPU

MODEL = Path(__file__).parents[2] / "models" / "unet_block.onnx"


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "fused.onnx"
    onnx.save(onnxfuse.optimize(MODEL, arch="ptx")[0], path)
    return path


def feed(rows: int = 16, text: int = 7) -> dict[str, np.ndarray]:
    random = np.random.default_rng([rows, text])
    shapes = {"hidden_states": (2, rows, 96), "encoder_hidden_states": (2, text, 64)}
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def options(**attributes: object) -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 3
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def bits(path: Path, settings: onnxruntime.SessionOptions, *feeds: dict[str, np.ndarray]) -> list[bytes]:
    session = onnxfuse.InferenceSession(path, settings, providers=[CPU])
    return [session.run(None, each)[0].tobytes() for each in feeds or (feed(),)]


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
def test_a_saved_optimised_model_has_the_same_bits(fused: Path, level: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.onnx"
    chosen = getattr(onnxruntime.GraphOptimizationLevel, level)
    first = bits(fused, options(optimized_model_filepath=str(saved), graph_optimization_level=chosen))
    assert saved.stat().st_size > 0
    off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert bits(saved, options(graph_optimization_level=off)) == first


def test_memory_patterns_change_nothing(fused: Path) -> None:
    feeds = [feed(rows, text) for rows, text in [(16, 7), (1, 1), (16, 7), (50, 3)]]
    assert bits(fused, options(enable_mem_pattern=False), *feeds) == bits(fused, options(), *feeds)


def test_the_cpu_arena_may_be_off(fused: Path) -> None:
    assert bits(fused, options(enable_cpu_mem_arena=False)) == bits(fused, options())


def test_settings_of_the_session_are_left_as_they_are(fused: Path) -> None:
    """EP context among them: what other providers compile is written and read as without this project."""
    entries = {"ep.context_enable": "0", "ep.context_embed_mode": "1", "session.use_env_allocators": "0"}
    settings = options()
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    bits(fused, settings)
    assert {key: settings.get_session_config_entry(key) for key in entries} == entries


@pytest.mark.parametrize("embedded", ["0", "1"])
def test_writing_ep_contexts_changes_nothing_where_nothing_is_compiled(
    fused: Path, embedded: str, tmp_path: Path
) -> None:
    settings, expected = options(), bits(fused, options())
    for key, value in {"enable": "1", "embed_mode": embedded, "file_path": str(tmp_path / "context.onnx")}.items():
        settings.add_session_config_entry(f"ep.context_{key}", value)
    assert bits(fused, settings) == expected
    assert not list(tmp_path.iterdir())


def test_a_model_compiled_by_onnx_runtime_has_the_same_bits(fused: Path, tmp_path: Path) -> None:
    """The CPU compiles nothing, so what is written has the nodes that ran: those of the fallback functions."""
    settings = options()
    onnxfuse.register(settings)
    onnxruntime.ModelCompiler(settings, str(fused)).compile_to_file(str(tmp_path / "compiled.onnx"))
    assert bits(tmp_path / "compiled.onnx", options()) == bits(fused, options())


def test_several_sessions_and_threads(fused: Path) -> None:
    sessions = [onnxfuse.InferenceSession(fused, options(), providers=[CPU]) for _ in range(2)]
    feeds = [feed(rows) for rows in (1, 5, 16, 33)]
    expected = bits(fused, options(), *feeds)

    def right(index: int) -> bool:
        case = index % len(feeds)
        return sessions[index % 2].run(None, feeds[case])[0].tobytes() == expected[case]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(40)))
