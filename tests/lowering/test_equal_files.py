"""Equal wishes make equal files, however they were spelled and however fast the machine was."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest

import onnxfuse
from onnxfuse.device import ARCHITECTURES, PTX, resolve
from onnxfuse.graph.archive import Flavour, unpack
from onnxfuse.lowering import plan_site
from tests.helpers.onnx_build import of_sizes

MODEL = Path(__file__).parents[2] / "models" / "lstm_gates.onnx"
SIZES = {"batch": 2, "sequence": 7}


def test_every_order_of_architectures_is_the_same() -> None:
    for names in itertools.permutations(ARCHITECTURES):
        assert resolve(",".join(names), list) == resolve(list(ARCHITECTURES), list)
    assert resolve("sm_80, ptx,sm_80,native", lambda: ["sm_80"]) == resolve(["ptx", "sm_80"], list)


def test_newer_code_comes_before_older_and_ptx_last() -> None:
    """The bridge takes the first that a device runs: sm_89's own before sm_80's, machine code before PTX."""
    found = resolve(list(ARCHITECTURES), list)
    assert [spec.capability for spec in found[:-1]] == sorted((spec.capability for spec in found[:-1]), reverse=True)
    assert found[-1].arch == PTX


def small() -> onnx.ModelProto:
    """Of one number of rows, for which each architecture has two kernels or three, and not ten."""
    return of_sizes(onnx.load(MODEL), SIZES)


def optimized(arch: str) -> bytes:
    return onnxfuse.optimize(small(), arch=arch)[0].SerializeToString(deterministic=True)


def test_every_order_makes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path))
    first = optimized("sm_80,sm_86,ptx")
    for names in itertools.permutations(("sm_86", "ptx", "sm_80")):
        assert optimized(",".join((*names, names[0]))) == first
    (archive,) = (tensor for tensor in onnxfuse.optimize(small(), arch="ptx,sm_80")[0].graph.initializer
                  if tensor.raw_data.startswith(b"onnxfuse"))  # fmt: skip
    flavours = [record.flavour for record in unpack(archive.raw_data)]
    assert Flavour.CUBIN in flavours
    assert flavours == sorted(flavours)


def test_two_compilations_and_any_number_of_jobs_make_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", "")
    files = set()
    for jobs in ("1", "3"):
        monkeypatch.setenv("ONNXFUSE_COMPILE_JOBS", jobs)
        files.add(optimized("sm_80,ptx"))
    assert len(files) == 1


def test_what_was_planned_before_makes_the_same_file() -> None:
    """A process plans equal sites once, whichever model they are of."""
    plan_site.kept_plan.cache_clear()
    first = optimized("sm_80,ptx")
    planned = plan_site.kept_plan.cache_info().misses
    assert planned
    assert optimized("sm_80,ptx") == first
    assert plan_site.kept_plan.cache_info().misses == planned
