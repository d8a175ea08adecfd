"""Layers behind ONNX Runtime's optimizer: `python -m tests.perf.behind_optimizer --out results/h200-optimized.json`.

Two layers of each model in the form in which the transformers optimizer or GenAI's builder leaves them, fp16, at a
server's batch and length: stock ONNX Runtime and the fused model, each captured in a CUDA graph, are replayed in turn,
and the fused model's output is compared with stock's. Then the normalisations alone, with their Adds and without: what
`normalising` in the cost model's calibration stands for.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import ModelProto

import onnxfuse
from onnxfuse.bench.contender import warm
from onnxfuse.bench.cuda_graph import Capture, capture
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from onnxfuse.schedule import cost_model
from onnxfuse.schedule.calibration import calibration
from tests.helpers.optimized_layers import Layers, Sizes, layers
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

BASE = Sizes(768, 3072, 12)
ROWS = (
    ("bert", BASE, (32, 128)),
    ("vit", BASE, (8, 197)),
    ("gpt2", BASE, (8, 512)),
    ("whisper", Sizes(1280, 5120, 20), (8, 1500)),
    ("llama", Sizes(4096, 14336, 32, 8), (1, 2048)),
)
COUNT = 2  # layers
NORMALISED = ((4096, 768), (1576, 768), (12000, 1280), (2048, 4096))  # rows and width
CHAIN = 8  # normalisations in one graph
MOST_APART = 2.0**-5  # of the largest output: both sides round in fp16, layer by layer


def captured(
    path: Path, shape: Sequence[int], runs: int = 1, dtype: DTypeLike = np.float16
) -> tuple[Capture, np.ndarray]:
    """A model's runs, one behind the other, as one CUDA graph, and its first output."""
    drawn = np.random.default_rng(1).standard_normal(1 << 20, np.float32).astype(dtype)
    contender, stream = warm(path, {"x": np.resize(drawn, shape)}, "cuda")
    output = next(iter(contender.outputs().values()))
    return capture(stream, several(contender.submit, runs)), output.numpy().astype(np.float32)


def several(submit: Callable[[], None], runs: int) -> Callable[[], None]:
    """So many runs as one: a graph of one short run is mostly what the host takes to launch it."""

    def submit_all() -> None:
        for _ in range(runs):
            submit()

    return submit_all


def time_layers(folder: Path, arch: str, form: str, sizes: Sizes, shape: tuple[int, int]) -> dict[str, Any]:
    """Microseconds of stock and fused."""
    paths = folder / f"{form}.onnx", folder / f"{form}.fused.onnx"
    onnx.save(layers(form, sizes, shape, COUNT), paths[0])
    report = onnxfuse.optimize_file(*paths, arch=arch)
    runs, outputs = zip(*(captured(path, (*shape, sizes.width)) for path in paths), strict=True)
    apart = float(np.abs(outputs[1] - outputs[0]).max() / np.abs(outputs[0]).max())
    stock, fused = (seconds * 1e6 for seconds in in_turn([run.seconds for run in runs]))
    return {
        "form": form, "shape": shape, "width": sizes.width, "stock_us": stock, "fused_us": fused,
        "ratio": stock / fused, "apart": apart, "launches": [run.launches for run in runs],
        "fused": len(report.fused), "left": [f"{skipped.anchor}: {skipped.reason}" for skipped in report.skipped],
    }  # fmt: skip


def chain(op: str, rows: int, width: int) -> ModelProto:
    """Normalisations one behind the other."""
    b = Layers(Sizes(width, width, 1))
    t = x = b.input("x", (rows, width))
    sums: list[str] = []
    for _ in range(CHAIN):
        if op == "LayerNormalization":
            t = b(op, t, b.weight(width), b.weight(width))
        elif op == "SimplifiedLayerNormalization":
            t = b(op, t, b.weight(width), axis=-1, stash_type=1)
        else:
            kind, _, wanted = op.partition(" ")
            make = b.normalised if kind == "SkipLayerNormalization" else b.rms_normalised
            t, total = make(t, x, wanted=bool(wanted))
            sums += [total] * bool(wanted)
    return b.finished(t, *sums)


def time_normalisations(folder: Path, rows: int, width: int) -> list[dict[str, Any]]:
    """Microseconds of each op, and how many times that is what memory takes for its bytes."""
    device = spec_of(driver.local_architectures()[0])
    tensors = {
        "LayerNormalization": 2, "SimplifiedLayerNormalization": 2, "SkipLayerNormalization": 3,
        "SkipSimplifiedLayerNormalization": 3, "SkipLayerNormalization with its sum": 4,
    }  # fmt: skip
    found = []
    for op, count in tensors.items():
        path = folder / "norm.onnx"
        onnx.save(chain(op, rows, width), path)
        run, _ = captured(path, (rows, width))
        (seconds,) = in_turn([run.seconds])
        us = seconds * 1e6 / CHAIN
        size = 2 * rows * width * count
        factor = (us - calibration(device).launch) / cost_model.from_memory(size, device)
        found.append({"op": op, "rows": rows, "width": width, "us": us, "normalising": factor})
        print(f"{op} {rows} x {width}: {us:.2f} us, {factor:.2f} times its bytes", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="one form")
    options = parser.parse_args()
    device = spec_of(driver.local_architectures()[0])
    result: dict[str, Any] = origin("python -m tests.perf.behind_optimizer --out results/h200-optimized.json")
    result |= {"layers": [], "normalisations": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows, width in () if options.only else NORMALISED:
            result["normalisations"] += time_normalisations(folder, rows, width)
            write_result(options.out, result)
        for form, sizes, shape in ROWS:
            if options.only not in ("", form):
                continue
            row = time_layers(folder, device.arch, form, sizes, shape)
            result["layers"].append(row)
            times = f"stock {row['stock_us']:.1f} us, fused {row['fused_us']:.1f} us, {row['ratio']:.2f}x"
            print(f"{form} {shape}: {times}, launches {row['launches']}, apart {row['apart']:.2g}", flush=True)
            assert row["apart"] <= MOST_APART, f"{form} is wrong: {row['apart']}"
            write_result(options.out, result)


if __name__ == "__main__":
    main()
