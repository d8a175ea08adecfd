"""A view that products share: one for each, wherever that is all that reads it, and the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnxfuse.graph.load import load_model
from tests.helpers.onnx_build import FLOAT, Builder, run
from tests.patterns.test_normalisation import analysed
from tests.tools import sweep

WIDTH, HEAD = 32, 8
FEED = {"x": np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)}


def tensordot(b: Builder, x: str, rows: str, seed: int) -> str:
    """As tf2onnx writes `tf.tensordot(x, weight, [[2], [0]])`."""
    weight = b.array(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)) / 8)
    sizes = b("Gather", b("Shape", x), b.integers(0, 1), axis=0)
    return b("Reshape", b("MatMul", rows, weight), b("Concat", sizes, b.integers(WIDTH), axis=0))


def shared(b: Builder) -> tuple[str, str]:
    x = b.input("x", ("batch", "tokens", WIDTH))
    return x, b("Reshape", x, b.integers(-1, WIDTH))


def heads(b: Builder, x: str) -> str:
    return b("Transpose", b("Reshape", x, b.integers(0, -1, WIDTH // HEAD, HEAD)), perm=(0, 2, 1, 3))


def test_products_that_share_a_view_are_kernels_with_the_bits_of_the_model() -> None:
    """Each with a bias, and all three before an attention."""
    b = Builder(FLOAT)
    x, rows = shared(b)
    q, k, v = (
        heads(b, b("Add", tensordot(b, x, rows, seed), b.array(np.full(WIDTH, 0.1 * seed)))) for seed in (1, 2, 3)
    )
    scores = b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2)))
    model = b.model(b("MatMul", b("Softmax", scores, axis=-1), v))
    analysis = analysed(model)
    fused = sweep.rewritten(analysis)
    assert not {node.op_type for node in fused.graph.node} & {"MatMul", "Softmax", "Add"}
    assert not sweep.difference(model, fused, [FEED])


def test_each_has_its_own() -> None:
    b = Builder(FLOAT)
    x, rows = shared(b)
    model = b.model(*(tensordot(b, x, rows, seed) for seed in (1, 2, 3)))
    loaded = load_model(model).proto
    read = [node.input[0] for node in loaded.graph.node if node.op_type == "MatMul"]
    assert len(set(read)) == 3
    for found, wanted in zip(run(loaded, FEED), run(model, FEED), strict=True):
        np.testing.assert_array_equal(found, wanted)


def of_another_reader(b: Builder) -> tuple[str, ...]:
    x, rows = shared(b)
    return tensordot(b, x, rows, 1), tensordot(b, x, rows, 2), b("Relu", rows)


STAYS: dict[str, Callable[[Builder], tuple[str, ...]]] = {
    "one product": lambda b: (tensordot(b, *shared(b), 1),),
    "another reader": of_another_reader,
    "rows stay": lambda b: tuple(
        b("Relu", b("MatMul", rows, b.array(np.ones((WIDTH, WIDTH))))) for rows in [shared(b)[1]] * 2
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_another_view_stays(case: str) -> None:
    b = Builder(FLOAT)
    model = b.model(*STAYS[case](b))
    before = [node.op_type for node in model.graph.node]
    assert [node.op_type for node in load_model(model).proto.graph.node] == before
