"""Products of the library: `python -m tests.perf.library --seeds 1 --seconds 60 --out results/h200-library.json.xz`.

What `tests.perf.learn_library` learns from. Of drawn products (tests/perf/drawn.py) and of those of transformers'
layers, in turn, the rows are drawn again. Each is multiplied as the bridge asks cuBLASLt to, in captured graphs with
cold buffers; its last row is checked. torch.mm takes as long: of 9,613 products of seeds 8001 and 8002, timed in turn,
90 of 100 within 1 %, vectors too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onnxfuse.schedule import library_cost
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.perf.anywhere import COLD_BYTES, GRAPH_US, floor_us
from tests.perf.compare import origin
from tests.perf.cublaslt import MOST_ALIGNED, WORKSPACE_BYTES, Product, Refused
from tests.perf.drawn import Drawn
from tests.perf.result_file import write_result
from tests.perf.tiles import rows_of_site, sites
from tests.perf.torch_graph import captured_by_torch, replay_seconds

ELEMENTS: dict[int, torch.dtype] = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16, FLOAT: torch.float32}
MOST_LAUNCHES = 48
REPLAYS = 5
# A product as long as the first runs for the second before it is timed: clocks settle at what the chip's power allows.
LONG_US, SETTLED_US = 50, 15e3
LONGEST_FLOOR = 0.8 * library_cost.LONGEST  # longer ones are not learnt
DIGITS = 2  # of microseconds


def products(seeds: list[int]) -> Iterator[Drawn]:
    """Plain products, whose n is that of the whole weight, of drawn sites and of layers in turn, without end."""
    streams = [sites(seeds), sites(seeds, "layers")]
    while True:
        for stream in streams:
            site = next(stream)
            for rows in rows_of_site(site):
                width = site.n if site.kind == "dual" else site.width
                found = Drawn("bias", rows, site.k, width, site.order, site.element, False, 0)
                if floor_us(found) <= LONGEST_FLOOR:
                    yield found
                if rows % 64 == 1:
                    yield replace(found, m=1)


class Pool:
    """Random numbers of each type; operands lie in it one behind the other, and begin again at its end."""

    def __init__(self) -> None:
        self.numbers = {
            element: torch.randn(1 << 26, device="cuda").to(kind).repeat(16) for element, kind in ELEMENTS.items()
        }
        self.out = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
        self.place = 0

    def take(self, element: int, rows: int, columns: int) -> torch.Tensor:
        """The next [rows, columns]."""
        numbers = self.numbers[element]
        count = rows * columns
        if self.place + count > len(numbers):
            self.place = 0
        found = numbers[self.place : self.place + count].view(rows, columns)
        self.place += -(-count // MOST_ALIGNED) * MOST_ALIGNED
        return found


def time_product(product: Drawn, pool: Pool, workspace: torch.Tensor) -> float:
    """Microseconds; raises Refused where cuBLASLt has no kernel."""
    launches = min(max(math.ceil(GRAPH_US / (floor_us(product) + 2)), 4), MOST_LAUNCHES)
    copies = min(launches, max(2, math.ceil(COLD_BYTES / product.bytes)))
    shapes = (product.m, product.k), (product.k, product.n) if product.order == "kn" else (product.n, product.k)
    operands = [tuple(pool.take(product.element, *shape) for shape in shapes) for _ in range(copies)]
    out_bytes = -(-product.m * (product.n + 16) * product.element_bytes // MOST_ALIGNED) * MOST_ALIGNED
    outs = [pool.out[index * out_bytes :][:out_bytes] for index in range(min(copies, 3))]
    sizes = (product.m, product.n, product.k)
    with closing(Product(*sizes, product.order, product.element, product.element_bytes, workspace.data_ptr())) as made:

        def multiply() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for index in range(launches):
                lhs, rhs = operands[index % copies]
                made(lhs.data_ptr(), rhs.data_ptr(), outs[index % len(outs)].data_ptr(), stream)

        graph = captured_by_torch(multiply)
        if (once := replay_seconds(graph, 1) * 1e6) > LONG_US * launches:
            replay_seconds(graph, math.ceil(SETTLED_US / once))
        times = [replay_seconds(graph, 1) * 1e6 / launches for _ in range(REPLAYS)]
        check(product, made, operands[0], outs[0])
    return statistics.median(times)


def check(product: Drawn, made: Product, operands: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """The last row beside float64."""
    made(operands[0].data_ptr(), operands[1].data_ptr(), out.data_ptr(), torch.cuda.current_stream().cuda_stream)
    lhs, rhs = (operand.double() for operand in operands)
    row = out.view(ELEMENTS[product.element])[(product.m - 1) * made.pitch :][: product.n].double()
    expected = lhs[-1] @ (rhs if product.order == "kn" else rhs.T)
    unit = 2.0**-8 if product.is_bfloat16 else 2.0**-11
    most = unit * (float(expected.abs().max()) + 4 * math.sqrt(product.k))
    off = float((row - expected).abs().max())
    assert off <= most, f"{product}: off by {off}, {most} allowed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    pool, workspace = Pool(), torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    end = time.monotonic() + options.seconds
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for product in products(options.seeds):
        if time.monotonic() > end:
            break
        known = found.setdefault((product.k, product.n, product.order, product.element), {})
        if product.m not in known:
            with suppress(Refused):
                known[product.m] = round(time_product(product, pool, workspace), DIGITS)
    seeds = " ".join(map(str, options.seeds))
    command = f"python -m tests.perf.library --seeds {seeds} --seconds {options.seconds:.0f} --out {options.out}"
    rows = [{"weight": weight, "us": dict(sorted(us.items()))} for weight, us in found.items() if us]
    write_result(options.out, {**origin(command), "rows": rows})
    print(sum(len(row["us"]) for row in rows), "products")


if __name__ == "__main__":
    main()
