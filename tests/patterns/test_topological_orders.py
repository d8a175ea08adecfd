"""A model has many orders of its nodes; which of them its file has decides neither what is fused nor what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.graph.functions import reads
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.matching import K, draw
from tests.helpers.onnx_build import FLOAT16, Builder, run
from tests.tools.sweep import rewritten

HEADS, GROUPS, WIDTH = 4, 2, 32  # of queries, of keys and of values; columns of each

Angles = Callable[[Builder], str]


def given(b: Builder) -> str:
    return b.input("angles", ("rows", WIDTH))


def of_positions(b: Builder) -> str:
    """By a product of its own, as rotary embeddings make them."""
    return b("MatMul", b.input("positions", ("rows", 1)), b.array(draw(1, WIDTH), "frequencies"))


def grouped_queries(b: Builder, angles: Angles) -> onnx.ModelProto:
    """Keys are turned, values are not; a shape is computed of the values' heads, and read before an attention."""
    b.input("x", ("batch", "rows", K))
    cosines = b("Cos", angles(b))

    def head(heads: int, name: str) -> str:
        t = b("MatMul", "x", b.array(draw(K, heads * WIDTH, seed=heads), name))
        return b("Transpose", b("Reshape", t, b.integers(0, 0, heads, WIDTH)), perm=(0, 2, 1, 3))

    q, k, v = head(HEADS, "q"), head(GROUPS, "k"), head(GROUPS, "v")
    q, k = b("Mul", q, cosines), b("Mul", k, cosines)
    sizes = [b("Slice", b("Shape", v), b.integers(axis), b.integers(axis + 1)) for axis in (0, 2)]
    shape = b("Concat", sizes[0], b.integers(HEADS), sizes[1], b.integers(WIDTH), axis=0)
    times = b.integers(1, 1, HEADS // GROUPS, 1, 1)
    keys, values = (b("Reshape", b("Tile", b("Unsqueeze", t, b.integers(2)), times), shape) for t in (k, v))
    scores = b("MatMul", q, b("Transpose", keys, perm=(0, 1, 3, 2)))
    return b.model(b("MatMul", b("Softmax", scores, axis=-1), values))


def in_another_order(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """One of a model's topological orders."""
    draws, left = random.Random(seed), list(model.graph.node)
    other = onnx.ModelProto()
    other.CopyFrom(model)
    del other.graph.node[:]
    while left:
        made = {value for node in left for value in node.output}
        other.graph.node.append(draws.choice([node for node in left if not made & set(node.input)]))
        left = [node for node in left if node.name != other.graph.node[-1].name]
    return other


def fused_nodes(analysis: Analysis) -> set[tuple[str, frozenset[str]]]:
    """By pattern, the nodes of each site."""
    return {
        (site.fusion.pattern, frozenset(site.graph.nodes[index].name for index in site.match.nodes))
        for site in analysis.sites
    }


def is_in_order(model: onnx.ModelProto) -> bool:
    made = {value for node in model.graph.node for value in node.output}
    for node in reversed(model.graph.node):
        made -= set(node.output)
        if not made.issuperset({value for value in reads(node) if value in made}):
            return False
    return True


@pytest.mark.one_in(2)
@pytest.mark.parametrize("angles", [given, of_positions])
def test_every_order_has_the_same_sites(angles: Angles) -> None:
    model = grouped_queries(Builder(FLOAT16), angles)
    shapes = {"x": (2, 5, K), "angles": (5, WIDTH), "positions": (5, 1)}
    feed = {value.name: draw(*shapes[value.name], seed=2).astype(np.float16) for value in model.graph.input}
    expected = run(model, feed)
    wanted = fused_nodes(analyse_model(model, resolve("sm_90a,sm_80", list)))
    assert sorted(pattern for pattern, _ in wanted) == ["attention", "gemm_epilogue", "sibling_gemms"]
    for seed in range(12):
        analysis = analyse_model(in_another_order(model, seed), resolve("sm_90a,sm_80", list))
        assert fused_nodes(analysis) == wanted
        fused = rewritten(analysis)
        assert is_in_order(fused)
        for before, after in zip(expected, run(fused, feed), strict=True):
            assert before.tobytes() == after.tobytes()


def test_what_moves_in_front_of_a_fusion_is_in_order_behind_the_rewrite() -> None:
    """The cosines of the keys stand behind the first reader of the values in the file."""
    model = grouped_queries(Builder(FLOAT16), given)
    late = [node for node in model.graph.node if node.op_type == "Cos"]
    turned = next(place for place, node in enumerate(model.graph.node) if node.op_type == "Mul")
    nodes = [node for node in model.graph.node if node not in late]
    nodes[turned - 1 : turned - 1] = late
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    fused = rewritten(analyse_model(model, resolve("sm_90a,sm_80", list)))
    assert is_in_order(fused)
    assert [node.op_type for node in fused.graph.node if node.op_type == "MatMul"] == []


def squeezed_and_excited(b: Builder, pooled: Callable[[Builder, str], str]) -> onnx.ModelProto:
    """A product's own mean, two products later, is what it is multiplied by; a view of the mean belongs to a fusion."""
    x = b.input("x", (1, K, 8, 8))
    image = b("Relu", b("Conv", x, b.array(draw(48, K, 1, 1), "front"), b.array(draw(48), "bias")))
    t = pooled(b, b("GlobalAveragePool", image))
    t = b("Relu", b("Gemm", t, b.array(draw(48, 12), "down"), b.array(draw(12), "down_bias")))
    t = b("Sigmoid", b("Gemm", t, b.array(draw(12, 48), "up"), b.array(draw(48, seed=1), "up_bias")))
    return b.model(b("Mul", image, b("Reshape", t, b.integers(1, 48, 1, 1))))


def flattened(b: Builder, mean: str) -> str:
    return b("Flatten", mean, axis=1)


def squeezed(b: Builder, mean: str) -> str:
    return b("Squeeze", mean, b.integers(2, 3))


def around_an_attention(b: Builder, normalised: Callable[[Builder, str], str]) -> onnx.ModelProto:
    """A product is added to an attention over itself."""
    x = b.input("x", (1, 16, K))
    front = b("Add", b("MatMul", x, b.array(draw(K, 64), "front")), b.array(draw(64), "front_bias"))
    t = normalised(b, front)

    def head(name: str, perm: tuple[int, ...]) -> str:
        made = b("Add", b("MatMul", t, b.array(draw(64, 64), name)), b.array(draw(64), f"{name}_bias"))
        return b("Transpose", b("Reshape", made, b.integers(1, 16, 4, 16)), perm=perm)

    q, k, v = head("q", (0, 2, 1, 3)), head("k", (0, 2, 3, 1)), head("v", (0, 2, 1, 3))
    scores = b("Softmax", b("Mul", b("MatMul", q, k), b.array(0.25)), axis=-1)
    context = b("Transpose", b("MatMul", scores, v), perm=(0, 2, 1, 3))
    out = b("MatMul", b("Reshape", context, b.integers(1, 16, 64)), b.array(draw(64, 64, seed=1), "out"))
    return b.model(b("Add", front, out))


def layer_norm(b: Builder, t: str) -> str:
    return b("LayerNormalization", t, b.array(draw(64), "scale"), b.array(draw(64, seed=1), "shift"), axis=-1)


def softmax(b: Builder, t: str) -> str:
    return b("Softmax", t, axis=-1)


@pytest.mark.parametrize(
    ("model", "between"),
    [
        (squeezed_and_excited, flattened), (squeezed_and_excited, squeezed),
        (around_an_attention, layer_norm), (around_an_attention, softmax),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_no_fusion_reads_what_is_computed_of_it(
    model: Callable[..., onnx.ModelProto], between: Callable[[Builder, str], str], seed: int
) -> None:
    """Also where the way from it leads through a view that another fusion has taken."""
    original = in_another_order(model(Builder(), between), seed)
    fused = rewritten(analyse_model(original, resolve("sm_90a,sm_80", list)))
    assert is_in_order(fused)
    assert any(node.domain == "onnxfuse" for node in fused.graph.node)
    shape = [dim.dim_value for dim in original.graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": draw(*shape, seed=5).astype(np.float32)}
    for before, after in zip(run(original, feed), run(fused, feed), strict=True):
        assert before.tobytes() == after.tobytes()
