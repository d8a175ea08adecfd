"""Bad models are refused with one clear line; known values are what the run would compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from onnxfuse.device import resolve
from onnxfuse.errors import ModelError
from onnxfuse.graph import load
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.scopes import skeleton_of
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder, run
from tests.tools.sweep import difference, rewritten


def small() -> onnx.ModelProto:
    b = Builder()
    return b.model(b("Relu", b("MatMul", b.input("x", ("m", 4)), b.array(np.ones((4, 4)), "weight"))))


def cycle() -> onnx.ModelProto:
    model = small()
    model.graph.node[0].input[0] = model.graph.node[1].output[0]
    return model


def unknown_opset() -> onnx.ModelProto:
    model = small()
    model.opset_import[0].version = 999
    return model


def wrong_dtype() -> onnx.ModelProto:
    model = small()
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((4, 4), np.float16), "weight"))
    return model


def dangling() -> onnx.ModelProto:
    model = small()
    model.graph.node[0].input[0] = "nowhere"
    return model


def no_graph() -> onnx.ModelProto:
    return onnx.ModelProto(ir_version=9, opset_import=[helper.make_opsetid("", 20)])


def unknown_operator() -> onnx.ModelProto:
    model = small()
    model.graph.node[1].op_type = "Reluu"
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (cycle, "cycle"),
        (unknown_opset, "opset 999"),
        (wrong_dtype, "float16|type"),
        (dangling, "nowhere"),
        (no_graph, "not an ONNX model"),
        (unknown_operator, "Reluu"),
    ],
)
def test_invalid_models_are_named(tmp_path: Path, build, words: str) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(build().SerializeToString())
    with pytest.raises(ModelError, match=words) as caught:
        Graph(load_model(path))
    assert "bad.onnx" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.randoms(use_true_random=False))
def test_nodes_in_any_order_are_the_same_model(random) -> None:
    """Converters append the casts that they insert; ONNX Runtime sorts what it loads, and so does the loader."""
    b = Builder()
    t = b("Add", b("MatMul", b.input("x", ("m", 4)), b.array(np.ones((4, 8)), "weight")), b.array(np.ones(8), "bias"))
    first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Mul", first, b("Sigmoid", second)))
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(random.sample(list(model.graph.node), len(model.graph.node)))
    graph = Graph(load_model(shuffled))
    made = {name: index for index, node in enumerate(graph.scope.nodes) for name in node.output}
    assert all(made.get(name, -1) < index for index, node in enumerate(graph.scope.nodes) for name in node.input)
    assert sorted(node.name for node in graph.nodes) == sorted(node.name for node in model.graph.node)
    assert load_model(model).proto == model


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x09", bytes(range(256)), b"\0" * 100])
def test_what_is_not_onnx_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.onnx"):
        load_model(path)


def test_every_truncation_of_a_model_is_refused(tmp_path: Path) -> None:
    whole = small().SerializeToString()
    path = tmp_path / "bad.onnx"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            Graph(load_model(path))


@pytest.mark.parametrize("most", [10, 1 << 20])
def test_a_file_that_protobuf_cannot_read_for_its_size_says_so(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes larger messages than it reads."""
    monkeypatch.setattr(load, "MOST_BYTES", most)
    path = tmp_path / "large.onnx"
    path.write_bytes(small().SerializeToString()[:-1])
    with pytest.raises(ModelError, match="over 2 GiB.*save_as_external_data" if most == 10 else "truncated"):
        load_model(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path / "nothing.onnx")


def test_the_skeleton_carries_no_weight_and_all_shapes() -> None:
    b = Builder()
    model = b.model(b("MatMul", b.input("x", ("m", 64)), b.array(np.ones((64, 96)), "weight")))
    skeleton = skeleton_of(model)
    assert skeleton.ByteSize() < 1000 < model.ByteSize()
    graph = Graph(load_model(model))
    assert graph.shape("weight") == (64, 96)
    assert graph.shape(graph.nodes[0].outputs[0].name) == ("m", 96)


@given(
    last=st.integers(1, 40),
    steps=st.lists(st.tuples(st.sampled_from(["Add", "Sub", "Mul", "Div"]), st.integers(-7, 7)), max_size=5),
)
def test_shape_arithmetic_is_what_the_run_computes(last: int, steps) -> None:
    b = Builder()
    x = b.input("x", ("batch", last))
    value = b("Gather", b("Shape", x), b.integers(-1), axis=0)
    for op, operand in steps:
        value = b(op, value, b.integers(operand or 1 if op == "Div" else operand))
    b.dtype = 7
    model = b.model(b("Identity", value))
    graph = Graph(load_model(model))
    (expected,) = run(model, {"x": np.zeros((2, last), np.float32)})
    assert graph.known_integers(graph.tensor(str(value))) == expected.tolist()


def test_a_dynamic_dimension_is_not_known() -> None:
    b = Builder()
    x = b.input("x", ("batch", 4))
    value = b("Gather", b("Shape", x), b.integers(0), axis=0)
    graph = Graph(load_model(b.model(b("Add", b("Cast", value, to=1), b.array([1.0])))))
    assert graph.known_integers(graph.tensor(value)) is None


@pytest.mark.parametrize(("domain", "there"), [("", True), ("ai.onnx", True), ("somebody", False)])
def test_an_op_of_a_domain_that_nobody_knows_is_never_taken_for_another(domain: str, there: bool) -> None:
    model = small()
    for node in model.graph.node:
        node.domain = domain
    model.opset_import.append(helper.make_opsetid("somebody", 1))
    ops = {node.op for node in Graph(load_model(model)).nodes}
    assert ops == ({"MatMul", "Relu"} if there else {"somebody::MatMul", "somebody::Relu"})


def test_an_operator_set_of_onnx_runtime_needs_no_import() -> None:
    """As `onnxruntime.transformers.optimizer` leaves models in memory; what it says itself stays as it is."""
    b = Builder()
    x = b.input("x", ("rows", 8))
    product = b("MatMul", x, b.array(draw(8, 8), "weight"))
    bare = b.model(b("Gelu", b("Add", product, b.array(draw(8), "bias"))))
    bare.graph.node[-1].domain = "com.microsoft"
    feed = {"x": draw(3, 8).astype(np.float32)}
    analysis = analyse_model(bare, resolve("sm_80", list))
    assert len(analysis.sites) == 1
    assert {opset.domain for opset in bare.opset_import} == {""}, "the caller's message is the caller's"
    fused = rewritten(analysis)
    assert not difference(bare, fused, [feed])
    onnx.checker.check_model(fused)
