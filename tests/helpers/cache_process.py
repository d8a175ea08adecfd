"""A process that works on the caches, for test_cache_faults.py, which starts several.

    python -m tests.helpers.cache_process write|check FOLDER SECONDS
    python -m tests.helpers.cache_process kill FOLDER ROUNDS

`write` writes the same few entries and times again and again; `check` reads them; `kill` starts writers and kills them.
The exit code is 1 when something that can be read is not what was written.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onnxfuse.runtime.cache import Entry, entry_key, read_entry, write_entry
from onnxfuse.tune.timing_cache import read_times, write_times

IMAGE = "kernel.cubin"
KERNELS = 3


def entry(number: int) -> Entry:
    """The one right content of a key: large enough to be caught halfway."""
    return Entry(f"// kernel {number}\n" * 5000, random.Random(number).randbytes(200_000), f"log {number}\n" * 500)


def place(folder: Path, number: int) -> Path:
    return folder / entry_key(entry(number).source, ("-arch=sm_90a",), (13, 0))


def key(number: int) -> dict[str, object]:
    return {"gpu": "NVIDIA H200", "m": number, "padding": ["x" * 100] * 200}


def times(number: int) -> dict[str, float]:
    return {f"kernel {index}": 1.5 + number + index for index in range(500)}


def write(folder: Path, number: int) -> None:
    write_entry(place(folder, number), IMAGE, entry(number), {"arch": "sm_90a"})
    write_times(folder, key(number), times(number))


def check(folder: Path, number: int) -> int:
    """How many of the two caches had an answer; a wrong one is an error."""
    found, measured = read_entry(place(folder, number), IMAGE), read_times(folder, key(number))
    assert found is None or found == entry(number), "a wrong kernel"
    assert measured is None or measured == times(number), "wrong times"
    return (found is not None) + (measured is not None)


def kill_writers(folder: Path, rounds: int) -> None:
    """Two writers at once, forked, are killed at a random point; whatever has an entry's name then is whole."""
    delays = random.Random(0)
    seen = 0
    for _ in range(rounds):
        children = [fork_writer(folder) for _ in range(2)]
        time.sleep(delays.uniform(0.001, 0.02))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for number in range(KERNELS):
            seen += check(folder, number)
            assert not place(folder, number).exists() or read_entry(place(folder, number), IMAGE), "half an entry"
    assert seen > rounds, "the writers wrote something"


def fork_writer(folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    for count in itertools.count():
        write(folder, count % KERNELS)
    return 0


def repeat(action: Callable[[Path, int], object], folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    for count in itertools.count():
        action(folder, count % KERNELS)
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    name, place_of_caches, amount = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    if name == "kill":
        kill_writers(place_of_caches, int(amount))
    else:
        repeat({"write": write, "check": check}[name], place_of_caches, amount)
