"""A batch that inputs call otherwise: told where they meet, of what has no name of its own, and with the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.shared_batch import shared_batches
from onnxfuse.verify.verify import verify
from tests.helpers.onnx_build import FLOAT, Builder, run

HEADS, TOKENS, HEAD = 4, 6, 8
OF_MASK = (1, 1, TOKENS)
OF_HEADS = (HEADS, TOKENS, HEAD)
NAMES = ("unk__7", "unk__8", "unk__9", "unk__10")


def attention(names: tuple[str, ...] = NAMES) -> onnx.ModelProto:
    """As tf2onnx writes it: queries, keys, values and a mask are inputs, and all their batches are open."""
    b = Builder(FLOAT, opset=18)
    q, k, v = (b.input(name, (batch, *OF_HEADS)) for name, batch in zip("qkv", names, strict=False))
    mask = b.input("mask", (names[3], *OF_MASK))
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), b.array(HEAD**-0.5))
    hidden = b("Mul", b("Sub", b.array(1.0), mask), b.array(-1e9))
    return b.model(b("MatMul", b("Softmax", b("Add", scores, hidden)), v))


def given(batch: int, masks: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    heads = {name: rng.standard_normal((batch, *OF_HEADS)).astype(np.float32) for name in "qkv"}
    return {**heads, "mask": (rng.random((masks, *OF_MASK)) > 0.3).astype(np.float32)}


def shared(model: onnx.ModelProto) -> dict[str, str]:
    return shared_batches(Graph(load_model(model)))


def test_batches_that_meet_are_one_also_where_they_meet_what_two_of_them_make() -> None:
    assert shared(attention()) == dict.fromkeys(NAMES[1:], NAMES[0])


@pytest.mark.parametrize("names", [("a", "b", "c", "d"), ("unk__7", "b", "c", "d"), ("unk__7",) * 4])
def test_names_of_an_exporter_stay(names: tuple[str, ...]) -> None:
    assert shared(attention(names)) == {}


def test_batches_that_do_not_meet_stay() -> None:
    """As those of images and texts, of which each pair has a score."""
    b = Builder(FLOAT, opset=18)
    images, texts = (b.input(name, (batch, HEAD)) for name, batch in zip(("images", "texts"), NAMES, strict=False))
    assert shared(b.model(b("Exp", b("MatMul", images, b("Transpose", texts, perm=(1, 0)))))) == {}


def test_batches_of_rows_in_one_dimension_meet_as_multiples() -> None:
    b = Builder(FLOAT, opset=18)
    first, second = (b.input(name, (batch, TOKENS, HEAD)) for name, batch in zip("xy", NAMES, strict=False))
    rows = (b("Reshape", value, b.integers(-1, HEAD)) for value in (first, second))
    assert shared(b.model(b("Mul", *rows))) == {NAMES[1]: NAMES[0]}


def test_an_attention_is_one_node_with_the_bits_of_the_model(tmp_path: Path) -> None:
    """Its body has them of one mask for all as well, which a kernel refuses; names stay in the file."""
    model = attention()
    made, report = onnxfuse.optimize(model, arch="sm_90a")
    assert [site.pattern for site in report.fused] == ["attention"]
    assert tuple(value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input) == NAMES
    assert {
        value.type.tensor_type.shape.dim[0].dim_param for value in made.graph.input if value.name in given(1, 1)
    } == {*NAMES}
    for batch, masks in ((3, 3), (1, 1), (3, 1)):
        feed = given(batch, masks)
        np.testing.assert_array_equal(run(model, feed)[0], run(made, feed)[0])
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    onnx.save(model, before)
    onnx.save(made, after)
    assert verify(before, after, sizes={NAMES[0]: [5]}).passed
