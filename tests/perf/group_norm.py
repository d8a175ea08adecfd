"""Group normalisation with SiLU: `python -m tests.perf.group_norm --out results/h200-group-norm.json`.

Of images as a UNet and a VAE have them: chains of as many as make a replay long, each between Reshapes as TorchScript
writes torch's GroupNorm, with the scale and the shift of channels and SiLU. Stock ONNX Runtime and the fused model are
replayed in turn, each captured in a CUDA graph. Of some groups the fused model is no farther from float64 than stock.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

import onnxfuse
from onnxfuse.bench.contender import warm
from onnxfuse.bench.cuda_graph import capture
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import Array
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

COMMAND = "python -m tests.perf.group_norm --out results/h200-group-norm.json"
GROUPS = 32
CHAIN = 8
# Images, channels, a side, and the element: the UNet of SD 1.5, its VAE's decoder, and small ones.
CASES = (
    (2, 320, 64, FLOAT16), (2, 640, 32, FLOAT16), (2, 1280, 16, FLOAT16), (2, 1280, 8, FLOAT16), (2, 960, 64, FLOAT16),
    (1, 320, 128, FLOAT16), (1, 512, 64, FLOAT16), (1, 512, 128, FLOAT16), (1, 256, 512, FLOAT16),
    (1, 128, 512, FLOAT16), (16, 320, 64, FLOAT16), (2, 320, 64, FLOAT), (1, 96, 7, FLOAT16), (64, 64, 14, FLOAT16),
)  # fmt: skip
CHECKED = 4  # groups of the first image, which a chain computes by themselves


def chain(channels: int, element: int) -> ModelProto:
    """Normalisations one after the other, of images of any size."""
    b, rng = Builder(element, opset=17), np.random.default_rng(0)
    x = b.input("x", ("batch", channels, "h", "w"))
    for place in range(CHAIN):
        rows = b("Reshape", x, b.integers(0, GROUPS, -1))
        y = b("InstanceNormalization", rows, b.array(np.ones(GROUPS)), b.array(np.zeros(GROUPS)), epsilon=1e-5)
        scale, shift = (b.array(rng.standard_normal((channels, 1, 1)), f"{name}{place}") for name in ("scale", "shift"))
        y = b("Add", b("Mul", b("Reshape", y, b("Shape", x)), scale), shift)
        x = b("Mul", y, b("Sigmoid", y))
    return b.model(x)


def expected(model: ModelProto, x: Array) -> Array:
    """The chain of the first groups of the first image, in float64."""
    channels = CHECKED * x.shape[1] // GROUPS
    numbers = {each.name: numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
    value = x[:1, :channels].astype(np.float64)
    for place in range(CHAIN):
        rows = value.reshape(CHECKED, -1)
        rows = rows - rows.mean(-1, keepdims=True)
        normal = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5)
        scale, shift = (numbers[f"{name}{place}"][:channels] for name in ("scale", "shift"))
        value = normal.reshape(value.shape) * scale + shift
        value = value / (1 + np.exp(-value))
    return value


def measure(folder: Path, images: int, channels: int, side: int, element: int, arch: str) -> dict[str, Any]:
    """Microseconds of one normalisation, stock and fused."""
    paths = folder / "stock.onnx", folder / "fused.onnx"
    onnx.save(chain(channels, element), paths[0])
    report = onnxfuse.optimize_file(*paths, arch=arch, force=True)
    assert len(report.fused) == CHAIN
    drawn = np.random.default_rng(side).standard_normal((images, channels, side, side), np.float32)
    feeds = {"x": drawn.astype(np.float16) if element == FLOAT16 else drawn}
    graphs, outputs = [], []
    for path in paths:
        contender, stream = warm(path, feeds, "cuda")
        (output,) = contender.outputs().values()
        outputs.append(output.numpy().astype(np.float32))
        graphs.append(capture(stream, contender.submit))
    wanted = expected(onnx.load(paths[0]), feeds["x"])
    stock_error, error = (np.linalg.norm(output[:1, : wanted.shape[1]] - wanted) for output in outputs)
    assert error <= stock_error, f"{images} x {channels} x {side}: {error} against {stock_error}"
    stock, fused = (seconds * 1e6 / CHAIN for seconds in in_turn([graph.seconds for graph in graphs]))
    kind = "f16" if element == FLOAT16 else "f32"
    shape = f"{images} x {channels} x {side} x {side} {kind}"
    return {"images": shape, "stock_us": stock, "fused_us": fused, "ratio": stock / fused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    arch = spec_of(driver.local_architectures()[0]).arch
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            rows.append(measure(Path(name), *case, arch))
            row = rows[-1]
            times = f"stock {row['stock_us']:7.1f} us, fused {row['fused_us']:6.1f} us"
            print(f"{row['images']:28} {times}, {row['ratio']:.2f}x", flush=True)
            write_result(options.out, {**origin(COMMAND), "rows": rows})


if __name__ == "__main__":
    main()
