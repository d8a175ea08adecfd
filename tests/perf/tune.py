"""What `--tune` measures for the problems of the table: `python -m tests.perf.tune --out results/h200-tune.json`.

Weights are [k, n] and stay so, m is static.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from onnxfuse.device import spec_of
from onnxfuse.pipeline import analyse_model, tune_model
from onnxfuse.runtime import driver
from onnxfuse.tune.session_timer import SessionTimer
from onnxfuse.tune.timing_cache import FOLDER
from tests.helpers.onnx_build import FLOAT, FLOAT16
from tests.perf.compare import origin
from tests.perf.kernels import ROWS, Row, site_model
from tests.perf.result_file import write_result

LARGEST = 4096 * 14336 * 2  # weights above this only once: they take seconds to draw and nothing new to see
TYPES = {"fp16": FLOAT16, "fp32": FLOAT}


def time_row(row: Row, dtype: str) -> dict[str, Any]:
    """Microseconds of every implementation of one problem, and what tuning makes of them."""
    model = site_model(row, "kn", TYPES[dtype])
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = row.m
    device = spec_of(driver.local_architectures()[0])
    analysis = analyse_model(model, [device], keep_weights=True)
    planned = analysis.sites[0].strategy.value
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        tuned = tune_model(analysis, device, timer=SessionTimer(Path(folder)))
        seconds = time.perf_counter() - start
        (path,) = (Path(folder) / FOLDER).glob("*.json")
        times = json.loads(path.read_text())["microseconds"]
    chosen = tuned.sites[0].strategy.value if tuned.sites else "left alone"
    return {
        "problem": str(row), "dtype": dtype, "microseconds": times, "planned": planned, "chosen": chosen,
        "seconds": seconds,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    times = row["microseconds"]
    best = min(times, key=times.get)
    strategies = "  ".join(
        f"{strategy} {times.get(strategy, float('nan')):7.1f}" for strategy in ("behind the product", "left alone")
    )
    text = f"{row['dtype']} {row['problem']:26} {row['chosen']:19} planned {row['planned']:19} {best:36}"
    return f"{text} {times[best]:7.1f} us  {strategies}  in {row['seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    import onnxruntime

    rows = []
    barred = [row for row in ROWS if row.bar is not None and row.epilogue != "residual"]
    small = [row for row in barred if row.k * row.n < LARGEST // 2 or row.m == 2048]
    for dtype in TYPES:
        for row in small:
            made = time_row(row, dtype)
            rows.append(made)
            print(line_of(made), flush=True)
    result = {
        **origin("python -m tests.perf.tune --out results/h200-tune.json"),
        "onnxruntime": onnxruntime.__version__,
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
