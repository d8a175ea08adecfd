"""The last guard: where insertion points let a cycle through, one fusion is left alone and not the whole model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, Builder, run
from tests.tools.sweep import rewritten

WIDTH = 64


def around_an_attention() -> onnx.ModelProto:
    """A product and a sum behind an attention of it: in one kernel it would wait for the attention."""
    b = Builder(FLOAT)
    x = b.input("x", ("batch", 16, WIDTH))

    def product(of: str, name: str) -> str:
        return b("MatMul", of, b.array(draw(WIDTH, WIDTH) / 8, name))

    front = product(x, "front")
    normal = b("Softmax", front, axis=-1)
    q, k = product(normal, "q"), product(normal, "k")
    scores = b("MatMul", q, b("Transpose", k, perm=(0, 2, 1)))
    attended = b("MatMul", b("Softmax", scores, axis=-1), k)
    return b.model(b("Add", front, attended))


def analysed(model: onnx.ModelProto) -> Analysis:
    return analyse_model(model, resolve("sm_90a", list))


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Insertion points that see nothing in anybody's way."""
    monkeypatch.setattr(InsertionPoints, "_late", lambda self, match, point: set())


def test_the_fusion_that_closes_a_cycle_is_left_alone(unguarded: None) -> None:
    model = around_an_attention()
    analysis = analysed(model)
    assert sorted(site.fusion.pattern for site in analysis.sites) == ["attention", "sibling_gemms"]
    left = [(entry.anchor, entry.reason) for entry in analysis.skipped]
    assert ("MatMul_0", "needs_its_own_result") in left
    feed = {"x": draw(2, 16, WIDTH, seed=1).astype(np.float32)}
    fused = rewritten(analysis)
    assert [out.tobytes() for out in run(fused, feed)] == [out.tobytes() for out in run(model, feed)]


def test_it_is_no_more_than_insertion_points_leave(unguarded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    last = [site.match.nodes for site in analysed(around_an_attention()).sites]
    monkeypatch.undo()
    assert last == [site.match.nodes for site in analysed(around_an_attention()).sites]
