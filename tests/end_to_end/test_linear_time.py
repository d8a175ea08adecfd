"""The cost of analysis and rewrite is linear in the number of nodes."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse.device import resolve
from onnxfuse.graph.scopes import count_nodes
from onnxfuse.patterns.pointwise_table import MICROSOFT, POINTWISE
from onnxfuse.pipeline import analyse_model
from tests.helpers.onnx_build import Builder
from tests.patterns.test_contrib_ops import made
from tests.tools.sweep import rewritten

WIDTH = 16
BLOCK_NODES = 26
SITES = 7  # of a block: gate, down projection, query, attention, output projection, two normalisations
SECONDS = 6.0  # of one core for 2,000 nodes: a slow machine takes 4.3, and up to 8.7 while others share it
GROWTH = 8  # times the nodes; a cost that is quadratic and counts at all shows up far beyond NOISE
NOISE = 2.0  # times the linear cost that a measurement may take: other processes share the machine
RUNS, TRIES = 3, 8  # of the fastest of which the cost of a part and of the whole is judged


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


@pytest.mark.parametrize(("build", "nodes"), [(model, 2_000), (branches, 1_000)])
def test_thousands_of_nodes_take_seconds_and_cost_grows_linearly(build, nodes: int) -> None:
    seconds(build, 100)  # imports and caches
    part = min(seconds(build, nodes // GROWTH) for _ in range(RUNS))
    bound = min(SECONDS, GROWTH * NOISE * part)
    for _ in range(TRIES):
        whole = seconds(build, nodes)
        print(f"{nodes // GROWTH} nodes: {part:.1f} s, {nodes} nodes: {whole:.1f} s")
        if whole < bound:
            break
    assert whole < bound


LONG, SHORT = 1_000, 32  # nodes of a chain; 32 grow into 256, where growth ends, and a quadratic cost into 64 times
BESIDE: dict[str, str] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Sum", "Min", "Max", "PRelu", "SwiGLU"), "tensor"),
    **dict.fromkeys(("BiasGelu", "FastGelu", "BiasAdd"), "vector"),
    "Pow": "number",
    "Where": "mask tensor",
    "Clip": "number number",
    "BatchNormalization": "vector vector vector vector",
}
"""What a node reads beside the value before it; every node another."""
ROWS = [("", op) for op in POINTWISE] + [("com.microsoft", op) for op in MICROSOFT]


def operand(b: Builder, kind: str, number: int) -> str:
    if kind == "vector":
        return b.array(np.full(WIDTH, 1.0 + number))
    if kind == "number":
        return b.array(1.0 + number / LONG)
    mask = kind == "mask"
    return b.input(f"{kind}{number}", ("rows", WIDTH), onnx.TensorProto.BOOL if mask else None)


def chain(domain: str, op: str, nodes: int) -> onnx.ModelProto:
    """A product, and one node behind the other."""
    b = Builder()
    t = b("MatMul", b.input("x", ("rows", WIDTH)), b.array(np.ones((WIDTH, WIDTH))))
    for number in range(nodes):
        beside = [operand(b, kind, number) for kind in BESIDE.get(op, "").split()]
        inputs = [beside[0], t, *beside[1:]] if op == "Where" else [t, *beside]
        to = {"to": onnx.TensorProto.FLOAT16 if number % 2 else onnx.TensorProto.FLOAT} if op == "Cast" else {}
        t = b(op, *inputs, domain=domain, **to)
    model = made(b, t)
    model.opset_import[0].version = onnx.defs.onnx_opset_version()
    return model


def calls(original: onnx.ModelProto) -> int:
    """Of functions, built-in ones too: what a cost is made of, and the same on every machine."""
    profile = cProfile.Profile()
    with profile:
        analyse_model(original, resolve("sm_90a,sm_80", list))
    return sum(entry.callcount for entry in profile.getstats())


def product(b: Builder, x: str) -> str:
    return b("Relu", b("MatMul", x, b.array(np.ones((WIDTH, WIDTH)))))


def views_before(b: Builder, x: str, nodes: int) -> list[str]:
    for number in range(nodes):
        x = b("Reshape", x, b.integers(-1, *((4, WIDTH // 4), (WIDTH,))[number % 2]))
    return [product(b, x)]


def views_of_the_weight(b: Builder, x: str, nodes: int) -> list[str]:
    weight = b.array(np.ones((WIDTH, WIDTH)))
    for _ in range(nodes):
        weight = b("Transpose", weight, perm=[1, 0])
    return [b("Relu", b("MatMul", x, weight))]


def masks(b: Builder, x: str, nodes: int) -> list[str]:
    mask = b.input("mask", ("rows", WIDTH), onnx.TensorProto.BOOL)
    for _ in range(nodes):
        mask = b("Not", mask)
    return [b("Where", mask, product(b, x), b.array(0.0))]


def readers(b: Builder, x: str, nodes: int) -> list[str]:
    t = product(b, x)
    return [b("Tanh", b("Mul", t, b.array(float(number)))) for number in range(nodes)]


def outputs(b: Builder, x: str, nodes: int) -> list[str]:
    made = [product(b, x)]
    while len(made) < nodes:
        made.append(b("Tanh", made[-1]))
    return made


def products(b: Builder, x: str, nodes: int) -> list[str]:
    return [b("Concat", *(product(b, x) for _ in range(nodes)), axis=1)]


def ranges(b: Builder, x: str, nodes: int) -> list[str]:
    t = b("MatMul", x, b.array(np.ones((WIDTH, 4 * nodes))))
    return [b("Relu", part) for part in b("Split", t, outputs=nodes, axis=1, num_outputs=nodes)]


def growing_sizes(b: Builder, x: str, nodes: int) -> list[str]:
    """What a symbol would say doubles at each node."""
    size = b("Gather", b("Shape", x), b.integers(0), axis=0)
    for _ in range(nodes):
        size = b("Div", b("Mul", size, size), b.integers(3))
    return [
        b("Add", product(b, x), b("Expand", b.array(np.ones((1, WIDTH))), b("Concat", size, b.integers(1), axis=0)))
    ]


MANY = dict.fromkeys((views_before, views_of_the_weight, masks, readers, outputs, growing_sizes), (SHORT, LONG))
MANY |= {products: (8, 64), ranges: (8, 64)}  # each of which becomes a fusion, or a part of one


@pytest.mark.one_in(6)
@pytest.mark.parametrize("build", MANY)
def test_many_of_one_kind_cost_what_they_are(build: Callable[[Builder, str, int], list[str]]) -> None:
    def sized(count: int) -> onnx.ModelProto:
        b = Builder()
        return b.model(*build(b, b.input("x", ("rows", WIDTH)), count))

    few, many = MANY[build]
    calls(sized(few))
    assert calls(sized(many)) < NOISE * many / few * calls(sized(few))


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("domain", "op"), ROWS)
def test_a_chain_costs_what_its_nodes_cost(domain: str, op: str) -> None:
    calls(chain(domain, op, SHORT))  # imports and caches
    assert calls(chain(domain, op, LONG)) < LONG / SHORT * calls(chain(domain, op, SHORT))
