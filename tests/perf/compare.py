"""A result against a committed one: what each row costs over its peer in the same run, never its bare time."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxfuse.runtime import driver
from tests.perf.result_file import read_result

SLOWER = 1.05  # a cost may grow by so much before a comparison fails

Costs = Mapping[str, float]


def worse(now: Costs, before: Costs) -> list[str]:
    """Rows whose cost grew by more than SLOWER; rows that only one of the results has are not compared."""
    return [
        f"{row}: {before[row]:.3f} -> {cost:.3f}"
        for row, cost in now.items()
        if row in before and cost > SLOWER * before[row]
    ]


def model_costs(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Time of the fused model over stock ONNX Runtime's, of every site and model of `python -m tests.perf`."""
    sites = {f"{row['m']}, {row['k']}, {row['n']}": 1 / row["ratio"] for row in result.get("sites", ())}
    return sites | {str(row["model"]): 1 / row["ratio"] for row in result.get("models", ())}


def kernel_costs(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Time over cuBLAS's product, of every row of `python -m tests.perf.kernels`."""
    return {f"{row['problem']} {row['order']}": row["ratio"] for row in result["rows"]}


def origin(command: str) -> dict[str, str | None]:
    """What every result file begins with: the command that makes it, the day, and the machine."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": driver.device_name(),
        "driver": driver.driver_version(),
    }


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--against FILE`."""
    parser.add_argument("--against", type=Path, help="a committed result to compare with; a worse ratio fails")


def compare(result: Any, against: Path | None, costs: Callable[[Any], Costs]) -> bool:
    """Print what grew, if there is something to compare with; whether anything did."""
    if against is None:
        return False
    rows = worse(costs(result), costs(read_result(against)))
    print("\n".join(["slower than the committed result:", *rows]) if rows else "no ratio fell")
    return bool(rows)
