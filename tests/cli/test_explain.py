"""What explain prints: equal fusions once, one product in full, and rejected tiles as a count with the runner-up."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.errors import SettingError
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.schedule.variant import SLOWER
from tests.cli.test_cli import MODELS
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import FLOAT16, Builder

LAYERS = 40


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal layers, one of another activation, and products that nothing follows."""
    b, path = Builder(), tmp_path_factory.mktemp("deep") / "deep.onnx"
    weight, bias = b.array(np.eye(32)), b.array(np.ones(32))
    x = b.input("x", ("rows", 32))
    for layer in range(LAYERS):
        x = b("Tanh" if layer == 7 else "Relu", b("Add", b("MatMul", x, weight), bias))
        x = b("Softmax", b("MatMul", x, weight), axis=0)  # no row softmax, so no attention
    onnx.save(b.model(x), path)
    return path


def test_equal_fusions_stand_once_with_their_count(deep: Path) -> None:
    report = make_report(analyse_model(deep, resolve("sm_80", list)))
    assert [len(group) for group in report.distinct] == [LAYERS - 1, 1]
    assert sum(map(len, report.distinct)) == len(report.fused)
    result = command("explain", deep, "--arch", "sm_80")
    lines = result.stdout.splitlines()
    assert len(lines) < 20
    assert re.search(rf"{LAYERS} fused \({LAYERS} gemm_epilogue\), {LAYERS} left alone; nodes", lines[-2])
    assert re.search(rf"no_attention_kernel +│ +{LAYERS - 1} ", result.stdout)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_fusions_that_stand_together_differ_in_names_alone(path: Path) -> None:
    report = make_report(analyse_model(path, resolve("sm_80", list)))
    assert sorted(site.anchor for group in report.distinct for site in group) == sorted(s.anchor for s in report.fused)
    for first, *others in report.distinct:
        for other in others:
            for fields in ("pattern", "features", "axes", "sizes", "strategy", "kernel", "timings"):
                assert getattr(first, fields) == getattr(other, fields)


def test_one_product_is_shown_in_full_by_its_name_a_nodes_or_a_glob(deep: Path) -> None:
    report = make_report(analyse_model(deep, resolve("sm_80", list)))
    for name in ("MatMul_0", "Relu_2", "MatMul_3"):
        (entry,) = (*report.only(name).fused, *report.only(name).skipped)
        assert name in (entry.anchor, *getattr(entry, "nodes", ()))
    assert len(report.only("MatMul_*").fused) == LAYERS
    with pytest.raises(SettingError, match="near it: MatMul_0"):
        report.only("MatMul0")
    shown = command("explain", deep, "--site", "MatMul_0", "--arch", "sm_80").stdout
    assert "fusion  MatMul_0\n" in shown
    assert shown.count("fusion  ") == 1
    everything = command("explain", deep, "--all", "--arch", "sm_80").stdout
    assert everything.count("fusion  ") == LAYERS
    assert everything.count("left alone") == LAYERS
    both = command("explain", deep, "--all", "--site", "MatMul_0")
    assert (both.returncode, len(both.stderr.splitlines())) == (2, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_runner_up_is_the_nearest_of_the_tiles_that_are_not_taken(path: Path) -> None:
    for site in analyse_model(path, resolve("sm_80,sm_90a", list)).sites:
        for plan in site.implementation.plans:
            text = str(plan)
            slower = {str(entry.tile) for entry in plan.rejected if entry.reason == SLOWER}
            assert len(re.findall(r"^ +\d+ ", text, re.MULTILINE)) == len({entry.reason for entry in plan.rejected})
            found = re.search(rf"{len(slower)} {SLOWER}; next (.+), at m \d+ ([\d.]+) us against ([\d.]+)", text)
            assert bool(found) == bool(slower)
            if not found:
                continue
            best = min(
                time / ranked.tiles[0][0]
                for ranked in plan.ranked
                for time, candidate in ranked.tiles
                if str(candidate.tile) in slower
            )
            assert found[1] in slower
            assert float(found[2]) / float(found[3]) == pytest.approx(best, abs=0.2)
            assert plan.details.count(" not ") == len(plan.rejected)


def test_what_is_copied_before_a_kernel_reads_it_is_said() -> None:
    """The same operand of few rows is read as it lies; the plan names each kernel that reads a copy."""
    b = Builder(FLOAT16)
    model = b.model(b("Relu", b("MatMul", b.input("x", ("rows", 1365)), b.raw(np.zeros((1365, 512), np.float16), "w"))))
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = make_report(analysis).fused
    lhs, rhs, *_ = site.operands
    assert "copied to rows on 16-byte boundaries, then TMA" in lhs.path["sm_90a"]
    assert "copied" not in lhs.path["few rows"]
    assert not any("copied" in path for path in rhs.path.values())
    assert re.search(r"ping-pong.*lhs x8 copied rhs x8", str(analysis.sites[0].plans[0]))
