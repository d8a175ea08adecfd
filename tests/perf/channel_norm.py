"""Normalisation of channels: `python -m tests.perf.channel_norm --out results/h200-channel-norm.json`.

Chains of layer normalisations of the channels of images and of sound, `[b, c, ...]`, with scale and shift, spelled out
as SAM, NAFNet and Glow-TTS have them. Stock ONNX Runtime and the fused model are replayed in turn, each captured in a
CUDA graph; microseconds of one. Of some pixels outputs are compared with float64.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto
from onnx.helper import tensor_dtype_to_np_dtype

import onnxfuse
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.perf.behind_optimizer import captured
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

CHAIN, RUNS = 8, 2
EPSILON = 1e-6
SHAPES = (
    (1, 32, 256, 256), (8, 64, 128, 128), (1, 48, 512, 512), (8, 96, 56, 56), (1, 256, 64, 64), (2, 512, 32, 32),
    (4, 768, 16, 16), (16, 192, 400),
)  # fmt: skip
CHECKED = 4  # pixels of the first image
MOST_APART: dict[int, float] = {FLOAT: 1e-5, FLOAT16: 2e-2}  # of the largest number, behind the whole chain


def parameters(channels: int) -> tuple[np.ndarray, np.ndarray]:
    """A scale and a shift of each."""
    rng = np.random.default_rng(channels)
    return 1 + rng.standard_normal(channels) / 8, rng.standard_normal(channels)


def chain(shape: tuple[int, ...], element: int) -> ModelProto:
    """Normalisations one after the other."""
    b = Builder(element, opset=17)
    x = b.input("x", shape)
    dims = (shape[1], *[1] * (len(shape) - 2))
    scale, shift = (b.array(each.reshape(dims)) for each in parameters(shape[1]))
    for _ in range(CHAIN):
        centred = b("Sub", x, b("ReduceMean", x, axes=[1], keepdims=1))
        variance = b("ReduceMean", b("Pow", centred, b.array(2.0)), axes=[1], keepdims=1)
        normal = b("Div", centred, b("Sqrt", b("Add", variance, b.array(EPSILON))))
        x = b("Add", b("Mul", scale, normal), shift)
    return b.model(x)


def expected(pixels: np.ndarray, element: int) -> np.ndarray:
    """The chain of pixels `[c, pixels]` in float64."""
    dtype = tensor_dtype_to_np_dtype(element)
    scale, shift = (each.astype(dtype).astype(np.float64)[:, None] for each in parameters(len(pixels)))
    for _ in range(CHAIN):
        own = pixels - pixels.mean(0)
        pixels = own / np.sqrt((own**2).mean(0) + EPSILON) * scale + shift
    return pixels


def measure(folder: Path, shape: tuple[int, ...], element: int, arch: str) -> dict[str, Any]:
    """Microseconds of one normalisation, stock and fused."""
    paths, dtype = (folder / "stock.onnx", folder / "fused.onnx"), tensor_dtype_to_np_dtype(element)
    onnx.save(chain(shape, element), paths[0])
    report = onnxfuse.optimize_file(*paths, arch=arch, force=True)
    assert len(report.fused) == CHAIN
    runs, outputs = zip(*(captured(path, shape, RUNS, dtype) for path in paths), strict=True)
    x = np.resize(np.random.default_rng(1).standard_normal(1 << 20, np.float32).astype(dtype), shape)
    wanted, made = (each[0].reshape(shape[1], -1)[:, :CHECKED].astype(np.float64) for each in (x, outputs[1]))
    wanted = expected(wanted, element)
    assert np.abs(made - wanted).max() <= MOST_APART[element] * np.abs(wanted).max(), shape
    stock, fused = (seconds * 1e6 / CHAIN / RUNS for seconds in in_turn([run.seconds for run in runs]))
    name = f"{' x '.join(map(str, shape))} {'f16' if element == FLOAT16 else 'f32'}"
    return {"images": name, "stock_us": stock, "fused_us": fused, "ratio": stock / fused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    arch = spec_of(driver.local_architectures()[0]).arch
    result: dict[str, Any] = {**origin(f"python -m tests.perf.channel_norm --out {options.out}"), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        for element in (FLOAT16, FLOAT):
            for shape in SHAPES:
                row = measure(Path(name), shape, element, arch)
                result["rows"].append(row)
                times = f"stock {row['stock_us']:7.1f} us, fused {row['fused_us']:6.1f} us"
                print(f"{row['images']:28} {times}, {row['ratio']:.2f}x", flush=True)
                write_result(options.out, result)


if __name__ == "__main__":
    main()
