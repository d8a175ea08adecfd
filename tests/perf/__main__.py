"""Stock ONNX Runtime against the fused model, in one run: `python -m tests.perf --out results/h200.json`.

A site is timed in a model of several equal gates, captured in a CUDA graph by both sessions, so that kernels are timed
and not the host; some rows of every output are compared with float64. Blocks and the UNet are timed as `onnxfuse bench`
does, run by run, and verified against the float64 reference first. A committed result is compared with
`--against results/h200.json`: a ratio that fell by more than 5 % fails.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxfuse
from onnxfuse.bench.bench import bench, interleave
from onnxfuse.verify.verify import verify
from tests.helpers import corpus
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.perf.compare import add_option, compare, model_costs, origin
from tests.perf.launches import launches
from tests.perf.result_file import write_result

# m, k, n of one half: the GEGLU sites of SD1.5 at 64x64, batch 2, and of SDXL.
SITES = [
    (8192, 320, 1280), (2048, 640, 2560), (512, 1280, 5120), (128, 1280, 5120), (8192, 640, 2560), (2048, 1280, 5120),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A true-width model of the corpus that is timed as a whole.

    Attributes:
        graph: its file's name without the suffix.
        shapes: of its inputs.
        positions: entries of its table of positions, where the shapes need more than the corpus has.
    """

    graph: str
    shapes: dict[str, tuple[int, ...]]
    positions: int | None = None

    @property
    def name(self) -> str:
        """What a result calls it."""
        wider = f".{self.positions}_positions" if self.positions else ""
        return f"real/{self.graph}{wider}.onnx"

    def build(self) -> onnx.ModelProto:
        """The model with weights."""
        model = onnx.load(corpus.folder() / f"real/{self.graph}.onnx")
        return corpus.with_weights(corpus.with_positions(model, self.positions) if self.positions else model)


BERT = "bert.real.torchscript.op17.fp16.dynamic.eager"
BLOCK: dict[str, tuple[int, ...]] = {"hidden_states": (2, 4096, 320), "encoder_hidden_states": (2, 77, 768)}
MODELS = [
    Case("btb_320.real.torchscript.op17.fp16.dynamic", BLOCK),
    Case("btb_640.real.torchscript.op17.fp16.dynamic", BLOCK | {"hidden_states": (2, 1024, 640)}),
    Case("btb_1280.real.torchscript.op17.fp16.dynamic", BLOCK | {"hidden_states": (2, 256, 1280)}),
    Case("phi3.real.torchscript.op17.fp16.dynamic", {"input_ids": (1, 2048), "attention_mask": (1, 2048)}),
    Case("llama.real.torchscript.op17.fp16.dynamic", {"input_ids": (1, 2048), "attention_mask": (1, 2048)}),
    Case(BERT, {"input_ids": (64, 64), "attention_mask": (64, 64)}),
    Case(BERT, {"input_ids": (32, 128), "attention_mask": (32, 128)}, positions=128),
    Case("btb_320.real.torchscript.op17.fp32.dynamic", BLOCK),
    Case("llama.real.torchscript.op17.fp32.dynamic", {"input_ids": (1, 2048), "attention_mask": (1, 2048)}),
    Case("bert.real.torchscript.op17.fp32.dynamic", {"input_ids": (32, 64), "attention_mask": (32, 64)}),
    Case(
        "sd15_unet.real.torchscript.op17.fp16.dynamic",
        {"sample": (2, 4, 64, 64), "timestep": (2,), "encoder_hidden_states": (2, 77, 768)},
    ),
]
INPUTS, WEIGHTS = 4, 8  # gates of one model: what a run costs the host is shared among them
GATES = INPUTS * WEIGHTS
REPLAYS = 5  # of one timed batch
CHECKED_ROWS = 32


def draw_weights(m: int, k: int, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """WEIGHTS times a weight [k, 2 n] and a bias [2 n], fp16."""
    rng = np.random.default_rng([m, k, n])
    drawn = [(rng.standard_normal((k, 2 * n), np.float32), rng.standard_normal(2 * n)) for _ in range(WEIGHTS)]
    return [((weight / np.sqrt(k)).astype(np.float16), bias.astype(np.float16)) for weight, bias in drawn]


def gates_model(m: int, k: int, weights: Sequence[tuple[np.ndarray, np.ndarray]]) -> onnx.ModelProto:
    """INPUTS x WEIGHTS times `a * gelu(g)` as torch writes it, fp16: each input with each weight."""
    b = Builder(FLOAT16)
    inputs = [b.input(f"x{index}", (m, k)) for index in range(INPUTS)]
    stored = [tuple(map(b.array, weight)) for weight in weights]
    return b.model(*(gate(b, x, *weight) for x in inputs for weight in stored))


def gate(b: Builder, x: str, weight: str, bias: str) -> str:
    t = b("Add", bias, b("MatMul", x, weight))
    value, gated = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    erf = b("Add", b("Erf", b("Div", gated, b.array(2**0.5))), b.array(1.0))
    return b("Mul", value, b("Mul", b("Mul", gated, erf), b.array(0.5)))


def graph_runner(path: Path, x: np.ndarray, columns: int, fused: bool) -> tuple[Callable[[], None], list[Any]]:
    """What replays the model REPLAYS times through a captured CUDA graph and waits for the last, and its outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    make = onnxfuse.InferenceSession if fused else onnxruntime.InferenceSession
    session = make(str(path), options, providers=providers)
    binding = session.io_binding()
    for entry in session.get_inputs():
        binding.bind_ortvalue_input(entry.name, onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
    values = []
    for output in session.get_outputs():
        values.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type([x.shape[0], columns], np.float16, "cuda", 0))
        binding.bind_ortvalue_output(output.name, values[-1])
    quick = onnxruntime.RunOptions()
    quick.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run() -> None:
        for _ in range(REPLAYS):
            session.run_with_iobinding(binding, quick)
        binding.synchronize_outputs()

    session.run_with_iobinding(binding)
    return run, values


def errors(values: Sequence[Any], x: np.ndarray, weights: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Of each output the largest error on some rows against float64, over its largest element."""
    rows = np.random.default_rng(1).choice(len(x), CHECKED_ROWS, replace=False)
    found = []
    for value, (weight, bias) in zip(values, itertools.cycle(weights)):
        kept, gated = np.split(x[rows].astype(np.float64) @ weight.astype(np.float64) + bias, 2, axis=1)
        expected = kept * gated * (np.vectorize(math.erf)(gated / 2**0.5) + 1) / 2
        found.append(float(np.abs(value.numpy()[rows] - expected).max() / np.abs(expected).max()))
    return found


def time_site(folder: Path, m: int, k: int, n: int) -> dict[str, Any]:
    """Microseconds of one gate, stock and fused."""
    weights = draw_weights(m, k, n)
    model = gates_model(m, k, weights)
    fused, report = onnxfuse.optimize(model, arch="native")
    paths = folder / "site.onnx", folder / "site.fused.onnx"
    for proto, path in zip((model, fused), paths, strict=True):
        onnx.save(proto, path)
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float16)
    (first, stock_values), (second, values) = (graph_runner(path, x, n, path == paths[1]) for path in paths)
    stock, ours = interleave(first, second, runs=20, warmup=5)
    error, of_stock = max(errors(values, x, weights)), max(errors(stock_values, x, weights))
    assert error <= 2 * of_stock, f"{m}, {k}, {n} is wrong: {error} where stock has {of_stock}"
    before, after = (float(np.median(times)) / REPLAYS / GATES * 1e6 for times in (stock, ours))
    kernel = report.fused[0].kernel
    return {
        "m": m, "k": k, "n": n, "stock_us": before, "fused_us": after, "ratio": before / after, "kernel": kernel,
        "errors": {"stock": of_stock, "fused": error},
    }  # fmt: skip


def time_model(folder: Path, case: Case) -> dict[str, Any]:
    """Latency of a whole model, stock and fused, verified first."""
    original, fused = folder / "model.onnx", folder / "model.fused.onnx"
    onnx.save(case.build(), original)
    start = time.perf_counter()
    proto, report = onnxfuse.optimize(original, arch="native")
    seconds = time.perf_counter() - start
    fused.write_bytes(proto.SerializeToString())
    with ThreadPoolExecutor(2) as pool:  # beside the verification, most of which the CPU does
        counts = [pool.submit(launches, path, case.shapes) for path in (original, fused)]
        checked = verify(original, fused, shapes=case.shapes)
    result = bench(original, fused, shapes=case.shapes, measures=("latency",))
    return {
        "model": case.name,
        "optimize_seconds": seconds,
        "fused": len(report.fused),
        "nodes": [report.nodes_before, report.nodes_after],
        "verify": checked.to_dict(),
        **result.to_dict(),
        "launches": [count.result() for count in counts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="only models whose name contains this, and no sites")
    add_option(parser)
    options = parser.parse_args()
    import onnxruntime

    only = f"--only {options.only} " if options.only else ""
    results: dict[str, Any] = {
        **origin(f"python -m tests.perf {only}--out results/{options.out.name}"),
        "onnxruntime": onnxruntime.__version__,
        "sites": [],
        "models": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for site in () if options.only else SITES:
            row = time_site(folder, *site)
            results["sites"].append(row)
            print(
                f"{site}: stock {row['stock_us']:.1f} us, fused {row['fused_us']:.1f} us, {row['ratio']:.2f}x",
                flush=True,
            )
        for case in MODELS:
            if options.only not in case.name:
                continue
            row = time_model(folder, case)
            results["models"].append(row)
            text = f"stock {row['original']['median']:.3f} ms, fused {row['optimized']['median']:.3f} ms"
            text += f", {row['ratio']:.2f}x, launches {row['launches']}, verified {row['verify']['passed']}"
            print(f"{case.name}: {text}", flush=True)
            write_result(options.out, results)
    sys.exit(compare(results, options.against, model_costs))


if __name__ == "__main__":
    main()
