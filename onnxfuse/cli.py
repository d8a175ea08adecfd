"""The command line: optimize, explain, verify, bench, and what deployment needs."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import click

from onnxfuse import __version__
from onnxfuse.bench.bench import DEVICES
from onnxfuse.bench.bench import bench as run_bench
from onnxfuse.bench.chart import check_pillow, png
from onnxfuse.bench.html import html
from onnxfuse.device import resolve, tuning_device
from onnxfuse.errors import EXIT_CODES, INTERRUPTED, NOT_DONE, WRONG, OnnxfuseError, OutputError, SettingError
from onnxfuse.genai import export_genai as write_genai
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.load import check_weights
from onnxfuse.graph.save import (
    STANDARD_OUTPUT,
    check_files,
    check_holds_none,
    check_new,
    check_target,
    make_folder,
    save_model,
    write_bytes,
    write_text,
)
from onnxfuse.lowering.inspection import inspect as run_inspection
from onnxfuse.pipeline import (
    FP32_MODES,
    ROUNDING_MODES,
    Fp32,
    Rounding,
    analyse_model,
    check_budget,
    make_report,
    optimize_model,
    tune_model,
)
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.feeds import load_inputs, load_npz
from onnxfuse.runtime.session import library_path, options_with
from onnxfuse.selection import Selection, make_selection
from onnxfuse.terminal import (
    print_error,
    print_explanation,
    print_inspection,
    print_json,
    print_report,
    print_result,
    print_saved,
    print_sites,
    print_summary,
    print_written,
    progress_bar,
    require_output,
)
from onnxfuse.triton_server import MAX_BATCH
from onnxfuse.triton_server import export_triton as write_triton
from onnxfuse.verify.verify import verify as run_verify

ENDING = (signal.SIGTERM, signal.SIGHUP)
_CODES = "\b\nExit codes:\n" + "\n".join(f"{code:5}  {meaning}" for code, meaning in EXIT_CODES.items())


def main() -> None:
    """Run the command line; a user's mistake is one line and an exit code, never a traceback."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we then
            signal.signal(number, _end)
    try:
        sys.exit(commands(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except OnnxfuseError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        print_error(OutputError(f"{error.filename or 'standard output'}: {error.strerror}"))
        _drop_standard_output()
        sys.exit(OutputError.exit_code)
    except Exception:  # a fault of onnxfuse, which is no verdict on the model
        traceback.print_exc()
        sys.exit(NOT_DONE)


def _end(number: int, _: FrameType | None) -> None:
    """End as Ctrl-C does, so that what was begun is removed; once, for a second signal would interrupt that."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _drop_standard_output() -> None:
    """What is left in its buffer would fail once more as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(epilog=_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def commands() -> None:
    """Fuse matrix products of an ONNX model with what follows them into single GPU kernels."""


_arch = click.option("--arch", help="Architectures: sm_90a,sm_80,ptx or native. Default: the GPUs at hand.")
_fp32 = click.option(
    "--fp32", type=click.Choice(FP32_MODES), default="tf32", show_default=True, help="How fp32 products are computed."
)
_rounding = click.option(
    "--rounding",
    type=click.Choice(ROUNDING_MODES),
    default="fp32",
    show_default=True,
    help="What kernels keep to themselves: left in fp32, or rounded as the model's own nodes do.",
)
_keep_weights = click.option(
    "--keep-weights", is_flag=True, help="Store no weight in another order, such as [n, k] for [k, n], than MODEL does."
)
_attention = click.option(
    "--attention/--no-attention",
    default=True,
    help="Make one kernel of two products and the softmax between them; on by default.",
)
_inputs = click.option(
    "--inputs", type=click.Path(path_type=Path), help="An .npz file with one array for each input; verify: or a folder."
)
_shapes = click.option(
    "--shape", "shapes", multiple=True, metavar="NAME=2,77,768", help="Shape of a random input. May be repeated."
)
_libraries = click.option(
    "--library",
    "libraries",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A shared library of the model's own custom operators. May be repeated.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_quiet = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors and what --json asks for.")
_COUNT = click.IntRange(min=1)
_seed = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random inputs."
)


def _selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Options --only, --skip and --plan, which reach the command as one selection."""

    @click.option("--only", multiple=True, metavar="PATTERN|GLOB", help="Fuse only what fits. May be repeated.")
    @click.option("--skip", multiple=True, metavar="PATTERN|GLOB", help="Leave out what fits. May be repeated.")
    @click.option("--plan", type=click.Path(path_type=Path), help="What explain --json printed, edited.")
    @functools.wraps(command)
    def with_selection(*, only: tuple[str, ...], skip: tuple[str, ...], plan: Path | None, **rest: Any) -> None:
        command(selection=make_selection(only, skip, plan), **rest)

    return with_selection


@commands.command(epilog=_CODES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Where the fused model goes.")
@_arch
@_fp32
@_rounding
@_keep_weights
@_attention
@_selecting
@click.option("--report", type=click.Path(path_type=Path), help="Write the report as JSON.")
@click.option("--dump", type=click.Path(path_type=Path), help="A folder that gets one numbered file a stage.")
@click.option("--tune", is_flag=True, help="Choose kernels by measuring on the GPU at hand.")
@click.option("--budget", type=click.FloatRange(min=0), metavar="SECONDS", help="How long --tune may measure.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@_json
@_quiet
def optimize(
    model: Path,
    output: Path,
    arch: str | None,
    fp32: Fp32,
    rounding: Rounding,
    keep_weights: bool,
    attention: bool,
    selection: Selection,
    report: Path | None,
    dump: Path | None,
    tune: bool,
    budget: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fuse MODEL and write the result; `-o -` writes it to standard output, and what is printed to standard error."""
    to_standard_output = output in (Path("-"), STANDARD_OUTPUT)
    require_output(quiet and not to_standard_output)
    if to_standard_output:
        output = _standard_output(as_json)
    check_target(model, output, force)
    if report is not None:
        check_new(report, force, {"the input": model, "the fused model": output})
    check_budget(tune, budget)
    devices = resolve(arch, local_architectures)
    local = tuning_device(devices, local_architectures()) if tune else None
    if dump is not None:
        make_folder(dump, force)
    with progress_bar(quiet) as progress:
        progress("finding fusions", 0, 0)
        source = load_model(model)
        check_weights(source)
        analysis = analyse_model(source, devices, fp32, selection, rounding, keep_weights, attention)
        check_files(analysis.model, output, force, analysis.transposed)
        if report is not None:
            check_holds_none(analysis.model, report)
        if local is not None:
            analysis = tune_model(analysis, local, budget=budget, progress=progress)
        proto, outcome = optimize_model(analysis, dump=dump, progress=progress, to_save=True)
        progress("writing the model", 0, 0)
        saved = save_model(proto, analysis.model, output, force)
    if report is not None:
        write_text(report, json.dumps(outcome.to_dict(), indent=2) + "\n")
    if as_json:
        print_json(outcome.to_dict())
    if as_json or quiet:
        return
    with redirect_stdout(sys.stderr if output == STANDARD_OUTPUT else sys.stdout):
        print_report(outcome)
        print_saved(saved)


def _standard_output(as_json: bool) -> Path:
    """Where `-o -` writes.

    Raises:
        OutputError: a terminal shows nothing useful of a model.
        SettingError: --json goes there.
    """
    if as_json:
        raise SettingError("-o -: the model goes to standard output, and so does --json; --report R.json writes a file")
    if sys.stdout.isatty():
        raise OutputError("-o -: standard output is a terminal; name a file, or send it to one")
    return STANDARD_OUTPUT


@commands.command(epilog=_CODES)
@click.argument("model", type=click.Path(path_type=Path))
@_arch
@_fp32
@_rounding
@_keep_weights
@_attention
@_selecting
@click.option("--site", metavar="NAME|GLOB", help="One product in full, by its name or a node's.")
@click.option("--all", "in_full", is_flag=True, help="Every product in full.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def explain(
    model: Path,
    arch: str | None,
    fp32: Fp32,
    rounding: Rounding,
    keep_weights: bool,
    attention: bool,
    selection: Selection,
    site: str | None,
    in_full: bool,
    as_json: bool,
) -> None:
    """Show what of MODEL would be fused, and why the rest is left alone. Needs no GPU and writes nothing."""
    require_output()
    if site is not None and in_full:
        raise SettingError("--site shows one product and --all every one; give one of them")
    with progress_bar(quiet=False) as progress:
        progress("finding fusions", 0, 0)
        devices = resolve(arch, local_architectures)
        analysis = analyse_model(model, devices, fp32, selection, rounding, keep_weights, attention)
    outcome = make_report(analysis)
    if site is not None:
        outcome = outcome.only(site)
    if as_json:
        print_json(outcome.to_dict())
    elif in_full or site is not None:
        print_explanation(outcome, analysis)
    else:
        print_summary(outcome)


@commands.command(epilog=_CODES)
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("optimized", type=click.Path(path_type=Path))
@_inputs
@_shapes
@_seed
@click.option(
    "--runs",
    type=_COUNT,
    help="Random runs, each with the next seed. By default 1, or more for small outputs or for all branches.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="SYMBOL=1,2,7",
    help="Sizes of a dynamic axis, one a run; may be repeated.",
)
@click.option("--per-site", is_flag=True, help="Compare what each fused node makes as well.")
@_libraries
@click.option("--require-gpu", is_flag=True, help="Fail where no GPU can run the kernels.")
@_json
@_quiet
def verify(
    original: Path,
    optimized: Path,
    inputs: Path | None,
    shapes: tuple[str, ...],
    seed: int,
    runs: int | None,
    sizes: tuple[str, ...],
    per_site: bool,
    libraries: tuple[Path, ...],
    require_gpu: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run both models and compare each with a float64 reference."""
    require_output(quiet)
    _check_models(original, optimized)
    with progress_bar(quiet) as progress:
        result = run_verify(
            original,
            optimized,
            inputs=load_inputs(inputs) if inputs is not None else None,
            shapes=_shapes_of(shapes),
            sizes=dict(_shape(text, "--size", "SYMBOL=1,2,7") for text in sizes),
            seed=seed,
            runs=runs,
            per_site=per_site,
            session_options=options_with(libraries),
            require_gpu=require_gpu,
            progress=progress,
        )
    print_result(result, original, optimized, as_json, quiet)
    if not result.passed:
        sys.exit(WRONG)


@commands.command(epilog=_CODES)
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("optimized", type=click.Path(path_type=Path))
@_inputs
@_shapes
@_seed
@click.option("--runs", type=_COUNT, default=50, show_default=True, help="Timed runs of each model.")
@click.option("--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Runs of each before.")
@click.option("--device", type=click.Choice(list(DEVICES)), default="cuda", show_default=True, help="Where both run.")
@click.option("--per-site", is_flag=True, help="Time each fused node and what it stands for as well.")
@_libraries
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write a report with a bar per site.")
@click.option("--png", "chart", type=click.Path(path_type=Path), help="Write the same as an image.")
@click.option("--force", is_flag=True, help="Overwrite an existing report.")
@_json
@_quiet
def bench(
    original: Path,
    optimized: Path,
    inputs: Path | None,
    shapes: tuple[str, ...],
    seed: int,
    runs: int,
    warmup: int,
    device: str,
    per_site: bool,
    libraries: tuple[Path, ...],
    page: Path | None,
    chart: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Time both models, run by run in turn."""
    require_output(quiet)
    _check_models(original, optimized)
    kept = {"the original": original, "the fused model": optimized}
    for what, report in (("the page", page), ("the chart", chart)):
        if report is not None:
            check_new(report, force, kept)
            kept[what] = report
    if chart is not None:
        check_pillow()
    with progress_bar(quiet) as progress:
        result = run_bench(
            original,
            optimized,
            **_feed_options(inputs, shapes),
            seed=seed,
            runs=runs,
            warmup=warmup,
            device=device,
            per_site=per_site or page is not None or chart is not None,
            session_options=options_with(libraries),
            progress=progress,
        )
    title = f"{original.name} and {optimized.name}"
    if page is not None:
        write_text(page, html(result, title))
    if chart is not None:
        write_bytes(chart, png(result, title))
    print_result(result, original, optimized, as_json, quiet)
    if result.sites and not as_json and not quiet:
        print_sites(result.sites)


@commands.command(epilog=_CODES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--rebuild", is_flag=True, help="Compile every kernel again and compare the code byte for byte.")
@_json
def inspect(model: Path, rebuild: bool, as_json: bool) -> None:
    """List the GPU code that the fused MODEL carries: kernels, architectures, sizes, hashes. None of it is run."""
    require_output()
    with progress_bar(quiet=False) as progress:
        found = run_inspection(model, rebuild, progress)
    print_inspection(found, as_json)
    if not found.passed:
        sys.exit(WRONG)


@commands.command(epilog=_CODES)
def library() -> None:
    """Print the path of the shared library that runs the fused nodes."""
    require_output()
    click.echo(library_path())


@commands.command("export-triton", epilog=_CODES)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", help="What clients call the model. Default: the file's name.")
@click.option("--max-batch", default=MAX_BATCH, show_default=True, help="Rows that the server gathers into one run.")
@click.option("--mount", default="", help="Where the server sees FOLDER. Default: the same path.")
@click.option("--unfused", is_flag=True, help="Write a model without any fused node as well.")
def export_triton(model: Path, folder: Path, name: str | None, max_batch: int, mount: str, unfused: bool) -> None:
    """Write the fused MODEL into FOLDER, a model repository of Triton Inference Server."""
    require_output()
    place = write_triton(
        model, folder, Path(library_path()), name=name, max_batch=max_batch, mount=mount, unfused=unfused
    )
    print_written(place)


@commands.command("export-genai", epilog=_CODES)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@_arch
@_fp32
@_rounding
@_keep_weights
def export_genai(
    model: Path, folder: Path, arch: str | None, fp32: Fp32, rounding: Rounding, keep_weights: bool
) -> None:
    """Fuse the models of MODEL, a folder of ONNX Runtime GenAI, and write it with the library as FOLDER."""
    require_output()
    devices = resolve(arch, local_architectures)
    with progress_bar(quiet=False) as progress:
        progress("finding fusions", 0, 0)
        reports = write_genai(
            model,
            folder,
            Path(library_path()),
            lambda path: analyse_model(path, devices, fp32, rounding=rounding, keep_weights=keep_weights),
            progress,
        )
    for report in reports.values():
        print_report(report)
    print_written(folder)


def _check_models(*paths: Path) -> None:
    for path in paths:
        check_weights(load_model(path))


def _feed_options(inputs: Path | None, shapes: tuple[str, ...]) -> Mapping[str, Any]:
    return {"inputs": load_npz(inputs) if inputs is not None else None, "shapes": _shapes_of(shapes)}


def _shapes_of(shapes: tuple[str, ...]) -> dict[str, list[int]] | None:
    return dict(_shape(text, "--shape", "NAME=2,77,768") for text in shapes) or None


def _shape(text: str, option: str, form: str) -> tuple[str, list[int]]:
    name, separator, sizes = text.rpartition("=")
    if not separator or not all(size.strip().isdecimal() for size in sizes.split(",")):
        raise SettingError(f"{option} {text!r}: expected {form}")
    return name, [int(size) for size in sizes.split(",")]
