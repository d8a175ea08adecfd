"""Branches that name values alike, as in Optimum's merged decoders, are analysed as each is by itself."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.graph.graph import Graph, all_graphs, load_model
from tests.graph.test_known_branches import analysed
from tests.helpers.matching import draw
from tests.helpers.onnx_build import run
from tests.tools.sweep import rewritten

HEADS = {2: (-1, 8), 4: (4, -1), 16: (-1, 1)}
"""What a branch of so many heads writes for them and their columns, of 16."""
WEIGHT, BIAS = draw(16, 16).astype(np.float32) / 4, draw(16).astype(np.float32)
X = draw(2, 3, 16, seed=1).astype(np.float32)


def branch(name: str, heads: int) -> str:
    first, second = HEADS[heads]
    return f"""
        {name} () => (float[] out) {{
            dims = Shape(like)
            zero = Constant<value = int64 {{0}}>()
            one = Constant<value = int64 {{1}}>()
            axis = Constant<value = int64[1] {{0}}>()
            batch = Gather(dims, zero)
            length = Gather(dims, one)
            rows = Unsqueeze(batch, axis)
            columns = Unsqueeze(length, axis)
            first = Constant<value = int64[1] {{{first}}}>()
            second = Constant<value = int64[1] {{{second}}}>()
            target = Concat<axis = 0>(rows, columns, first, second)
            product = MatMul(x, w)
            sum = Add(product, bias)
            heads = Reshape(sum, target)
            turned = Transpose<perm = [0, 2, 1, 3]>(heads)
            out = Tanh(turned)
        }}"""


def model(yes: int, no: int) -> ModelProto:
    branches = f"then_branch = {branch('yes', yes)}, else_branch = {branch('no', no)}"
    text = f"""
        <ir_version: 9, opset_import: ["" : 18]>
        chosen (float[b, s, 16] x, float[b, s] like, bool flag) => (float[] y) {{ y = If<{branches}>(flag) }}"""
    made = onnx.parser.parse_model(text)
    stored = {"w": WEIGHT, "bias": BIAS}
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    return made


def scope(graphs: tuple[Graph, ...], name: str) -> Graph:
    return next(graph for graph in graphs if graph.scope.label.endswith(name))


@pytest.mark.parametrize("yes", HEADS)
@pytest.mark.parametrize("no", HEADS)
def test_each_branch_has_the_heads_that_it_writes(yes: int, no: int) -> None:
    graphs = all_graphs(load_model(model(yes, no)))
    for name, heads in (("then_branch", yes), ("else_branch", no)):
        graph = scope(graphs, name)
        turned = next(node for node in graph.nodes if node.op == "Transpose").outputs[0]
        assert graph.shape(turned.name) == ("b", heads, "s", 16 // heads)


@pytest.mark.parametrize("yes", HEADS)
@pytest.mark.parametrize("no", HEADS)
def test_both_branches_make_the_bits_of_before(yes: int, no: int) -> None:
    made = model(yes, no)
    analysis = analysed(made)
    assert len(analysis.sites) == 2
    fused = rewritten(analysis)
    for flag in (True, False):
        feed = {"x": X, "like": X[..., 0], "flag": np.array(flag)}
        (before,), (after,) = run(made, feed), run(fused, feed)
        assert before.shape == after.shape
        assert before.tobytes() == after.tobytes()
