"""Many runs of the command line or of a helper, each in a process of its own, for the price of few starts of Python.

This file is a server: it imports a module once, and then makes a copy of itself for each run of its `main`. Each
process of the tests starts one for each environment that it runs commands in.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 300  # of one run, which then ends with a signal
CURRENT_TEST = "PYTEST_CURRENT_TEST"  # of no command's business, and another one in each test


def run_command(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """What one command gives back: its exit code, and what it prints to both streams."""
    (result,) = run_all([command], **environment)
    return result


def run_helper(module: str, *command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same of a module of the tests, in the folder of the project."""
    (result,) = run_all([command], module, ROOT, **environment)
    return result


def run_all(
    commands: Sequence[Sequence[Any]], module: str = "onnxfuse.cli", folder: Path | None = None, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """The same of several commands."""
    texts = [list(map(str, command)) for command in commands]
    variables = {name: value for name, value in os.environ.items() if name != CURRENT_TEST} | environment
    server = _server(frozenset(variables.items()))
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([str(folder or Path.cwd()), module, texts]) + "\n")
    server.stdin.flush()
    results = json.loads(server.stdout.readline())
    return [subprocess.CompletedProcess(command, **result) for command, result in zip(texts, results, strict=True)]


@functools.cache
def _server(environment: frozenset[tuple[str, str]]) -> subprocess.Popen[str]:
    """A server in an environment; it ends with this process."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """A line of results for each line of commands, until nobody asks any more."""
    for line in sys.stdin:
        folder, module, commands = json.loads(line)
        main = importlib.import_module(module).main
        print(json.dumps([_run(main, [module, *command], folder) for command in commands]), flush=True)


def _run(main: Callable[[], Any], command: list[str], working: str) -> Mapping[str, Any]:
    """One command in a copy of this process."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            for number, stream in enumerate(streams, 1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(working)
            sys.argv = ["onnxfuse" if command[0] == "onnxfuse.cli" else command[0], *command[1:]]
            end_with(main)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (stream.read_text() for stream in streams)
    return {"returncode": os.waitstatus_to_exitcode(status), "stdout": stdout, "stderr": stderr}


def end_with(run: Callable[[], Any]) -> NoReturn:
    """Run something in a copy of a process, which ends with it: what it has left behind is not taken down."""
    signal.alarm(MOST_SECONDS)
    code = 1
    try:
        returned = run()
        code = returned if isinstance(returned, int) else 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _serve()
