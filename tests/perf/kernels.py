"""The planned kernels against cuBLAS's plain product of the full width: `python -m tests.perf.kernels --out FILE`.

One process, random data, buffers that rotate through more than the L2 cache, CUDA graphs, medians, the peer and ours in
turn. Every timed output is checked against float64 on some of its rows. A committed result is compared with
`--against results/h200-kernels.json`: a ratio that grew by more than 5 % fails.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import cupy
import numpy as np
from onnx import ModelProto

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.device import CACHE_LINE, DeviceSpec, spec_of
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import Fusion
from onnxfuse.ir.simplify import simplify
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.kernels.hopper import COPY_ENTRY
from onnxfuse.patterns import is_anchor, match_site
from onnxfuse.runtime import driver
from onnxfuse.runtime.compile import compile_cached
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.plan import make_plan
from onnxfuse.schedule.variant import ProductPlan, ProductVariant
from onnxfuse.settings import cache_dir
from tests.helpers.kernel_problem import ARGUMENTS
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.reference_fusion import evaluate
from tests.perf.ahead import in_order
from tests.perf.compare import add_option, compare, kernel_costs, origin
from tests.perf.early_launch import launch as launch_kernel
from tests.perf.early_launch import starts_early
from tests.perf.result_file import write_result
from tests.perf.torch_graph import captured_by_torch, replay_seconds

ROTATED_BYTES = 200e6  # more than three times the L2 cache of an H200
LAUNCHES = 20  # of one graph
REPLAYS = 9
AHEAD = 6  # problems that are prepared beside the one that is timed
CHECKED_ROWS = 16
COPY_THREADS, COPY_CHUNK = 256, 16  # threads, and bytes of each; kernels/cuda/common/copied_rows.cuh
MAP_BYTES = 128
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
MAP_TYPES = {2: 1, 4: 2}  # CU_TENSOR_MAP_DATA_TYPE_UINT16 and _UINT32, by bytes
TF32_EPS = 2.0**-10


@dataclass(frozen=True)
class Row:
    """A problem and its bar, if any: time over cuBLAS's plain product of the full width. n is that of one part.

    It is in fp16, or in fp32 that both compute in TF32.
    """

    m: int
    k: int
    n: int
    epilogue: str
    bar: float | None = None
    tf32: bool = False

    @property
    def parts(self) -> int:
        return 2 if self.epilogue in ("geglu", "geglu_tanh", "swiglu") else 1

    def __str__(self) -> str:
        return f"{self.m}, {self.k}, {self.n} {self.epilogue}{' tf32' if self.tf32 else ''}"


ROWS = [
    Row(8192, 320, 1280, "geglu", 0.77), Row(2048, 640, 2560, "geglu", 0.87), Row(512, 1280, 5120, "geglu", 0.94),
    Row(128, 1280, 5120, "geglu", 1.00), Row(8192, 640, 2560, "geglu", 0.86), Row(2048, 1280, 5120, "geglu", 0.91),
    Row(8192, 1024, 2624, "geglu_tanh", 0.86),
    Row(1, 4096, 14336, "swiglu", 1.00), Row(16, 4096, 14336, "swiglu", 0.98), Row(128, 4096, 14336, "swiglu", 0.93),
    Row(2048, 4096, 14336, "swiglu", 0.94), Row(8192, 4096, 14336, "swiglu", 0.96),
    Row(4096, 768, 3072, "gelu", 0.93), Row(6304, 1024, 4096, "gelu", 0.97), Row(12000, 1280, 5120, "gelu", 0.88),
    Row(8192, 1280, 320, "residual", 1.00), Row(2048, 2560, 640, "residual", 1.02),
    Row(512, 5120, 1280, "residual", 1.04), Row(4096, 4096, 4096, "residual", 0.99),
    *(Row(m, 4096, 14336, "swiglu") for m in (17, 32, 64)),
    *(Row(m, 4096, 4096, "residual") for m in (17, 32, 64, 96)),
    *(Row(m, 14336, 4096, "residual") for m in (17, 64)),
    *(Row(m, 1280, 5120, "geglu") for m in (17, 64)),
    *(Row(m, 4096, 4096, "residual", tf32=True) for m in (1, 16, 64)),
    *(Row(m, 768, 3072, "gelu", tf32=True) for m in (8, 128, 4096)),
    *(Row(m, 4096, 14336, "swiglu", tf32=True) for m in (1, 16)),
]  # fmt: skip


@lru_cache(maxsize=1)
def _weight_and_bias(k: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """[k, width] and [width]; rows of one weight stand one behind the other, and the numbers take a second."""
    rng = np.random.default_rng(k)
    return rng.standard_normal((k, width), np.float32) / np.sqrt(k, dtype=np.float32), rng.standard_normal(width)


def site_model(row: Row, order: str, dtype: int = FLOAT16) -> ModelProto:
    """The problem as an exporter writes it, with weights [k, n] (MatMul) or [n, k] (Gemm with transB)."""
    b = Builder(dtype)
    x, width = b.input("x", ("m", row.k)), row.n * row.parts
    numbers, biases = _weight_and_bias(row.k, width)
    weight = numbers.astype(b.numpy)
    bias = () if row.epilogue in ("swiglu", "geglu_tanh") else (b.array(biases, "bias"),)
    if order == "nk":
        t = b("Gemm", x, b.array(np.ascontiguousarray(weight.T), "weight"), *bias, transB=1)
    else:
        t = b("MatMul", x, b.array(weight, "weight"))
        t = b("Add", t, *bias) if bias else t
    if row.epilogue == "gelu":
        return b.model(b("Gelu", t))
    if row.epilogue == "residual":
        return b.model(b("Add", t, b.input("residual", ("m", row.n))))
    value, gate = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    if row.epilogue == "swiglu":
        return b.model(b("Mul", value, b("Mul", gate, b("Sigmoid", gate))))
    return b.model(b("Mul", value, b("Gelu", gate, approximate="tanh" if row.epilogue == "geglu_tanh" else "none")))


def _random(seed: int, dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


class Sizes(Protocol):
    """What a launch asks of a problem; its text names a file."""

    @property
    def m(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...


class Copies(Protocol):
    """Copies of a problem's tensors, for ours and for cuBLAS to rotate through."""

    copies: int
    x: list[cupy.ndarray]
    weight: list[cupy.ndarray]
    product: list[cupy.ndarray]

    @property
    def row(self) -> Sizes: ...

    def arguments(self, copy: int) -> np.ndarray: ...


class Buffers:
    """As many copies of a problem's tensors as it takes to miss the L2 cache."""

    def __init__(self, row: Row, fusion: Fusion, stored: dict[str, np.ndarray]) -> None:
        outputs, element, self.bytes = (
            2 if row.epilogue == "residual" else 1,
            fusion.lhs.dtype.numpy,
            fusion.lhs.dtype.bytes,
        )
        each = self.bytes * (row.m * row.k + row.k * row.n * row.parts + outputs * row.m * row.n)
        self.copies = min(max(2, int(ROTATED_BYTES / each) + 1), LAUNCHES)
        self.row, self.fusion = row, fusion
        self.inputs = {"x": _random(row.m, element, row.m, row.k)}
        if row.epilogue == "residual":
            self.inputs["residual"] = _random(row.k, element, row.m, row.n)
        self.x = [cupy.asarray(self.inputs["x"]) for _ in range(self.copies)]
        self.residual = [cupy.asarray(self.inputs["residual"]) for _ in range(self.copies) if outputs == 2]
        self.weight = [cupy.asarray(stored["weight"]) for _ in range(self.copies)]
        self.bias = cupy.asarray(stored["bias"]) if "bias" in stored else None
        self.out = [cupy.full((row.m, row.n), np.nan, element) for _ in range(self.copies)]
        self.product = [cupy.empty((row.m, row.n * row.parts), element) for _ in range(min(self.copies, 4))]

    def arguments(self, copy: int) -> np.ndarray:
        row, arguments = self.row, np.zeros(1, ARGUMENTS)
        arguments["lhs"][0] = (self.x[copy].data.ptr, 0, row.k, 1)
        transposed = self.fusion.rhs[0].axes[-1] == "k"
        width = row.n * row.parts
        for part in range(row.parts):
            offset = self.bytes * part * row.n * (row.k if transposed else 1)
            strides = (1, row.k) if transposed else (width, 1)
            arguments["rhs"][0, part] = (self.weight[copy].data.ptr + offset, 0, *strides)
        for index, load in enumerate(self.fusion.loads):
            if "m" in self.fusion.operands[load.operand].axes:
                arguments["loads"][0, index] = (self.residual[copy].data.ptr, 0, row.n, 1)
            else:
                assert self.bias is not None
                arguments["loads"][0, index] = (self.bias.data.ptr + self.bytes * (load.part or 0) * row.n, 0, 0, 1)
        arguments["outs"][0, 0] = (self.out[copy].data.ptr, 0, row.n, 1)
        for name, value in (("m", row.m), ("n", row.n), ("k", row.k), ("batch", 1)):
            arguments[name] = value
        return arguments


def tensor_maps(arguments: np.ndarray, rules: Sequence[MapRule | None], size: int) -> tuple[np.ndarray, int]:
    """The tensor maps of a launch whose elements have so many bytes, and their address; the memory must outlive it."""
    memory = np.zeros(MAP_BYTES * len(rules) + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    m, n, k = (int(arguments[name][0]) for name in "mnk")
    extents = {"lhs": (m, k), "rhs": (k, n), "load": (m, n), "out": (m, n)}
    for place, rule in enumerate(rules):
        if rule is None:
            continue
        field = arguments[{"load": "loads", "out": "outs"}.get(rule.tensor, rule.tensor)][0]
        tensor = field if rule.tensor == "lhs" else field[rule.index]
        rows, columns = extents[rule.tensor]
        transposed = rule.rows_contiguous
        inner, outer = (rows, columns) if transposed else (columns, rows)
        pitch = size * int(tensor["column_stride" if transposed else "row_stride"])
        done = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(start + place * MAP_BYTES), MAP_TYPES[size], 3, ctypes.c_uint64(int(tensor["pointer"])),
            (ctypes.c_uint64 * 3)(inner, outer, 1), (ctypes.c_uint64 * 2)(pitch, pitch * outer),
            (ctypes.c_uint32 * 3)(rule.box_inner, rule.box_outer, 1), (ctypes.c_uint32 * 3)(1, 1, 1),
            0, SWIZZLES[rule.swizzle], 3, 0,
        )  # fmt: skip
        assert done == 0, (rule, inner, outer, pitch)
    return memory, start


def image(variant: ProductVariant, device: DeviceSpec, folder: Path) -> Path:
    """The machine code, compiled unless it is there. A name of its own: CuPy remembers modules by their path."""
    source = kernel_source(variant, device)
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()}.cubin"
    if not path.exists():
        (compiled,) = compile_cached(source, (device,), cache_dir())
        path.write_bytes(compiled.data)
    return path


class Copying:
    """The arguments of a kernel that reads copies of factors, and the launches that make them."""

    def __init__(self, arguments: np.ndarray, spec: KernelSpec) -> None:
        self.behind, self.memory = arguments.copy(), list[cupy.ndarray]()
        self.launches: list[tuple[int, np.ndarray]] = []
        m, n, k = (int(arguments[name][0]) for name in "mnk")
        size = spec.dtype.bytes
        if "lhs" in spec.copied:
            self.behind["lhs"][0] = self._copy(arguments["lhs"][0], m, k, size)
        for part in range(spec.parts if "rhs" in spec.copied else 0):
            pointer, batch, row, column = arguments["rhs"][0, part]
            if spec.rhs_order == "kn":
                self.behind["rhs"][0, part] = self._copy((pointer, batch, row, column), k, n, size)
            else:
                copy = self._copy((pointer, batch, column, row), n, k, size)
                self.behind["rhs"][0, part] = (copy[0], copy[1], copy[3], copy[2])

    def _copy(self, source: Any, rows: int, columns: int, size: int) -> tuple[int, int, int, int]:
        pitch = -(-columns * size // CACHE_LINE) * CACHE_LINE // size
        self.memory.append(cupy.empty((rows, pitch * size), np.uint8))
        arguments, copy = np.zeros(1, ARGUMENTS), (self.memory[-1].data.ptr, 0, pitch, 1)
        arguments["lhs"][0], arguments["outs"][0, 0] = tuple(source), copy
        for name, value in (("m", rows), ("k", columns), ("batch", 1)):
            arguments[name] = value
        self.launches.append((-(-rows * -(-columns * size // COPY_CHUNK) // COPY_THREADS), arguments))
        return copy


def launcher(
    variant: ProductVariant, device: DeviceSpec, buffers: Copies, folder: Path, early: bool | None = None
) -> Callable[[int], None]:
    """Launches the variant on one copy of the buffers; before it what copies factors, if any.

    It starts `early` or not, or as the bridge has it.
    """
    path = image(variant, device, folder)
    module = cupy.RawModule(path=str(path))
    function = module.get_function(ENTRY)
    copier = module.get_function(COPY_ENTRY) if variant.spec.copied else function
    rule = variant.family.launch(variant.spec, variant.tile, device)
    function.max_dynamic_shared_size_bytes = rule.shared_bytes
    row = buffers.row
    tiles = -(-row.m // rule.block_m) * -(-row.n // rule.block_n)
    cluster = rule.cluster
    grid = min(tiles, device.multiprocessors // cluster) * cluster if cluster else tiles
    early = starts_early(rule, tiles, row.k, device) if early is None else early
    prepared: list[tuple[Any, ...]] = []
    kept: list[np.ndarray] = []
    copies: list[Copying] = []
    for copy in range(buffers.copies):
        arguments = buffers.arguments(copy)
        if variant.spec.copied:
            copies.append(Copying(arguments, variant.spec))
            arguments = copies[-1].behind
        arguments["rhs_ready"] = early and "rhs" not in variant.spec.copied  # weights are initializers
        if not rule.maps:
            prepared.append((arguments,))
            continue
        memory, start = tensor_maps(arguments, rule.maps, variant.spec.dtype.bytes)
        kept.append(memory)
        offset = start - memory.ctypes.data
        maps = memory[offset : offset + MAP_BYTES * len(rule.maps)].view(f"V{MAP_BYTES * len(rule.maps)}")
        prepared.append((arguments, maps))

    def launch(copy: int) -> None:
        for blocks, made in copies[copy].launches if copies else ():
            launch_kernel(copier, blocks, COPY_THREADS, 0, (made,), early=True)
        launch_kernel(function, grid, rule.threads, rule.shared_bytes, prepared[copy], early)

    return launch


def graph_of(launch: Callable[[int], None], copies: int, stream: cupy.cuda.Stream) -> Callable[[], None]:
    with stream:
        launch(0)
        stream.synchronize()
        stream.begin_capture()
        for index in range(LAUNCHES):
            launch(index % copies)
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


def cublas_graph(
    buffers: Copies, transposed: bool, tf32: bool = False
) -> tuple[Callable[[], None], Callable[[], float]]:
    """The peer through torch, which can capture cuBLAS: to time with, where it is installed, and no dependency."""
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    lhs = [torch.as_tensor(x, device="cuda") for x in buffers.x]
    rhs = [torch.as_tensor(w, device="cuda") for w in buffers.weight]
    out = [torch.as_tensor(p, device="cuda") for p in buffers.product]

    def product(copy: int) -> None:
        torch.mm(lhs[copy], rhs[copy].T if transposed else rhs[copy], out=out[copy % len(out)])

    def products() -> None:
        for index in range(LAUNCHES):
            product(index % buffers.copies)

    graph = captured_by_torch(products)
    return graph.replay, lambda: replay_seconds(graph, 1) * 1e6 / LAUNCHES


def timed_replay(replay: Callable[[], None], stream: cupy.cuda.Stream) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    replay()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1000 / LAUNCHES


def check(buffers: Buffers, stored: dict[str, np.ndarray], most: float = 2.0) -> float:
    """The largest error on some rows, in units of the last place of the arithmetic at the output's magnitude."""
    rows = np.unique(np.linspace(0, buffers.row.m - 1, CHECKED_ROWS).astype(int))
    inputs = {name: value[rows] for name, value in buffers.inputs.items()}
    (expected,) = evaluate(buffers.fusion, stored | inputs)
    actual = buffers.out[0].get()[rows].astype(np.float64)
    unit = TF32_EPS if buffers.row.tf32 else float(np.finfo(buffers.out[0].dtype).eps)
    error = np.abs(actual - expected).max() / (unit * max(1.0, np.abs(expected).max()))
    assert error <= most, f"{buffers.row}: off by {error} units in the last place"
    assert not any(cupy.isnan(out).any() for out in buffers.out), f"{buffers.row}: outputs were not written"
    return float(error)


def planned(
    row: Row, order: str, device: DeviceSpec, dtype: int = FLOAT16
) -> tuple[Fusion, ProductPlan, dict[str, np.ndarray]]:
    """The fusion of a problem, its plan, and what the model stores; fp32 is in full precision, but for rows in TF32."""
    from onnx import numpy_helper

    dtype = FLOAT if row.tf32 else dtype
    model = site_model(row, order, dtype)
    graph = Graph(load_model(model))
    _, fusion = match_site(graph, next(node for node in graph.nodes if is_anchor(graph, node)))
    fusion = simplify(fusion)
    mapping = map_axes(fusion)
    plan = make_plan(fusion, mapping, analyse(fusion, mapping), device, exact_fp32=not row.tf32)
    names = ("weight", "bias")
    return fusion, plan, {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in names}


@dataclass(frozen=True)
class Ready:
    """A problem whose kernel is compiled: work that threads do while another one is timed."""

    row: Row
    order: str
    fusion: Fusion
    variant: ProductVariant
    stored: dict[str, np.ndarray]


def prepare(row: Row, order: str, device: DeviceSpec, folder: Path) -> Ready:
    fusion, plan, stored = planned(row, order, device)
    variant = next(variant for variant in plan.variants if variant.min_m <= row.m <= variant.max_m)
    image(variant, device, folder)
    return Ready(row, order, fusion, variant, stored)


def time_row(ready: Ready, device: DeviceSpec, folder: Path) -> dict[str, Any]:
    row, order, fusion, variant, stored = ready.row, ready.order, ready.fusion, ready.variant, ready.stored
    buffers = Buffers(row, fusion, stored)
    stream = cupy.cuda.Stream(non_blocking=True)
    ours = graph_of(launcher(variant, device, buffers, folder), buffers.copies, stream)
    peer, peer_time = cublas_graph(buffers, order == "nk", row.tf32)
    for replay in (ours, peer):
        replay()
    cupy.cuda.Device().synchronize()
    pairs = [(peer_time(), timed_replay(ours, stream)) for _ in range(REPLAYS)]
    cublas, fused = (statistics.median(times) for times in zip(*pairs, strict=True))
    error = check(buffers, stored)
    return {
        "problem": str(row), "order": order, "bar": row.bar, "cublas_us": cublas, "fused_us": fused,
        "ratio": fused / cublas, "tile": str(variant.tile), "error_ulp": error,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    add_option(parser)
    parser.add_argument("--only", default="", help="only problems whose text contains this")
    options = parser.parse_args()
    device = spec_of(driver.local_architectures()[0])
    result: dict[str, Any] = origin("python -m tests.perf.kernels --out results/h200-kernels.json") | {"rows": []}
    print(f"{'problem':30} order  cuBLAS us  ours us  ratio   bar  tile", flush=True)
    problems = [(row, order) for row in ROWS for order in ("kn", "nk") if options.only in str(row)]
    with tempfile.TemporaryDirectory() as folder:
        calls = (partial(prepare, *problem, device, Path(folder)) for problem in problems)
        for ready in in_order(ThreadPoolExecutor(AHEAD), AHEAD, calls):
            made, row, order = time_row(ready, device, Path(folder)), ready.row, ready.order
            result["rows"].append(made)
            write_result(options.out, result)
            print(
                f"{made['problem']:30} {order:5} {made['cublas_us']:10.1f} {made['fused_us']:8.1f} "
                f"{made['ratio']:6.3f} {'    -' if row.bar is None else f'{row.bar:5.2f}'}  {made['tile']}",
                flush=True,
            )
            cupy.get_default_memory_pool().free_all_blocks()
    sys.exit(compare(result, options.against, kernel_costs))


if __name__ == "__main__":
    main()
