"""What a fused node costs the host: `python -m tests.perf.launch_cost --out results/h200-launch.json`.

Chains of equal nodes are put on the stream without waiting for the GPU, and the host's time until that is done is
divided by the nodes. A Neg is what a node costs ONNX Runtime itself, with one launch of its own kernel; what a fused
node takes beyond it is the bridge's: its axes, its choice of a kernel, its tensor maps. The original nodes of the same
chains, three for each fused one, are timed beside them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxfuse
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.perf.compare import origin
from tests.perf.result_file import write_result

NODES = 200
RUNS, WARMUP = 60, 10
WIDTHS = [(1, 512), (256, 256)]  # rows and columns: the kernel for small M, and that of sm_90a with its tensor maps


def fused_chain(m: int, width: int) -> onnx.ModelProto:
    """`relu(x W + b)`, NODES of them one behind the other."""
    rng = np.random.default_rng(width)
    b = Builder(FLOAT16)
    weight, bias = b.array(rng.standard_normal((width, width)) / width**0.5), b.array(rng.standard_normal(width))
    value = b.input("x", (m, width))
    for _ in range(NODES):
        value = b("Relu", b("Add", b("MatMul", value, weight), bias))
    return b.model(value)


def bare_chain(m: int, width: int) -> onnx.ModelProto:
    """As many Neg."""
    b = Builder(FLOAT16)
    value = b.input("x", (m, width))
    for _ in range(NODES):
        value = b("Neg", value)
    return b.model(value)


def enqueuer(path: Path, x: np.ndarray, fused: bool) -> Callable[[], float]:
    """Seconds that one run keeps the host."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # The level at which the chain stays as it is: two Neg are none.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    make = onnxfuse.InferenceSession if fused else onnxruntime.InferenceSession
    session = make(str(path), options, providers=["CUDAExecutionProvider"])
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
    output = session.get_outputs()[0].name
    binding.bind_ortvalue_output(output, onnxruntime.OrtValue.ortvalue_from_shape_and_type(x.shape, x.dtype, "cuda", 0))
    quick = onnxruntime.RunOptions()
    quick.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def enqueue() -> float:
        start = time.perf_counter()
        session.run_with_iobinding(binding, quick)
        seconds = time.perf_counter() - start
        binding.synchronize_outputs()
        return seconds

    return enqueue


def measure(folder: Path, m: int, width: int) -> dict[str, Any]:
    """Microseconds of the host for one node, of each chain in turn."""
    model, paths = fused_chain(m, width), {name: folder / f"{name}.onnx" for name in ("fused", "original", "neg")}
    fused, report = onnxfuse.optimize(model, arch="native")
    assert len(report.fused) == NODES
    for name, proto in (("fused", fused), ("original", model), ("neg", bare_chain(m, width))):
        onnx.save(proto, paths[name])
    x = np.random.default_rng(m).standard_normal((m, width)).astype(np.float16)
    runs = {name: enqueuer(path, x, name == "fused") for name, path in paths.items()}
    rounds = [{name: run() for name, run in runs.items()} for _ in range(WARMUP + RUNS)][WARMUP:]
    times = {name: statistics.median(each[name] for each in rounds) / NODES * 1e6 for name in runs}
    kernel = report.fused[0].kernel
    return {"m": m, "width": width, **{f"{name}_us": value for name, value in times.items()}, "kernel": kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for m, width in WIDTHS:
            rows.append(measure(Path(folder), m, width))
            row = rows[-1]
            times = "  ".join(f"{name} {row[f'{name}_us']:6.2f} us" for name in ("fused", "original", "neg"))
            print(f"{m:4} x {width:4}  {times}  {row['kernel']}", flush=True)
    result = {**origin("python -m tests.perf.launch_cost --out results/h200-launch.json"), "nodes": NODES, "rows": rows}
    write_result(options.out, result)


if __name__ == "__main__":
    main()
