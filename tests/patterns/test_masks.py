"""Models under masks are one fusion each, with the mask, and keep their bits on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests.helpers.masked_models import MODELS, SIZES, built, feed
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.tools.sweep import difference, rewritten


@pytest.mark.one_in(2)
@pytest.mark.parametrize("epilogue_only", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("graph", MODELS)
def test_a_masked_model_is_one_fusion_and_keeps_its_bits(
    graph: Callable[[Builder], str], dtype: int, epilogue_only: bool
) -> None:
    model = built(graph, dtype)
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    (site,) = analysis.sites
    assert "mask" in site.fusion.features
    assert not difference(model, rewritten(analysis, epilogue_only), [feed(model, *size) for size in SIZES])


def test_numbers_as_many_as_another_value_has_are_no_number() -> None:
    """Zeros of the shape of what is transposed beside them: where their own makes the result larger, they count."""
    b = Builder()
    x = b.input("x", ("batch", 1, 64))
    t = b("MatMul", x, b.array(draw(64, 96) / 8, "weight"))
    zeros = b("ConstantOfShape", b("Shape", b("Transpose", t, perm=(0, 2, 1))))
    model = b.model(b("Add", b("Neg", t), zeros))
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    assert "Add" not in {site.graph.nodes[index].op for site in analysis.sites for index in site.match.nodes}
    assert not difference(model, rewritten(analysis), [feed(model, size, 1) for size in (1, 3)])
