"""The MLP of an LLM with few-bit weights: `python -m tests.perf.quantized_mlp --out results/h200-quantized.json`.

Two MLPs of a model of 8 billion parameters, 4096 -> 2 x 14336 -> 4096 with SiLU and residual, one behind the other, so
that no cache holds the weights; microseconds of one. Stock ONNX Runtime in both of its modes (ORT_FPA_INTB_GEMM), the
same in fp16 with and without onnxfuse, and the fused model with few-bit weights; of each several runs are captured in a
CUDA graph, of 200 microseconds and more, and replayed in turn. The fused model's output is compared with stock's. Of
the last form activations are fp32, and so is what it is beside.
"""

from __future__ import annotations

import argparse
import os
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
from tests.helpers.onnx_build import FLOAT, FLOAT16
from tests.helpers.optimized_layers import Layers, Sizes
from tests.helpers.quantized import Form, nbits_node
from tests.perf.behind_optimizer import captured
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

SIZES = Sizes(4096, 14336, 32, 8)
ROWS = (1, 4, 16, 64, 300, 2048)
OF_FP32 = "4 bits, blocks of 32, fp32"
FORMS = {
    "4 bits, blocks of 32": Form(),
    "4 bits, blocks of 128, zero points": Form(4, 128, True),
    "8 bits, blocks of 32": Form(8, 32),
    OF_FP32: Form(),
}
COUNT = 2  # MLPs
LONG_ENOUGH = 300  # rows from which one run takes 200 microseconds
RUNS = 4  # of fewer rows, in one graph
MODE = "ORT_FPA_INTB_GEMM"


class Mlp(Layers):
    """Builds MLPs whose weights are of few bits, or of the activations' type without a form."""

    def __init__(self, form: Form | None, dtype: int = FLOAT16) -> None:
        super().__init__(SIZES, dtype)
        self.form = form

    def product(self, x: str, k: int, n: int) -> str:
        """A product with a drawn weight."""
        if self.form is None:
            return self("MatMul", x, self.weight(k, n))
        form, blocks, out = self.form, k // self.form.block, f"v{len(self.nodes)}_0"
        drawn = np.random.default_rng(n).integers(0, 256, 1 << 20, np.uint8)
        codes = np.resize(drawn, (n, blocks, form.block * form.bits // 8))
        scales = np.resize(np.abs(self._drawn) * (1 / 2**form.bits / k**0.5), (n, blocks)).astype(self.numpy)
        arrays = [codes, scales]
        if form.zero_points:
            arrays.append(np.full((n, blocks * form.bits // 8), 0x88, np.uint8))
        names = [self.raw(array, f"w{len(self.initializers)}") for array in arrays]
        self.nodes.append(nbits_node(x, out, names, form, n, k, name=f"product_{len(self.nodes)}"))
        return out


def mlps(form: Form | None, dtype: int) -> ModelProto:
    b = Mlp(form, dtype)
    x = b.input("x", ("rows", SIZES.width))
    for _ in range(COUNT):
        gate, up = (b.product(x, SIZES.width, SIZES.hidden) for _ in range(2))
        x = b("Add", b.product(b("Mul", b("Mul", gate, b("Sigmoid", gate)), up), SIZES.hidden, SIZES.width), x)
    return b.finished(x)


def dtype_of(form: str) -> int:
    """The activations' type."""
    return FLOAT if form == OF_FP32 else FLOAT16


def timed(paths: dict[str, Path], rows: int, form: str) -> dict[str, Any]:
    """Microseconds of one MLP, by the model's name, and how far the fused output is from stock's."""
    count, numpy = RUNS if rows < LONG_ENOUGH else 1, tensor_dtype_to_np_dtype(dtype_of(form))
    runs, outputs = {}, {}
    for name, path in paths.items():
        os.environ[MODE] = "1" if name == "stock, its mode" else "0"
        runs[name], outputs[name] = captured(path, (rows, SIZES.width), count, numpy)
    times = in_turn([run.seconds for run in runs.values()])
    stock, fused = outputs["stock"], outputs["fused"]
    apart = float(np.abs(fused - stock).max() / np.abs(stock).max())
    return {name: seconds * 1e6 / COUNT / count for name, seconds in zip(runs, times, strict=True)} | {"apart": apart}


def prepared(folder: Path, form: str, arch: str) -> tuple[dict[str, Path], int]:
    """The models of a form, and how many sites of it are fused."""
    dtype = dtype_of(form)
    plain = "fp32" if dtype == FLOAT else "fp16"
    names = ("stock", "stock, its mode", "fused", plain, f"{plain} fused")
    paths = {name: folder / f"{form}.{name}.onnx" for name in names}
    onnx.save(mlps(FORMS[form], dtype), paths["stock"])
    paths["stock, its mode"] = paths["stock"]
    onnx.save(mlps(None, dtype), paths[plain])
    onnxfuse.optimize_file(paths[plain], paths[f"{plain} fused"], arch=arch)
    report = onnxfuse.optimize_file(paths["stock"], paths["fused"], arch=arch)
    return paths, len(report.fused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--form", action="append", choices=FORMS, help="only these forms")
    options = parser.parse_args()
    arch = spec_of(driver.local_architectures()[0]).arch
    of = "".join(f' --form "{form}"' for form in options.form or ())
    result: dict[str, Any] = origin(f"python -m tests.perf.quantized_mlp{of} --out {options.out}")
    result["rows"] = []
    with tempfile.TemporaryDirectory() as name:
        for form in options.form or FORMS:
            paths, sites = prepared(Path(name), form, arch)
            for rows in ROWS:
                row = {"form": form, "m": rows, "sites": sites, **timed(paths, rows, form)}
                result["rows"].append(row)
                write_result(options.out, result)
                figures = (f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
                print(form, rows, *figures, flush=True)


if __name__ == "__main__":
    main()
