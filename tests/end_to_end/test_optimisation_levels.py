"""A fused file has the original's bits without the bridge, whatever ONNX Runtime's optimiser makes of both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from onnxfuse.selection import make_selection
from tests.helpers import corpus
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder
from tests.tools.sweep import rewritten

LEVELS = ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]  # tests.tools.sweep runs every model without any
TINY = sorted(key for key in corpus.manifest() if key.startswith("tiny"))
# docs/limits.md says what these have in common.
OTHERWISE = {
    "tiny/ff_gelu_approximate.tiny.dynamo.op20.fp16.dynamic.onnx": "where fp16 is rounded",
    "tiny/gpt2.tiny.dynamo.op20.fp32.dynamic.definit.onnx": "a shape that the exporter wrote down",
    "tiny/gpt2.tiny.dynamo.op20.fp32.dynamic.onnx": "a shape that the exporter wrote down",
    "tiny/sd15_unet_mini.tiny.dynamo.op20.fp32.dynamic.definit.onnx": "a shape that the exporter wrote down",
    "tiny/sd15_unet_mini.tiny.dynamo.op20.fp32.dynamic.onnx": "a shape that the exporter wrote down",
}


def outputs(model: bytes, level: str, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feed)


def fused(model: onnx.ModelProto) -> bytes:
    analysis = analyse_model(model, resolve("sm_90a", list))
    return rewritten(analysis, transposed=True).SerializeToString()


def distance(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest magnitude of its output."""
    pairs = [[each.astype(np.float64) for each in pair] for pair in zip(left, right, strict=True)]
    return max(float(np.max(np.abs(x - y), initial=0) / np.max(np.abs(x), initial=1e-30)) for x, y in pairs)


@pytest.mark.one_in(40)
@pytest.mark.parametrize("key", TINY)
def test_the_corpus_keeps_its_bits_at_every_level(key: str) -> None:
    model, feed = corpus.materialize(key), corpus.feed(key, 0)
    before, after = model.SerializeToString(), fused(model)
    plain = outputs(before, "ORT_DISABLE_ALL", feed)
    for level in LEVELS:
        expected, actual = outputs(before, level, feed), outputs(after, level, feed)
        same = all(x.tobytes() == y.tobytes() for x, y in zip(expected, actual, strict=True))
        # Elsewhere the optimiser moves bits itself; a fused file differs by no more than twice that, or one rounding.
        moved = max(2 * distance(expected, plain), float(np.finfo(expected[0].dtype).eps))
        assert same or (key in OTHERWISE and distance(expected, actual) <= moved), level


def scaled_by_its_width(b: Builder, elsewhere: bool) -> str:
    """Scores scaled by the width of the heads, which the graph reads from a shape, as exporters write attention."""
    x, y = (b.input(name, ("batch", "rows", 8)) for name in "xy")
    query, key = (b("MatMul", t, b.array(draw(8, 8, seed=seed), f"w{seed}")) for seed, t in enumerate((x, y)))
    heads = [b("Reshape", t, b.integers(0, -1, 2, 4)) for t in (query, key)]
    query, key = (b("Transpose", t, perm=[0, 2, 1, 3]) for t in heads)
    width = b("Gather", b("Shape", query if elsewhere else key), b.scalar(3))
    scale = b("Sqrt", b("Div", b.array(1.0), b("Sqrt", b("Cast", width, to=1))))
    return b("Softmax", b("MatMul", query, b("Mul", b("Transpose", key, perm=[0, 1, 3, 2]), scale)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_number_that_the_model_computes_stays_computed(elsewhere: bool) -> None:
    """A scale from the shape of the product itself, or of a tensor that its fused node does not see."""
    b = Builder(opset=17)
    model = b.model(scaled_by_its_width(b, elsewhere))
    analysis = analyse_model(model, resolve("sm_90a", list))
    assert any("0.707" in str(site.fusion) for site in analysis.sites), "the scale is no constant of a kernel"
    feed = {name: draw(2, 5, 8, seed=seed).astype(np.float32) for seed, name in enumerate("xy")}
    files = model.SerializeToString(), fused(model)
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert expected[0].tobytes() == actual[0].tobytes(), level


def normalised(b: Builder, x: str) -> str:
    return b("LayerNormalization", x, b.array(draw(32), "scale"))


def clipped(b: Builder, x: str) -> str:
    return b("Clip", x, b.array(-0.71), b.array(0.71))


def split_by_its_sizes(b: Builder, normed: str) -> str:
    """Attention of fp16 whose heads are split by the sizes of its input, as TorchScript writes it."""
    sizes = b("Slice", b("Shape", normed), b.integers(0), b.integers(2))
    split = b("Concat", sizes, b.integers(2, 16), axis=0)
    factors = (b("MatMul", normed, b.array(draw(32, 32, seed=seed), f"w{seed}")) for seed in range(3))
    query, key, value = (b("Transpose", b("Reshape", each, split), perm=[0, 2, 1, 3]) for each in factors)
    scores = b("MatMul", query, b("Transpose", key, perm=[0, 1, 3, 2]))
    result = b("MatMul", b("Softmax", scores), value)
    merged = b("Reshape", b("Transpose", result, perm=[0, 2, 1, 3]), b("Concat", sizes, b.integers(-1), axis=0))
    return b("Add", merged, normed)


@pytest.mark.parametrize("is_computed", [False, True], ids=["given", "computed"])
@pytest.mark.parametrize("form", [normalised, clipped], ids=lambda form: form.__name__)
def test_a_value_whose_shape_was_read_is_rounded_as_before(form: Callable[..., str], is_computed: bool) -> None:
    """By a node that a kernel has as well as by one that it has not, and where all neighbours are of 32 bits."""
    b = Builder(TensorProto.FLOAT16, opset=17)
    x = b.input("x", ("batch", "rows", 32))
    model = b.model(split_by_its_sizes(b, form(b, b("Sin", x) if is_computed else x)))
    files = model.SerializeToString(), fused(model)
    after = onnx.load_model_from_string(files[1])
    nodes = [node for body in (after.graph, *after.functions) for node in body.node]
    assert all(node.doc_string for node in nodes if node.op_type == "Shape"), "the model's is needed by nothing"
    feed = {"x": draw(2, 5, 32).astype(np.float16)}
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert expected[0].tobytes() == actual[0].tobytes(), level


def parts_of_three_kinds(b: Builder) -> str:
    """Mamba's projection in fp16: one part is widened, one transposed, and one stays as it is."""
    projected = b("MatMul", b.input("x", ("batch", "rows", 32)), b.array(draw(32, 56, seed=1), "w"))
    gate, states, steps = b("Split", projected, b.integers(32, 16, 8), outputs=3, axis=-1)
    wide = b("Cast", gate, to=TensorProto.FLOAT)
    gate = b("Cast", b("Mul", wide, b("Sigmoid", wide)), to=b.dtype)
    states = b("Sqrt", b("Abs", b("Transpose", states, perm=[0, 2, 1])))
    steps = b("Softplus", b("Add", steps, b.array(draw(8, seed=2), "bias")))
    sums = (b("ReduceMean", part, b.integers(1, 2)) for part in (b("Sqrt", b("Abs", gate)), states, steps))
    return b("Concat", *sums, axis=0)


@pytest.mark.parametrize("only", [("MatMul_0/*",), ("MatMul_0/0",), ("MatMul_0/32", "MatMul_0/48")], ids=" ".join)
def test_a_copied_split_is_rounded_as_the_models_own(only: tuple[str, ...]) -> None:
    """All of its parts are fused, or some, and it stays for the others."""
    b = Builder(TensorProto.FLOAT16, opset=18)
    model = b.model(parts_of_three_kinds(b))
    analysis = analyse_model(model, resolve("sm_90a", list), selection=make_selection(only, (), None))
    assert len(analysis.sites) == (3 if "*" in only[0] else len(only))
    files = model.SerializeToString(), rewritten(analysis, transposed=True).SerializeToString()
    feed = {"x": draw(2, 5, 32).astype(np.float16)}
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert expected[0].tobytes() == actual[0].tobytes(), level


def test_a_split_whose_first_output_nobody_reads_is_copied() -> None:
    b = Builder(TensorProto.FLOAT16, opset=18)
    projected = b("MatMul", b.input("x", (5, 32)), b.array(draw(32, 48, seed=1), "w"))
    gate = b("Split", projected, b.integers(16, 32), outputs=2, axis=-1)[1]
    model = b.model(b("Mul", b("Sigmoid", gate), gate))
    assert len(onnx.load_model_from_string(fused(model)).functions) == 1


def merged_by_the_ids(b: Builder) -> str:
    """Heads and batch of fp16 merged to sizes of the ids, where nobody reads the shape of what is normalised."""
    ids = b.input("ids", ("batch", "rows"), TensorProto.INT64)
    x = b("Gather", b.array(draw(9, 32), "table"), ids)
    normed = b("LayerNormalization", b("Add", x, x), b.array(draw(32), "scale"))
    batch, rows = (b("Gather", b("Shape", ids), b.integers(place)) for place in range(2))
    parts = []
    for seed in range(2):
        projected = b(
            "Add", b("MatMul", normed, b.array(draw(32, 32, seed=seed), f"w{seed}")), b.array(draw(32), f"b{seed}")
        )
        heads = b(
            "Transpose", b("Reshape", projected, b("Concat", batch, rows, b.integers(2, 16), axis=0)), perm=[0, 2, 1, 3]
        )
        parts.append(b("Reshape", heads, b("Concat", b("Mul", batch, b.integers(2)), rows, b.integers(16), axis=0)))
    return b("MatMul", parts[0], b("Transpose", parts[1], perm=[0, 2, 1]))


def test_a_value_whose_shape_nobody_read_is_rounded_no_more_than_before() -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    model = b.model(merged_by_the_ids(b))
    files = model.SerializeToString(), fused(model)
    feed = {"ids": np.arange(10).reshape(2, 5) % 9}
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert expected[0].tobytes() == actual[0].tobytes(), level


def padded_behind_a_transpose(b: Builder) -> tuple[str, str]:
    """MaxViT's shortcut in fp16 by TorchScript: what is padded is computed from the shape of what a kernel stores."""
    product = b("MatMul", b.input("x", ("batch", 4, 4, 32)), b.array(draw(32, 16, seed=1), "w"))
    total = b("Add", b.input("skip", ("batch", 4, 4, 16)), b("Add", b.array(draw(16, seed=2), "bias"), product))
    image = b("Transpose", total, perm=[0, 3, 1, 2])
    ends = [b("Sub", b.integers(5), b("Gather", b("Shape", image), b.integers(place), axis=0)) for place in (2, 3)]
    padded = b("Pad", image, b("Concat", b.integers(*[0] * 6), *ends, axis=0))
    statistics = [b.array(np.abs(draw(16, seed=seed)) + 0.5, f"statistic{seed}") for seed in range(4)]
    return b("Sqrt", b("Abs", padded)), b("Sqrt", b("Abs", b("BatchNormalization", image, *statistics)))


def test_a_value_whose_shape_became_a_number_is_rounded_as_before() -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    model = b.model(*padded_behind_a_transpose(b))
    files = model.SerializeToString(), fused(model)
    feed = {"x": draw(2, 4, 4, 32).astype(np.float16), "skip": draw(2, 4, 4, 16, seed=3).astype(np.float16)}
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert [each.tobytes() for each in expected] == [each.tobytes() for each in actual], level


def padded_behind_a_reshape(b: Builder) -> tuple[str, str]:
    """The same behind a Reshape to sizes of the run, which the function reads from a Shape of its own."""
    x = b.input("x", ("batch", 16, 32))
    product = b("Add", b("MatMul", x, b.array(draw(32, 16, seed=1), "w")), b.array(draw(16, seed=2), "bias"))
    batch = b("Gather", b("Shape", b.input("ids", ("batch", 3), TensorProto.INT64)), b.integers(0), axis=0)
    image = b("Reshape", product, b("Concat", batch, b.integers(4, 4, 16), axis=0))
    ends = [b("Sub", b.integers(5), b("Gather", b("Shape", image), b.integers(place), axis=0)) for place in (1, 2)]
    padded = b("Pad", image, b("Concat", b.integers(*[0] * 5), *ends, b.integers(0), axis=0))
    return b("Sqrt", b("Abs", padded)), b("Sqrt", b("Abs", b("Add", image, b.array(draw(16, seed=3), "last"))))


def test_a_shape_that_became_a_number_has_a_name_of_its_own() -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    model = b.model(*padded_behind_a_reshape(b))
    files = model.SerializeToString(), fused(model)
    feed = {"x": draw(2, 16, 32).astype(np.float16), "ids": np.zeros((2, 3), np.int64)}
    for level in ("ORT_DISABLE_ALL", *LEVELS):
        expected, actual = (outputs(each, level, feed) for each in files)
        assert [each.tobytes() for each in expected] == [each.tobytes() for each in actual], level


def transposed_in_front(b: Builder) -> tuple[str, str]:
    """Rows of fp16 that are turned before a projection, where the number of the turned ones is read as well.

    So TorchScript writes torch's MultiheadAttention of `batch_first`. Nothing but the Shape reads them in 16 bits.
    """
    turned = b("Transpose", b("Sin", b.input("x", ("batch", "rows", 32))), perm=[1, 0, 2])
    rows = b("Cast", b("Gather", b("Shape", turned), b.integers(1)), to=TensorProto.FLOAT)
    made = b("Add", b("MatMul", turned, b.array(draw(32, 48, seed=3), "w1")), b.array(draw(48, seed=4), "bias1"))
    return b("Sqrt", b("Abs", b("Softmax", made))), b("Cast", b("Sqrt", rows), to=b.dtype)


def test_what_is_transposed_in_front_of_a_product_is_rounded_as_before() -> None:
    b = Builder(TensorProto.FLOAT16, opset=17)
    model = b.model(*transposed_in_front(b))
    files = model.SerializeToString(), fused(model)
    (body,) = onnx.load_model_from_string(files[1]).functions
    assert [node.op_type for node in body.node if not node.doc_string][:2] == ["Transpose", "MatMul"]
    feed = {"x": draw(2, 5, 32).astype(np.float16)}
    for level in ("ORT_DISABLE_ALL", *LEVELS[:2]):  # the highest ends the process, of the original too (docs/limits.md)
        expected, actual = (outputs(each, level, feed) for each in files)
        assert expected[0].tobytes() == actual[0].tobytes(), level
