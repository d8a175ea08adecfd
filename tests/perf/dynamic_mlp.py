"""The MLP of an LLM at any number of rows: `python -m tests.perf.dynamic_mlp --out results/h200-dynamic-mlp.json`.

One layer of an 8-billion-parameter model as torch exports it (4096 -> 2 x 14336, SwiGLU, -> 4096, residual, fp16,
weights [k, n]) with dynamic batch and tokens, by the default plan. Of stock ONNX Runtime and the fused model several
runs at the same sizes are captured in a CUDA graph, of 200 microseconds and more, and replayed in turn; the weights
alone are larger than the L2 cache. The fused model's output is compared with stock's.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

import onnxfuse
from onnxfuse.bench.contender import warm
from onnxfuse.bench.cuda_graph import capture
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.perf.behind_optimizer import several
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

WIDTH, HIDDEN = 4096, 14336
NAMED = ((1, 1), (1, 4), (1, 16), (1, 32), (1, 64), (2, 77), (1, 300), (2, 257), (8, 128), (1, 2048))
DRAWN = 14  # log-uniform from 1 to 2,048 rows
RUNS = 3  # of a graph
MOST_APART = 2.0**-7  # of the largest output: both sides round in fp16


def mlp() -> ModelProto:
    """The layer."""
    rng = np.random.default_rng(0)
    b = Builder(FLOAT16)
    drawn = rng.standard_normal(1 << 20, np.float32)

    def weight(name: str, k: int, n: int) -> str:
        return b.raw(np.resize((drawn / math.sqrt(k)).astype(np.float16), (k, n)), name)

    x = b.input("x", ("batch", "tokens", WIDTH))
    gate, up = (b("MatMul", x, weight(name, WIDTH, HIDDEN)) for name in ("gate", "up"))
    hidden = b("Mul", b("Mul", gate, b("Sigmoid", gate)), up)
    return b.model(b("Add", x, b("MatMul", hidden, weight("down", HIDDEN, WIDTH))))


def sizes() -> list[tuple[int, int]]:
    """Batch and tokens."""
    rng = np.random.default_rng(1)
    return [*NAMED, *((1, round(math.exp(rng.uniform(0, math.log(2048))))) for _ in range(DRAWN))]


def measure(paths: tuple[Path, Path], batch: int, tokens: int) -> dict[str, Any]:
    """Microseconds of stock and fused."""
    drawn = np.random.default_rng(tokens).standard_normal(1 << 20, np.float32).astype(np.float16)
    feeds = {"x": np.resize(drawn, (batch, tokens, WIDTH))}
    graphs, outputs = [], []
    for path in paths:
        contender, stream = warm(path, feeds, "cuda")
        (output,) = contender.outputs().values()
        outputs.append(output.numpy().astype(np.float32))
        graphs.append(capture(stream, several(contender.submit, RUNS)))
    apart = float(np.abs(outputs[1] - outputs[0]).max() / np.abs(outputs[0]).max())
    assert apart <= MOST_APART, f"{batch} x {tokens}: {apart}"
    stock, fused = (seconds * 1e6 / RUNS for seconds in in_turn([graph.seconds for graph in graphs]))
    return {"batch": batch, "tokens": tokens, "stock_us": stock, "fused_us": fused, "ratio": stock / fused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    device = spec_of(driver.local_architectures()[0])
    with tempfile.TemporaryDirectory() as name:
        paths = Path(name, "mlp.onnx"), Path(name, "mlp.fused.onnx")
        onnx.save(mlp(), paths[0])
        onnxfuse.optimize_file(*paths, arch=device.arch)
        for batch, tokens in sizes():
            rows.append(measure(paths, batch, tokens))
            row = rows[-1]
            times = f"stock {row['stock_us']:7.1f} us, fused {row['fused_us']:7.1f} us"
            print(f"{batch} x {tokens:4}: {times}, {row['ratio']:.2f}x", flush=True)
            write_result(
                options.out,
                {**origin("python -m tests.perf.dynamic_mlp --out results/h200-dynamic-mlp.json"), "rows": rows},
            )


if __name__ == "__main__":
    main()
