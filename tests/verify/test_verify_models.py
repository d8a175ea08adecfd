"""verify judges every valid model: what converters write, what has no double, what is no tensor. On the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.bench.bench import bench
from onnxfuse.errors import ModelError, SettingError
from onnxfuse.runtime.session import CPU
from onnxfuse.verify import verify
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


def weights(*shape: int) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / 4).astype(np.float32)


def save(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def product(b: Builder, tail: Callable[[Builder, str], str]) -> str:
    """What every fusion begins with, before the part that is new here."""
    return tail(b, b("Relu", b("MatMul", b.input("x", ["m", 8]), b.array(weights(8, 4), "w"))))


def of(tail: Callable[[Builder, str], str], dtype: int = FLOAT, opset: int = 20) -> ModelProto:
    b = Builder(dtype, opset)
    return b.model(product(b, tail))


def unsorted() -> ModelProto:
    """As ONNX Runtime's own float16 converter leaves it: its Casts stand at the end."""
    model = of(lambda b, x: b("Tanh", b("Neg", x)))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    return model


def graph_model(graph: GraphProto, opset: int = 17, *domains: str) -> ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def recurrent(op: str, gates: int, dtype: int) -> ModelProto:
    def tail(b: Builder, x: str) -> str:
        sequence = b("Unsqueeze", x, b.integers(0))
        w, r = b.array(weights(1, gates * 3, 4)), b.array(weights(1, gates * 3, 3))
        outputs = [f"{op}_{index}" for index in range(2)]
        b.nodes.append(helper.make_node(op, [sequence, w, r], outputs, hidden_size=3))
        return b("Sigmoid", outputs[0])

    return of(tail, dtype)


def output_is(name: str) -> ModelProto:
    model = of(lambda b, x: b("Tanh", x))
    shape = {"x": ["m", 8], "w": [8, 4]}[name]
    model.graph.output.append(helper.make_tensor_value_info(name, FLOAT, shape))
    return model


def sparse() -> ModelProto:
    model = of(lambda b, x: b("Add", x, "sparse"))
    values = numpy_helper.from_array(np.array([0.3, -0.7], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([1, 2], np.int64), "")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    return model


def sparse_constant() -> ModelProto:
    values = numpy_helper.from_array(np.array([0.3, -0.7], np.float32), "values")
    indices = numpy_helper.from_array(np.array([1, 2], np.int64), "indices")
    held = helper.make_sparse_tensor(values, indices, [4])

    def tail(b: Builder, x: str) -> str:
        return b("Add", x, b("Constant", sparse_value=held))

    return of(tail)


def sequences() -> ModelProto:
    model = of(lambda b, x: b("Tanh", x))
    (y,) = model.graph.output
    model.graph.node.append(helper.make_node("SequenceConstruct", [y.name, "x"], ["all"]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("all", FLOAT, None))
    return model


def zip_map(names: dict[str, Sequence[object]]) -> ModelProto:
    model = of(lambda b, x: b("Softmax", x))
    (y,) = model.graph.output
    model.graph.node.append(helper.make_node("ZipMap", [y.name], ["scores"], domain="ai.onnx.ml", **names))
    value = onnx.ValueInfoProto(name="scores")
    scores = value.type.sequence_type.elem_type.map_type
    scores.key_type = TensorProto.STRING if "classlabels_strings" in names else TensorProto.INT64
    scores.value_type.tensor_type.elem_type = FLOAT
    model.graph.output.append(value)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    return model


def strings() -> ModelProto:
    """Words become numbers, and these rows of a table."""
    words = [b"cat", b"dog", b"owl"]
    encoder = helper.make_node("LabelEncoder", ["words"], ["ids"], domain="ai.onnx.ml", keys_strings=words,
                               values_int64s=[0, 1, 2], default_int64=3)  # fmt: skip
    nodes = [
        encoder,
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["y"]),
        helper.make_node("Identity", ["words"], ["read"]),
    ]
    given = [numpy_helper.from_array(weights(4, 8), "table"), numpy_helper.from_array(weights(8, 4), "w")]
    inputs = [helper.make_tensor_value_info("words", TensorProto.STRING, ["m"])]
    outputs = [
        helper.make_tensor_value_info("y", FLOAT, ["m", 4]),
        helper.make_tensor_value_info("read", TensorProto.STRING, ["m"]),
    ]
    model = graph_model(helper.make_graph(nodes, "words", inputs, outputs, given))
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return model


def quantized(b: Builder, x: str) -> str:
    scale, zero = b.array(0.1), b("Cast", b.scalar(3), to=TensorProto.UINT8)
    return b("Tanh", b("DequantizeLinear", b("QuantizeLinear", x, scale, zero), scale, zero))


def untyped_loop() -> ModelProto:
    """A body that leaves the type of what it carries to the loop."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Mul", ["c", "w"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            onnx.ValueInfoProto(name="c"),
        ],
        [helper.make_tensor_value_info("again", TensorProto.BOOL, []), onnx.ValueInfoProto(name="next")],
    )
    inputs = [helper.make_tensor_value_info("x", FLOAT, [4])]
    given = [numpy_helper.from_array(weights(4), "w"), numpy_helper.from_array(np.array(2), "n")]
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    y = helper.make_tensor_value_info("y", FLOAT, None)
    return graph_model(helper.make_graph(nodes, "g", inputs, [y], given))


# name -> the model, and what of its reference is not in double.
MODELS: dict[str, tuple[Callable[[], ModelProto], dict[str, int]]] = {
    "unsorted nodes": (unsorted, {}),
    "a body without types": (untyped_loop, {}),
    "LSTM": (lambda: recurrent("LSTM", 4, FLOAT), {"LSTM in float32": 1}),
    "GRU": (lambda: recurrent("GRU", 3, FLOAT), {"GRU in float32": 1}),
    "RNN": (lambda: recurrent("RNN", 1, FLOAT), {"RNN in float32": 1}),
    "GRU in float16": (lambda: recurrent("GRU", 3, FLOAT16), {"GRU in float32": 1}),
    "Atan": (lambda: of(lambda b, x: b("Atan", b("Atan", x))), {"Atan in float32": 2}),
    "ThresholdedRelu": (lambda: of(lambda b, x: b("ThresholdedRelu", x)), {"ThresholdedRelu in float32": 1}),
    "quantised": (lambda: of(quantized), {"DequantizeLinear in float32": 1, "QuantizeLinear in float32": 1}),
    "an output that is an input": (lambda: output_is("x"), {}),
    "an output that is an initializer": (lambda: output_is("w"), {}),
    "a sparse initializer": (sparse, {}),
    "a sparse constant": (sparse_constant, {}),
    "sequences": (sequences, {}),
    "ZipMap of numbers": (lambda: zip_map({"classlabels_int64s": range(4)}), {"ai.onnx.ml::ZipMap in float32": 1}),
    "ZipMap of names": (lambda: zip_map({"classlabels_strings": list("abcd")}), {"ai.onnx.ml::ZipMap in float32": 1}),
    "strings": (strings, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_valid_model_is_judged(name: str, tmp_path: Path) -> None:
    make, kept = MODELS[name]
    path = save(make(), tmp_path / "model.onnx")
    result = verify.verify(path, path)
    assert result.passed, str(result)
    assert result.kept == kept
    assert all(f"{what} ({count})" in str(result) for what, count in kept.items())
    assert result.to_dict()["not_in_float64"] == kept
    assert {check.name.split("[")[0].split(" ")[0] for check in result.outputs} == {
        value.name for value in onnx.load(path).graph.output
    }
    floats = [check for check in result.outputs if "float" in check.dtype and check.original.max]
    assert floats or name == "sequences", "nothing was measured"
    assert all(check.original.max < 0.01 for check in floats)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_weights_are_off_is_found_out(name: str, tmp_path: Path) -> None:
    model = MODELS[name][0]()
    path = save(model, tmp_path / "model.onnx")
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float16(1.25), "w"))
    assert not verify.verify(path, save(model, tmp_path / "wrong.onnx")).passed


def test_sequences_and_maps_of_other_lengths_and_keys_are_wrong(tmp_path: Path) -> None:
    good = save(sequences(), tmp_path / "good.onnx")
    short = sequences()
    del short.graph.node[-1].input[1:]
    result = verify.verify(good, save(short, tmp_path / "short.onnx"))
    assert [check.name for check in result.outputs if not check.passed] == ["all length"]
    good = save(zip_map({"classlabels_strings": list("abcd")}), tmp_path / "good.onnx")
    other = save(zip_map({"classlabels_strings": list("abce")}), tmp_path / "other.onnx")
    failed = [check.name for check in verify.verify(good, other).outputs if not check.passed]
    assert failed[0] == "scores keys"


@pytest.mark.parametrize("name", ["sequences", "ZipMap of names", "strings", "LSTM"])
def test_bench_times_such_models_too(name: str, tmp_path: Path) -> None:
    path = save(MODELS[name][0](), tmp_path / "model.onnx")
    assert bench(path, path, device="cpu", runs=2, warmup=0).ratio > 0


def unranked() -> ModelProto:
    b = Builder()
    b.inputs.append(helper.make_tensor_value_info("x", FLOAT, None))
    return b.model(b("Relu", b("MatMul", "x", b.array(weights(8, 4), "w"))))


def test_an_input_of_unknown_rank_asks_for_a_shape_and_takes_it(tmp_path: Path) -> None:
    path = save(unranked(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"does not say how many dimensions it has; give its shape with --shape x="):
        verify.verify(path, path)
    for shape in ((8,), (3, 8), (2, 3, 8)):
        result = verify.verify(path, path, shapes={"x": shape})
        assert result.passed
        assert result.runs[0].shapes == {"x": shape}
    assert verify.verify(path, path, inputs={"x": np.ones((5, 8), np.float32)}).passed
    assert bench(path, path, device="cpu", runs=2, warmup=0, shapes={"x": (3, 8)}).shapes == {"x": (3, 8)}


def test_a_scalar_input_is_none_of_unknown_rank(tmp_path: Path) -> None:
    b = Builder()
    path = save(b.model(b("Mul", b.input("x", []), b.array(weights(8, 4)))), tmp_path / "model.onnx")
    assert verify.verify(path, path).runs[0].shapes == {"x": ()}
    with pytest.raises(SettingError, match=r"input 'x': shape \[2\] has rank 1"):
        verify.verify(path, path, shapes={"x": (2,)})


def test_text_in_npz_files(tmp_path: Path) -> None:
    path = save(strings(), tmp_path / "model.onnx")
    result = verify.verify(path, path, inputs={"words": np.array(["owl", "eel"])})
    assert result.passed
    assert result.runs[0].shapes == {"words": (2,)}
