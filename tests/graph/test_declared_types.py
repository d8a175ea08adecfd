"""What a model declares of its values is no reason to refuse it where ONNX Runtime does not."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.device import resolve
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder
from tests.tools.sweep import difference, rewritten

K = 6


def layers(b: Builder, x: str) -> str:
    for name in ("first", "second"):
        product = b("MatMul", x, b.array(draw(K, K), f"{name}_weight"))
        x = b("Relu", b("Add", product, b.array(draw(K), f"{name}_bias")))
    return x


def model(rows: int | str = "rows") -> ModelProto:
    b = Builder()
    return b.model(layers(b, b.input("x", (rows, K))))


def declare(model: ModelProto, name: str, dtype: int, shape: tuple[int | str, ...]) -> ModelProto:
    model.graph.value_info.append(helper.make_tensor_value_info(name, dtype, shape))
    return model


def fused(model: ModelProto, sites: int) -> Analysis:
    """The analysis of a model with so many fusions, whose rewritten form has the same bits at several sizes."""
    analysis = analyse_model(model, resolve("sm_80", list))
    assert len(analysis.sites) == sites
    feeds = [{"x": draw(rows, K).astype(np.float32)} for rows in (1, 5)]
    assert not difference(model, rewritten(analyse_model(model, resolve("sm_80", list))), feeds)
    return analysis


@pytest.mark.parametrize("name", ["first_weight", "second_bias"])
def test_an_initializer_is_of_its_own_type(name: str) -> None:
    """ONNX Runtime's converter to float16 declares some to be what they were before."""
    fused(declare(model(), name, TensorProto.FLOAT16, (K,)), 2)


def values() -> list[str]:
    return [name for node in model().graph.node for name in node.output]


@pytest.mark.parametrize("name", values())
@pytest.mark.parametrize("shape", [(3, K), (K,), (1, "rows", K)])
def test_a_shape_of_another_batch_is_not_believed(name: str, shape: tuple[int | str, ...]) -> None:
    """What is left where somebody makes the batch of a model dynamic."""
    stale = model()
    output = next((value for value in stale.graph.output if value.name == name), None)
    if output is None:
        declare(stale, name, TensorProto.FLOAT, shape)
    else:
        output.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    expected = [site.fusion for site in fused(model(), 2).sites]
    assert [site.fusion for site in fused(stale, 2).sites] == expected


def test_a_shape_that_nothing_else_tells_is_believed() -> None:
    """The output of an op that nobody knows, which only a declaration gives a rank."""
    b = Builder()
    unknown = b("Mystery", b.input("x", ("rows", K)), domain="somebody")
    out = layers(b, unknown)
    graph = helper.make_graph(b.nodes, "test", b.inputs, [helper.make_tensor_value_info(out, 1, ("rows", K))])
    graph.initializer.extend(b.initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("somebody", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    assert not analyse_model(proto, resolve("sm_80", list)).sites
    assert (
        len(analyse_model(declare(proto, unknown, TensorProto.FLOAT, ("rows", K)), resolve("sm_80", list)).sites) == 2
    )


def test_an_output_needs_no_type() -> None:
    bare = model()
    bare.graph.output[0].ClearField("type")
    fused(bare, 2)


def test_a_weight_that_is_an_output_too_has_the_shape_that_it_has() -> None:
    """Whatever the output declares: here its type alone. Larger than what is looked at as a value."""
    b = Builder()
    weight = b.array(draw(K, 64), "weight")
    made = b.model(b("Relu", b("MatMul", b.input("x", ("rows", K)), weight)))
    made.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, None))
    fused(made, 1)


def test_both_names_of_the_default_domain_are_one() -> None:
    named = model()
    for node in named.graph.node:
        node.domain = "ai.onnx"
    fused(named, 2)


def test_an_operator_is_no_function_of_its_name() -> None:
    """ONNX Runtime takes its own Relu."""
    overridden = model()
    body = [helper.make_node("Neg", ["a"], ["b"])]
    overridden.functions.append(helper.make_function("", "Relu", ["a"], ["b"], body, overridden.opset_import))
    fused(overridden, 2)


SCALERS = {
    "Scaler": {"offset": [0.5] * K, "scale": [2.0] * K},
    "Normalizer": {"norm": "L2"},
    "Imputer": {"imputed_value_floats": [1.0] * K, "replaced_value_float": 0.0},
}


@pytest.mark.parametrize("op", SCALERS)
def test_what_scales_features_keeps_their_shape(op: str) -> None:
    """scikit-learn's pipelines, as skl2onnx writes them: what is in front of a perceptron."""
    b = Builder()
    out = layers(
        b, b("Cast", b(op, b.input("x", ("rows", K)), domain="ai.onnx.ml", **SCALERS[op]), to=TensorProto.FLOAT)
    )
    graph = helper.make_graph(b.nodes, "test", b.inputs, [helper.make_tensor_value_info(out, 1, None)])
    graph.output[0].type.tensor_type.ClearField("shape")
    graph.initializer.extend(b.initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    fused(proto, 2)


FRAMES = "((((samples - 3)//2)) - 1)//2 + 1"


def heard(named: bool) -> Analysis:
    """Frames that convolutions make of a sound, and a mask of as many as the model computes, as torch writes it."""
    b = Builder()
    samples = b.input("x", (2, 1, "samples"))
    frames = b("Conv", samples, b.array(draw(K, 1, 4), "first_kernel"), strides=[2])
    frames = b("Conv", frames, b.array(draw(K, K, 2), "second_kernel"), strides=[2])
    product = b("MatMul", b("Transpose", frames, perm=[0, 2, 1]), b.array(draw(K, K), "weight"))
    length = b("Gather", b("Shape", samples), b.integers(2), axis=0)
    for less in (3, 1):
        length = b("Div", b("Sub", length, b.integers(less)), b.integers(2))
    length = b("Concat", b("Add", length, b.integers(1)), b.integers(1), axis=0)
    model = b.model(b("Relu", b("Add", product, b("Expand", b.array([[0.5]], "half"), length))))
    if named:
        declare(model, frames, TensorProto.FLOAT, (2, K, FRAMES))
    analysis = analyse_model(model, resolve("sm_80", list))
    feeds = [{"x": draw(2, 1, size).astype(np.float32)} for size in (6, 7, 12, 19)]
    assert not difference(model, rewritten(analyse_model(model, resolve("sm_80", list))), feeds)
    return analysis


def test_frames_are_as_many_as_the_exporter_says() -> None:
    """The arithmetic of a dimension's name is the model's own, by which it computes what meets the frames."""
    (site,) = heard(named=True).sites
    assert "relu" in {step.op for step in site.fusion.steps}
    assert {skipped.reason for skipped in heard(named=False).skipped} == {"unknown_broadcast"}


FEWER = "((samples - 5)//4) - 1"  # less than 0 of few samples, of which there is no frame


def positioned(named: bool) -> Analysis:
    """Frames that convolutions make of a sound, and as many positions, counted to the sum that torch writes."""
    b = Builder(opset=18)
    frames = samples = b.input("x", (2, 1, "samples"))
    for channels in (1, K):
        frames = b("Conv", frames, b.array(draw(K, channels, 5), f"kernel_of_{channels}"), strides=[2])
    product = b("MatMul", b("Transpose", frames, perm=[0, 2, 1]), b.array(draw(K, K), "weight"))
    length = b("Gather", b("Shape", samples), b.scalar(2), axis=0)
    limit = b("Add", b("Div", b("Sub", length, b.scalar(5)), b.scalar(4)), b.scalar(-1))
    counted = b("Range", b.scalar(0), limit, b.scalar(1))
    positions = b("Unsqueeze", b("Cast", counted, to=TensorProto.FLOAT), b.integers(1))
    model = b.model(b("Relu", b("Add", product, positions)))
    if named:
        declare(model, frames, TensorProto.FLOAT, (2, K, FEWER))
        declare(model, counted, TensorProto.INT64, (FEWER,))
    analysis = analyse_model(model, resolve("sm_80", list))
    feeds = [{"x": draw(2, 1, size).astype(np.float32)} for size in (13, 16, 17, 40)]
    assert not difference(model, rewritten(analysis), feeds)
    return analysis


def test_positions_are_as_many_as_the_exporter_says() -> None:
    """A limit may be negative where a size is not; what a Range has of it, and the model names so, is the limit."""
    (site,) = positioned(named=True).sites
    assert "relu" in {step.op for step in site.fusion.steps}
    assert {skipped.reason for skipped in positioned(named=False).skipped} == {"unknown_broadcast"}
