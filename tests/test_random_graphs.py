"""Random graphs: fusions compute what their graph computes, and rewritten models keep their order and their bits."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from onnxfuse.pipeline import analyse_model
from tests.matching import run_values
from tests.onnx_build import run
from tests.random_graphs import FEED, RandomGraph
from tests.reference_fusion import evaluate
from tests.sweep import rewritten


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_fusions_mean_what_the_graph_means(seed: int) -> None:
    model = RandomGraph(seed).model()
    sites = analyse_model(model, []).sites
    made = {name for node in model.graph.node for name in node.output}
    tensors = [tensor for site in sites for tensor in (*site.fusion.inputs, *site.fusion.outputs)]
    names = list(dict.fromkeys(tensor.name for tensor in tensors if tensor.name in made))
    values = FEED | {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values |= dict(zip(names, run_values(model, names, FEED), strict=True)) if names else {}
    for site in sites:
        for tensor, actual in zip(site.fusion.outputs, evaluate(site.fusion, values), strict=True):
            np.testing.assert_allclose(actual, values[tensor.name], rtol=1e-3, atol=1e-3)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rewritten_models_are_in_order_and_keep_their_bits(seed: int) -> None:
    model = RandomGraph(seed).model()
    expected = run(model, FEED)
    fused = rewritten(analyse_model(model, []))
    onnx.checker.check_model(fused)
    for before, after in zip(expected, run(fused, FEED), strict=True):
        assert before.tobytes() == after.tobytes()
