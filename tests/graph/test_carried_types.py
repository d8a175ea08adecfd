"""Shapes of what Loops carry: what is known holds in runs of any number of iterations, and is enough to fuse."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.symbolic import Size
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import run
from tests.tools.sweep import rewritten

RUN = {"b": 2, "s": 3}
STORED = {
    "w": draw(16, 16).astype(np.float32) / 4, "bias": draw(16).astype(np.float32), "axes": np.array([0]),
    "heads": np.array([0, 0, 4, 4]), "whole": np.array([0, 0, 16]), "one": np.array([1]),
    "end": np.array([4]), "last": np.array([2]),
}  # fmt: skip
LAYER = "p = MatMul(h, w) a = Add(p, bias) t = Tanh(a) out = Add(t, h)"
CASES: dict[str, tuple[str, str, tuple[Size, ...] | None]] = {
    "all of it": ("float[] h", LAYER, ("b", "s", 16)),
    "what a body declares open": ("float[?, ?, ?] h", LAYER, ("b", "s", 16)),
    "a shape from outside": ("float[] h", "p = Reshape(h, heads) out = Reshape(p, whole)", ("b", "s", 16)),
    "all but what grows": ("float[] h", "t = Tanh(h) out = Concat<axis = 1>(t, h)", ("b", None, 16)),
    "all but what becomes less": ("float[] h", "out = Slice(h, one, end, last)", ("b", "s", None)),
    "of a rank that grows nothing": ("float[] h", "out = Unsqueeze(h, axes)", None),
}  # fmt: skip


def looped(given: str, body: str) -> ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 20]>
        loops (float[b, s, 16] x, int64 trips) => (float[] y) {{
            y = Loop(trips, , x) <body = graph (int64 i, bool go, {given}) => (bool on, float[] out) {{
                on = Identity(go) {body} }}>
        }}""")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in STORED.items())
    return model


def feed(trips: int) -> dict[str, np.ndarray]:
    return {"x": draw(2, 3, 16, seed=1).astype(np.float32), "trips": np.array(trips)}


@pytest.mark.parametrize("case", CASES)
def test_what_is_known_behind_a_loop_holds_in_runs(case: str) -> None:
    given, body, expected = CASES[case]
    model = looped(given, body)
    assert Graph(load_model(model)).shape("y") == expected
    for trips in range(3):
        (y,) = run(model, feed(trips))
        assert expected is None or [RUN.get(str(size), size) for size in expected] == [
            None if size is None else own for size, own in zip(expected, y.shape, strict=True)
        ]


def test_two_that_change_places_have_what_both_have() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 20]>
        loops (float[b, s, 16] x, float[b, 4, 16] z, int64 trips) => (float[] y, float[] v) {
            y, v, all = Loop(trips, , x, z) <body = graph (int64 i, bool go, float[] g, float[] h)
                => (bool on, float[] first, float[] second, float[] seen) {
                on = Identity(go) first = Tanh(h) second = Neg(g) seen = ReduceMax(g) }>
        }""")
    graph = Graph(load_model(model))
    assert [graph.shape(name) for name in ("y", "v")] == [("b", None, 16)] * 2


def test_as_many_loops_in_a_row_as_models_have_layers() -> None:
    last = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 20]>
        loops (float[b, s, 16] y0, int64 trips) => (float[] y24) { y24 = Loop(trips, , y0) <body = graph
            (int64 i, bool go, float[] h) => (bool on, float[] out) { on = Identity(go) out = Tanh(h) }> }""")
    (node,) = last.graph.node
    for layer in range(24):
        last.graph.node.add().CopyFrom(node)
        last.graph.node[-1].input[2], last.graph.node[-1].output[0] = f"y{layer}", f"y{layer + 1}"
    del last.graph.node[0]
    assert Graph(load_model(last)).shape("y24") == ("b", "s", 16)


@pytest.mark.parametrize("given", ["float[] h", "float[?, ?, ?] h", "float[b, s, 16] h"])
def test_a_residual_on_what_is_carried_is_fused_inside_and_behind(given: str) -> None:
    model = looped(given, LAYER)
    behind = "q = MatMul(y, w) r = Add(q, bias) u = Tanh(r) z = Add(u, y)"
    graph = onnx.parser.parse_graph(f"behind (float[] y) => (float[] z) {{ {behind} }}")
    model.graph.node.extend(graph.node)
    model.graph.output[0].name = "z"
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert [site.fusion.features for site in analysis.sites] == [("activation", "bias", "residual")] * 2
    fused = rewritten(analysis)
    for trips in (0, 2):
        assert run(model, feed(trips))[0].tobytes() == run(fused, feed(trips))[0].tobytes()
