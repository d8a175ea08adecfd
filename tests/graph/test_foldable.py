"""Which products ONNX Runtime computes once, as it loads a model: asked of the model that it then has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.graph.graph import Graph, load_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder

K, N = 8, 16


def table(b: Builder) -> str:
    return b.array(draw(4, K))


def normalised(b: Builder) -> str:
    return b("LayerNormalization", table(b), b.array(np.ones(K)), b.array(np.zeros(K)), axis=-1)


def random(b: Builder) -> str:
    return b("Cast", b("RandomNormal", shape=[4, K], dtype=FLOAT), to=b.dtype)


def of_a_branch(b: Builder) -> str:
    value = helper.make_tensor_value_info("inside", b.dtype, [4, K])
    graph = helper.make_graph([helper.make_node("Tanh", [table(b)], ["inside"])], "branch", [], [value])
    return b("If", b.input("which", (), TensorProto.BOOL), then_branch=graph, else_branch=graph)


def shape_of_an_input(b: Builder) -> str:
    return b("Expand", b.array(draw(1, K)), b("Shape", b.input("like", ("rows", K))))


MAKERS: list[Callable[[Builder], str]] = [
    table, normalised, random, of_a_branch, shape_of_an_input, lambda b: b.input("x", (4, K)),
]  # fmt: skip


def products(model: ModelProto) -> int:
    return sum(node.op_type in ("MatMul", "Gemm") for node in model.graph.node)


def left_by_the_runtime(model: ModelProto, folder: Path) -> int:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(folder / "left.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return products(onnx.load(folder / "left.onnx"))


def left_by_us(model: ModelProto) -> int:
    graph = Graph(load_model(model))
    return sum(node.op in ("MatMul", "Gemm") and not graph.is_folded(node.outputs[0].name) for node in graph.nodes)


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("make", MAKERS)
def test_it_is_what_the_runtime_folds(make: Callable[[Builder], str], dtype: int, tmp_path: Path) -> None:
    b = Builder(dtype, opset=17)
    first = b("MatMul", b("Tanh", make(b)), b.array(draw(K, N)))
    model = b.model(b("MatMul", b("Relu", first), b.array(draw(N, K))))
    assert left_by_us(model) == left_by_the_runtime(model, tmp_path)


def test_what_a_run_may_replace_is_not_folded(tmp_path: Path) -> None:
    b = Builder(FLOAT, opset=17)
    stored = b.array(draw(4, K), "table")
    model = b.model(b("MatMul", b("Tanh", stored), b.array(draw(K, N))))
    assert left_by_us(model) == left_by_the_runtime(model, tmp_path) == 0
    model.graph.input.append(helper.make_tensor_value_info("table", FLOAT, [4, K]))
    assert left_by_us(model) == left_by_the_runtime(model, tmp_path) == 1
