"""Times many tiles of the portable kernel against cuBLAS, to choose the planner's tile list by. A script, no test.

    python tests/gpu/time_portable.py [--quick] [--only TEXT]

Microseconds a launch: the median of CUDA graph replays over buffers that rotate through more than the L2 cache. cuBLAS
computes the plain product of the same operands, all parts in one, without the epilogue.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cupy
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from onnxfuse.device import ARCHITECTURES, DeviceSpec
from onnxfuse.dtypes import F16
from onnxfuse.fusion import Step
from onnxfuse.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.kernels.emit import ENTRY, emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.tile_footprint import shared_bytes, why_not
from tests.kernel_problem import ARGUMENTS

ROTATED_BYTES = 200e6  # more than three times the L2 cache of an H200
LAUNCHES = 40  # of one graph
REPLAYS = 7


@dataclass(frozen=True)
class Shape:
    """One row of the table: `n` is the width of one part."""

    m: int
    k: int
    n: int
    epilogue: str

    @property
    def parts(self) -> int:
        return 2 if self.epilogue == "geglu" else 1

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n} {self.epilogue}"


SHAPES = [
    Shape(8192, 320, 1280, "geglu"),
    Shape(2048, 640, 2560, "geglu"),
    Shape(512, 1280, 5120, "geglu"),
    Shape(128, 1280, 5120, "geglu"),
    Shape(8192, 640, 2560, "geglu"),
    Shape(2048, 1280, 5120, "geglu"),
    Shape(8192, 1024, 2624, "geglu"),
    Shape(4096, 768, 3072, "gelu"),
    Shape(4096, 1024, 4096, "gelu"),
    Shape(8192, 1280, 320, "residual"),
    Shape(2048, 2560, 640, "residual"),
    Shape(512, 5120, 1280, "residual"),
]

# (block_m, columns of all parts together, block_k, warps_m, warps_n, stages)
TILES = [
    (128, 128, 32, 2, 2, 4), (128, 128, 32, 2, 2, 5), (128, 128, 64, 2, 2, 3), (128, 128, 32, 2, 4, 4),
    (128, 128, 64, 2, 4, 3), (128, 256, 32, 2, 4, 4), (128, 256, 64, 2, 4, 3), (128, 256, 64, 2, 4, 4),
    (256, 128, 32, 4, 2, 4), (256, 128, 64, 4, 2, 3), (128, 192, 64, 4, 2, 3), (128, 192, 64, 2, 4, 3),
    (128, 160, 64, 8, 1, 3), (64, 192, 64, 2, 2, 3), (64, 256, 32, 1, 4, 4), (64, 256, 64, 1, 4, 3),
    (64, 128, 64, 2, 2, 4), (64, 128, 32, 2, 2, 5), (64, 64, 64, 2, 2, 5), (128, 64, 64, 4, 1, 4),
    (32, 128, 64, 1, 4, 5),
]  # fmt: skip


def specs(shape: Shape, order: str, device: DeviceSpec) -> Iterator[KernelSpec]:
    for block_m, width, block_k, warps_m, warps_n, stages in TILES:
        tile = Tile(block_m, width // shape.parts, block_k, warps_m, warps_n, stages)
        spec = make_spec(shape, order, tile)
        if why_not(spec, device.shared_bytes) is None:
            yield spec


def make_spec(shape: Shape, order: str, tile: Tile) -> KernelSpec:
    """Bias and activation as SD's GEGLU, BERT's GELU, and a bias with a residual have them; all accesses 16 bytes."""
    row, whole = Access("row", F16, 8), Access("tile", F16, 8)
    bias = [Step(f"a{part}", "add", (f"acc{part}", f"op{part}")) for part in range(shape.parts)]
    after = {
        "geglu": [Step("g", "gelu", ("a1",)), Step("y", "mul", ("a0", "g"))],
        "gelu": [Step("y", "gelu", ("a0",))],
        "residual": [Step("y", "add", ("a0", "op1"))],
    }
    loads = [row] * shape.parts + [whole] * (shape.epilogue == "residual")
    steps = (*bias, *after[shape.epilogue])
    return KernelSpec(F16, "f16", shape.parts, order, 8, 8, tuple(loads), (whole,), steps, ("y",), tile)


def compile_to(spec: KernelSpec, device: DeviceSpec, path: Path) -> Path:
    path.write_bytes(compile_source(emit(spec), device).data)
    return path


def load(spec: KernelSpec, path: Path) -> Callable[..., None]:
    function = cupy.RawModule(path=str(path)).get_function(ENTRY)
    function.max_dynamic_shared_size_bytes = shared_bytes(spec)
    return function


def tensor(array: cupy.ndarray, strides: tuple[int, int], offset: int = 0) -> tuple[int, int, int, int]:
    return (array.data.ptr + 2 * offset, 0, *strides)


class Operands:
    """As many copies of a shape's tensors as it takes to miss the L2 cache."""

    def __init__(self, shape: Shape, order: str) -> None:
        self.shape, self.order = shape, order
        m, k, n, parts = shape.m, shape.k, shape.n, shape.parts
        each = 2 * (m * k + k * n * parts + m * n * (2 if shape.epilogue == "residual" else 1))
        self.copies = max(2, int(ROTATED_BYTES / each))

        def random(*extents: int) -> cupy.ndarray:
            return cupy.random.standard_normal(extents, dtype=np.float32).astype(np.float16)

        weight = random(k, n * parts) if order == "kn" else random(n * parts, k)
        self.lhs = [random(m, k) for _ in range(self.copies)]
        self.rhs = [weight.copy() for _ in range(self.copies)]
        self.out = [cupy.empty((m, n), np.float16) for _ in range(self.copies)]
        self.residual = [random(m, n) for _ in range(self.copies)] if shape.epilogue == "residual" else []
        self.bias = random(n * parts)
        self.product = [cupy.empty((m, n * parts), np.float16) for _ in range(min(self.copies, 8))]

    def arguments(self, copy: int) -> np.ndarray:
        shape, arguments = self.shape, np.zeros(1, ARGUMENTS)
        m, k, n, parts = shape.m, shape.k, shape.n, shape.parts
        arguments["lhs"][0] = tensor(self.lhs[copy], (k, 1))
        for part in range(parts):
            kn = tensor(self.rhs[copy], (n * parts, 1), part * n)
            nk = tensor(self.rhs[copy], (1, k), part * n * k)
            arguments["rhs"][0, part] = kn if self.order == "kn" else nk
            arguments["loads"][0, part] = tensor(self.bias, (0, 1), part * n)
        if self.residual:
            arguments["loads"][0, parts] = tensor(self.residual[copy], (n, 1))
        arguments["outs"][0, 0] = tensor(self.out[copy], (n, 1))
        for name, value in (("m", m), ("n", n), ("k", k), ("batch", 1)):
            arguments[name] = value
        return arguments

    def run_cublas(self, copy: int) -> None:
        rhs = self.rhs[copy] if self.order == "kn" else self.rhs[copy].T
        cupy.matmul(self.lhs[copy], rhs, out=self.product[copy % len(self.product)])

    def launcher(self, spec: KernelSpec, function: Callable[..., None]) -> Callable[[int], None]:
        tile = spec.tile
        tiles = -(-self.shape.m // tile.block_m) * -(-self.shape.n // tile.block_n)
        arguments = [self.arguments(copy) for copy in range(self.copies)]
        return lambda copy: function(
            (tiles, 1, 1), (tile.threads, 1, 1), (arguments[copy],), shared_mem=shared_bytes(spec)
        )


def cublas_microseconds(operands: Operands) -> float:
    """Mean time of one product, launched back to back: CuPy lets no cuBLAS call into a graph."""
    for index in range(LAUNCHES):
        operands.run_cublas(index % operands.copies)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for index in range(5 * LAUNCHES):
        operands.run_cublas(index % operands.copies)
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1000 / (5 * LAUNCHES)


def microseconds(launch: Callable[[int], None], copies: int) -> float:
    """Median time of one launch inside a CUDA graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch(0)
        stream.synchronize()
        stream.begin_capture()
        for index in range(LAUNCHES):
            launch(index % copies)
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(REPLAYS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000 / LAUNCHES)
    return statistics.median(times)


def text(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.warps_m}x{tile.warps_n} s{tile.stages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the rows with k, n contiguous weights")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    capability = cupy.cuda.Device().compute_capability
    device = next(spec for spec in ARCHITECTURES.values() if str(spec.capability) == capability)
    orders = ("kn",) if options.quick else ("kn", "nk")
    jobs = [
        (shape, order, spec)
        for shape in SHAPES
        if options.only in str(shape)
        for order in orders
        for spec in specs(shape, order, device)
    ]
    distinct = list(dict.fromkeys(spec for _, _, spec in jobs))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = (Path(folder) / f"{number}.cubin" for number in range(len(distinct)))
        written = pool.map(lambda spec, path: compile_to(spec, device, path), distinct, paths)
        functions = {spec: load(spec, path) for spec, path in zip(distinct, written, strict=True)}
    for shape in dict.fromkeys(shape for shape, _, _ in jobs):
        for order in orders:
            own = [spec for at, by, spec in jobs if (at, by) == (shape, order)]
            report(shape, order, own, functions)


def report(
    shape: Shape, order: str, candidates: list[KernelSpec], functions: dict[KernelSpec, Callable[..., None]]
) -> None:
    operands = Operands(shape, order)
    base = cublas_microseconds(operands)
    timed = sorted(
        (microseconds(operands.launcher(spec, functions[spec]), operands.copies), text(spec.tile))
        for spec in candidates
    )
    flops = 2.0 * shape.m * shape.k * shape.n * shape.parts
    print(f"{shape} {order}: cuBLAS {base:.1f} us ({flops / base / 1e6:.0f} TFLOP/s)", flush=True)
    for time, name in timed:
        print(
            f"    {time:8.1f} us  {base / time:5.2f} of cuBLAS  {flops / time / 1e6:5.0f} TFLOP/s  {name}", flush=True
        )


if __name__ == "__main__":
    main()
