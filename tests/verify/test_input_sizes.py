"""Sizes that a model's own operators fix: verify and bench run such models without being told any size. On the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.graph import load_model
from onnxfuse.graph.input_sizes import input_sizes
from onnxfuse.runtime.session import CPU
from onnxfuse.verify import verify

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 16, 64


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


def weight(name: str, *shape: int) -> TensorProto:
    array = (np.random.default_rng(len(name)).standard_normal(shape) / 8).astype(np.float32)
    return numpy_helper.from_array(array, name)


def value(name: str, element: int, *dims: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, dims)


def model_of(nodes: list, inputs: list, outputs: list, given: list, opset: int = 21) -> ModelProto:
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, given)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def caches(heads: int | str, width: int | str) -> tuple[list, list]:
    past = [value(f"past.{each}", FLOAT, "batch_size", heads, "past_sequence_length", width) for each in "kv"]
    present = [value(f"present.{each}", FLOAT, "batch_size", heads, "present_length", width) for each in "kv"]
    return past, present


def grouped(mask: bool, **attributes: int) -> ModelProto:
    """As ONNX Runtime GenAI's builder writes a layer; without a mask its lengths are inputs."""
    x = value("x", FLOAT, "batch_size", "sequence_length", HIDDEN)
    past, present = caches("kv_heads", "kv_cache_dim")
    names = ["packed", "", "", "past.k", "past.v", "last", "total"]
    attributes |= {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    outputs = ["attended", "present.k", "present.v"]
    attention = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes)
    nodes = [helper.make_node("MatMul", ["x", "qkv"], ["packed"])]
    given = [weight("qkv", HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH), weight("o", HIDDEN, HIDDEN)]
    inputs = [value("last", INT32, "batch_size"), value("total", INT32)]
    if mask:
        given += [numpy_helper.from_array(np.array(v), n) for n, v in (("one", 1), ("axis", [1]))]
        nodes += [
            helper.make_node("ReduceSum", ["attention_mask", "axis"], ["counted"], keepdims=0),
            helper.make_node("Sub", ["counted", "one"], ["before"]),
            helper.make_node("Cast", ["before"], ["last"], to=INT32),
            helper.make_node("Shape", ["attention_mask"], ["shape"]),
            helper.make_node("Gather", ["shape", "one"], ["length"]),
            helper.make_node("Cast", ["length"], ["total"], to=INT32),
        ]
        inputs = [value("attention_mask", INT64, "batch_size", "total_sequence_length")]
    nodes += [attention, helper.make_node("MatMul", ["attended", "o"], ["y"])]
    return model_of(nodes, [x, *inputs, *past], [value("y", FLOAT, "b", "s", HIDDEN), *present], given)


def windowed(size: int = 6) -> ModelProto:
    """The same behind a layer whose cache holds a window of the keys, as Gemma's has."""
    model = grouped(mask=True)
    graph = model.graph
    place, full = next((i, node) for i, node in enumerate(graph.node) if node.op_type == "GroupQueryAttention")
    names = ["packed", "", "", "window.k", "window.v", "last", "total"]
    outputs = ["attended.window", "kept.k", "kept.v"]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": size}
    attributes["sliding_window_cache"] = 1
    graph.node.insert(place, helper.make_node(full.op_type, names, outputs, domain="com.microsoft", **attributes))
    for each in "kv":
        sizes = ("batch_size", "kv_heads", "past_sliding_length", "kv_cache_dim")
        graph.input.append(value(f"window.{each}", FLOAT, *sizes))
        graph.output.append(value(f"kept.{each}", FLOAT, *sizes[:2], "present_sliding_length", sizes[3]))
    graph.output.append(value("attended.window", FLOAT, "b", "s", HIDDEN))
    return model


def exported(total: str) -> ModelProto:
    """As an exporter writes attention with a cache: keys are joined, and a mask of all of them is added."""
    x = value("x", FLOAT, "batch_size", "sequence_length", HIDDEN)
    mask = value("attention_mask", FLOAT, "batch_size", 1, 1, total)
    past, present = caches(HEADS, WIDTH)
    nodes = []
    for each in "qkv":
        nodes += [
            helper.make_node("MatMul", ["x", each], [f"{each}1"]),
            helper.make_node("Reshape", [f"{each}1", "heads"], [f"{each}2"]),
            helper.make_node("Transpose", [f"{each}2"], [f"{each}3"], perm=[0, 2, 1, 3]),
        ]
    nodes += [helper.make_node("Concat", [f"past.{e}", f"{e}3"], [f"present.{e}"], axis=2) for e in "kv"]
    nodes += [
        helper.make_node("Transpose", ["present.k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q3", "kt"], ["scores"]),
        helper.make_node("Add", ["scores", "attention_mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"]),
        helper.make_node("MatMul", ["shares", "present.v"], ["y"]),
    ]
    given = [weight(each, HIDDEN, HIDDEN) for each in "qkv"]
    given.append(numpy_helper.from_array(np.array([0, 0, HEADS, WIDTH]), "heads"))
    return model_of(nodes, [x, mask, *past], [value("y", FLOAT, "b", HEADS, "s", WIDTH), *present], given)


def multi_head() -> ModelProto:
    """As the transformers optimizer of ONNX Runtime writes it."""
    x = value("x", FLOAT, "batch_size", "sequence_length", HIDDEN)
    past, present = caches("heads", "width")
    names = [*(f"{each}1" for each in "qkv"), "", "", "bias", "past.k", "past.v"]
    nodes = [helper.make_node("MatMul", ["x", each], [f"{each}1"]) for each in "qkv"]
    nodes.append(helper.make_node("MultiHeadAttention", names, ["y", "present.k", "present.v"], domain="com.microsoft",
                                  num_heads=HEADS))  # fmt: skip
    bias = value("bias", FLOAT, "batch_size", HEADS, "sequence_length", "total_length")
    given = [weight(each, HIDDEN, HIDDEN) for each in "qkv"]
    return model_of(nodes, [x, bias, *past], [value("y", FLOAT, "b", "s", HIDDEN), *present], given)


def packed() -> ModelProto:
    """GPT-2's."""
    x = value("x", FLOAT, "batch_size", "sequence_length", HIDDEN)
    past = value("past", FLOAT, 2, "batch_size", "heads", "past_sequence_length", "width")
    present = value("present", FLOAT, 2, "batch_size", "heads", "present_length", "width")
    node = helper.make_node("Attention", ["x", "w", "c", "", "past"], ["y", "present"], domain="com.microsoft",
                            num_heads=HEADS, unidirectional=1)  # fmt: skip
    given = [weight("w", HIDDEN, 3 * HIDDEN), weight("c", 3 * HIDDEN)]
    return model_of([node], [x, past], [value("y", FLOAT, "b", "s", HIDDEN), present], given)


MODELS: dict[str, Callable[[], ModelProto]] = {
    "grouped, a mask": lambda: grouped(mask=True),
    "grouped, lengths": lambda: grouped(mask=False),
    "grouped, a window": windowed,
    "exported": lambda: exported("total_length"),
    "exported, a sum": lambda: exported("past_sequence_length + sequence_length"),
    "multi-head": multi_head,
    "packed": packed,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [{}, {"past_sequence_length": [9]}, {"sequence_length": [1]}])
def test_a_decoder_is_judged_without_sizes(name: str, sizes: dict[str, list[int]], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(MODELS[name](), path)
    result = verify.verify(path, path, sizes=sizes)
    assert result.passed
    assert all(check.original.max < 0.01 for check in result.outputs)
    shapes = result.runs[0].shapes
    keys = shapes.get("past.k", shapes.get("past"))
    assert keys[-3] in (HEADS, KV_HEADS)
    assert keys[-1] == WIDTH
    assert all(size[0] in (keys[-2], shapes["x"][1]) for size in sizes.values())


def test_a_batch_that_is_asked_for_leaves_grouped_queries_one_token(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(grouped(mask=True), path)
    assert verify.verify(path, path, sizes={"batch_size": [3]}).runs[0].shapes["x"] == (3, 1, HIDDEN)


def test_the_total_that_is_asked_for_leaves_the_past_its_share(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(grouped(mask=True), path)
    sizes = {"total_sequence_length": [30], "sequence_length": [1]}
    shapes = verify.verify(path, path, sizes=sizes).runs[0].shapes
    assert (shapes["x"][1], shapes["past.k"][2], shapes["attention_mask"][1]) == (1, 29, 30)


def test_a_cache_of_a_sliding_window_has_room_for_it(tmp_path: Path) -> None:
    """As GenAI's builder writes Gemma's layers: ONNX Runtime refuses a shorter cache."""
    path = tmp_path / "model.onnx"
    onnx.save(grouped(mask=True, local_window_size=40, sliding_window_cache=1), path)
    result = verify.verify(path, path)
    assert result.passed
    assert result.runs[0].shapes["past.k"] == (1, KV_HEADS, 40, WIDTH)


def test_a_windows_cache_is_full(tmp_path: Path) -> None:
    """Rows of it that no token has, nobody writes: two runs of one model are not the same there (gpt-oss)."""
    path = tmp_path / "model.onnx"
    onnx.save(windowed(100), path)
    result = verify.verify(path, path)
    assert result.passed
    shapes = result.runs[0].shapes
    assert shapes["window.k"][2] == 100
    assert shapes["attention_mask"][1] == shapes["past.k"][2] + shapes["x"][1] >= 100


def test_what_the_operators_say_is_read() -> None:
    found = input_sizes(load_model(grouped(mask=True)))
    assert found.fixed == {"kv_heads": KV_HEADS, "kv_cache_dim": WIDTH}
    assert found.sums == {"total_sequence_length": ("past_sequence_length", "sequence_length")}
    found = input_sizes(load_model(grouped(mask=False)))
    parts = ("past_sequence_length", "sequence_length")
    assert found.values == {"total": (parts, 0), "last": (parts, -1)}


def halves(factor: int) -> ModelProto:
    """Rows of a tensor that are several of another's, as torch's exporter names a dimension `2*rows`."""
    inputs = [value("x", FLOAT, "rows", 8), value("y", FLOAT, f"{factor}*rows", 8)]
    given = [weight("w", 8, 8), numpy_helper.from_array(np.array([factor, 1]), "times")]
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["repeated"]),
        helper.make_node("MatMul", ["repeated", "w"], ["product"]),
        helper.make_node("Add", ["product", "y"], ["out"]),
    ]
    return model_of(nodes, inputs, [value("out", FLOAT, f"{factor}*rows", 8)], given)


@pytest.mark.parametrize(
    ("factor", "sizes", "rows"),
    [(2, None, 8), (8, None, 2), (32, None, 2), (1, None, 16), (8, {"rows": [3]}, 3), (8, {"8*rows": [24]}, 3),
     (3, {"rows": [0]}, 0)],
)  # fmt: skip
def test_a_dimension_that_is_a_multiple_is_one(
    factor: int, sizes: dict[str, list[int]] | None, rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(halves(factor), path)
    result = verify.verify(path, path, sizes=sizes)
    assert result.passed
    assert result.runs[0].shapes == {"x": (rows, 8), "y": (factor * rows, 8)}


def test_the_shape_of_a_multiple_tells_the_other(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(halves(4), path)
    assert verify.verify(path, path, shapes={"y": (20, 8)}).runs[0].shapes["x"] == (5, 8)
