"""An ordinary ONNX Runtime session, with the bridge registered wherever it can be used.

Without a CUDA device the fused nodes need no library: ONNX Runtime inlines their bodies. With the library registered
and no CUDA provider in the session it would refuse to load them, so the library is registered for CUDA sessions only.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxfuse.errors import DeviceError, ModelError, SettingError
from onnxfuse.runtime import driver

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
_LIBRARY = "_bridge/libonnxfuse.so"
_MARK = "onnxfuse.bridge"
_FATAL = 4

Provider = str | tuple[str, dict[Any, Any]]


def library_path() -> str:
    """The bridge's shared library inside the installed package, as `register_custom_ops_library` takes it.

    Raises:
        DeviceError: the package was not built, so there is none.
    """
    for folder in _package_folders():
        library = folder / _LIBRARY
        if library.is_file():
            return str(library.resolve())
    raise DeviceError(f"{_LIBRARY} is not built; build and install onnxfuse with `pip install .` in its repository")


def library_function(name: str) -> Any:
    """A function of the bridge's library, which is called as C.

    Raises:
        DeviceError: there is no library, or it is of another version and has no such function.
    """
    library = library_path()
    try:
        return getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        remedy = "install onnxfuse again, with `pip install .` in its repository"
        raise DeviceError(f"{library} is not of this version of onnxfuse; {remedy} ({error})") from error


def _package_folders() -> list[Path]:
    """Where `onnxfuse.runtime` lies; an editable install keeps the built library apart from the sources."""
    spec = importlib.util.find_spec("onnxfuse.runtime")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []]
    try:
        installed = importlib.metadata.distribution("onnxfuse").locate_file("onnxfuse/runtime")
    except importlib.metadata.PackageNotFoundError:
        return folders
    return [*folders, Path(str(installed))]


def onnxruntime() -> Any:
    """The onnxruntime module, imported late: optimising a model does not need it.

    Raises:
        DeviceError: it is not installed; it comes in two packages, so it is no dependency of onnxfuse.
    """
    try:
        import onnxruntime as module
    except ImportError as error:
        raise DeviceError(
            "ONNX Runtime is not installed: `pip install onnxruntime-gpu` for NVIDIA GPUs, "
            f"`pip install onnxruntime` without one ({error})"
        ) from error
    return module


def cuda_usable() -> bool:
    """Whether a CUDA device is usable and ONNX Runtime has its CUDA provider.

    Raises:
        DeviceError: onnxruntime is not installed.
    """
    return CUDA in onnxruntime().get_available_providers() and driver.device_count() > 0


def register(session_options: Any) -> None:
    """Register the bridge in an `onnxruntime.SessionOptions`, which is changed; a second call does nothing.

    For sessions with the CUDA provider only: without that provider ONNX Runtime refuses to load a fused model into a
    session whose options know the bridge.

    Raises:
        DeviceError: the library is not built, or ONNX Runtime cannot load it.
    """
    if _registered(session_options):
        return
    library = library_path()
    _load(session_options, library, library)
    session_options.add_session_config_entry(_MARK, "registered")


def _registered(session_options: Any) -> bool:
    try:
        return bool(session_options.get_session_config_entry(_MARK))
    except RuntimeError:  # no such entry
        return False


def InferenceSession(  # noqa: N802  it takes the place of onnxruntime.InferenceSession
    path_or_bytes: str | bytes | os.PathLike[str],
    sess_options: Any = None,
    providers: Sequence[Provider] | None = None,
    provider_options: Sequence[dict[Any, Any]] | None = None,
    **kwargs: Any,
) -> Any:
    """Make an `onnxruntime.InferenceSession`, with the bridge registered if the session uses a CUDA device.

    Args:
        path_or_bytes: the model, fused or not.
        sess_options: an `onnxruntime.SessionOptions`. It cannot be copied, so for a CUDA session the bridge is
            registered in this very object, once; do not use it for a session without CUDA afterwards. Otherwise it is
            not changed.
        providers: as in ONNX Runtime; None means CUDA and CPU where a device is usable, else CPU.
        provider_options: as in ONNX Runtime.
        kwargs: passed on.

    Raises:
        DeviceError: onnxruntime is not installed, or the bridge is not built, or ONNX Runtime has a CUDA provider that
            does not start.
    """
    runtime = onnxruntime()
    if providers is None:
        providers = default_providers()
    options = sess_options if sess_options is not None else runtime.SessionOptions()
    bridged = _wants_cuda(providers) and cuda_usable()
    if bridged:
        _preload(runtime)
        register(options)
    try:
        return runtime.InferenceSession(path_or_bytes, options, providers, provider_options, **kwargs)
    except Exception as error:
        if bridged and "onnxfuse" in str(error) and "NOT_IMPLEMENTED" in str(error):
            raise DeviceError(
                "ONNX Runtime did not start its CUDA provider, whose libraries (CUDA, cuDNN) may be missing; "
                f"providers=['{CPU}'] runs the model without it ({error})"
            ) from error
        raise


def default_providers() -> list[Provider]:
    """CUDA, then CPU, where a device is usable; else CPU."""
    return [CUDA, CPU] if cuda_usable() else [CPU]


def _wants_cuda(providers: Sequence[Provider]) -> bool:
    return any((provider if isinstance(provider, str) else provider[0]) == CUDA for provider in providers)


def _preload(runtime: Any) -> None:
    """Let ONNX Runtime find the CUDA and cuDNN libraries of pip packages; it says itself what it misses."""
    preload = getattr(runtime, "preload_dlls", None)
    if preload is not None:
        preload()


def quiet_options(options: Any = None) -> Any:
    """The given `onnxruntime.SessionOptions`, or new ones, that log nothing: every error comes as an exception."""
    options = onnxruntime().SessionOptions() if options is None else options
    options.log_severity_level = _FATAL
    return options


@contextmanager
def adjusted(options: Any, **changes: Any) -> Iterator[Any]:
    """Options that cannot be copied, changed for a while."""
    before = {name: getattr(options, name) for name in changes}
    for name, value in changes.items():
        setattr(options, name, value)
    try:
        yield options
    finally:
        for name, value in before.items():
            setattr(options, name, value)


def options_with(libraries: Sequence[Path]) -> Any:
    """Session options that know the custom operators of some shared libraries; None without any.

    Raises:
        SettingError: no such file.
        DeviceError: ONNX Runtime cannot load one.
    """
    if not libraries:
        return None
    options = quiet_options()
    for library in libraries:
        if not library.is_file():
            raise SettingError(f"{library}: no such file; --library is a shared library of custom operators")
        _load(options, library, str(library.resolve()))
    return options


def _load(options: Any, library: str | Path, path: str) -> None:
    """Register a library of operators, which messages call `library`."""
    try:
        options.register_custom_ops_library(path)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise DeviceError(f"{library}: ONNX Runtime cannot load it: {error}") from error


_LOSING = re.compile(r"onnxfuse:Fused\w+\(-?\d+\) is not a registered|onnxfuse\.kernels\) of operator \(Fused")
_LOST = "a tool that ran behind onnxfuse dropped or cut the functions of its fused nodes; let it run before onnxfuse"


def open_session(
    path: Path,
    providers: Sequence[Provider],
    options: Any = None,
    label: Path | str | None = None,
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """A session on a model file that logs nothing, with its failures in onnxfuse's terms.

    Args:
        path: the file.
        providers: as in ONNX Runtime.
        options: an `onnxruntime.SessionOptions`.
        label: what failures call a file that the user does not know; by default its path.
        disabled_optimizers: of ONNX Runtime's, by name.

    Raises:
        ModelError: the file is missing, or ONNX Runtime refuses it.
        DeviceError: as in `InferenceSession`.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        return InferenceSession(path, quiet_options(options), providers, disabled_optimizers=[*disabled_optimizers])
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        text = str(error).replace(str(path), str(label or path))
        text = f"{_LOST}: {text}" if _LOSING.search(text) else text
        raise ModelError(f"{label or path}: ONNX Runtime refuses the model: {text}") from error
