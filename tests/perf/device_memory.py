"""Peak device memory of whole models, stock ONNX Runtime against fused: `python -m tests.perf.device_memory --out F`.

Each session is in a process of its own: what the device has less of after some runs than before the session is what the
session holds, weights, the arena of ONNX Runtime's allocator, which never shrinks, and the code of its kernels.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cupy
import onnx

import onnxfuse
from onnxfuse.bench.contender import Contender
from onnxfuse.runtime.feeds import input_specs, make_feeds
from onnxfuse.runtime.session import open_session
from tests.perf.__main__ import MODELS, Case
from tests.perf.compare import origin
from tests.perf.result_file import write_result

RUNS = 5


def held(path: Path, shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes of the device that a session holds after some runs: to be called in a process of its own."""
    feeds = make_feeds(input_specs(open_session(path, ["CPUExecutionProvider"])), shapes=shapes)
    before, _ = cupy.cuda.runtime.memGetInfo()
    contender = Contender(path, feeds, "cuda")
    for _ in range(RUNS):
        contender.run()
    after, _ = cupy.cuda.runtime.memGetInfo()
    return int(before - after)


def measure(folder: Path, case: Case) -> dict[str, Any]:
    """Megabytes of both."""
    original, fused = folder / "model.onnx", folder / "model.fused.onnx"
    onnx.save(case.build(), original)
    onnxfuse.optimize_file(original, fused, arch="native")
    megabytes = []
    for path in (original, fused):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            megabytes.append(pool.submit(held, path, case.shapes).result() / 1e6)
    fused.unlink()
    return {"model": case.name, "stock_mb": megabytes[0], "fused_mb": megabytes[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in MODELS:
            if options.only in case.name:
                rows.append(measure(Path(name), case))
                print("{model}: stock {stock_mb:.0f} MB, fused {fused_mb:.0f} MB".format(**rows[-1]), flush=True)
    only = f"--only {options.only} " if options.only else ""
    write_result(
        options.out,
        {**origin(f"python -m tests.perf.device_memory {only}--out results/{options.out.name}"), "rows": rows},
    )


if __name__ == "__main__":
    main()
