"""What the commands show on a terminal: tables, results, errors, progress; in a pipe no bar, and no broken line."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from onnxfuse.bench.bench import BenchResult
from onnxfuse.bench.html import SITE_HEADINGS, SITES_TITLE, site_rows
from onnxfuse.bench.sites import SiteTimes
from onnxfuse.errors import OnnxfuseError, OutputError
from onnxfuse.graph.fused_nodes import architectures_of
from onnxfuse.graph.packed_data import Packing
from onnxfuse.graph.padded_rows import PaddedRows
from onnxfuse.graph.save import Saved
from onnxfuse.graph.transposed_data import Order
from onnxfuse.lowering.inspection import Inspection
from onnxfuse.pipeline import Analysis
from onnxfuse.progress import Progress
from onnxfuse.report.document import document
from onnxfuse.report.site_report import FusedSite, Report
from onnxfuse.report.tables import show_table
from onnxfuse.verify.verify import VerifyResult

UNWRAPPED = 1000  # columns


def _errors() -> Console:
    return Console(stderr=True, highlight=False)


def _console() -> Console:
    """As wide as the terminal; in a pipe or a file no name is broken."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNWRAPPED
    return console


def require_output(quiet: bool = False) -> None:
    """Say before any work that nobody could read its result.

    Raises:
        OutputError: standard output is closed, and something will be printed.
    """
    if sys.stdout is None and not quiet:
        raise OutputError("standard output is closed")


def print_json(document: Mapping[str, Any]) -> None:
    """A result for programs."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def _print(what: object) -> None:
    """Text as it is, on lines as long as it takes."""
    _console().print(escape(str(what)), soft_wrap=True)


def print_error(error: OnnxfuseError) -> None:
    """A user's mistake, in one line."""
    _errors().print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def print_written(path: Path) -> None:
    """Where the result is."""
    _print(f"wrote {path}")


def print_saved(saved: Saved) -> None:
    """Where the model is, and what lies beside it."""
    print_written(saved.model)
    if saved.weights is not None:
        print_written(saved.weights)
    if saved.instead:
        files = str(saved.instead[0]) if len(saved.instead) == 1 else f"{len(saved.instead)} files of the input"
        _print(f"it takes the place of {files}, with weights in another order; --keep-weights needs no new file")
    if saved.copied:
        count = len(saved.copied)
        files = str(saved.copied[0]) if count == 1 else f"{count} files to {saved.copied[0].parent}"
        _print(f"copied {files}: ONNX Runtime reads data from the model's own folder alone")


def print_sites(sites: Sequence[SiteTimes]) -> None:
    """The table of `bench --per-site`."""
    show_table(_console(), SITES_TITLE, SITE_HEADINGS, site_rows(sites), right=SITE_HEADINGS[1:-1])


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, nothing in a log; a step whose length is not known (0) moves without a measure."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=_errors(), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield progress


def print_explanation(report: Report, analysis: Analysis) -> None:
    """Fusions in full with their operands and plans, then products that are left alone: those of the report."""
    sites = {site.fusion.anchor: site for site in analysis.sites}
    for entry in report.fused:
        site = sites[entry.anchor]
        _print(entry.text)
        if site.match.stop is not None:
            _print(f"ends    at {site.match.stop}")
        for operand in entry.operands:
            _print(operand)
        for name, order in site.implementation.transposed.items():
            _print(f"stored  {name}: {_order_text(order)}")
        _print("\n".join((f"strategy {entry.strategy_text}", *map(str, site.implementation.plans))) + "\n")
    for skipped in report.skipped:
        _print(f"{skipped.anchor}: left alone, {skipped.reason}: {skipped.detail}")


def _order_text(order: Order) -> str:
    if isinstance(order, tuple):
        return f"the model's dimensions {', '.join(map(str, order))}"
    if isinstance(order, PaddedRows):
        as_it_was = order.perm == tuple(range(len(order.perm)))
        dimensions = "" if as_it_was else f"{_order_text(order.perm)}, "
        return f"{dimensions}rows of {order.row} with zeros up to {order.whole}"
    return "as a MatMulNBits has it" if isinstance(order, Packing) else "part by part"


def print_report(report: Report) -> None:
    """Tables of what was fused, equal fusions once, and of what was left alone and why."""
    console = _console()
    if report.fused:
        show_table(console, "fused", FUSED_HEADINGS, [_fused_row(group) for group in report.distinct], right=("sites",))
    if report.skipped:
        reasons = Counter(entry.reason for entry in report.skipped)
        rows = [(reason, str(count), _example(report, reason)) for reason, count in reasons.most_common()]
        show_table(console, "left alone", ("reason", "sites", "example"), rows, right=("sites",))
    patterns = Counter(entry.pattern for entry in report.fused).most_common()
    of = f" ({', '.join(f'{count} {pattern}' for pattern, count in patterns)})" if patterns else ""
    left = f", {len(report.skipped)} left alone" if report.skipped else ""
    _print(f"{len(report.fused)} fused{of}{left}; nodes {report.nodes_before} -> {report.nodes_after}")
    if report.already_fused:
        what = "node is" if report.already_fused == 1 else "nodes are"
        _print(f"{report.already_fused} {what} an earlier run's and left alone; other options need the original model")
    if report.transposed:
        megabytes = sum(report.transposed.values()) / 1e6
        what, them = ("weight", "it") if len(report.transposed) == 1 else ("weights", "them")
        zeros = sum(report.padding.values()) / 1e3
        grown = f" and {zeros:.1f} kB of zeros behind rows" if report.padding else ""
        _print(
            f"{len(report.transposed)} {what} stored in another order, {megabytes:.1f} MB{grown}; "
            f"--keep-weights leaves {them}"
        )


def print_summary(report: Report) -> None:
    """The same, and how to see more."""
    print_report(report)
    if report.fused or report.skipped:
        _print("--site NAME shows a product in full, --all shows every one")


FUSED_HEADINGS = ("product", "sites", "pattern", "features", "nodes", "m, k, n", "strategy")


def _fused_row(group: Sequence[FusedSite]) -> tuple[str, ...]:
    first = group[0]
    sizes = ", ".join("?" if first.sizes[loop] is None else str(first.sizes[loop]) for loop in ("m", "k", "n"))
    features = ", ".join(first.features)
    return first.anchor, str(len(group)), first.pattern, features, str(len(first.nodes)), sizes, first.strategy_text


def _example(report: Report, reason: str) -> str:
    example = next(entry for entry in report.skipped if entry.reason == reason)
    return f"{example.anchor}: {example.detail}"


def print_inspection(found: Inspection, as_json: bool) -> None:
    """What a fused file carries, as text or as JSON."""
    if as_json:
        print_json(document("inspect", str(found.model), found.architectures, found.to_dict()))
    else:
        _print(found)


def print_result(
    result: VerifyResult | BenchResult, original: Path, optimized: Path, as_json: bool, quiet: bool
) -> None:
    """What was compared or timed, as text or as JSON."""
    if as_json:
        kind = "verify" if isinstance(result, VerifyResult) else "bench"
        body = {"original_model": str(original), **result.to_dict()}
        print_json(document(kind, str(optimized), architectures_of(optimized), body))
    elif not quiet:
        _print(result)
