"""Every exception that onnxfuse raises on purpose, and the exit codes of the command line.

OnnxfuseError                 a user's mistake or a limit; the command line prints it in one line
|-- ModelError                the model cannot be read, is not ONNX, or breaks its own rules      (exit code 3)
|-- OutputError               the result cannot be written where it was asked to go              (exit code 3)
|-- SettingError              a setting, flag or architecture that does not exist                (exit code 2)
|-- CompileError              NVRTC refused a kernel; carries its log                            (exit code 3)
|-- DeviceError               no CUDA device, or the driver refused                              (exit code 3)
`-- NotFusable                one site cannot be fused: caught in one place and reported, never shown as a failure
"""

from __future__ import annotations

DONE, WRONG, USAGE, NOT_DONE, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = {
    DONE: "done; verify: the fused model is as good as the original",
    WRONG: "verify, inspect --rebuild: the fused model is wrong, its numbers or its kernels",
    USAGE: "usage: a command, an option or its value does not exist, or does not fit the model",
    NOT_DONE: "it could not be done, or not be judged; one line says why",
    INTERRUPTED: "interrupted by Ctrl-C",
}
"""The same table for every command, in `--help` and in the README."""


class OnnxfuseError(Exception):
    """Base of everything that onnxfuse raises on purpose."""

    exit_code = NOT_DONE


class ModelError(OnnxfuseError):
    """The model cannot be read, is not ONNX, or breaks its own rules."""


class OutputError(OnnxfuseError):
    """The result cannot be written where it was asked to go."""


class SettingError(OnnxfuseError):
    """A setting, flag or architecture that does not exist."""

    exit_code = USAGE


class CompileError(OnnxfuseError):
    """NVRTC refused a kernel.

    Attributes:
        log: what the compiler printed.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class DeviceError(OnnxfuseError):
    """No usable CUDA device, or the driver refused a call."""


class NotFusable(OnnxfuseError):
    """One site cannot be fused.

    Attributes:
        reason: a stable lower-case code, listed in docs/reasons.md.
        node: the name of the node at fault.
        detail: one plain sentence.
    """

    def __init__(self, reason: str, node: str, detail: str) -> None:
        super().__init__(f"{node}: {detail} ({reason})")
        self.reason = reason
        self.node = node
        self.detail = detail
