"""Attentions of few query rows: `python -m tests.perf.few_queries --out results/h200-few-queries.json`.

What a decoder exported with its cache computes for a token, fp16 or `--fp32`: scaled scores of some heads, Softmax, the
mean of the values. Of fixed problems, and of some drawn by `--seed`; rows and keys are dynamic, or `--static`, and the
plan is the default: what it leaves alone is not timed. Stock ONNX Runtime and the fused model, each captured in a CUDA
graph, are replayed in turn; there are as many attentions, with tensors of their own, as it takes to miss the L2 cache.
Microseconds of one. The fused outputs are compared with stock's.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

import onnxfuse
from onnxfuse.bench.contender import warm
from onnxfuse.bench.cuda_graph import Capture, capture
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

COLD = 60e6  # bytes of keys and values, more than the L2 cache
MOST = 8  # attentions of a model
MOST_APART = 2.0**-8  # of the largest value: probabilities and sums are rounded in fp16, or factors to TF32


@dataclass(frozen=True)
class Problem:
    """Sizes of an attention."""

    batch: int
    heads: int
    rows: int
    keys: int
    head: int
    is_fp32: bool = False
    is_static: bool = False

    @property
    def copies(self) -> int:
        """Attentions beside each other."""
        size = self.batch * self.heads * self.keys * self.head * (8 if self.is_fp32 else 4)
        return max(2, min(MOST, math.ceil(COLD / size)))

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} heads of {self.head}, {self.rows} rows, {self.keys} keys"


NAMED = (
    Problem(1, 32, 1, 128, 128), Problem(1, 32, 1, 512, 128), Problem(1, 32, 1, 1024, 128),
    Problem(1, 32, 1, 4096, 128), Problem(4, 32, 1, 1024, 128), Problem(16, 32, 1, 1024, 128),
    Problem(1, 12, 1, 1024, 64), Problem(1, 12, 4, 448, 64), Problem(1, 8, 1, 2048, 64), Problem(1, 32, 16, 2048, 64),
)  # fmt: skip


def drawn(seed: int, count: int) -> list[Problem]:
    """Batches and rows few, keys log-uniform from 16 to 8,192 and even."""
    rng = np.random.default_rng(seed)
    return [
        Problem(
            int(rng.choice([1, 1, 2, 4])), int(rng.choice([4, 6, 8, 12, 16, 20, 32, 40])),
            int(rng.choice([1, 1, 1, 2, 3, 5, 8, 16])), 2 * round(math.exp(rng.uniform(math.log(8), math.log(4096)))),
            int(rng.choice([32, 64, 80, 96, 128])),
        )
        for _ in range(count)
    ]  # fmt: skip


def model(problem: Problem) -> ModelProto:
    """So many attentions."""
    b = Builder(FLOAT if problem.is_fp32 else FLOAT16)
    sizes = (problem.batch, problem.rows, problem.keys) if problem.is_static else ("batch", "rows", "keys")
    scale = b.array(np.array(problem.head**-0.5), "scale")
    outs = []
    for index in range(problem.copies):
        q, k, v = (
            b.input(f"{name}{index}", (sizes[0], problem.heads, rows, problem.head))
            for name, rows in (("query", sizes[1]), ("keys", sizes[2]), ("values", sizes[2]))
        )
        scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), scale)
        outs.append(b("Transpose", b("MatMul", b("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3)))
    return b.model(*outs)


def recorded(path: Path, feeds: dict[str, np.ndarray]) -> tuple[Capture, list[np.ndarray]]:
    """A captured run, and what it gives."""
    contender, stream = warm(path, feeds, "cuda")
    outputs = [value.numpy().astype(np.float32) for value in contender.outputs().values()]
    return capture(stream, contender.submit), outputs


def feeds_of(problem: Problem) -> dict[str, np.ndarray]:
    """Drawn numbers for every input."""
    numbers = np.random.default_rng(problem.keys).standard_normal(1 << 22, np.float32)
    numbers = numbers.astype(np.float32 if problem.is_fp32 else np.float16)
    rows = {"query": problem.rows, "keys": problem.keys, "values": problem.keys}
    names = [(f"{name}{index}", rows[name]) for index in range(problem.copies) for name in rows]
    return {
        name: np.resize(np.roll(numbers, 977 * place), (problem.batch, problem.heads, count, problem.head))
        for place, (name, count) in enumerate(names)
    }


def measure(problem: Problem, folder: Path, arch: str) -> dict[str, Any]:
    """Microseconds of one attention, stock and fused."""
    paths = folder / "stock.onnx", folder / "fused.onnx"
    onnx.save(model(problem), paths[0])
    report = onnxfuse.optimize_file(*paths, arch=arch, force=True)
    if not report.fused:
        return {"problem": str(problem), "sites": 0}
    feeds = feeds_of(problem)
    (stock, expected), (fused, found) = (recorded(path, feeds) for path in paths)
    apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))
    assert apart <= MOST_APART, f"{problem}: {apart}"
    times = [seconds * 1e6 / problem.copies for seconds in in_turn([stock.seconds, fused.seconds])]
    return {
        "problem": str(problem), "sites": len(report.fused), "stock_us": times[0], "fused_us": times[1],
        "ratio": times[0] / times[1], "apart": apart,
    }  # fmt: skip


def described(row: dict[str, Any]) -> str:
    """A line of the output."""
    if not row["sites"]:
        return f"{row['problem']}: left alone"
    times = f"stock {row['stock_us']:6.2f} us, fused {row['fused_us']:6.2f} us"
    return f"{row['problem']}: {times}, {row['ratio']:.2f}x, apart {row['apart']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--seed", type=int, default=1, help="of drawn problems")
    parser.add_argument("--count", type=int, default=12, help="of drawn problems")
    parser.add_argument("--fp32", action="store_true", help="of fp32, in TF32, and not of fp16")
    parser.add_argument("--static", action="store_true", help="rows and keys that the model says")
    options = parser.parse_args()
    arch, rows = spec_of(driver.local_architectures()[0]).arch, []
    drawn_as = f"--seed {options.seed} --count {options.count}"
    drawn_as += " --fp32" * options.fp32 + " --static" * options.static
    command = f"python -m tests.perf.few_queries {drawn_as} --out results/{options.out.name}"
    with tempfile.TemporaryDirectory() as name:
        for each in (*NAMED, *drawn(options.seed, options.count)):
            problem = replace(each, is_fp32=options.fp32, is_static=options.static)
            row = measure(problem, Path(name), arch)
            rows.append(row)
            print(described(row), flush=True)
            write_result(options.out, {**origin(command), "rows": rows})


if __name__ == "__main__":
    main()
