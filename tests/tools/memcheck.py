"""The GPU tests under compute-sanitizer: `python -m tests.tools.memcheck [--tool racecheck] [--jobs 15] [FILE ...]`.

The sanitizer hangs under pytest-xdist, so each file is run in shards, each in a process of its own. A line for each
shard, with the end of what a failing one printed; the exit code is 1 if any failed or the tool reported an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "gpu"
# Files whose tests are many or long, and into how many processes they go. Those that measure time are left out.
SHARDS = {
    "test_hopper_kernel.py": 22, "test_ort_session.py": 40, "test_portable_kernel.py": 16, "test_match_outputs.py": 6,
    "test_small_m_kernel.py": 5, "test_vector_widths.py": 4, "test_masks.py": 2, "test_faults.py": 4,
    "test_exact_kernel.py": 4, "test_library_product.py": 6, "test_quantized_hopper.py": 6,
    "test_quantized_small_m.py": 14, "test_attention.py": 15, "test_cached_attention.py": 14, "test_group_norm.py": 14,
    "test_swapped_hopper.py": 56, "test_copied_rows.py": 15, "test_norm.py": 8, "test_rotation.py": 12,
}  # fmt: skip
FAILED = 9  # what the sanitizer exits with where it found an error
PLUGINS = {"racecheck": ("-p", "tests.helpers.all_lanes_arrive")}  # by tool
LOOKED_AT = {"racecheck": ("--kernel-name", "kns=onnxfuse")}  # ONNX Runtime's attention of one token has hazards
SHOWN = 1500  # characters of what a failing shard printed


@dataclass(frozen=True)
class Shard:
    """Some tests of one file."""

    file: Path
    part: int
    count: int

    def __str__(self) -> str:
        return f"{self.file.name} {self.part + 1}/{self.count}"


def shards(files: list[Path]) -> Iterator[Shard]:
    """All shards of some files, those of the largest first."""
    for file in sorted(files, key=lambda file: -SHARDS.get(file.name, 1)):
        count = SHARDS.get(file.name, 1)
        yield from (Shard(file, part, count) for part in range(count))


def run(shard: Shard, tool: str, log: Path) -> str:
    """Run one shard; empty where nothing is wrong, else what was printed and found."""
    command = ["compute-sanitizer", "--tool", tool, "--log-file", str(log), "--error-exitcode", str(FAILED)]
    command += LOOKED_AT.get(tool, ())
    command += [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.helpers.shard",
        *PLUGINS.get(tool, ()),
        str(shard.file),
    ]
    environment = os.environ | {"SHARD": f"{shard.part}/{shard.count}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    found = log.read_text() if log.exists() else ""
    return f"exit code {done.returncode}\n{done.stdout[-SHOWN:]}{done.stderr[-SHOWN:]}{found[:SHOWN]}"


def main() -> None:
    """Run every shard and say which failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="test files; by default those of tests/gpu that have shards"
    )
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    options = parser.parse_args()
    everything = list(shards(options.files or [FOLDER / name for name in SHARDS]))
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        jobs = {
            pool.submit(run, shard, options.tool, Path(folder) / f"{number}.log"): shard
            for number, shard in enumerate(everything)
        }
        for job in as_completed(jobs):
            wrong = job.result()
            failures += bool(wrong)
            print(f"{jobs[job]}: {wrong or 'clean'}", flush=True)
    print(f"{len(everything) - failures} of {len(everything)} shards are clean")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
