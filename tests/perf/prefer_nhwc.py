"""The UNet of SD1.5 with NHWC convolutions: `python -m tests.perf.prefer_nhwc --out results/h200-prefer-nhwc.json`.

fp16, 2 x 4 x 64 x 64, stock and fused, each without and with the CUDA provider's option `prefer_nhwc`, from the call to
the results, in turn: what ONNX Runtime does with them no CUDA graph can hold. Every output is compared with stock's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxfuse
from onnxfuse.bench.contender import timed
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from tests.perf.__main__ import MODELS
from tests.perf.behind_optimizer import MOST_APART
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.genai_decode import bound, distance, output_of
from tests.perf.result_file import write_result

(UNET,) = (case for case in MODELS if "unet" in case.graph)


def feeds() -> dict[str, np.ndarray]:
    """Drawn inputs, at a step in the middle."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32).astype(np.float16) for name, shape in UNET.shapes.items()}
    return drawn | {"timestep": np.full(UNET.shapes["timestep"], 500, np.float16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    result: dict[str, Any] = origin("python -m tests.perf.prefer_nhwc --out results/h200-prefer-nhwc.json")
    with tempfile.TemporaryDirectory() as name:
        paths = Path(name, "stock.onnx"), Path(name, "fused.onnx")
        onnx.save(UNET.build(), paths[0])
        report = onnxfuse.optimize_file(*paths, arch=spec_of(driver.local_architectures()[0]).arch)
        runs = [bound(path, feeds(), "cuda", {"prefer_nhwc": nhwc}) for nhwc in "01" for path in paths]
    times = [seconds * 1e3 for seconds in in_turn([timed(run.run) for run in runs])]
    outputs = [output_of(run) for run in runs]
    result["sites"] = len(report.fused)
    result["rows"] = [
        {
            "prefer_nhwc": index, "stock_ms": times[2 * index], "fused_ms": times[2 * index + 1],
            "ratio": times[2 * index] / times[2 * index + 1],
            "apart": [distance(output, outputs[0]) for output in outputs[2 * index : 2 * index + 2]],
        }
        for index in range(2)
    ]  # fmt: skip
    write_result(options.out, result)
    print(*result["rows"], sep="\n", flush=True)
    assert all(max(row["apart"]) <= MOST_APART for row in result["rows"]), "an output is wrong"


if __name__ == "__main__":
    main()
