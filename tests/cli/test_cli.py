"""The command line: what it prints, what it writes, and that a user's mistake is one line and an exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse import __version__
from onnxfuse.cli import commands
from onnxfuse.device import resolve
from onnxfuse.graph.scopes import count_nodes
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import analyse_model, make_report, optimize_model
from tests.graph.test_graph import cycle, unknown_opset, wrong_dtype
from tests.helpers import corpus
from tests.helpers.many_commands import run_all
from tests.helpers.many_commands import run_command as onnxfuse
from tests.helpers.onnx_build import Builder

MODELS = sorted((Path(__file__).parents[2] / "models").glob("*.onnx"))
GATE = "tiny/ff_geglu.tiny.torchscript.op17.fp16.dynamic.onnx"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gate.onnx"
    onnx.save(corpus.materialize(GATE), path)
    return path


@pytest.fixture(scope="module")
def fused(gate: Path) -> Path:
    out = gate.with_name("fused.onnx")
    result = onnxfuse("optimize", gate, "-o", out, "--arch", "sm_80", "--report", gate.with_name("report.json"))
    assert result.returncode == 0, result.stderr
    assert "split_gemm" in result.stdout
    assert "gemm_epilogue" in result.stdout
    assert "nodes 27 -> 2" in result.stdout
    return out


def test_the_report_tells_what_was_fused(fused: Path) -> None:
    report = json.loads(fused.with_name("report.json").read_text())
    site, projection = report["fused"]
    assert (site["pattern"], site["features"]) == ("split_gemm", ["activation", "bias", "gate"])
    assert site["axes"] == "b m k, k (p n), (p n) -> b m n"
    assert site["sizes"] == {"batch": 1, "m": None, "n": 128, "k": 32}
    assert (projection["pattern"], projection["features"]) == ("gemm_epilogue", ["bias"])
    assert report["skipped"] == []
    assert (report["nodes_before"], report["nodes_after"]) == (27, 2)


def test_explain_tells_the_same_and_writes_nothing(gate: Path, fused: Path) -> None:
    before = sorted(gate.parent.iterdir())
    result = onnxfuse("explain", gate, "--json", "--arch", "sm_80")
    assert json.loads(result.stdout)["fused"] == json.loads(fused.with_name("report.json").read_text())["fused"]
    text = onnxfuse("explain", gate, "--all", "--keep-weights").stdout
    assert "rhs     f16[k, (p n)]  parts 2" in text
    assert "rhs     f16[k, n]  parts 1" in text
    assert re.search(r"^ends    at \S+: .+ \(taken\)$", text, re.MULTILINE)
    assert sorted(gate.parent.iterdir()) == before


def test_what_an_earlier_run_fused_is_told_and_stays(fused: Path, tmp_path: Path) -> None:
    nodes = len(onnx.load(fused).graph.node)
    again = onnxfuse("optimize", fused, "-o", tmp_path / "again.onnx", "--arch", "sm_80")
    for text in (again.stdout, onnxfuse("explain", fused, "--arch", "sm_80").stdout):
        assert f"{nodes} nodes are an earlier run's and left alone" in text
    report = json.loads(onnxfuse("explain", fused, "--arch", "sm_80", "--json").stdout)
    assert (report["already_fused"], report["fused"]) == (nodes, [])
    assert onnx.load(tmp_path / "again.onnx").graph == onnx.load(fused).graph


def test_verify_says_that_nothing_is_fused(gate: Path, fused: Path) -> None:
    """As of a model that a tool behind onnxfuse took apart again, or of two arguments in each other's place."""
    words = "has no fused node"
    for before, after in ((gate, fused), (fused, gate), (gate, gate)):
        shown = onnxfuse("verify", before, after)
        assert shown.returncode == 0
        assert (words in shown.stdout) == (after == gate)


@pytest.mark.parametrize("name", ["fifo", "/dev/null"])
def test_a_pipe_is_no_missing_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    shown = onnxfuse("optimize", tmp_path / name, "-o", tmp_path / "out.onnx")
    assert (shown.returncode, shown.stderr.count("\n")) == (3, 1)
    assert "is a pipe or a device" in shown.stderr


def test_rounding_is_in_the_report(gate: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.onnx"
    result = onnxfuse(
        *("optimize", gate, "-o", out, "--arch", "ptx", "--rounding", "onnx", "--report", tmp_path / "r.json")
    )
    assert result.returncode == 0, result.stderr
    assert all("rounded" in site["features"] for site in json.loads((tmp_path / "r.json").read_text())["fused"])
    assert "round_f16(acc0)" in onnxfuse("explain", gate, "--arch", "sm_80", "--rounding", "onnx", "--all").stdout
    assert onnxfuse("verify", gate, out, "--shape", "hidden_states=2,3,32").returncode == 0


def test_verify_passes_and_fails_with_its_exit_code(gate: Path, fused: Path, tmp_path: Path) -> None:
    assert onnxfuse("verify", gate, fused, "--shape", "hidden_states=2,3,32").returncode == 0
    broken = onnx.load(fused)
    weight = next(tensor for tensor in broken.graph.initializer if tensor.name.startswith("onnx::MatMul_34"))
    values = onnx.numpy_helper.to_array(weight) * np.float16(1.02)
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(broken, tmp_path / "broken.onnx")
    assert onnxfuse("verify", gate, tmp_path / "broken.onnx").returncode == 1


def test_json_is_all_that_a_bfloat16_model_prints(tmp_path: Path) -> None:
    b = Builder(onnx.TensorProto.BFLOAT16)
    t = b("MatMul", b.input("x", ("m", 16)), b.array(np.eye(16)))
    onnx.save(b.model(b("Relu", b("Add", t, b.array(np.ones(16))))), tmp_path / "bf16.onnx")
    result = onnxfuse("explain", tmp_path / "bf16.onnx", "--json", "--arch", "sm_80")
    assert len(json.loads(result.stdout)["fused"]) == 1


def test_dump_writes_one_numbered_file_a_stage(gate: Path, tmp_path: Path) -> None:
    result = onnxfuse("optimize", gate, "-o", tmp_path / "o.onnx", "--arch", "sm_80", "--dump", tmp_path / "dump")
    assert result.returncode == 0, result.stderr
    site, _ = sorted((tmp_path / "dump").iterdir())
    names = sorted(path.name for path in site.iterdir())
    assert [name[0] for name in names if "-kernel-" not in name] == list("0123456")
    assert all(path.read_text().strip() for path in site.iterdir())
    assert "HMMA" in (site / "7-kernel-sm_80.sass").read_text()


def test_an_existing_output_is_kept_without_force(gate: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    out.write_text("mine")
    refused = onnxfuse("optimize", gate, "-o", out, "--arch", "sm_80")
    assert (refused.returncode, out.read_text()) == (3, "mine")
    assert onnxfuse("optimize", gate, "-o", out, "--arch", "sm_80", "--force").returncode == 0
    assert onnxfuse("optimize", gate, "-o", gate, "--arch", "sm_80", "--force").returncode == 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("optimize", "GATE", "-o", "OUT", "--arch", "sm_80"),
        ("explain", "GATE", "--arch", "sm_80"),
        ("verify", "GATE", "FUSED", "--per-site"),
        ("bench", "GATE", "FUSED", "--device", "cpu", "--runs", "2", "--per-site"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_all_of_standard_output_and_progress_goes_to_the_terminal(
    arguments: tuple[str, ...], gate: Path, fused: Path, tmp_path: Path
) -> None:
    """Standard error is a terminal here: there the bar is drawn, and standard output has nothing of it."""
    places = {"GATE": gate, "FUSED": fused, "OUT": tmp_path / "out.onnx"}
    command = [places.get(argument, argument) for argument in arguments]
    stdout, stderr = on_terminal(*command, "--json")
    assert isinstance(json.loads(stdout), dict)
    assert STEPS[arguments[0]] in stderr


# The last step of each: a bar is drawn ten times a second, and at its end.
STEPS = {
    "optimize": "writing the model", "explain": "finding fusions", "verify": "reading kernels",
    "bench": "timing sites",
}  # fmt: skip


def on_terminal(*arguments: object) -> tuple[str, str]:
    """Standard output, and what a terminal that is standard error shows."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "onnxfuse", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        shown = []
        with suppress(OSError):  # how Linux says that nobody writes to the terminal any more
            while data := os.read(master, 1 << 16):
                shown.append(data)
        os.close(master)
        stdout = process.stdout.read()
    assert process.returncode == 0, b"".join(shown).decode()
    return stdout, b"".join(shown).decode()


def test_a_log_has_no_progress(gate: Path, tmp_path: Path) -> None:
    result = onnxfuse("optimize", gate, "-o", tmp_path / "out.onnx", "--arch", "sm_80")
    assert result.stderr == ""


def test_quiet_commands_print_nothing(gate: Path, fused: Path, tmp_path: Path) -> None:
    for arguments in (
        ("optimize", gate, "-o", tmp_path / "out.onnx", "--arch", "sm_80"),
        ("verify", gate, fused),
        ("bench", gate, fused, "--device", "cpu", "--runs", "1", "--html", tmp_path / "page.html"),
    ):
        assert on_terminal(*arguments, "--quiet") == ("", "")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_bench_prints_a_table_and_keeps_reports_that_exist(gate: Path, fused: Path, tmp_path: Path) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.png"
    arguments = ("bench", gate, fused, "--device", "cpu", "--runs", "1", "--html", page, "--png", chart)
    for report in (page, chart):
        report.write_text("mine")
        assert onnxfuse(*arguments).returncode == 3
        assert report.read_text() == "mine"
        report.unlink()
    page.write_text("mine")
    chart.write_text("mine")
    result = onnxfuse(*arguments, "--force")
    assert result.returncode == 0
    assert result.stderr == ""
    assert "from the call to the results" in result.stdout
    assert "sites, microseconds" in result.stdout
    assert "gate.onnx and fused.onnx" in page.read_text()
    assert chart.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


FOLDERS = (("optimize", "-o", "out.onnx"), ("explain",), ("verify", "."), ("bench", "."), ("export-triton", "models"))


def mistakes(tmp_path: Path, gate: Path) -> dict[str, tuple[object, ...]]:
    files = {
        "truncated": gate.read_bytes()[: gate.stat().st_size // 2],
        "text": b"this is no model\n",
        "empty": b"",
        "cycle": cycle().SerializeToString(),
        "opset": unknown_opset().SerializeToString(),
        "dtype": wrong_dtype().SerializeToString(),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    out = tmp_path / "out.onnx"
    commands: dict[str, tuple[object, ...]] = {
        f"{verb} {name}": (verb, tmp_path / f"{name}.onnx", *(("-o", out) if verb == "optimize" else ()))
        for name in (*files, "missing")
        for verb in ("optimize", "explain")
    }
    return commands | {
        "architecture": ("optimize", gate, "-o", out, "--arch", "sm_1"),
        "no gpu": ("optimize", gate, "-o", out, "--arch", "native"),
        "folder": ("optimize", gate, "-o", tmp_path / "nowhere" / "out.onnx"),
        "long name": ("optimize", gate, "-o", tmp_path / ("n" * 300)),
        "report over the input": ("optimize", gate, "-o", out, "--report", gate, "--force"),
        "report over the output": ("optimize", gate, "-o", out, "--report", out),
        "page over a model": ("bench", gate, gate, "--html", gate, "--force"),
        "page and chart": ("bench", gate, gate, "--html", tmp_path / "a", "--png", tmp_path / "a"),
        "dump into a file": ("optimize", gate, "-o", out, "--dump", gate, "--force"),
        "dump over files": ("optimize", gate, "-o", out, "--dump", tmp_path),
        "fp32": ("optimize", gate, "-o", out, "--fp32", "half"),
        "verify shape": ("verify", gate, gate, "--shape", "hidden_states"),
        "verify digits": ("verify", gate, gate, "--shape", "hidden_states=²"),
        "verify name": ("verify", gate, gate, "--shape", "x=2,3"),
        "verify rank": ("verify", gate, gate, "--shape", "hidden_states=2,3"),
        "verify size": ("verify", gate, gate, "--size", "nothing=2"),
        "verify seed": ("verify", gate, gate, "--seed", "-1"),
        "bench runs": ("bench", gate, gate, "--runs", "0"),
        "bench warmup": ("bench", gate, gate, "--warmup", "-5"),
        "verify inputs": ("verify", gate, gate, "--inputs", tmp_path / "nothing.npz"),
        "verify missing": ("verify", gate, tmp_path / "nothing.onnx"),
        "bench": ("bench", gate, gate),
        "tune": ("optimize", gate, "-o", out, "--tune"),
        "tune for another": ("optimize", gate, "-o", out, "--tune", "--arch", "sm_80"),
        "budget": ("optimize", gate, "-o", out, "--budget", "10"),
        "unknown command": ("optimise", gate),
        **{f"folder as {verb}": (verb, tmp_path, *rest) for verb, *rest in FOLDERS},
        "folder as output": ("optimize", gate, "-o", tmp_path),
        "folder as page": ("bench", gate, gate, "--html", tmp_path),
        "folder as plan": ("explain", gate, "--plan", tmp_path),
        "folder as inputs": ("bench", gate, gate, "--device", "cpu", "--inputs", tmp_path),
        "file as repository": ("export-triton", gate, gate, "--unfused"),
        "nothing to serve": ("export-triton", gate, tmp_path / "models"),
        "no output": ("optimize", gate),
    }


USAGE = frozenset({
    "architecture", "no gpu", "fp32", "verify shape", "verify digits", "verify seed", "verify name", "verify rank",
    "verify size", "bench runs", "bench warmup", "budget", "unknown command", "no output",
    "folder as plan",
})  # fmt: skip


def test_a_mistake_is_one_line_and_an_exit_code(tmp_path: Path, gate: Path) -> None:
    before, made = gate.read_bytes(), mistakes(tmp_path, gate)
    for name, result in zip(made, run_all([*made.values()], CUDA_VISIBLE_DEVICES=""), strict=True):
        assert result.returncode == (2 if name in USAGE else 3), f"{name}: exit code {result.returncode}"
        assert "Traceback" not in result.stderr, f"{name}: {result.stderr}"
        lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith(("Usage", "Try"))]
        assert len(lines) == 1, f"{name}: {result.stderr}"
        assert ("is a folder" in lines[0]) == name.startswith("folder as"), f"{name}: {result.stderr}"
    assert not (tmp_path / "out.onnx").exists()
    assert gate.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_standard_output_that_takes_nothing_is_one_line(gate: Path) -> None:
    command = [sys.executable, "-m", "onnxfuse", "explain", str(gate), "--arch", "sm_80", "--json"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1), result.stderr


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_nothing_takes_the_place_of_external_weights(gate: Path, tmp_path: Path, option: str) -> None:
    source, weights, out = tmp_path / "in.onnx", tmp_path / "weights.bin", tmp_path / "out.onnx"
    onnx.save(onnx.load(gate), source, save_as_external_data=True, location=weights.name, size_threshold=0)
    before = weights.read_bytes()
    asked = ("-o", weights) if option == "-o" else ("-o", out, option, weights)
    result = onnxfuse("optimize", source, *asked, "--arch", "sm_80", "--force")
    assert (result.returncode, out.exists()) == (3, False)
    assert "holds data of the input" in result.stderr
    assert weights.read_bytes() == before


@pytest.mark.parametrize("fault", ["missing", "cut short"])
def test_weights_that_are_not_there_are_said_before_work_begins(gate: Path, tmp_path: Path, fault: str) -> None:
    """Each command that needs them; explain does not."""
    source, weights = tmp_path / "in.onnx", tmp_path / "weights.bin"
    onnx.save(onnx.load(gate), source, save_as_external_data=True, location=weights.name, size_threshold=0)
    weights.write_bytes(weights.read_bytes()[:-1])
    if fault == "missing":
        weights.unlink()
    commands = {
        "optimize": ("-o", tmp_path / "out.onnx", "--arch", "sm_80", "--dump", tmp_path / "dump"),
        "verify": (source,),
        "bench": (source, "--device", "cpu"),
        "export-triton": (tmp_path / "models", "--unfused"),
    }
    for verb, rest in commands.items():
        result = onnxfuse(verb, source, *rest)
        assert (result.returncode, len(result.stderr.splitlines())) == (3, 1), result.stderr
        assert f"weights are {fault}: {weights}" in result.stderr
    assert onnxfuse("explain", source).returncode == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arguments", [("explain", "GATE"), ("explain", "GATE", "--json"), ("library",)])
def test_a_closed_standard_output_is_said(gate: Path, arguments: tuple[str, ...]) -> None:
    words = [str(gate) if word == "GATE" else word for word in arguments]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "onnxfuse", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (3, "error: standard output is closed\n")


def test_a_quiet_command_needs_no_standard_output(gate: Path, tmp_path: Path) -> None:
    words = ["optimize", str(gate), "-o", str(tmp_path / "out.onnx"), "--arch", "sm_80", "--quiet"]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "onnxfuse", *words]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_help_is_short_as_well_and_the_version_is_told() -> None:
    asked = [(*verb, flag) for verb in ((), *((name,) for name in commands.commands)) for flag in ("-h", "--help")]
    results = iter(run_all(asked))
    for short, long in zip(results, results, strict=True):
        assert (short.returncode, short.stdout) == (0, long.stdout)
        assert short.stdout.startswith("Usage")
    assert onnxfuse("--version").stdout.split()[-1] == __version__


def test_a_start_of_python_by_itself_is_the_same_command(gate: Path) -> None:
    """Most tests run commands in copies of one process that has imported the command line."""
    for words, code in ((("explain", str(gate), "--json", "--arch", "sm_80"), 0), (("explain", "nowhere.onnx"), 3)):
        alone = subprocess.run([sys.executable, "-m", "onnxfuse", *words], capture_output=True, text=True, check=False)
        copied = onnxfuse(*words)
        assert (alone.returncode, alone.stdout, alone.stderr) == (code, copied.stdout, copied.stderr)
        assert copied.returncode == code


def test_a_shell_completes_commands_and_options() -> None:
    asked = {"_ONNXFUSE_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    command = [str(Path(sys.executable).with_name("onnxfuse"))]
    for typed, expected in (("opt", "plain,optimize"), ("ex", "plain,explain")):
        environment = os.environ | asked | {"COMP_WORDS": f"onnxfuse {typed}"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert expected in result.stdout.splitlines()


def without_kernels(site: Site) -> Site:
    """A site that needs no compiler, in whichever way it is written."""
    ways = {"epilogue_only": site.epilogue_only, "whole": site.whole}
    return replace(site, plans=(), **{name: way and replace(way, plans=()) for name, way in ways.items()})


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_explain_counts_the_nodes_that_optimize_leaves(path: Path) -> None:
    analysis = analyse_model(path, resolve("sm_80", list))
    told = make_report(analysis).nodes_after
    bare = [without_kernels(site) for site in analysis.sites]
    model, report = optimize_model(replace(analysis, sites=tuple(bare)))
    assert told == report.nodes_after == count_nodes(model)


def test_a_full_disk_is_one_line(gate: Path) -> None:
    result = onnxfuse("optimize", gate, "-o", "/dev/full/out.onnx", "--arch", "sm_80")
    assert result.returncode == 3
    assert "Traceback" not in result.stderr


def test_no_name_is_broken_in_a_pipe(gate: Path, tmp_path: Path) -> None:
    """A terminal of 80 columns wraps a table's cells; what a script reads has each on one line."""
    model, name = onnx.load(gate), "/a" * 100
    for index, node in enumerate(model.graph.node):
        node.name = f"{name}/{node.op_type}_{index}"
    onnx.save(model, tmp_path / "long.onnx")
    report = tmp_path / "report.json"
    result = onnxfuse(
        "optimize",
        tmp_path / "long.onnx",
        "-o",
        tmp_path / "out.onnx",
        "--arch",
        "sm_80",
        "--report",
        report,
        COLUMNS="80",
    )
    anchors = [site["anchor"] for site in json.loads(report.read_text())["fused"]]
    assert anchors
    assert all(anchor.startswith(name) and anchor in result.stdout for anchor in anchors)


def test_a_dash_is_standard_output(gate: Path, fused: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onnxfuse", "optimize", str(gate), "-o", "-", "--arch", "sm_80"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert onnx.load_from_string(done.stdout) == onnx.load(fused)
    assert b"nodes 27 -> 2" in done.stderr
    for refused in ([*command, "--json"], [*command[:6], "out.onnx", *command[7:], "--report", "-"]):
        done = subprocess.run(refused, capture_output=True, check=False, cwd=tmp_path)
        assert (done.returncode in (2, 3), done.stdout, done.stderr.count(b"\n")) == (True, b"", 1), done.stderr
    assert not list(tmp_path.iterdir())
