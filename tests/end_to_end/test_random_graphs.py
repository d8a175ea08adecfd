"""Whatever is fused in a random graph means what ONNX Runtime computes, and the rewritten model keeps its bits.

100 graphs; `pytest --hypothesis-profile nightly tests/end_to_end/test_random_graphs.py` takes 2,000.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, settings

from onnxfuse.device import resolve
from onnxfuse.graph import weight_readers
from onnxfuse.ir.fusion import OPS
from onnxfuse.lowering import plan_site
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import check_meaning
from tests.helpers.onnx_build import run
from tests.helpers.random_graphs import graphs
from tests.tools.sweep import rewritten

DEVICES = resolve("sm_90a,sm_80", list)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs())
def test_what_is_fused_means_what_it_meant(drawn) -> None:
    """Of weights as they lie: a weight of 1 KB may be planned otherwise."""
    model, feed = drawn
    analysis = analyse_model(model, DEVICES, keep_weights=True)
    products = sum(node.op_type in ("MatMul", "Gemm", "Einsum", "Conv") for node in model.graph.node)
    fused = {product.label for site in analysis.sites for product in site.match.products}  # columns may be of two sites
    assert len(fused) + len(analysis.skipped) == products
    for site in analysis.sites:
        check_meaning(model, site.fusion, feed, 1e-4)
        assert all(len(step.inputs) == OPS[step.op] for step in site.fusion.steps)
    for expected, actual in zip(run(model, feed), run(rewritten(analysis), feed), strict=True):
        assert expected.tobytes() == actual.tobytes()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs())
def test_weights_in_another_order_mean_the_same(drawn) -> None:
    """As if every weight were large and faster so; without ONNX Runtime's optimiser a Transpose restores each."""
    model, feed = drawn
    with (
        patch.object(weight_readers, "is_large", lambda tensor: True),
        patch.object(plan_site, "is_faster", lambda other, kept: True),
    ):
        analysis = analyse_model(model, DEVICES)
    fused = rewritten(analysis, transposed=True)
    stored = {tensor.name for tensor in fused.graph.initializer}
    assert {f"{name}.transposed" for name in analysis.transposed} <= stored
    assert not stored & analysis.transposed
    for expected, actual in zip(run(model, feed), run(fused, feed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
