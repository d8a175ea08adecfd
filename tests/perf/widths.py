"""What epilogue vectorization is worth: `python -m tests.perf.widths --out results/h200-widths.json`.

Products of 8192 x 1280 x 1280 in fp16, by the kernels that the plan chooses, in four tables:

    floor       bias + residual over cuBLAS's plain product and the residual's bytes at the speed of a copy
    transposed  a residual stored as [n, m] over the same one stored as [m, n]
    odd         n = 1281, where no row begins on more than an element, over cuBLAS's plain product of that n
    worth       six epilogues with accesses as wide as the analysis allows over the same with accesses of one element

Measured as `tests.perf.kernels` does, both sides of a ratio in turn. Every timed output is checked against float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import Width, analyse
from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.dtypes import F16, F32, DType
from onnxfuse.ir.fusion import Axis, Fusion, Tensor
from onnxfuse.runtime import driver
from onnxfuse.schedule.plan import make_plan
from onnxfuse.schedule.variant import ProductVariant
from tests.helpers.fusions import fusion
from tests.helpers.kernel_problem import ARGUMENTS, NUMPY
from tests.helpers.reference_fusion import evaluate
from tests.perf.compare import add_option, compare, kernel_costs, origin
from tests.perf.kernels import LAUNCHES, REPLAYS, ROTATED_BYTES, cublas_graph, graph_of, launcher, timed_replay
from tests.perf.result_file import write_result

M, K = 8192, 1280
CHECKED_ROWS = 8
COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Problem:
    """A product with operands added to it."""

    name: str
    operands: tuple[tuple[str, DType], ...]
    n: int = 1280
    order: str = "kn"
    out: str = "m n"
    out_dtype: DType = F16
    wide: bool = True

    @property
    def fusion(self) -> Fusion:
        sizes: dict[str, int | None] = {"m": M, "n": self.n, "k": K}
        built = fusion(
            sizes, rhs=" ".join(self.order), operands=self.operands, out=self.out, out_dtype=self.out_dtype
        )  # fmt: skip
        steps = built.steps[:-1]  # no activation: its time would hide what memory takes
        return replace(built, steps=steps, outs=(replace(built.outs[0], value=steps[-1].result),))

    def variant(self, device: DeviceSpec) -> ProductVariant:
        """The kernel that a launch takes, with the widths of the analysis or of one element for the epilogue."""
        built = self.fusion
        mapping = map_axes(built)
        widths = analyse(built, mapping)
        if not self.wide:
            one = Width(1, "forced")
            widths = replace(widths, operands=(one,) * len(widths.operands), outs=(one,) * len(widths.outs))
        return make_plan(built, mapping, widths, device, exact_fp32=False).variants[0]

    @property
    def narrow(self) -> Problem:
        return replace(self, wide=False)


BIAS, RESIDUAL, TRANSPOSED = ("n", F16), ("m n", F16), ("n m", F16)
FLOOR = [Problem("bias, residual", (BIAS, RESIDUAL), order=order) for order in ("kn", "nk")]
TRANSPOSED_OVER_PLAIN = [(replace(each, name="residual [n, m]", operands=(BIAS, TRANSPOSED)), each) for each in FLOOR]
ODD = [replace(each, n=1281) for each in FLOOR]
WORTH = [
    Problem("bias", (BIAS,), order="nk"),
    Problem("bias, residual", (BIAS, RESIDUAL), order="nk"),
    Problem("bias, fp32 residual", (BIAS, ("m n", F32)), order="nk"),
    Problem("bias, residual [n, m]", (BIAS, TRANSPOSED), order="nk"),
    Problem("bias, residual, fp32 output", (BIAS, RESIDUAL), order="nk", out_dtype=F32),
    Problem("bias, output [n, m]", (BIAS,), order="nk", out="n m"),
]


class Row(NamedTuple):
    """A problem's sizes, as `kernels.Sizes`, and a name."""

    m: int
    n: int
    k: int
    name: str

    def __str__(self) -> str:
        return self.name


def shape(tensor: Tensor, built: Fusion) -> tuple[int, ...]:
    sizes = {axis.name: axis.size for axis in built.axes if axis.size is not None}
    return tuple(math.prod(sizes[axis] for axis in dim) for dim in tensor.dims)


def strides(tensor: Tensor, built: Fusion, rows: str, columns: str) -> tuple[int, int]:
    """Elements from row to row and from column to column; 0 along an axis that the tensor lacks."""
    found, stride = {}, 1
    for axis in reversed(tensor.axes):
        found[axis] = stride
        stride *= built.size(axis) or 1
    return found.get(rows, 0), found.get(columns, 0)


class Buffers:
    """As many copies of a problem's tensors as it takes to miss the L2 cache; what `kernels.launcher` takes."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.fusion = built = problem.fusion
        self.row = Row(M, problem.n, K, f"{seed}-{problem.name}-{problem.n}-{problem.wide}")
        rng = np.random.default_rng(seed)
        self.inputs = {
            tensor.name: rng.standard_normal(shape(tensor, built), np.float32).astype(NUMPY[tensor.dtype])
            for tensor in built.inputs
        }
        self.inputs["rhs"] = (self.inputs["rhs"].astype(np.float32) / np.sqrt(K)).astype(np.float16)
        out = built.outs[0].tensor
        each = sum(value.nbytes for value in self.inputs.values()) + M * problem.n * out.dtype.bytes
        self.copies = max(2, int(ROTATED_BYTES / each) + 1)
        self.memory = [{name: cupy.asarray(value) for name, value in self.inputs.items()} for _ in range(self.copies)]
        self.out = [cupy.full(shape(out, built), np.nan, NUMPY[out.dtype]) for _ in range(self.copies)]
        self.x = [copy["lhs"] for copy in self.memory]
        self.weight = [copy["rhs"] for copy in self.memory]
        self.product = [cupy.empty((M, problem.n), np.float16) for _ in range(self.copies)]

    def arguments(self, copy: int) -> np.ndarray:
        built, memory = self.fusion, self.memory[copy]
        arguments = np.zeros(1, ARGUMENTS)

        def entry(tensor: Tensor, array: cupy.ndarray, rows: str, columns: str) -> tuple[int, int, int, int]:
            return (array.data.ptr, 0, *strides(tensor, built, rows, columns))

        arguments["lhs"][0] = entry(built.lhs, memory["lhs"], "m", "k")
        arguments["rhs"][0, 0] = entry(built.rhs[0], memory["rhs"], "k", "n")
        for index, operand in enumerate(built.operands):
            arguments["loads"][0, index] = entry(operand, memory[operand.name], "m", "n")
        arguments["outs"][0, 0] = entry(built.outs[0].tensor, self.out[copy], "m", "n")
        for name, value in (("m", M), ("n", self.row.n), ("k", K), ("batch", 1)):
            arguments[name] = value
        return arguments

    def check(self) -> float:
        """The largest error on some rows, in units of the last place of fp16 at the output's magnitude."""
        rows = np.unique(np.linspace(0, M - 1, CHECKED_ROWS).astype(int))
        out = self.fusion.outs[0].tensor
        tensors = {tensor.name: tensor for tensor in self.fusion.inputs}
        inputs = {name: of_rows(tensors[name], value, rows) for name, value in self.inputs.items()}
        axes = tuple(Axis(axis.name, len(rows) if axis.name == "m" else axis.size) for axis in self.fusion.axes)
        (expected,) = evaluate(replace(self.fusion, axes=axes), inputs)
        error = np.abs(of_rows(out, self.out[0].get(), rows).astype(np.float64) - expected).max()
        error /= 2.0**-10 * max(1.0, np.abs(expected).max())
        assert error <= 2.0, f"{self.row}: off by {error} units in the last place"
        assert not any(cupy.isnan(each).any() for each in self.out), f"{self.row}: outputs were not written"
        return float(error)


def of_rows(tensor: Tensor, value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Some rows of a tensor, along the dimension that m is; all of one without m."""
    return np.take(value, rows, axis=tensor.axes.index("m")) if "m" in tensor.axes else value


Timed = Callable[[], float]


@dataclass
class Bench:
    """Kernels on the device at hand."""

    device: DeviceSpec
    folder: Path
    made: int = 0

    def __post_init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def ours(self, problem: Problem) -> tuple[Timed, Buffers, ProductVariant]:
        self.made += 1
        variant, buffers = problem.variant(self.device), Buffers(problem, self.made)
        replay = graph_of(launcher(variant, self.device, buffers, self.folder), buffers.copies, self.stream)
        return lambda: timed_replay(replay, self.stream), buffers, variant

    def copy(self) -> Timed:
        """Microseconds of a copy of COPIED_BYTES."""
        source, target = (cupy.zeros(COPIED_BYTES, np.uint8) for _ in range(2))

        def launch(_: int) -> None:
            target.data.copy_from_device_async(source.data, COPIED_BYTES, cupy.cuda.get_current_stream())

        replay = graph_of(launch, 1, self.stream)
        return lambda: timed_replay(replay, self.stream)


def medians(timed: Sequence[Timed]) -> list[float]:
    """Microseconds of each, measured in turn."""
    for each in timed:
        each()
    rounds = [[each() for each in timed] for _ in range(REPLAYS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def row(
    problem: Problem, table: str, bar: float | None, us: float, peer: float, made: ProductVariant, error: float
) -> dict[str, Any]:
    spec = made.spec
    return {
        "table": table, "problem": f"{table}: {problem.name}, n={problem.n}", "order": problem.order, "bar": bar,
        "us": us, "peer_us": peer, "ratio": us / peer, "tile": str(made.tile),
        "widths": [spec.lhs_width, spec.rhs_width, *(each.width for each in (*spec.loads, *spec.outs))],
        "error_ulp": error,
    }  # fmt: skip


def against_cublas(bench: Bench, problem: Problem, table: str, bar: float | None) -> dict[str, Any]:
    """Over cuBLAS's plain product and, where there is a bar, what reading the residual takes at the speed of a copy."""
    timed, buffers, variant = bench.ours(problem)
    _, cublas = cublas_graph(buffers, problem.order == "nk")
    ours, product, copied = medians([timed, cublas, bench.copy()])
    residual = M * problem.n * F16.bytes * copied / (2 * COPIED_BYTES)  # a copy reads and writes
    made = row(problem, table, bar, ours, product + (residual if bar else 0.0), variant, buffers.check())
    return made | {"cublas_us": product, "residual_us": residual, "copy_tb_s": 2 * COPIED_BYTES / copied / 1e6}


def against_each_other(bench: Bench, problem: Problem, peer: Problem, table: str, bar: float | None) -> dict[str, Any]:
    timed, buffers, variant = bench.ours(problem)
    peer_timed, peer_buffers, _ = bench.ours(peer)
    ours, other = medians([timed, peer_timed])
    peer_buffers.check()
    return row(problem, table, bar, ours, other, variant, buffers.check())


def measure(device: DeviceSpec, folder: Path) -> list[dict[str, Any]]:
    bench, rows = Bench(device, folder), []
    jobs: list[Callable[[], dict[str, Any]]] = []
    jobs += [partial(against_cublas, bench, each, "floor", 1.03) for each in FLOOR]
    jobs += [partial(against_each_other, bench, each, peer, "transposed", 1.10) for each, peer in TRANSPOSED_OVER_PLAIN]
    jobs += [partial(against_cublas, bench, each, "odd", None) for each in ODD]
    jobs += [partial(against_each_other, bench, each, each.narrow, "worth", None) for each in WORTH]
    print(f"{'problem':46} order   ours us   peer us  ratio   bar  widths; tile", flush=True)
    for job in jobs:
        made = job()
        rows.append(made)
        bar = f"{made['bar']:5.2f}" if made["bar"] else "    -"
        times = f"{made['us']:9.1f} {made['peer_us']:9.1f} {made['ratio']:6.3f} {bar}"
        print(f"{made['problem']:46} {made['order']:5} {times}  {made['widths']}; {made['tile']}", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(spec_of(driver.local_architectures()[0]), Path(folder))
    result = {
        **origin("python -m tests.perf.widths --out results/h200-widths.json"),
        "cupy": cupy.__version__,
        "launches": LAUNCHES,
        "rows": rows,
    }
    write_result(options.out, result)
    sys.exit(compare(result, options.against, kernel_costs))


if __name__ == "__main__":
    main()
