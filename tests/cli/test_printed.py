"""What is printed or written of a site assumes no axes: it may have no m, no n, no batch, and a k of one element."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model, make_report
from tests.helpers import printed
from tests.helpers.many_commands import run_command as command
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder

SIZES = {"b": 3, "m": 5, "n": 16, "k": 8}
DEVICES = resolve("sm_90a,sm_80", list)


def product(axes: str, known: bool) -> ModelProto:
    """`Tanh` of an Einsum over some axes, sizes written down or left to the run."""
    b, subset = Builder(), set(axes)
    factors = ["".join(axis for axis in "bmk" if axis in subset), "".join(axis for axis in "bkn" if axis in subset)]
    out = "".join(axis for axis in "bmn" if axis in subset)
    inputs = [
        b.input(name, [SIZES[axis] if known else axis for axis in factor])
        for name, factor in zip("xy", factors, strict=True)
    ]
    return b.model(b("Tanh", b("Einsum", *inputs, equation=f"{','.join(factors)}->{out}")))


SUBSETS = ["".join(axes) for count in range(5) for axes in itertools.combinations("bmnk", count)]


@pytest.mark.parametrize("known", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("axes", SUBSETS)
def test_every_form_is_printed_whatever_axes_there_are(axes: str, known: bool) -> None:
    analysis = analyse_model(product(axes, known), DEVICES)
    forms = printed.of_analysis(analysis)
    report = make_report(analysis)
    assert len(report.fused) + len(report.skipped) == 1
    for site in report.fused:
        assert site.anchor in forms["optimize"]
        assert site.anchor in forms["explain"]
        loops = {"m": "m", "n": "n", "k": "k", "batch": "b"}
        stepped = [SIZES[axis] if known else None for axis in axes]
        total = None if None in stepped else int(np.prod([1, *(SIZES[axis] for axis in axes)]))
        sizes = [site.sizes[loop] for loop in loops]
        assert (None if None in sizes else int(np.prod(sizes))) == total, (
            "an axis may be of another loop, and is of one"
        )


def test_products_without_an_axis_are_among_those_that_fuse() -> None:
    fused = {axes for axes in SUBSETS if analyse_model(product(axes, True), DEVICES).sites}
    assert {"mk", "nk", "bk", "mnk"} <= fused


def head(b: Builder, x: str) -> str:
    """The end of a binary classifier."""
    return b("Squeeze", b("Sigmoid", b("Gemm", x, b.array(draw(8, 1)), b.array(draw(1)))), b.integers(1))


FORMS = {
    "classifier": (("rows", 8), head),
    "vector input": ((8,), lambda b, x: b("Tanh", b("MatMul", x, b.array(draw(8, 16))))),
    "vector weight": ((2, 3, 8), lambda b, x: b("Sigmoid", b("MatMul", x, b.array(draw(8))))),
    "scalar": ((8,), lambda b, x: b("Sigmoid", b("MatMul", x, b.array(draw(8))))),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORMS)
def test_every_command_prints_it(name: str, tmp_path: Path) -> None:
    (shape, form), b = FORMS[name], Builder()
    original, fused = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(b.model(form(b, b.input("x", shape))), original)
    result = command("optimize", original, "-o", fused, "--arch", "sm_80", "--dump", tmp_path / "dump")
    assert (result.returncode, result.stderr) == (0, "")
    assert "1 fused" in result.stdout
    sizes = [size if isinstance(size, int) else 3 for size in shape]
    forms = printed.of_files(original, fused, {"x": draw(*sizes).astype(np.float32)}, tmp_path)
    assert set(forms) == {
        *("verify", "verify --json", "bench", "bench --json", "bench --per-site", "bench --html", "triton")
    }
