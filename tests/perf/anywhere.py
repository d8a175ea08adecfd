"""Problems drawn at random: stock ONNX Runtime, cuBLAS's plain product and ours, and every tile that could have been.

    python -m tests.perf.anywhere --seed 1 --seconds 200 --out results/h200-anywhere-1.json

A problem is a model of several equal sites, each with an input of its own, and with as many weights as it takes to miss
the L2 cache. Stock and fused model are captured in CUDA graphs and replayed in turn with a graph of cuBLAS's products
of the full width, by torch; the time is that of one site, the median of several rounds. Outputs are checked against
float64 on some rows. Then the tiles that the cost model puts near the best are timed by themselves: how much slower the
chosen one is than the fastest is the plan's regret.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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

import onnxfuse
from onnxfuse.bench.contender import Contender, warm
from onnxfuse.bench.cuda_graph import capture
from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import from_bfloat16
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.perf import ahead
from tests.perf.bars import FLOORS, LATE, over_cublas, quantile, regret, regrets, slower_than_stock
from tests.perf.compare import origin
from tests.perf.drawn import Drawn, draw, model, stored
from tests.perf.every_tile import Planned, compile_tiles, in_turn, is_odd, planned, time_tiles
from tests.perf.kernels import TF32_EPS
from tests.perf.result_file import write_result
from tests.perf.torch_graph import captured_by_torch, replay_seconds

BYTES_PER_US = 4.0e6  # an H200 reads at 4.8 TB/s by its data sheet, 4.0 by a copy
PRODUCTS_PER_US: dict[int, float] = {
    FLOAT16: 395e6,
    BFLOAT16: 395e6,
    FLOAT: 197e6,
}  # dense, at the clock that its power allows
COLD_BYTES = 130e6  # more than twice the L2 cache
GRAPH_US = 200
MOST_SITES = 48
CHECKED_ROWS = 16
MOST_ULP = 2.0  # of the output's magnitude
AHEAD = 20  # problems that are prepared beside the one that is timed
WORST = 10
SHOWN_KERNELS = 160  # characters


@dataclass(frozen=True)
class Prepared:
    """A problem with both models on disk and its tiles compiled."""

    problem: Drawn
    sites: int
    weights: int
    original: Path
    fused: Path
    kernel: str
    seconds: float
    tiles: Planned | None


def floor_us(problem: Drawn) -> float:
    """What the chip allows the plain product: its bytes, or its products."""
    product = problem.element_bytes * (problem.m * problem.k + problem.k * problem.width + problem.m * problem.width)
    return max(product / BYTES_PER_US, problem.m * problem.k * problem.width / PRODUCTS_PER_US[problem.element])


def sizes(problem: Drawn) -> tuple[int, int]:
    """Sites of a model, and different weights among them."""
    sites = min(max(math.ceil(GRAPH_US / (floor_us(problem) + 2)), 2), MOST_SITES)
    return sites, min(sites, max(1, math.ceil(COLD_BYTES / problem.bytes)))


def prepare(problem: Drawn, index: int, folder: Path, device: DeviceSpec, further: int) -> Prepared:
    """Write both models and compile the tiles: work for a process that sees no GPU."""
    sites, weights = sizes(problem)
    original, fused = folder / f"{index}.onnx", folder / f"{index}.fused.onnx"
    kernel, seconds = "", 0.0
    if not further:
        onnx.save(model(problem, sites, weights), original)
        start = time.perf_counter()
        report = onnxfuse.optimize_file(original, fused, arch=device.arch)
        seconds = (time.perf_counter() - start) / sites
        kernel = f"{report.fused[0].strategy}: {report.fused[0].kernel}" if report.fused else "left alone"
    found = planned(problem, device, further)
    if found is not None:
        compile_tiles(found, device, folder)
    return Prepared(problem, sites, weights, original, fused, kernel, seconds, found)


def measure(each: Prepared, device: DeviceSpec, folder: Path) -> dict[str, Any]:
    """One row of the result."""
    row: dict[str, Any] = {"problem": str(each.problem), "drawn": asdict(each.problem)}
    if each.kernel:
        row |= _in_sessions(each)
    if each.tiles is not None:
        row["chosen"] = each.tiles.chosen
        row["tiles"] = time_tiles(each.problem, each.tiles, each.sites, each.weights, device, folder)
    return row


def _in_sessions(each: Prepared) -> dict[str, Any]:
    """Stock, cuBLAS and ours."""
    problem = each.problem
    stock, ours = (_captured(path, problem, each.sites) for path in (each.original, each.fused))
    ulp = None if ours is None else _error(ours[0], problem)
    ran = {name: run[1] for name, run in (("stock", stock), ("ours", ours)) if run is not None}
    graphs = [partial(_microseconds, run, each.sites) for run in ran.values()]
    cublas, *times = in_turn([_cublas(problem, each.sites, each.weights), *graphs])
    found = dict(zip(ran, times, strict=True))
    return {
        "floor_us": floor_us(problem), "stock_us": found.get("stock"), "cublas_us": cublas,
        "ours_us": found.get("ours"), "error_ulp": ulp, "optimize_s": each.seconds,
        "kernel": each.kernel.split("\n")[0][:SHOWN_KERNELS],
    }  # fmt: skip


def _microseconds(seconds: Callable[[], float], sites: int) -> float:
    return seconds() / sites * 1e6


def _captured(path: Path, problem: Drawn, sites: int) -> tuple[Contender, Callable[[], float]] | None:
    """The model in a session of its own, and seconds of one replay; None where ONNX Runtime cannot run it."""
    try:
        contender, stream = warm(path, _feeds(problem, sites), "cuda")
        graph = capture(stream, contender.submit)
    except OnnxfuseError as error:
        print(f"  {path.name}: {str(error)[:300]}", flush=True)
        return None
    return contender, graph.seconds


def _feeds(problem: Drawn, sites: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(problem.m).standard_normal(1 << 20, np.float32)
    element = np.float16 if problem.element == FLOAT16 else np.float32
    x = np.resize(drawn.astype(element), problem.lhs_shape)
    feeds = {f"x{index}": x for index in range(sites)}
    if problem.kind == "residual":
        residual = np.resize(np.roll(drawn, 5).astype(element), problem.out_shape)
        feeds |= {f"residual{index}": residual for index in range(sites)}
    return feeds


def _cublas(problem: Drawn, sites: int, weights: int) -> Callable[[], float]:
    """Microseconds of one plain product of the full width."""
    import torch

    torch.set_float32_matmul_precision("high")
    names: dict[int, Any] = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT: torch.float32}
    element = names[problem.element]
    x = [torch.randn(problem.m, problem.k, device="cuda", dtype=element) for _ in range(sites)]
    shape = (problem.k, problem.width) if problem.order == "kn" else (problem.width, problem.k)
    rhs = [torch.randn(shape, device="cuda", dtype=element) for _ in range(weights)]
    rhs = rhs if problem.order == "kn" else [each.T for each in rhs]
    out = [torch.empty(problem.m, problem.width, device="cuda", dtype=element) for _ in range(min(sites, 4))]

    def products() -> None:
        for site in range(sites):
            torch.mm(x[site], rhs[site % weights], out=out[site % len(out)])

    graph = captured_by_torch(products)
    return lambda: replay_seconds(graph) * 1e6 / sites


def _error(contender: Contender, problem: Drawn) -> float:
    """The largest error of the first site on some rows, in units of the last place of the output's magnitude."""
    rows = np.unique(np.linspace(0, problem.m - 1, CHECKED_ROWS).astype(int))
    first = list(contender.outputs().values())[: problem.outputs]
    shape, at = (problem.m, problem.n), cupy.asarray(rows)
    actual = [read(value, shape, problem.element, at) for value in first]
    expected = _expected(problem, rows)
    unit = TF32_EPS if problem.element == FLOAT else 2.0**-7 if problem.is_bfloat16 else 2.0**-10
    found = max(np.abs(a - e).max() / (unit * max(1.0, np.abs(e).max())) for a, e in zip(actual, expected, strict=True))
    assert found <= MOST_ULP, f"{problem}: off by {found} units in the last place"
    return float(found)


def read(value: Any, shape: tuple[int, ...], element: int, rows: Any = slice(None)) -> np.ndarray:
    """An output on the device, or some rows of it, in float64; NumPy has no bfloat16."""
    size = 4 if element == FLOAT else 2
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), math.prod(shape) * size, value)
    whole = cupy.ndarray(shape, np.uint32 if size == 4 else np.uint16, cupy.cuda.MemoryPointer(memory, 0))
    taken: np.ndarray = whole[rows].get()
    if element == BFLOAT16:
        return from_bfloat16(taken).astype(np.float64)
    return taken.view(np.float32 if size == 4 else np.float16).astype(np.float64)


def _expected(problem: Drawn, rows: np.ndarray) -> list[np.ndarray]:
    """Some rows of the first site's outputs in float64, computed on the GPU."""
    feeds = _feeds(problem, 1)

    def numbers(values: np.ndarray) -> cupy.ndarray:
        rounded = values.astype("bfloat16" if problem.is_bfloat16 else values.dtype)
        return cupy.asarray(rounded.astype(np.float32)).astype(np.float64)

    x = numbers(feeds["x0"].reshape(problem.m, problem.k)[rows])
    weights, biases = stored(problem, 0)
    products = [x @ (numbers(w) if problem.order == "kn" else numbers(w).T) for w in weights]
    products = [p + numbers(b) for p, b in zip(products, biases, strict=True)] if biases else products
    if problem.kind == "residual":
        products[0] += numbers(feeds["residual0"].reshape(problem.m, problem.n)[rows])
    return [out.get() for out in epilogue(problem.kind, products, cupy)]


def epilogue(kind: str, products: list[Any], module: Any) -> list[Any]:
    """What a site stores, given its products with bias and residual; by NumPy or CuPy, the `module`."""

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + _erf(x / 2**0.5))

    if kind == "gelu":
        return [gelu(products[0])]
    if kind in ("bias", "residual", "qkv"):
        return products
    value, gate = products if len(products) == 2 else module.split(products[0], 2, axis=1)
    return [value * (gelu(gate) if kind == "geglu" else gate / (1 + module.exp(-gate)))]


def _erf(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.vectorize(math.erf, otypes=[np.float64])(x)
    from cupyx.scipy.special import erf

    return erf(x)


def in_order(
    problems: Iterator[Drawn], folder: Path, device: DeviceSpec, further: int
) -> Generator[Prepared, None, None]:
    """The problems as other processes get them ready."""
    pool = ProcessPoolExecutor(max(os.cpu_count() or 2, 3) - 2, get_context("spawn"))
    calls = (partial(prepare, problem, index, folder, device, further) for index, problem in enumerate(problems))
    return ahead.in_order(pool, AHEAD, calls)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures of a result, and the rows that are furthest from cuBLAS's product."""
    ran = [row for row in rows if row.get("ours_us")]
    lines = [f"{len(rows)} problems, {len(ran)} ran"]
    both = [row for row in ran if row["stock_us"]]
    slower = slower_than_stock(both)
    lines.append(f"slower than stock by more than 2 %: {len(slower)} of {len(both)}")
    lines += [f"  {row['ours_us'] / row['stock_us']:.3f} of stock: {text(row)}" for row in slower]
    for floor in FLOORS:
        ratios = over_cublas(ran, floor)
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"floor {floor} us: {len(ratios)} problems, {mean:.3f} of cuBLAS, worst {max(ratios):.2f}")
    lines.append("worst of cuBLAS's product:")
    worst = sorted(ran, key=lambda row: -row["ours_us"] / row["cublas_us"])[:WORST]
    lines += [f"  {row['ours_us'] / row['cublas_us']:.3f}: {text(row)}" for row in worst]
    found = regrets(rows)
    if found:
        lines.append(f"regret: median {quantile(found, 0.5):.1%}, 95th percentile {quantile(found, LATE):.1%}")
        errors = sorted(abs(math.log(estimate / us)) for row in rows for us, estimate in row.get("tiles", {}).values())
        errors = [math.exp(each) - 1 for each in errors]
        lines.append(f"estimates off by: median {quantile(errors, 0.5):.1%}, 95th {quantile(errors, LATE):.1%}")
    return "\n".join(lines)


def text(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    us, tile = min(((us, tile) for tile, (us, _) in row.get("tiles", {}).items()), default=(0.0, ""))
    best = f", best {tile} {us:.1f}" if tile else ""
    chosen = f"{row['problem']}: {_times(row)}{row.get('chosen') or row.get('kernel', 'not timed')}{best}"
    return f"{chosen}, regret {found:.1%}" if (found := regret(row)) is not None else chosen


def _times(row: Mapping[str, Any]) -> str:
    if "ours_us" not in row:
        return ""
    stock, ours = (f"{row[name]:.1f}" if row[name] else "-" for name in ("stock_us", "ours_us"))
    return f"stock {stock}, cuBLAS {row['cublas_us']:.1f}, ours {ours} us; "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the problems")
    parser.add_argument("--seconds", type=float, default=200, help="after so many no problem is begun")
    parser.add_argument("--count", type=int, help="so many problems at most")
    parser.add_argument("--out", type=Path, help="result file, JSON")
    parser.add_argument("--further", type=int, default=0, help="time tiles alone, so many far ones among them")
    parser.add_argument(
        "--odd", action="store_true", help="only problems whose rows along k begin where TMA cannot read"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fp32", action="store_const", dest="element", const=FLOAT, help="TF32 by both sides")
    kinds.add_argument("--bf16", action="store_const", dest="element", const=BFLOAT16)
    options = parser.parse_args()
    element = options.element or FLOAT16
    device, deadline = spec_of(driver.local_architectures()[0]), time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    every = (each for each in draw(options.seed, element) if not options.odd or is_odd(each))
    problems = itertools.islice(every, options.count)
    with (
        tempfile.TemporaryDirectory() as name,
        closing(in_order(problems, Path(name), device, options.further)) as ready,
    ):
        for each in ready:
            if time.monotonic() > deadline:
                break
            rows.append(measure(each, device, Path(name)))
            print(text(rows[-1]), flush=True)
            each.original.unlink(missing_ok=True)
            each.fused.unlink(missing_ok=True)
            cupy.get_default_memory_pool().free_all_blocks()
    print(summary(rows))
    if options.out:
        flag = {FLOAT: " --fp32", BFLOAT16: " --bf16"}.get(element, "")
        flag += f" --further {options.further}" if options.further else ""
        flag += " --odd" if options.odd else ""
        command = f"python -m tests.perf.anywhere --seed {options.seed} --seconds {options.seconds:g}{flag}"
        write_result(options.out, {**origin(command), "rows": rows})


if __name__ == "__main__":
    main()
