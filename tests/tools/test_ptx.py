"""PTX of every kind of kernel assembles for GPUs that nobody tried; tests.tools.ptx does it for the corpus."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import distributions

import pytest
from onnx import ModelProto

from tests.helpers.attention_graphs import plain
from tests.helpers.corpus import materialize
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.helpers.quantized import Form
from tests.patterns.test_quantized import dual_gate, model_of
from tests.tools.ptx import LATER, AssembleError, assemble, compiled, failures, sources

INSTALLED = {each.name for each in distributions()}
pytestmark = pytest.mark.skipif("nvidia-nvjitlink" not in INSTALLED, reason="pip install '.[dev]' brings nvJitLink")


def attention() -> ModelProto:
    b = Builder(FLOAT16)
    return b.model(*plain(b))


MODELS: dict[str, Callable[[], ModelProto]] = {
    "sm_100": lambda: materialize("tiny/btb.tiny.dynamo.op20.fp16.dynamic.onnx"),
    "sm_103": attention,
    "sm_110": lambda: model_of(dual_gate, Form(4, 32), FLOAT16),
    "sm_120": lambda: materialize("tiny/ff_geglu.tiny.dynamo.op20.fp32.dynamic.onnx"),
    "sm_121": lambda: model_of(dual_gate, Form(8, 128, True), FLOAT16),
}


@pytest.mark.parametrize("arch", LATER)
def test_a_kernel_assembles(arch: str) -> None:
    """The longest of a model, for one GPU of each; no thread runs out of registers."""
    ptx = compiled(max(sources(MODELS[arch]()), key=len))
    assert b".target sm_80" in ptx
    size, spills = assemble(ptx, arch)
    assert size > 1000
    assert spills == 0


def test_what_does_not_assemble_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(AssembleError, match="bad input"):
        assemble(b"no PTX", "sm_120")
    with pytest.raises(AssembleError):
        assemble(b".version 9.0\n.target sm_80\n.address_size 64\n", "sm_12")
    monkeypatch.setattr("tests.tools.ptx.compiled", lambda text: text.encode())
    assert [line[:8] for line in failures(["one", "two"], ["sm_110"])] == ["sm_110: "] * 2
    assert capsys.readouterr().out == "sm_110: 0 of 2 kernels, 0 of them spill\n"
