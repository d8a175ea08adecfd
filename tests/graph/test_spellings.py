"""What tools write in another way, and means the same, is fused as much and keeps its bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import FunctionProto, ModelProto, helper, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.errors import ModelError
from onnxfuse.graph.load import load_model
from onnxfuse.graph.transposed_data import transpose
from onnxfuse.pipeline import analyse_model, make_report
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder
from tests.tools.sweep import difference, rewritten

K, N = 16, 64


def layer() -> ModelProto:
    """A normalisation and a product of rows in one, whose bounds and shape the run computes, as in GPT-2."""
    b = Builder(opset=17)
    x = b.input("x", ("batch", "rows", K))
    normal = b("LayerNormalization", x, b.array(draw(K), "scale"), b.array(draw(K, seed=1), "shift"), axis=-1)
    flat = b("Reshape", b("Dropout", normal), b.integers(-1, K))
    product = b("Gemm", flat, b.array(draw(K, N), "weight"), b.array(draw(N), "bias"))
    rows = b("Slice", b("Shape", x), b.integers(0), b.integers(2), b.integers(0))
    made = b("Tanh", b("Reshape", product, b("Concat", rows, b.integers(N), axis=0)))
    return b.model(b("Slice", made, b.integers(0), b.integers(N // 2), b.integers(-1)))


def with_every_output_named(model: ModelProto) -> None:
    for node in model.graph.node:
        count = {"Dropout": 2, "LayerNormalization": 3}.get(node.op_type, 1)
        node.output.extend(f"{node.name}_{index}" for index in range(1, count))


def with_absent_inputs_named(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type in ("Slice", "Dropout"):
            node.input.append("")


def in_a_function(alter: Callable[[ModelProto], None]) -> Callable[[ModelProto], None]:
    """The same where all nodes are those of a function of the model."""

    def altered(model: ModelProto) -> None:
        alter(model)
        graph, body = model.graph, FunctionProto(name="Layer", domain="own")
        body.input.extend([graph.input[0].name, *(tensor.name for tensor in graph.initializer)])
        body.output.extend(value.name for value in graph.output)
        body.node.extend(graph.node)
        body.opset_import.extend(model.opset_import)
        model.functions.append(body)
        del graph.node[:]
        graph.node.append(helper.make_node("Layer", body.input, body.output, "layer", domain="own"))
        model.opset_import.append(helper.make_opsetid("own", 1))

    return altered


def with_sparse_weights(model: ModelProto) -> None:
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name in ("weight", "scale")]:
        values = numpy_helper.to_array(tensor).ravel()
        stored = numpy_helper.from_array(values, tensor.name)
        places = numpy_helper.from_array(np.arange(values.size), "")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(stored, places, tensor.dims))
        model.graph.initializer.remove(tensor)


SPELLINGS: dict[str, Callable[[ModelProto], None]] = {
    "outputs": with_every_output_named,
    "inputs": with_absent_inputs_named,
    "outputs in a function": in_a_function(with_every_output_named),
    "inputs in a function": in_a_function(with_absent_inputs_named),
    "sparse": with_sparse_weights,
}


def fusions(model: ModelProto) -> list[tuple[str, int]]:
    """The pattern of each, and of how many nodes it is."""
    report = make_report(analyse_model(model, resolve("sm_80", list)))
    return [(site.pattern, len(site.nodes)) for site in report.fused]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_fused_as_much_and_keeps_its_bits(spelling: str) -> None:
    model = layer()
    SPELLINGS[spelling](model)
    onnx.checker.check_model(model)
    assert fusions(model) == fusions(layer()) != []
    made = rewritten(analyse_model(model, resolve("sm_80", list)))
    feeds = [{"x": draw(*shape, K).astype(np.float32)} for shape in ((2, 3), (1, 1))]
    assert not difference(model, made, feeds)


@pytest.mark.parametrize("named", ["trips", "condition", "both"])
def test_a_loop_that_carries_nothing_need_not_name_both_its_inputs(named: str) -> None:
    """Its trip count and its condition may have empty names, which still count as inputs."""
    body = layer().graph
    names = ("trip", "condition"), (onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
    own = [helper.make_tensor_value_info(name, dtype, ()) for name, dtype in zip(*names, strict=True)]
    body.node.append(helper.make_node("Less", ["trip", "last"], ["again"], "again"))
    body.initializer.append(numpy_helper.from_array(np.array(1), "last"))
    again = helper.make_tensor_value_info("again", onnx.TensorProto.BOOL, ())
    (x,), made = tuple(body.input), body.output[0].name
    inner = helper.make_graph(body.node, "body", own, [again, *body.output], body.initializer)
    known = {name: numpy_helper.from_array(np.array(value), name) for name, value in (("trips", 3), ("start", True))}
    given = ["" if named == "condition" else "trips", "" if named == "trips" else "start"]
    loop = helper.make_node("Loop", given, ["all"], "loop", body=inner)
    whole = helper.make_tensor_value_info("all", onnx.TensorProto.FLOAT, [None] * 4)
    graph = helper.make_graph([loop], made, [x], [whole], [known[name] for name in given if name])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    assert fusions(model) == fusions(layer())
    feed = {"x": draw(2, 3, K).astype(np.float32)}
    assert not difference(model, rewritten(analyse_model(model, resolve("sm_80", list))), [feed])


def test_an_output_that_is_read_keeps_its_name() -> None:
    model = layer()
    with_every_output_named(model)
    norm = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    model.graph.output.append(helper.make_tensor_value_info(norm.output[2], onnx.TensorProto.FLOAT, None))
    loaded = next(node for node in load_model(model).proto.graph.node if node.op_type == norm.op_type)
    assert list(loaded.output) == [norm.output[0], "", norm.output[2]]


def test_a_weight_without_data_is_named() -> None:
    """A model that was stored without its weights can be explained, but none of them be moved."""
    tensor = onnx.TensorProto(name="weight", data_type=onnx.TensorProto.FLOAT, dims=[K, N])
    with pytest.raises(ModelError, match="weight 'weight' has no data"):
        transpose(tensor, (1, 0))
