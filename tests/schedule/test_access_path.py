"""The table of paths: every access has one, and `explain` prints kind, width, bytes, reason and path of each tensor."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.dtypes import BOOL, F16, F32
from onnxfuse.kernels.emit import TEXTS
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.schedule.attention import ATTENTION, PORTABLE_ATTENTION
from onnxfuse.schedule.cached_attention import CACHED_ATTENTION
from onnxfuse.schedule.families import FAMILIES
from onnxfuse.schedule.group_norm import GROUP_NORM
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED
from onnxfuse.schedule.kernel_family import KernelFamily
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.library import LIBRARY
from onnxfuse.schedule.norm import NORM
from onnxfuse.schedule.pointwise import POINTWISE
from onnxfuse.schedule.portable import PORTABLE
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M
from onnxfuse.schedule.small_m import SMALL_M
from onnxfuse.schedule.strategy import Strategy
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec
from tests.helpers.onnx_build import FLOAT16, Builder

TILE = Tile(128, 64, 64, 2, 2, 3)
OF_ATTENTION = (ATTENTION, PORTABLE_ATTENTION, CACHED_ATTENTION)
ALONG_ROWS = (POINTWISE, NORM, GROUP_NORM, LIBRARY)  # those kernels go along n only
VECTOR = "once per tile through shared memory"


def test_every_family_has_a_text_and_a_label_of_its_own() -> None:
    assert TEXTS.keys() == {family.name for family in FAMILIES}
    assert {family.label for family in FAMILIES} == {
        "portable",
        "sm_90a",
        "sm_90a swapped",
        "sm_90a quantized",
        "few rows",
        "few rows of quantized",
        "behind the product",
        "normalisation",
        "normalisation of groups",
        "cuBLASLt + epilogue",
        "attention",
        "attention, portable",
        "attention over a cache",
    }


@pytest.mark.parametrize("family", OF_ATTENTION, ids=lambda each: each.label)
@pytest.mark.parametrize("kind", ["scalar", "row", "tile"])
def test_attention_has_a_path_to_what_its_plan_lets_through(family: KernelFamily, kind: str) -> None:
    assert family.access_path("load", Access(kind, F16, 8))
    assert family.access_path("load", Access(kind, BOOL, 1))
    assert family.access_path("out", Access("tile", F16, 8))


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in OF_ATTENTION], ids=lambda each: each.label)
@pytest.mark.parametrize("kind", ["scalar", "row", "column", "tile"])
def test_every_operand_has_a_path(family: KernelFamily, kind: str) -> None:
    turns = (False, True) if family not in ALONG_ROWS else (False,)
    for dtype, width, transposed in itertools.product((F16, F32, BOOL), (1, 2, 4), turns):
        assert family.access_path("load", Access(kind, dtype, width, transposed))
        assert family.access_path("out", Access("tile", dtype, width, transposed))


@pytest.mark.parametrize(
    ("load", "path"),
    [
        (Access("scalar", F32, 1), VECTOR),
        (Access("row", F16, 8), VECTOR),
        (Access("column", F16, 1), VECTOR),
        (Access("tile", F16, 8), "cp.async along n"),
        (Access("tile", F16, 2), "cp.async along n"),
        (Access("tile", F32, 1), "cp.async along n"),
        (Access("tile", F16, 1), "element by element along n"),
        (Access("tile", BOOL, 16), "cp.async along n"),
        (Access("tile", BOOL, 4), "cp.async along n"),
        (Access("tile", BOOL, 2), "element by element along n"),
        (Access("row", BOOL, 16), VECTOR),
        (Access("tile", F16, 8, transposed=True), "cp.async along m, transposed in shared memory"),
        (Access("tile", F16, 8, two_levels=("n",), run=64), "cp.async along n, n in runs of 64"),
        (
            Access("tile", F16, 8, transposed=True, two_levels=("m",)),
            "cp.async along m, transposed in shared memory, m in runs",
        ),
    ],
)
def test_paths_of_operands(load: Access, path: str) -> None:
    assert PORTABLE.access_path("load", load) == path
    assert SMALL_M.access_path("load", load).startswith("element by element")
    assert "the main loop" in HOPPER.access_path("load", load)


@pytest.mark.parametrize(
    ("out", "path"),
    [
        (Access("tile", F16, 8), "TMA store"),
        (Access("tile", F16, 4), "direct store along n"),  # rows that begin on 8 bytes
        (Access("tile", F32, 4), "direct store along n"),
        (Access("tile", F16, 8, transposed=True), "transposed in shared memory, direct store along m"),
        (Access("tile", F16, 8, two_levels=("n",), run=64), "TMA store, n in runs of 64"),
        (Access("tile", F16, 8, two_levels=("n",), run=40), "direct store along n, n in runs of 40"),
    ],
)
def test_paths_of_outputs_on_hopper(out: Access, path: str) -> None:
    assert HOPPER.access_path("out", out) == path
    assert "TMA" not in PORTABLE.access_path("out", out)


def test_paths_of_the_product() -> None:
    wide, narrow = (make_spec("f16", 1, "nk", TILE, Size(8, 8, 8), narrow=narrow) for narrow in (False, True))
    crossed = make_spec("f16", 1, "kn", TILE, Size(8, 8, 8), lhs_order="km")
    assert paths(HOPPER, wide) == paths(HOPPER, crossed) == ["TMA", "TMA"]
    assert paths(PORTABLE, wide) == ["cp.async along k", "cp.async along k"]
    assert paths(PORTABLE, crossed) == ["cp.async along m", "cp.async along n"]
    assert paths(PORTABLE, narrow)[0] == "words shifted in registers along k"
    assert paths(SMALL_M, wide)[1] == "along k into registers"
    assert paths(PORTABLE, replace(wide, lhs_run=64))[0] == "cp.async along k in runs of 64"


def paths(family: KernelFamily, spec: TiledSpec) -> list[str]:
    """To lhs and to rhs."""
    return [family.access_path(role, access) for role, access in zip(("lhs", "rhs"), spec.factors, strict=True)]


def test_explain_prints_kind_width_bytes_path_and_reason() -> None:
    b = Builder(FLOAT16)
    t = b("MatMul", b.input("x", (2048, 320)), b.array(np.ones((320, 640)), "weight"))
    t = b("Add", b("Add", t, b.array(np.ones(640), "bias")), b.input("residual", (2048, 640)))
    model, devices = b.model(b("Mul", t, b.array(0.5, "half"))), resolve("sm_80,sm_90a", list)
    report = make_report(analyse_model(model, devices, keep_weights=True))
    rows = {operand.name: operand for operand in report.fused[0].operands}
    ahead = f"{VECTOR}, ahead of the main loop"
    assert [str(rows[name]) for name in ("x", "weight", "bias", "residual")] == [
        "lhs     x8  16 B  x: 16 bytes; sm_90a: TMA; portable: cp.async along k",
        "rhs     x8  16 B  weight: 16 bytes; sm_90a: TMA; portable: cp.async along n",
        f"row     x8  16 B  bias: 16 bytes; sm_90a: {ahead}; portable: {VECTOR}",
        "tile    x8  16 B  residual: 16 bytes; "
        "sm_90a: TMA or cp.async along n, beside the main loop; portable: cp.async along n",
    ]
    (out,) = (operand for operand in report.fused[0].operands if operand.kind == "out")
    assert out.path == {"portable": "direct store along n", "sm_90a": "TMA store"}
    entry = report.to_dict()["fused"][0]["operands"][0]
    assert (entry["width"], entry["bytes"], entry["path"]["sm_90a"]) == (8, 16, "TMA")


def test_explain_prints_masks() -> None:
    """16 elements at a time; behind a product as many as a thread owns columns."""
    b = Builder(FLOAT16)
    t = b("MatMul", b.input("x", (2048, 320)), b.array(np.ones((320, 640)), "weight"))
    chosen = b("Where", b.input("mask", (2048, 640), BOOL.onnx), t, b.array(-np.inf))
    model = b.model(b("Where", b.input("columns", (640,), BOOL.onnx), b.array(0.0), chosen))
    analysis = analyse_model(model, resolve("sm_80,sm_90a", list))
    epilogue_only = replace(
        analysis, sites=tuple(replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites)
    )
    (whole,), (second,) = make_report(analysis).fused, make_report(epilogue_only).fused
    rows = {operand.name: str(operand) for operand in whole.operands}
    ahead = f"{VECTOR}, ahead of the main loop"
    assert rows["mask"] == (
        "tile    x16 16 B  mask: 16 bytes; sm_90a: TMA or cp.async along n, beside the main loop; "
        "portable: cp.async along n"
    )
    assert rows["columns"] == f"row     x16 16 B  columns: 16 bytes; sm_90a: {ahead}; portable: {VECTOR}"
    assert {operand.name: (operand.width, operand.reason) for operand in second.operands[1:3]} == {
        "mask": (8, "a thread owns no more columns"),
        "columns": (8, "a thread owns no more columns"),
    }


def test_behind_a_product_the_paths_are_those_of_the_kernel_behind_it() -> None:
    b = Builder(FLOAT16)
    t = b("MatMul", b.input("x", (4096, 320)), b.array(np.ones((320, 641)), "weight"))
    t = b("Add", t, b.array(np.ones(641), "bias"))
    model = b.model(b("Tanh", b("Add", t, b.input("residual", (4096, 641)))))
    analysis = analyse_model(model, resolve("sm_100", list))
    epilogue_only = tuple(replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites)
    (site,) = make_report(replace(analysis, sites=epilogue_only)).fused
    assert [(row.kind, row.width, row.path) for row in site.operands] == [
        ("tile", 1, {"behind the product": "element by element along n"}),
        ("row", 1, {"behind the product": "once per tile into registers"}),
        ("tile", 1, {"behind the product": "element by element along n"}),
        ("out", 1, {"behind the product": "direct store along n"}),
    ]
    assert site.operands[2].reason == "row pitch 641 is odd"


def test_what_a_weight_has_beside_its_integers_goes_the_way_that_its_kernel_takes() -> None:
    """TMA brings integers alone; for few rows all of it comes by the same copies."""
    access = Access("tile", F16, 8)
    for role in ("scales", "zeros"):
        assert HOPPER_QUANTIZED.access_path(role, access) != HOPPER_QUANTIZED.access_path("rhs", access)
        assert HOPPER_QUANTIZED.access_path(role, access).startswith("cp.async")
        assert QUANTIZED_SMALL_M.access_path(role, access) == QUANTIZED_SMALL_M.access_path("rhs", access)
