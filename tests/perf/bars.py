"""What the project sets itself, beside what the committed results measured: a table of docs/performance.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Results = Callable[[str], Row]
Bar = tuple[str, str, str, bool]
"""What, the bar, the figure, and whether it is met."""

SLOWER = 1.02
TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}
CLASSES = ((10.0, math.inf, 1.00, 1.25), (3.0, 10.0, 1.08, 1.25), (0.0, 3.0, 1.08, 1.5))
"""Floors in microseconds, from and below, and the bars of the mean and of the worst over cuBLAS's plain product."""
MLP_BAR, MLP_ROWS = 1.1, (154, 300, 514)
MODELS = {
    "llama.real.torchscript.op17.fp32": 1.15, "btb_320.real.torchscript.op17.fp32": 1.25,
    "bert.real.torchscript.op17.fp32": 1.12, "sd15_unet.real.torchscript.op17.fp16": 1.23,
}  # fmt: skip
LAYERS = {"dinov2.f32": 1.12}
FORM = "4 bits, blocks of 32"
COARSE, COARSE_BAR = "4 bits, blocks of 128, zero points", 1.10
EIGHT, EIGHT_BAR = "8 bits, blocks of 32", 1.7
QUANTIZED = {1: 30.0, 4: 30.0, 16: 34.0, 64: 55.0}
AS_FP16 = 1.10
DECODE_BAR = 1.5


def regret(row: Row) -> float | None:
    """How much slower the chosen tile is than the fastest; None where none was timed or the library was taken."""
    times = {tile: us for tile, (us, _) in row.get("tiles", {}).items()}
    return times[row["chosen"]] / min(times.values()) - 1 if row.get("chosen") in times else None


def late(sorted_values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted_values[min(int(0.95 * len(sorted_values)), len(sorted_values) - 1)]


def slower_than_stock(rows: Sequence[Row]) -> list[Row]:
    """Those that take more than 2 % longer."""
    return [row for row in rows if row["ours_us"] > SLOWER * row["stock_us"]]


def bars(result: Results) -> Iterator[Bar]:
    """All of them."""
    drawn = {name: result(f"h200-anywhere-{file}")["rows"] for name, file in TYPES.items()}
    every = [row for rows in drawn.values() for row in rows]
    slower = slower_than_stock(every)
    yield "drawn problems slower than stock by 2 %", "none", f"{len(slower)} of {len(every)}", not slower
    for name, rows in drawn.items():
        yield from _over_cublas(name, rows)
        yield _regret(name, rows)
    yield from _dynamic_mlp(result("h200-dynamic-mlp")["rows"])
    yield from _models(result("h200")["models"], MODELS)
    yield from _models(result("h200-strangers")["rows"], LAYERS)
    yield from _quantized({(row["form"], row["m"]): row for row in result("h200-quantized")["rows"]})
    yield from _decoding(result("h200-genai")["rows"])


def _over_cublas(name: str, rows: Sequence[Row]) -> Iterator[Bar]:
    for low, high, mean_bar, worst_bar in CLASSES:
        ratios = [row["ours_us"] / row["cublas_us"] for row in rows if low <= row["floor_us"] < high]
        if ratios:
            what = f"drawn {name} over cuBLAS's plain product, floor {_range(low, high)}"
            for kind, ratio, bar in (
                ("mean", statistics.geometric_mean(ratios), mean_bar),
                ("worst", max(ratios), worst_bar),
            ):
                yield f"{what}, {kind}", f"{bar:.2f}", f"{ratio:.2f}", ratio <= bar


def _range(low: float, high: float) -> str:
    return f"over {low:.0f} us" if math.isinf(high) else f"{low:.0f} to {high:.0f} us"


def _regret(name: str, rows: Sequence[Row]) -> Bar:
    found = sorted(own for row in rows if (own := regret(row)) is not None)
    median, last = statistics.median(found), late(found)
    what = f"drawn {name}, regret, median and 95th percentile"
    return what, "2 %, 10 %", f"{median:.1%}, {last:.1%}", median <= 0.02 and last <= 0.10


def _dynamic_mlp(rows: Sequence[Row]) -> Iterator[Bar]:
    least = min(row["ratio"] for row in rows)
    yield (
        f"fp16 MLP of 8 billion parameters, least of {len(rows)} numbers of rows",
        "1.00x",
        f"{least:.2f}x",
        least >= 1,
    )
    ratios = {row["batch"] * row["tokens"]: row["ratio"] for row in rows}
    for m in MLP_ROWS:
        yield f"the same, {m} rows", f"{MLP_BAR:.2f}x", f"{ratios[m]:.2f}x", ratios[m] >= MLP_BAR


def _models(rows: Sequence[Row], wanted: Mapping[str, float]) -> Iterator[Bar]:
    for name, bar in wanted.items():
        ratio = min(row["ratio"] for row in rows if row["model"].rsplit("/", 1)[-1].startswith(name))
        yield f"`{name}`", f"{bar:.2f}x", f"{ratio:.2f}x", ratio >= bar


def _quantized(rows: Mapping[tuple[str, int], Row]) -> Iterator[Bar]:
    for m, bar in QUANTIZED.items():
        fused = rows[FORM, m]["fused"]
        yield f"MLP of {FORM}, {m} row{'s' * (m > 1)}", f"{bar:.0f} us", f"{fused:.1f} us", fused <= bar
    for m in (300, 2048):
        row = rows[FORM, m]
        limit = AS_FP16 * row["fp16 fused"] if m != 300 else min(AS_FP16 * row["fp16 fused"], row["fp16"])
        yield f"MLP of {FORM}, {m} rows", f"{limit:.0f} us, by fp16", f"{row['fused']:.0f} us", row["fused"] <= limit
    yield _worst(f"MLP of {COARSE}, over {FORM}", rows, COARSE, sorted({m for _, m in rows}), COARSE_BAR)
    yield _worst(f"MLP of {EIGHT}, over {FORM}, 1 to 16 rows", rows, EIGHT, (1, 4, 16), EIGHT_BAR)


def _worst(what: str, rows: Mapping[tuple[str, int], Row], form: str, counts: Sequence[int], bar: float) -> Bar:
    ratio, m = max((rows[form, m]["fused"] / rows[FORM, m]["fused"], m) for m in counts)
    return what, f"{bar:.2f}", f"{ratio:.2f} ({m} rows)", ratio <= bar


def _decoding(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row["form"] == FORM and row["batch"] == 1:
            yield (
                "a layer decoding with GenAI, 4 bits",
                f"{DECODE_BAR}x",
                f"{row['ratio']:.2f}x",
                row["ratio"] >= DECODE_BAR,
            )
