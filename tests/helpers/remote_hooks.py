"""The bridge's test hooks in a process of their own, which an emulator may run: for another architecture's library."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np


class RemoteHooks:
    """Stands for a `ctypes.CDLL` of the bridge: calls go to a `hook_server`, and buffers come back."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the server.

        Args:
            command: the emulator, if any, the server's program and the library.
        """
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._call, name)

    def close(self) -> None:
        """End the server, which ends by itself where requests do."""
        self._process.communicate()

    def _call(self, name: str, *arguments: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        packed = [_packed(argument) for argument in arguments]
        request = _sized(name.encode()) + _number(len(arguments)) + b"".join(data for data, _ in packed)
        self._process.stdin.write(request)
        self._process.stdin.flush()
        (result,) = struct.unpack("<q", self._read(8))
        for _, memory in packed:
            data = b"" if memory is None else self._read(len(memory))
            if memory is not None and not memory.readonly:
                memory[:] = data
        return int(result) & 0xFFFFFFFF

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        assert len(data) == size, f"the server ended with {self._process.wait()}"
        return data


def _packed(argument: Any) -> tuple[bytes, memoryview | None]:
    """An argument as the server reads it, and where its bytes go afterwards."""
    if isinstance(argument, int):
        return b"i" + _number(argument), None
    if isinstance(argument, ctypes._SimpleCData) and not isinstance(argument, ctypes.c_void_p):
        return b"i" + _number(argument.value), None
    if isinstance(argument, ctypes.Array) and issubclass(argument._type_, ctypes.c_char_p):
        return b"s" + _number(len(argument)) + b"".join(map(_sized, argument)), None
    memory = _memory(argument)
    return b"b" + _sized(bytes(memory)), memory


def _memory(argument: Any) -> memoryview:
    """The bytes behind a pointer; a text ends in a NUL."""
    if isinstance(argument, bytes):
        return memoryview(argument + b"\0")
    if isinstance(argument, ctypes.c_void_p):  # what `ndarray.ctypes.data_as` makes, which keeps its array
        array: np.ndarray = argument._arr  # type: ignore[attr-defined]
        return memoryview(array.reshape(-1).view(np.uint8)).cast("B")
    return memoryview(getattr(argument, "_obj", argument)).cast("B")


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data
