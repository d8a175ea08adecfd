"""Many runs of the command line, each in a process of its own, for the price of one start of Python.

`run_all` starts this file once; it imports the command line, and then makes a copy of itself for each run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_all(commands: Sequence[Sequence[Any]], **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """What each command gives back: its exit code, and what it prints to both streams."""
    texts = [list(map(str, command)) for command in commands]
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(texts), capture_output=True, text=True, check=True,
        env=os.environ | environment,
    )  # fmt: skip
    results = json.loads(done.stdout)
    return [subprocess.CompletedProcess(command, **result) for command, result in zip(texts, results, strict=True)]


def _run(command: Sequence[str]) -> Mapping[str, Any]:
    """One command in a copy of this process."""
    from onnxfuse.cli import main

    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            for number, stream in enumerate(streams, 1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["onnxfuse", *command]
            code = 1
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (stream.read_text() for stream in streams)
    return {"returncode": os.waitstatus_to_exitcode(status), "stdout": stdout, "stderr": stderr}


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    print(json.dumps([_run(command) for command in commands]))
