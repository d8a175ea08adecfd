"""What the project sets itself, beside what the committed results measured: a table of docs/performance.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.perf.drawn import ELEMENT_NAMES

Row = Mapping[str, Any]
Results = Callable[[str], Row]
Bar = tuple[str, str, str, bool]
"""What, the bar, the figure, and whether it is met."""

SLOWER = 1.02
LATE = 0.95  # of regrets
TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}
FLOORS = {"over 10": (10.0, math.inf), "3 to 10": (3.0, 10.0), "under 3": (0.0, 3.0)}  # microseconds, from and below
OVER_CUBLAS = {"over 10": (1.00, 1.25), "3 to 10": (1.08, 1.25), "under 3": (1.08, 1.5)}
"""The bars of the mean and of the worst over cuBLAS's plain product, by floor."""
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


def regrets(rows: Sequence[Row]) -> list[float]:
    """Of all rows that have one, ascending."""
    return sorted(own for row in rows if (own := regret(row)) is not None)


def quantile(ordered: Sequence[float], part: float) -> float:
    """The value at a part of an ascending list."""
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def over_cublas(rows: Sequence[Row], floor: str) -> list[float]:
    """The time over that of cuBLAS's plain product, of problems of a class of floors."""
    low, high = FLOORS[floor]
    return [row["ours_us"] / row["cublas_us"] for row in rows if low <= row["floor_us"] < high]


def slower_than_stock(rows: Sequence[Row]) -> list[Row]:
    """Those that take more than 2 % longer."""
    return [row for row in rows if row["ours_us"] > SLOWER * row["stock_us"]]


def by_weights(rows: Sequence[Row]) -> dict[str, list[float]]:
    """How many times as fast as stock they are, by the type of the activations and of the weights."""
    found: dict[str, list[float]] = {}
    for row in rows:
        drawn = row["drawn"]
        weights = f" by i{drawn['form']['bits']}" if drawn["form"] else ""
        name = f"{ELEMENT_NAMES[drawn['element']]}{weights}"
        found.setdefault(name, []).append(row["stock_us"] / row["ours_us"])
    return dict(sorted(found.items()))


def bars(result: Results) -> Iterator[Bar]:
    """All of them."""
    drawn = {name: result(f"h200-anywhere-{file}")["rows"] for name, file in TYPES.items()}
    every = [row for rows in drawn.values() for row in rows]
    slower = slower_than_stock(every)
    yield "drawn problems slower than stock by 2 %", "none", f"{len(slower)} of {len(every)}", not slower
    chains = result("h200-drawn-mlps")["rows"]
    slower = slower_than_stock(chains)
    yield "drawn MLPs slower than stock by 2 %", "none", f"{len(slower)} of {len(chains)}", not slower
    for name, rows in drawn.items():
        yield from _ratios(name, rows)
        yield _regret(name, rows)
    yield from _dynamic_mlp(result("h200-dynamic-mlp")["rows"])
    yield from _models(result("h200")["models"], MODELS)
    yield from _models(result("h200-strangers")["rows"], LAYERS)
    yield from _quantized({(row["form"], row["m"]): row for row in result("h200-quantized")["rows"]})
    yield from _decoding(result("h200-genai")["rows"])


def _ratios(name: str, rows: Sequence[Row]) -> Iterator[Bar]:
    for floor, (mean_bar, worst_bar) in OVER_CUBLAS.items():
        ratios = over_cublas(rows, floor)
        if ratios:
            what = f"drawn {name} over cuBLAS's plain product, floor {floor} us"
            for kind, ratio, bar in (
                ("mean", statistics.geometric_mean(ratios), mean_bar),
                ("worst", max(ratios), worst_bar),
            ):
                yield f"{what}, {kind}", f"{bar:.2f}", f"{ratio:.2f}", ratio <= bar


def _regret(name: str, rows: Sequence[Row]) -> Bar:
    found = regrets(rows)
    median, last = statistics.median(found), quantile(found, LATE)
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
