"""MLPs drawn at random, one behind the other: `python -m tests.perf.drawn_mlps --seed 1 --seconds 100 --out F`.

What `tests.perf.anywhere` does not show, whose sites have nothing to do with each other: kernels that read what the one
before them stores, start beside its end, and find the multiprocessors as it leaves them. Each MLP is two products, with
a residual, and half of them behind a normalisation; stock ONNX Runtime and the fused model are captured in CUDA graphs
and replayed in turn; microseconds of one MLP. Outputs are compared with float64 on some rows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import onnx
from onnx import ModelProto, helper

import onnxfuse
from onnxfuse.bench.contender import Contender, warm
from onnxfuse.bench.cuda_graph import Capture, capture
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder
from tests.perf import ahead
from tests.perf.anywhere import AHEAD, BYTES_PER_US, COLD_BYTES, GRAPH_US, PRODUCTS_PER_US, epilogue, read
from tests.perf.bars import slower_than_stock
from tests.perf.behind_optimizer import several
from tests.perf.compare import origin
from tests.perf.drawn import ELEMENT_NAMES, WIDTHS
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result

NARROWEST, WIDEST, MOST_HIDDEN = 128, 5120, 18944
WIDENINGS = (1.5, 2, 8 / 3, 3.5, 4, 5.4)  # of the hidden layer
MOST_ROWS, MOST_PRODUCTS = 4096, 4e11
LEAST_COUNT, MOST_COUNT = 2, 12
FEW_NUMBERS = 1 << 20  # drawn once and repeated
CHECKED_ROWS = 8
EPSILON = 1e-5
WEIGHT = 0.4  # times 1 / sqrt(k): the square of what a chain of gates without normalisations adds must not grow
UNITS: dict[int, float] = {FLOAT: 2.0**-10, FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7}  # fp32 is multiplied in TF32
MOST_UNITS = 8.0  # of the largest output, for each MLP of the chain, whose sum is rounded again


@dataclass(frozen=True)
class Mlp:
    """width -> hidden -> width, with the residual.

    Attributes:
        kind: `gelu` has biases; `geglu` splits one product of twice `hidden` columns; `swiglu` has two products.
        m: rows.
        order: of the weights, `kn` or `nk`.
        normalised: whether a LayerNormalization comes before the first product.
    """

    kind: str
    m: int
    width: int
    hidden: int
    order: str
    element: int
    normalised: bool

    @property
    def parts(self) -> int:
        """Of the first product."""
        return 1 if self.kind == "gelu" else 2

    @property
    def weights(self) -> int:
        """Numbers of the weights."""
        return (self.parts + 1) * self.width * self.hidden

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return self.weights * helper.tensor_dtype_to_np_dtype(self.element).itemsize

    @property
    def count(self) -> int:
        """MLPs of a model: until no cache holds their weights, or there are many."""
        return min(max(math.ceil(COLD_BYTES / self.bytes), LEAST_COUNT), MOST_COUNT)

    @property
    def runs(self) -> int:
        """Runs of the model in one graph."""
        floor = max(self.bytes / BYTES_PER_US, self.m * self.weights / PRODUCTS_PER_US[self.element]) + 4
        return math.ceil(GRAPH_US / (floor * self.count))

    def __str__(self) -> str:
        norm = " normalised" if self.normalised else ""
        return f"{self.m}, {self.width}, {self.hidden} {self.kind}{norm} {ELEMENT_NAMES[self.element]} {self.order}"


def draw(seed: int, element: int, most_rows: int = MOST_ROWS) -> Iterator[Mlp]:
    """MLPs without end; the same seed gives the same ones."""
    rng = np.random.default_rng([seed, element, most_rows])
    while True:
        width = int(rng.choice([width for width in WIDTHS if NARROWEST <= width <= WIDEST]))
        hidden = min(round(width * float(rng.choice(WIDENINGS))) // 8 * 8, MOST_HIDDEN)
        m = round(math.exp(rng.uniform(0, math.log(most_rows))))
        kind, order = str(rng.choice(["gelu", "geglu", "swiglu"])), str(rng.choice(["kn", "nk"]))
        mlp = Mlp(kind, m, width, hidden, order, element, bool(rng.random() < 0.5))
        if mlp.m * mlp.weights <= MOST_PRODUCTS:
            yield mlp


def stored(mlp: Mlp) -> Iterator[list[np.ndarray]]:
    """Of MLP after MLP the weights, of the first product and of the second, then the biases."""
    element = helper.tensor_dtype_to_np_dtype(mlp.element)
    drawn = np.random.default_rng([mlp.width, mlp.hidden]).standard_normal(FEW_NUMBERS, np.float32)
    products = 2 if mlp.kind == "swiglu" else 1
    shapes = [(mlp.width, mlp.hidden * mlp.parts // products)] * products + [(mlp.hidden, mlp.width)]
    biases = [] if mlp.kind == "swiglu" else [shape[1:] for shape in shapes]
    for index in range(mlp.count):
        numbers = np.roll(drawn, 7919 * index)
        weights = [np.resize((WEIGHT * numbers / k**0.5).astype(element), (k, n)) for k, n in shapes]
        yield weights + [np.resize(numbers.astype(element), shape) for shape in biases]


def model(mlp: Mlp) -> ModelProto:
    """The chain, as exporters write it."""
    b = Builder(mlp.element)
    x = b.input("x", (mlp.m, mlp.width))
    ones, zeros = b.array(np.ones(mlp.width), "ones"), b.array(np.zeros(mlp.width), "zeros")
    for arrays in stored(mlp):
        products = 2 if mlp.kind == "swiglu" else 1
        *first, last = (_weight(b, mlp, array) for array in arrays[: products + 1])
        biases = [b.raw(array, f"bias{len(b.initializers)}") for array in arrays[products + 1 :]] or [""] * 2
        y = b("LayerNormalization", x, ones, zeros, axis=-1, epsilon=EPSILON) if mlp.normalised else x
        hidden = _activated(b, mlp, [_product(b, mlp, y, weight, biases[0]) for weight in first])
        x = b("Add", x, _product(b, mlp, hidden, last, biases[1]))
    return b.model(x)


def _weight(b: Builder, mlp: Mlp, array: np.ndarray) -> str:
    values = array if mlp.order == "kn" else np.ascontiguousarray(array.T)
    return b.raw(values, f"weight{len(b.initializers)}")


def _product(b: Builder, mlp: Mlp, x: str, weight: str, bias: str) -> str:
    if mlp.order == "nk":
        return b("Gemm", x, weight, *([bias] if bias else []), transB=1)
    product = b("MatMul", x, weight)
    return b("Add", product, bias) if bias else product


def _activated(b: Builder, mlp: Mlp, products: list[str]) -> str:
    if mlp.kind == "swiglu":
        gate, up = products
        return b("Mul", b("Mul", gate, b("Sigmoid", gate)), up)
    if mlp.kind == "gelu":
        return b("Gelu", *products)
    value, gate = b("Split", *products, outputs=2, axis=-1, num_outputs=2)
    return b("Mul", value, b("Gelu", gate))


def expected(mlp: Mlp, x: np.ndarray, module: Any) -> Any:
    """The chain's output in float64, of rows of its input; by NumPy or CuPy, the `module`."""

    def numbers(values: np.ndarray) -> Any:
        return module.asarray(values.astype(np.float32)).astype(np.float64)

    out = numbers(x)
    for arrays in stored(mlp):
        products = 2 if mlp.kind == "swiglu" else 1
        *first, last = map(numbers, arrays[: products + 1])
        biases = [*map(numbers, arrays[products + 1 :])] or [0.0, 0.0]
        y = _normalised(out, module) if mlp.normalised else out
        made = [y @ weight + biases[0] for weight in first]
        out = out + epilogue(mlp.kind, made[::-1], module)[0] @ last + biases[1]
    return out


def _normalised(x: Any, module: Any) -> Any:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / module.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON)


def drawn_input(mlp: Mlp) -> np.ndarray:
    """Of the model's type; NumPy has no bfloat16, of which feeds are made of fp32."""
    element = np.float16 if mlp.element == FLOAT16 else np.float32
    numbers = np.random.default_rng(mlp.m).standard_normal(FEW_NUMBERS, np.float32)
    return np.resize(numbers.astype(element), (mlp.m, mlp.width))


@dataclass(frozen=True)
class Prepared:
    """An MLP with both models on disk, and how its sites are computed."""

    mlp: Mlp
    original: Path
    fused: Path
    kernels: tuple[str, ...]


def prepare(mlp: Mlp, index: int, folder: Path, arch: str) -> Prepared:
    """Write both models: work for a process that sees no GPU."""
    original, fused = folder / f"{index}.onnx", folder / f"{index}.fused.onnx"
    onnx.save(model(mlp), original)
    report = onnxfuse.optimize_file(original, fused, arch=arch)
    last = report.fused[-3:] if mlp.normalised else report.fused[-2:]
    return Prepared(mlp, original, fused, tuple(f"{each.strategy}: {each.kernel}".split("\n")[0] for each in last))


def captured(path: Path, mlp: Mlp) -> tuple[Contender, Capture]:
    """The model in a session of its own, and its runs as a graph."""
    contender, stream = warm(path, {"x": drawn_input(mlp)}, "cuda")
    return contender, capture(stream, several(contender.submit, mlp.runs))


def error(contender: Contender, mlp: Mlp) -> float:
    """The largest error on some rows, in units of the output's magnitude for each MLP.

    Raises:
        AssertionError: it is more than MOST_UNITS.
    """
    rows = np.unique(np.linspace(0, mlp.m - 1, CHECKED_ROWS).astype(int))
    (out,) = contender.outputs().values()
    actual = read(out, (mlp.m, mlp.width), mlp.element, cupy.asarray(rows))
    x = drawn_input(mlp)[rows].astype(helper.tensor_dtype_to_np_dtype(mlp.element))
    exact = expected(mlp, x, cupy).get()
    found = float(np.abs(actual - exact).max() / (UNITS[mlp.element] * np.abs(exact).max() * mlp.count))
    assert found <= MOST_UNITS, f"{mlp}: off by {found} units"
    return found


def measure(each: Prepared) -> dict[str, Any]:
    """One row of the result."""
    mlp = each.mlp
    (_, stock), (contender, ours) = (captured(path, mlp) for path in (each.original, each.fused))
    found = error(contender, mlp)
    times = [seconds * 1e6 / mlp.runs / mlp.count for seconds in in_turn([stock.seconds, ours.seconds])]
    return {
        "problem": str(mlp), "drawn": asdict(mlp), "stock_us": times[0], "ours_us": times[1], "error_units": found,
        "kernels": each.kernels,
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much faster they are, and which are slower."""
    ratios = [row["stock_us"] / row["ours_us"] for row in rows]
    slower = slower_than_stock(rows)
    lines = [f"{len(rows)} MLPs, {statistics.geometric_mean(ratios):.3f}x in the mean, least {min(ratios):.3f}x"]
    lines.append(f"slower than stock by more than 2 %: {len(slower)}")
    return "\n".join(lines + [f"  {text(row)}" for row in slower])


def text(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    figures = f"stock {row['stock_us']:.1f}, ours {row['ours_us']:.1f} us, {row['stock_us'] / row['ours_us']:.3f}x"
    return f"{row['problem']}: {figures}; {'; '.join(row['kernels'])}"


def in_order(mlps: Iterator[Mlp], folder: Path, arch: str) -> Generator[Prepared, None, None]:
    """The MLPs as other processes get them ready."""
    pool = ProcessPoolExecutor(max(os.cpu_count() or 2, 3) - 2, get_context("spawn"))
    return ahead.in_order(pool, AHEAD, (partial(prepare, mlp, index, folder, arch) for index, mlp in enumerate(mlps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the MLPs")
    parser.add_argument("--seconds", type=float, default=100, help="after so many no MLP is begun")
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS)
    parser.add_argument("--out", type=Path, help="result file, JSON")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fp32", action="store_const", dest="element", const=FLOAT, help="TF32 by both sides")
    kinds.add_argument("--bf16", action="store_const", dest="element", const=BFLOAT16)
    options = parser.parse_args()
    element = options.element or FLOAT16
    arch, deadline = spec_of(driver.local_architectures()[0]).arch, time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    mlps = draw(options.seed, element, options.most_rows)
    with tempfile.TemporaryDirectory() as name, closing(in_order(mlps, Path(name), arch)) as ready:
        for each in itertools.takewhile(lambda _: time.monotonic() < deadline, ready):
            rows.append(measure(each))
            print(text(rows[-1]), flush=True)
            each.original.unlink()
            each.fused.unlink()
            cupy.get_default_memory_pool().free_all_blocks()
    print(summary(rows))
    if options.out:
        flag = {FLOAT: " --fp32", BFLOAT16: " --bf16"}.get(element, "")
        flag += f" --most-rows {options.most_rows}" if options.most_rows != MOST_ROWS else ""
        command = f"python -m tests.perf.drawn_mlps --seed {options.seed} --seconds {options.seconds:g}{flag}"
        write_result(options.out, {**origin(f"{command} --out {options.out}"), "rows": rows})


if __name__ == "__main__":
    main()
