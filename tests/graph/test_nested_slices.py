"""Slices of several axes read one of some of them: the same elements, and rotations behind a token are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto

import onnxfuse
from onnxfuse.graph.load import load_model
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run

SHAPE = (3, 5, 6)
END = 2**63 - 1
HEADS, TOKENS, HEAD = 2, 9, 16
Bounds = dict[int, tuple[int, int, int]]


def sliced(b: Builder, x: str, bounds: Bounds) -> str:
    columns = ([bound[place] for bound in bounds.values()] for place in range(3))
    starts, ends, steps = (b.integers(*column) for column in columns)
    return b("Slice", x, starts, ends, b.integers(*bounds), steps)


RANGES = {axis: [(0, size, 1), (1, END, 1), (0, -1, 2), (-1, -100, -1)] for axis, size in enumerate(SHAPE)}
WINDOWS = st.lists(
    st.dictionaries(st.integers(0, 2), st.integers(0, 3), min_size=1).map(
        lambda drawn: {axis: RANGES[axis][each] for axis, each in drawn.items()}
    ),
    min_size=2,
    max_size=5,
)


@given(windows=WINDOWS)
def test_the_same_elements_by_slices_that_name_each_axis_once(windows: list[Bounds]) -> None:
    b = Builder(FLOAT)
    x = b.input("x", SHAPE)
    model = b.model(*(sliced(b, x, window) for window in windows))
    nested = load_model(model).proto
    feed = {"x": np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(np.float32)}
    for found, expected in zip(run(nested, feed), run(model, feed), strict=True):
        np.testing.assert_array_equal(found, expected)
    for index, node in enumerate(node for node in nested.graph.node if node.op_type == "Slice"):
        before = windows[:index]
        is_inside = any(own.items() < windows[index].items() for own in before)
        assert (node.input[0] != "x") == is_inside


@pytest.mark.parametrize("constant", [NodeProto(op_type="Constant", output=["c"]), NodeProto(op_type="Constant")])
def test_a_constant_without_a_value_or_a_name_is_not_read(constant: NodeProto) -> None:
    b = Builder(FLOAT)
    x = b.input("x", SHAPE)
    model = b.model(*(sliced(b, x, {axis: (0, 2, 1)}) for axis in range(2)))
    model.graph.node.append(constant)
    found = load_model(model).proto.graph.node
    assert [node for node in found if node.op_type == "Slice"] == b.nodes


def turned(at_once: bool) -> ModelProto:
    """Q whose rows behind the first one turn, in pairs, by Slices of rows and of columns, or of both."""
    b, rng = Builder(FLOAT16), np.random.default_rng(0)
    x = b.input("x", (2, TOKENS, HEADS * HEAD))
    weight = b.array(rng.standard_normal((HEADS * HEAD, HEADS * HEAD)) / 8)
    split = b("Reshape", b("MatMul", x, weight), b.integers(0, 0, HEADS, HEAD))
    q = b("Transpose", split, perm=(0, 2, 1, 3))
    first, rest = sliced(b, q, {2: (0, 1, 1)}), sliced(b, q, {2: (1, END, 1)})
    cosines, sines = (b.array(rng.standard_normal((TOKENS - 1, HEAD))) for _ in range(2))

    def every_second(start: int) -> str:
        if at_once:
            return sliced(b, q, {2: (1, END, 1), 3: (start, END, 2)})
        return sliced(b, rest, {3: (start, END, 2)})

    pair = (b("Unsqueeze", each, b.integers(-1)) for each in (b("Neg", every_second(1)), every_second(0)))
    other = b("Reshape", b("Concat", *pair, axis=-1), b.integers(2, HEADS, TOKENS - 1, HEAD))
    turn = b("Add", b("Mul", rest, cosines), b("Mul", other, sines))
    return b.model(b("Concat", first, turn, axis=2))


def test_a_rotation_behind_a_token_is_one_kernel_by_either() -> None:
    feed = {"x": np.random.default_rng(1).standard_normal((2, TOKENS, HEADS * HEAD)).astype(np.float16)}
    made = {at_once: onnxfuse.optimize(turned(at_once), arch="sm_90a") for at_once in (False, True)}
    patterns = {at_once: sorted(site.pattern for site in report.fused) for at_once, (_, report) in made.items()}
    assert patterns[True] == patterns[False]
    assert "rotation" in patterns[True]
    np.testing.assert_array_equal(run(made[True][0], feed)[0], run(turned(True), feed)[0])
