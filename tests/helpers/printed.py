"""Every form in which a command prints or writes a result, made without a process for each command.

A site may lack any of the kernel's axes, and a model may have any names in it: fuzzers and sweeps make all forms of
whatever they meet, and what cannot be printed is a fault like a wrong output.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from onnxfuse.bench.bench import bench
from onnxfuse.bench.chart import png
from onnxfuse.bench.html import html
from onnxfuse.errors import OnnxfuseError
from onnxfuse.pipeline import Analysis, make_report
from onnxfuse.report.stage_dump import decisions
from onnxfuse.runtime.session import library_path
from onnxfuse.terminal import print_explanation, print_result, print_sites, print_summary
from onnxfuse.triton_server import export_triton
from onnxfuse.verify.verify import verify


def of_analysis(analysis: Analysis) -> dict[str, str]:
    """What `optimize`, `explain` and `--dump` print of an analysis, by form."""
    report = make_report(analysis)
    forms = {
        "optimize": _shown(lambda: print_summary(report)),
        "explain": _shown(lambda: print_explanation(report, analysis)),
        "json": json.dumps(report.to_dict(), allow_nan=False),
    }
    for number, (site, entry) in enumerate(zip(analysis.sites, report.fused, strict=True)):
        forms |= {f"{number}/{file}": text for file, text in decisions(site, entry, "kernel").items()}
    return forms


def of_files(original: Path, fused: Path, feed: Mapping[str, np.ndarray], folder: Path) -> dict[str, str]:
    """What `verify --per-site`, `bench --per-site` and `export-triton` print and write of a model, by form.

    What one of them refuses in words is missing.
    """
    forms: dict[str, str] = {}
    with contextlib.suppress(OnnxfuseError):
        forms |= dict(_of_verify(original, fused, feed))
    with contextlib.suppress(OnnxfuseError):
        forms |= dict(_of_bench(original, fused, feed))
    with contextlib.suppress(OnnxfuseError):
        place = export_triton(fused, folder / "triton", Path(library_path()), name="model")
        forms["triton"] = (place / "config.pbtxt").read_text()
    return forms


def _of_verify(original: Path, fused: Path, feed: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    result = verify(original, fused, inputs=feed, per_site=True)
    yield "verify", _shown(lambda: print_result(result, original, fused, as_json=False, quiet=False))
    yield "verify --json", _shown(lambda: print_result(result, original, fused, as_json=True, quiet=False))


def _of_bench(original: Path, fused: Path, feed: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    result = bench(original, fused, inputs=feed, device="cpu", runs=1, warmup=0, per_site=True)
    yield "bench", _shown(lambda: print_result(result, original, fused, as_json=False, quiet=False))
    yield "bench --json", _shown(lambda: print_result(result, original, fused, as_json=True, quiet=False))
    yield "bench --per-site", _shown(lambda: print_sites(result.sites))
    yield "bench --html", html(result, "a and b")
    assert png(result, "a and b").startswith(b"\x89PNG")


def _shown(write: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        write()
    return shown.getvalue()
