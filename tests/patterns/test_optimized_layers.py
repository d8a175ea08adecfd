"""Behind ONNX Runtime's transformers optimizer and in GenAI's models no product is left for a normalisation's sake."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.device import resolve
from onnxfuse.graph.opened_ops import openings
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import with_product
from tests.helpers.onnx_build import FLOAT, run
from tests.helpers.optimized_layers import FORMS, Sizes, layers
from tests.tools import sweep

SMALL = Sizes(width=64, hidden=256, heads=4, groups=2)
SITES = {"bert": 6, "vit": 8, "whisper": 8, "gpt2": 6, "llama": 6}
"""Of two layers: o, up (or gate and up) and down, and q, k and v where they are no part of an op."""
NORMALISATIONS = {"bert": 4, "vit": 5, "whisper": 5, "gpt2": 5, "llama": 5}
"""What is left of the four ops that add, and the first, which adds nothing."""
LEFT = {"llama": ["unknown_op", "no_attention_kernel"] * 2}
"""GroupQueryAttention, in fp32, reads the packed product as it is."""


@pytest.mark.parametrize("form", FORMS)
def test_every_product_is_fused(form: str) -> None:
    model = layers(form, SMALL, (2, 12), 2, FLOAT)
    analysis = analyse_model(model, resolve("sm_80", list))
    assert [skipped.reason for skipped in analysis.skipped] == LEFT.get(form, [])
    assert len(with_product(analysis)) == SITES[form]
    assert len(analysis.sites) == SITES[form] + NORMALISATIONS[form]
    assert len(openings(model)) == 4
    fused = sweep.rewritten(analysis)
    assert not [node for node in fused.graph.node if node.op_type.startswith("Skip")]
    (body,) = (each for each in fused.functions if any(node.op_type.startswith("Skip") for node in each.node))
    assert len([node for node in fused.graph.node if node.op_type == body.name]) == 4
    (zeros,) = (node.output[0] for node in body.node if node.op_type == "ConstantOfShape")
    assert [node.input[1] for node in body.node if node.op_type.startswith("Skip")] == [zeros]
    feed = {"x": np.random.default_rng(0).standard_normal((2, 12, 64)).astype(np.float32)}
    (before,), (after,) = run(model, feed), run(fused, feed)
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()
    assert not sweep.difference(sweep.taken_apart(model, analysis), fused, [feed])
