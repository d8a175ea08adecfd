"""Sessions: when the bridge is registered, when it is not, and what is said when something is missing. No GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.runtime import driver, session
from onnxfuse.runtime.session import CPU, CUDA

MODEL = Path(__file__).parents[2] / "models" / "ff_geglu.onnx"


class Options:
    """Stands for onnxruntime.SessionOptions, and counts registrations."""

    def __init__(self, error: Exception | None = None) -> None:
        self.libraries: list[str] = []
        self.entries: dict[str, str] = {}
        self.error = error

    def register_custom_ops_library(self, path: str) -> None:
        if self.error:
            raise self.error
        self.libraries.append(path)

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        if key not in self.entries:
            raise RuntimeError(f"no configuration with key {key}")
        return self.entries[key]


class Runtime(SimpleNamespace):
    """Stands for an onnxruntime that has the CUDA provider."""

    SessionOptions = Options

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(preloaded=0, calls=[], error=error)

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def preload_dlls(self) -> None:
        self.preloaded += 1

    def InferenceSession(self, path, options, providers, provider_options, **kwargs):  # noqa: N802
        self.calls.append((path, options, list(providers)))
        if self.error:
            raise self.error
        return "session"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "_bridge" / "libonnxfuse.so"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(session, "_package_folders", lambda: [tmp_path / "sources", tmp_path])
    return path.resolve()


def with_runtime(monkeypatch: pytest.MonkeyPatch, devices: int, error: Exception | None = None) -> Runtime:
    runtime = Runtime(error)
    monkeypatch.setattr(session, "onnxruntime", lambda: runtime)
    monkeypatch.setattr(driver, "device_count", lambda: devices)
    return runtime


def test_the_library_is_found_beside_the_installed_package(library: Path) -> None:
    assert session.library_path() == str(library)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_package_folders", lambda: [tmp_path])
    with pytest.raises(DeviceError, match=r"pip install \."):
        session.library_path()


def test_registering_twice_registers_once(library: Path) -> None:
    options = Options()
    session.register(options)
    session.register(options)
    assert options.libraries == [str(library)]


def test_a_library_that_does_not_load_is_named(library: Path) -> None:
    with pytest.raises(DeviceError, match=r"libonnxfuse\.so: ONNX Runtime cannot load it: wrong ELF class"):
        session.register(Options(OSError("wrong ELF class")))


def test_the_mark_is_one_that_onnxruntime_keeps() -> None:
    options = session.onnxruntime().SessionOptions()
    assert not session._registered(options)
    options.add_session_config_entry(session._MARK, "registered")
    assert session._registered(options)


@pytest.mark.parametrize(
    ("providers", "devices", "resolved", "bridged"),
    [
        (None, 1, [CUDA, CPU], True),
        (None, 0, [CPU], False),
        ([CPU], 1, [CPU], False),
        ([CUDA, CPU], 0, [CUDA, CPU], False),
        ([(CUDA, {"use_tf32": 0}), CPU], 1, [(CUDA, {"use_tf32": 0}), CPU], True),
    ],
)
def test_the_bridge_is_registered_for_cuda_sessions_only(
    library: Path, monkeypatch: pytest.MonkeyPatch, providers, devices, resolved, bridged
) -> None:
    runtime = with_runtime(monkeypatch, devices)
    options = Options()
    assert session.InferenceSession("model.onnx", options, providers) == "session"
    assert runtime.calls == [("model.onnx", options, resolved)]
    assert bool(options.libraries) == bridged
    assert runtime.preloaded == int(bridged)


def test_a_cuda_provider_that_does_not_start_is_explained(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, 1, RuntimeError("NOT_IMPLEMENTED : no kernel for onnxfuse.FusedGemm(1)"))
    with pytest.raises(DeviceError, match="did not start its CUDA provider"):
        session.InferenceSession("model.onnx")


def test_other_failures_are_left_as_they_are(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, 1, RuntimeError("Protobuf parsing failed"))
    with pytest.raises(RuntimeError, match="Protobuf"):
        session.InferenceSession("model.onnx")


def test_a_missing_onnxruntime_names_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"onnxruntime-gpu.*pip install onnxruntime`"):
        session.InferenceSession(MODEL)


def test_a_cpu_session_is_an_ordinary_one() -> None:
    made = session.InferenceSession(MODEL, providers=[CPU])
    assert type(made) is session.onnxruntime().InferenceSession
    assert made.get_providers() == [CPU]


def test_a_file_that_is_missing_or_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.onnx: no such file"):
        session.open_session(tmp_path / "nothing.onnx", [CPU])
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ModelError, match=r"text\.onnx: ONNX Runtime refuses the model"):
        session.open_session(tmp_path / "text.onnx", [CPU])


def test_the_kernel_modules_version_is_read(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  gcc 12.2.0"
    (tmp_path / "version").write_text(text)
    assert driver.driver_version(tmp_path / "version") == "580.65.06"
    assert driver.driver_version(tmp_path / "absent") is None
