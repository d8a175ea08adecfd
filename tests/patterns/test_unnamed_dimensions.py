"""A dimension of an input that has no name is known again where it comes back, as one that has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import K, draw
from tests.helpers.onnx_build import Builder, run
from tests.patterns.test_column_ranges import attended, split
from tests.patterns.test_topological_orders import fused_nodes
from tests.tools.sweep import rewritten

Unnamed = Callable[[onnx.TensorShapeProto.Dimension], None]


def left_open(dim: onnx.TensorShapeProto.Dimension) -> None:
    dim.Clear()


def negative(dim: onnx.TensorShapeProto.Dimension) -> None:
    dim.dim_value = -1


def with_residuals(b: Builder) -> list[str]:
    """Two layers, each added to what it reads."""
    t = b.input("x", ("batch", "rows", K))
    for layer in range(2):
        hidden = b("Relu", b("MatMul", t, b.array(draw(K, 48, seed=layer), f"up{layer}")))
        t = b("Add", b("MatMul", hidden, b.array(draw(48, K, seed=layer), f"down{layer}")), t)
    return [t]


def attention(b: Builder) -> list[str]:
    return attended(b, split, are_turned=False)


def without_names(model: onnx.ModelProto, unnamed: Unnamed) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for value in (*other.graph.input, *other.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                unnamed(dim)
    return other


@pytest.mark.parametrize("graph", [with_residuals, attention])
@pytest.mark.parametrize("unnamed", [left_open, negative])
def test_the_same_is_fused_without_names(graph: Callable[[Builder], list[str]], unnamed: Unnamed) -> None:
    b = Builder()
    named = b.model(*graph(b))
    other = without_names(named, unnamed)
    devices = resolve("sm_90a,sm_80", list)
    wanted, found = analyse_model(named, devices), analyse_model(other, devices)
    assert fused_nodes(found) == fused_nodes(wanted)
    assert fused_nodes(wanted)
    feed = {"x": draw(2, 5, K, seed=4).astype(np.float32)}
    fused = rewritten(found)
    for before, after in zip(run(named, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()


def test_sizes_of_two_inputs_without_names_are_not_the_same() -> None:
    """Their sum may broadcast either of them, which no kernel's residual does."""
    b = Builder()
    product = b("MatMul", b.input("x", (None, K)), b.array(draw(K, 48), "weight"))
    model = b.model(b("Add", product, b.input("residual", (None, 48))))
    sites = analyse_model(model, resolve("sm_90a", list)).sites
    assert not any(load for site in sites for load in site.fusion.loads)
