"""What the commands show on a terminal: tables, results, errors, progress; in a pipe no bar, and no broken line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from onnxfuse.bench_report import site_table
from onnxfuse.errors import OnnxfuseError, OutputError
from onnxfuse.pipeline import Analysis
from onnxfuse.progress import Progress
from onnxfuse.report import Report
from onnxfuse.runtime.bench import BenchResult
from onnxfuse.runtime.bench_sites import SiteTimes
from onnxfuse.runtime.verify import VerifyResult
from onnxfuse.store import Saved

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
    if saved.copied:
        count = len(saved.copied)
        files = str(saved.copied[0]) if count == 1 else f"{count} files to {saved.copied[0].parent}"
        _print(f"copied {files}: ONNX Runtime reads data from the model's own folder alone")


def print_sites(sites: Sequence[SiteTimes]) -> None:
    """The table of `bench --per-site`."""
    _console().print(site_table(sites))


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
    """Every fusion with its operands and plans, then every product that is left alone."""
    for site, entry in zip(analysis.sites, report.fused, strict=True):
        _print(entry.text)
        if site.match.stop is not None:
            _print(f"ends    at {site.match.stop}")
        for operand in entry.operands:
            _print(operand)
        _print("\n".join((f"tier    {entry.tier}", *map(str, site.form.plans))) + "\n")
    for skipped in report.skipped:
        _print(f"{skipped.anchor}: left alone, {skipped.reason}: {skipped.detail}")


def print_report(report: Report) -> None:
    """Tables of what was fused, and of what was left alone and why."""
    console = _console()
    table = Table(title="fused", title_justify="left")
    for heading in ("anchor", "pattern", "features", "nodes", "m, k, n"):
        table.add_column(heading, overflow="fold")
    for entry in report.fused:
        sizes = ", ".join("?" if entry.sizes[loop] is None else str(entry.sizes[loop]) for loop in ("m", "k", "n"))
        features = ", ".join(entry.features)
        table.add_row(escape(entry.anchor), entry.pattern, features, str(len(entry.nodes)), sizes)
    if report.fused:
        console.print(table)
    _print_skipped(console, report)
    console.print(f"{len(report.fused)} fused; nodes {report.nodes_before} -> {report.nodes_after}")


def _print_skipped(console: Console, report: Report) -> None:
    if not report.skipped:
        return
    table = Table(title="left alone", title_justify="left")
    for heading in ("reason", "sites", "example"):
        table.add_column(heading, overflow="fold")
    for reason in sorted({entry.reason for entry in report.skipped}):
        sites = [entry for entry in report.skipped if entry.reason == reason]
        example = sites[0]
        table.add_row(reason, str(len(sites)), escape(f"{example.anchor}: {example.detail}"))
    console.print(table)


def print_result(result: VerifyResult | BenchResult, as_json: bool, quiet: bool) -> None:
    """What was compared or timed, as text or as JSON."""
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        _print(result)
