"""The cost of analysis and rewrite is linear in the number of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from onnxfuse.scopes import count_nodes
from tests.onnx_build import Builder
from tests.sweep import rewritten

WIDTH = 16
BLOCK_NODES = 26
SITES = 4  # of a block: gate, down projection, query, output projection
SECONDS = 30.0  # of one core for 20,000 nodes
GROWTH = 8  # times the nodes; a cost that is quadratic and counts at all shows up far beyond NOISE
NOISE = 2.0  # times the linear cost that a measurement may take: other processes share the machine
RUNS = 3  # of the fastest of which a cost is judged


def stored(b: Builder) -> dict[str, str]:
    """Weights and numbers, by name."""
    draw = np.random.default_rng(0)
    shapes = {"gate": (WIDTH, 4 * WIDTH), "down": (2 * WIDTH, WIDTH), "query": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    weights = {name: b.array(draw.standard_normal(shape), name) for name, shape in shapes.items()}
    vectors = {"scale": b.array(np.ones(WIDTH), "scale"), "bias": b.array(np.ones(4 * WIDTH), "bias")}
    numbers = {"root": b.array(2**0.5), "half": b.array(0.5), "one": b.array(1.0)}
    integers = {"last": b.integers(-1), "zero": b.integers(0), "two": b.integers(2)}
    return weights | vectors | numbers | integers


def block(b: Builder, x: str, s: dict[str, str]) -> str:
    """A feed-forward layer with a computed chunk and a spelled-out gelu, and something like attention."""
    normal = b("LayerNormalization", x, s["scale"], axis=-1)
    t = b("Add", s["bias"], b("MatMul", normal, s["gate"]))
    size = b("Div", b("Gather", b("Shape", t), s["last"], axis=0), s["two"])
    first = b("Slice", t, s["zero"], size, s["last"])
    second = b("Slice", t, size, b("Mul", size, s["two"]), s["last"])
    inner = b("Add", b("Erf", b("Div", second, s["root"])), s["one"])
    gelu = b("Mul", b("Mul", second, inner), s["half"])
    h = b("Add", b("MatMul", b("Mul", first, gelu), s["down"]), x)
    normal = b("LayerNormalization", h, s["scale"], axis=-1)
    query = b("Mul", b("MatMul", normal, s["query"]), s["half"])
    scores = b("Softmax", b("MatMul", query, b("Transpose", normal, perm=[0, 2, 1])), axis=-1)
    return b("Add", b("MatMul", b("MatMul", scores, normal), s["out"]), h)


def model(nodes: int) -> onnx.ModelProto:
    b = Builder(opset=17)
    x, names = b.input("x", ("batch", "rows", WIDTH)), stored(b)
    while len(b.nodes) < nodes:
        x = block(b, x, names)
    return b.model(x)


def branches(nodes: int) -> onnx.ModelProto:
    """A chain of Ifs, each with a product, a bias and an activation in both branches."""
    b = Builder(opset=17)
    x, names = b.input("x", ("batch", "rows", WIDTH)), stored(b)
    b.input("flag", (), onnx.TensorProto.BOOL)
    for number in range(nodes // 7):
        sides = {f"{side}_branch": branch(x, f"{side}{number}", names) for side in ("then", "else")}
        x = b("If", "flag", **sides)
    return b.model(x)


def branch(x: str, prefix: str, names: dict[str, str]) -> onnx.GraphProto:
    nodes = [
        helper.make_node("MatMul", [x, names["query"]], [f"{prefix}_product"]),
        helper.make_node("Add", [f"{prefix}_product", names["scale"]], [f"{prefix}_sum"]),
        helper.make_node("Tanh", [f"{prefix}_sum"], [f"{prefix}_out"]),
    ]
    out = helper.make_tensor_value_info(f"{prefix}_out", onnx.TensorProto.FLOAT, ("batch", "rows", WIDTH))
    return helper.make_graph(nodes, prefix, [], [out])


CASES = {model: (BLOCK_NODES, SITES), branches: (7, 2)}


def seconds(build: Callable[[int], onnx.ModelProto], nodes: int) -> float:
    """Of this process's own time, for all stages but the compiler's."""
    original = build(nodes)
    block_nodes, sites = CASES[build]
    blocks = count_nodes(original) // block_nodes
    start = time.process_time()
    analysis = analyse_model(original, resolve("sm_90a,sm_80", list))
    fused = rewritten(analysis)
    spent = time.process_time() - start
    assert len(analysis.sites) == sites * blocks
    assert len(fused.functions) <= 2 * sites, "equal sites share their function"
    return spent


@pytest.mark.parametrize(("build", "nodes"), [(model, 20_000), (branches, 5_000)])
def test_thousands_of_nodes_take_seconds_and_cost_grows_linearly(build, nodes: int) -> None:
    seconds(build, 100)  # imports and caches
    part = min(seconds(build, nodes // GROWTH) for _ in range(RUNS))
    bound = min(SECONDS, GROWTH * NOISE * part)
    for _ in range(RUNS):
        whole = seconds(build, nodes)
        print(f"{nodes // GROWTH} nodes: {part:.1f} s, {nodes} nodes: {whole:.1f} s")
        if whole < bound:
            break
    assert whole < bound
