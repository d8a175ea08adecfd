"""MLPs drawn at random, one behind the other: `python -m tests.perf.drawn_mlps --seed 1 --seconds 100 --out F`.

What `tests.perf.anywhere` does not show, whose sites have nothing to do with each other: kernels that read what the one
before them stores, start beside its end, and find the multiprocessors as it leaves them. Each MLP is two products, with
a residual, and half of them behind a normalisation; stock ONNX Runtime and the fused model are captured in CUDA graphs
and replayed in turn; microseconds of one MLP. Outputs are compared with float64 on some rows. Types take turns, and
weights of the type with those of 4 or 8 bits, in blocks of any size, of which stock is the faster of its two modes.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import onnx
from onnx import ModelProto, helper
from onnx.helper import tensor_dtype_to_np_dtype

import onnxfuse
from onnxfuse.bench.contender import Contender, warm
from onnxfuse.bench.cuda_graph import Capture, capture
from onnxfuse.device import spec_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import driver
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder
from tests.helpers.quantized import MICROSOFT, Form, Packed, nbits_node
from tests.perf import ahead
from tests.perf.anywhere import AHEAD, BYTES_PER_US, COLD_BYTES, GRAPH_US, PRODUCTS_PER_US, epilogue, read
from tests.perf.bars import by_weights, slower_than_stock
from tests.perf.behind_optimizer import several
from tests.perf.compare import origin
from tests.perf.drawn import ELEMENT_NAMES, WIDTHS
from tests.perf.every_tile import in_turn
from tests.perf.quantized_mlp import MODE
from tests.perf.result_file import write_result

NARROWEST, WIDEST, MOST_HIDDEN = 128, 5120, 18944
WIDENINGS = (1.5, 2, 8 / 3, 3.5, 4, 5.4)  # of the hidden layer
MOST_ROWS, MOST_PRODUCTS = 4096, 4e11
MOST_BYTES = 1.9e9  # of all weights, which one message holds
LEAST_COUNT, MOST_COUNT = 2, 12
FEW_NUMBERS = 1 << 20  # drawn once and repeated
QUANTIZED_BLOCKS = (0.1, 0.4, 0.2, 0.3)  # how often blocks of 16, 32, 64 and 128 are drawn
CHECKED_ROWS = 8
EPSILON = 1e-5
MOST_SHOWN = 300  # characters
WEIGHT = 0.4  # times 1 / sqrt(k): the square of what a chain of gates without normalisations adds must not grow
UNITS: dict[int, float] = {FLOAT: 2.0**-10, FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7}  # fp32 is multiplied in TF32
MOST_UNITS = 8.0  # of the largest output, for each MLP of the chain, whose sum is rounded again


Weight = np.ndarray | Packed


@dataclass(frozen=True)
class Mlp:
    """width -> hidden -> width, with the residual.

    Attributes:
        kind: `gelu` has biases; `geglu` splits one product of twice `hidden` columns; `swiglu` has two products.
        m: rows.
        order: of the weights, `kn` or `nk`.
        normalised: whether a LayerNormalization comes before the first product.
        form: how the weights are quantised, if they are; then they are [n, k], and no Gemm reads them.
    """

    kind: str
    m: int
    width: int
    hidden: int
    order: str
    element: int
    normalised: bool
    form: Form | None = None

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
        element = tensor_dtype_to_np_dtype(self.element).itemsize
        if self.form is None:
            return self.weights * element
        return self.weights * self.form.bits // 8 + self.weights // self.form.block * element

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
        points = " with zero points" if self.form is not None and self.form.zero_points else ""
        weights = f"i{self.form.bits} by {self.form.block}{points}" if self.form is not None else self.order
        return f"{self.m}, {self.width}, {self.hidden} {self.kind}{norm} {ELEMENT_NAMES[self.element]} {weights}"


def draw(seed: int, most_rows: int = MOST_ROWS) -> Iterator[Mlp]:
    """MLPs without end, of all types in turn, quantised and not; the same seed gives the same ones."""
    rng = np.random.default_rng([seed, most_rows])
    for element, quantized in itertools.cycle(itertools.product(UNITS, (False, True))):
        mlp = _draw_one(rng, element, quantized, most_rows)
        if mlp.m * mlp.weights <= MOST_PRODUCTS and mlp.bytes * mlp.count <= MOST_BYTES:
            yield mlp


def _draw_one(rng: np.random.Generator, element: int, quantized: bool, most_rows: int) -> Mlp:
    width = int(rng.choice([width for width in WIDTHS if NARROWEST <= width <= WIDEST]))
    hidden = min(round(width * float(rng.choice(WIDENINGS))) // 8 * 8, MOST_HIDDEN)
    m = round(math.exp(rng.uniform(0, math.log(most_rows))))
    kind, order = str(rng.choice(["gelu", "geglu", "swiglu"])), str(rng.choice(["kn", "nk"]))
    mlp = Mlp(kind, m, width, hidden, order, element, bool(rng.random() < 0.5))
    if not quantized:
        return mlp
    block, bits = int(rng.choice([16, 32, 64, 128], p=QUANTIZED_BLOCKS)), int(rng.choice([4, 4, 4, 8]))
    width, hidden = (size // block * block for size in (width, hidden))
    return replace(mlp, width=width, hidden=hidden, order="nk", form=Form(bits, block, bool(rng.random() < 0.5)))


def stored(mlp: Mlp) -> Iterator[tuple[list[Weight], list[np.ndarray]]]:
    """Of MLP after MLP the weights, of the first product and of the second, and the biases."""
    element = tensor_dtype_to_np_dtype(mlp.element)
    drawn = np.random.default_rng([mlp.width, mlp.hidden]).standard_normal(FEW_NUMBERS, np.float32)
    products = 2 if mlp.kind == "swiglu" else 1
    shapes = [(mlp.width, mlp.hidden * mlp.parts // products)] * products + [(mlp.hidden, mlp.width)]
    biases = [] if mlp.kind == "swiglu" else [shape[1:] for shape in shapes]
    for index in range(mlp.count):
        numbers = np.roll(drawn, 7919 * index)
        weights = [_drawn_weight(mlp, numbers, k, n, element) for k, n in shapes]
        yield weights, [np.resize(numbers.astype(element), shape) for shape in biases]


def _drawn_weight(mlp: Mlp, numbers: np.ndarray, k: int, n: int, element: np.dtype) -> Weight:
    """[k, n], [n, k], or quantised."""
    scale, form = WEIGHT / k**0.5, mlp.form
    if form is None:
        weight = np.resize((scale * numbers).astype(element), (k, n))
        return weight if mlp.order == "kn" else np.ascontiguousarray(weight.T)
    blocks, integers = k // form.block, numbers.view(np.uint8)
    scales = np.resize((np.abs(numbers) * 2 * scale / 2**form.bits).astype(element), (n, blocks))
    codes = np.resize(integers[::4], (n, blocks, form.block * form.bits // 8))  # the last bits are drawn evenly
    points = np.resize(integers[1::4], (n, -(-blocks * form.bits // 8))) if form.zero_points else None
    return Packed(form, codes, scales, points)


def model(mlp: Mlp) -> ModelProto:
    """The chain, as exporters and quantisers write it."""
    b = Builder(mlp.element)
    x = b.input("x", (mlp.m, mlp.width))
    ones, zeros = b.array(np.ones(mlp.width), "ones"), b.array(np.zeros(mlp.width), "zeros")
    for (*first, last), vectors in stored(mlp):
        biases = [b.raw(array, f"bias{len(b.initializers)}") for array in vectors] or [""] * 2
        y = b("LayerNormalization", x, ones, zeros, axis=-1, epsilon=EPSILON) if mlp.normalised else x
        hidden = _activated(b, mlp, [_product(b, mlp.order, y, weight, biases[0]) for weight in first])
        x = b("Add", x, _product(b, mlp.order, hidden, last, biases[1]))
    return b.model(x) if mlp.form is None else _of_microsoft(b, x, mlp)


def _of_microsoft(b: Builder, out: str, mlp: Mlp) -> ModelProto:
    """The model with ONNX Runtime's operators, of which ONNX infers no shapes."""
    result = helper.make_tensor_value_info(out, mlp.element, (mlp.m, mlp.width))
    graph = helper.make_graph(b.nodes, "mlps", b.inputs, [result], b.initializers)
    opsets = [helper.make_opsetid("", b.opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _product(b: Builder, order: str, x: str, weight: Weight, bias: str) -> str:
    if isinstance(weight, Packed):
        (n, blocks), out = weight.scales.shape, f"v{len(b.nodes)}_0"
        names = [b.raw(array, f"weight{len(b.initializers)}") for array in weight.tensors]
        b.nodes.append(nbits_node(x, out, names, weight.form, n, blocks * weight.form.block, bias, f"product_{out}"))
        return out
    name = b.raw(weight, f"weight{len(b.initializers)}")
    if order == "nk":
        return b("Gemm", x, name, *([bias] if bias else []), transB=1)
    product = b("MatMul", x, name)
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
    out = _numbers(x, module)
    for weights, vectors in stored(mlp):
        *first, last = (_matrix(weight, mlp.order, module) for weight in weights)
        biases = [_numbers(vector, module) for vector in vectors] or [0.0, 0.0]
        y = _normalised(out, module) if mlp.normalised else out
        made = [y @ weight + biases[0] for weight in first]
        out = out + epilogue(mlp.kind, made[::-1], module)[0] @ last + biases[1]
    return out


def _numbers(values: np.ndarray, module: Any) -> Any:
    """In float64; CuPy has no bfloat16."""
    exact = values if values.dtype == np.uint8 else values.astype(np.float32)
    return module.asarray(exact).astype(np.float64)


def _matrix(weight: Weight, order: str, module: Any) -> Any:
    """[k, n]."""
    if not isinstance(weight, Packed):
        numbers = _numbers(weight, module)
        return numbers if order == "kn" else numbers.T
    form, (n, blocks) = weight.form, weight.scales.shape
    points = 2.0 ** (form.bits - 1)
    if weight.zero_points is not None:
        points = _integers(weight.zero_points, form.bits, module)[:, :blocks, None]
    codes = _integers(weight.weight.reshape(n, -1), form.bits, module).reshape(n, blocks, form.block)
    return ((codes - points) * _numbers(weight.scales, module)[..., None]).reshape(n, -1).T


def _integers(data: np.ndarray, bits: int, module: Any) -> Any:
    """Of each row of bytes; of 4 bits the low half comes first."""
    data = module.asarray(data)
    halves = (data,) if bits == 8 else (data & 15, data >> 4)
    return module.stack(halves, -1).reshape(len(data), -1).astype(np.float64)


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
    x = drawn_input(mlp)[rows].astype(tensor_dtype_to_np_dtype(mlp.element))
    exact = expected(mlp, x, cupy).get()
    found = float(np.abs(actual - exact).max() / (UNITS[mlp.element] * np.abs(exact).max() * mlp.count))
    assert found <= MOST_UNITS, f"{mlp}: off by {found} units"
    return found


def measure(each: Prepared) -> dict[str, Any]:
    """One row of the result."""
    mlp = each.mlp
    contender, ours = captured(each.fused, mlp)
    found = error(contender, mlp)
    graphs = [ours, *(_stock(each.original, mlp, mode) for mode in ("0", "1")[: 1 if mlp.form is None else 2])]
    times = [seconds * 1e6 / mlp.runs / mlp.count for seconds in in_turn([graph.seconds for graph in graphs])]
    return {
        "problem": str(mlp), "drawn": asdict(mlp), "stock_us": min(times[1:]), "ours_us": times[0],
        "error_units": found, "kernels": each.kernels,
    }  # fmt: skip


def _stock(path: Path, mlp: Mlp, mode: str) -> Capture:
    """Stock ONNX Runtime in one of its ways to multiply by few bits."""
    os.environ[MODE] = mode
    return captured(path, mlp)[1]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much faster they are, and which are slower."""
    lines = [
        f"{name}: {len(ratios)} MLPs, {statistics.geometric_mean(ratios):.3f}x in the mean, least {min(ratios):.3f}x"
        for name, ratios in by_weights(rows).items()
    ]
    slower = slower_than_stock(rows)
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
    options = parser.parse_args()
    arch, deadline = spec_of(driver.local_architectures()[0]).arch, time.monotonic() + options.seconds
    flag = f" --most-rows {options.most_rows}" if options.most_rows != MOST_ROWS else ""
    command = f"python -m tests.perf.drawn_mlps --seed {options.seed} --seconds {options.seconds:g}{flag}"
    rows: list[dict[str, Any]] = []
    result = {**origin(f"{command} --out {options.out}"), "rows": rows}
    mlps = draw(options.seed, options.most_rows)
    with tempfile.TemporaryDirectory() as name, closing(in_order(mlps, Path(name), arch)) as ready:
        for each in itertools.takewhile(lambda _: time.monotonic() < deadline, ready):
            try:
                rows.append(measure(each))
                print(text(rows[-1]), flush=True)
                if options.out:
                    write_result(options.out, result)
            except OnnxfuseError as error:  # ONNX Runtime has no kernel for it
                print(f"{each.mlp}: {str(error)[:MOST_SHOWN]}", flush=True)
            each.original.unlink()
            each.fused.unlink()
            cupy.get_default_memory_pool().free_all_blocks()
    print(summary(rows))


if __name__ == "__main__":
    main()
